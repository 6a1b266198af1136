"""The draft model: a small dense model inside the artifact, which proposes tokens that the larger one checks.

It lies in the folder `draft`, a whole artifact, and computes with all of its weights in DRAM, which the plan counts. It
proposes the likeliest tokens, whatever the run's settings are, and stops once the chance that all drafts of a pass are
accepted is below the plan's limit: one more would cost more than it saves. That chance is the draft model's own,
corrected by the ratio of accepted to expected drafts so far. Each of its sequences follows one of the run, and rolls
back drafts that the larger model rejects.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import numpy as np

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.decoder.decoder import Decoder
from coldpress.runtime.decoder.selection import Selection
from coldpress.runtime.drafts import Acceptance, Propose
from coldpress.runtime.dram.budget import choose_plan
from coldpress.runtime.generate.choice import DEFAULT_FLASH, make_flash
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.kernels.activations import ActivationFormat
from coldpress.runtime.store.clock import Clock
from coldpress.runtime.store.store import Store
from coldpress.schemas.errors import DoesNotFitError


class DraftModel:
    def __init__(
        self,
        path: str,
        vocab_size: int,
        *,
        dram_bytes: int | None = None,
        identity: str | None = None,
        certainty: float = 0.0,
        flash: str = DEFAULT_FLASH,
        activations: ActivationFormat = "fp32",
        modelled: bool = False,
    ) -> None:
        """Opens the artifact at `path` with `dram_bytes` of DRAM, None for those of its largest plan.

        Args:
            vocab_size: The larger model's; the draft's may have more tokens, which no text has.
            identity: sha256 that its manifest must have; None takes any.
            certainty: The plan's `draft_certainty`.
            modelled: Whether its seconds on the device that it was compiled for are counted.

        Raises:
            ArtifactError: if the artifact is damaged.
            DoesNotFitError: if the DRAM cannot hold what must stay there.
        """
        artifact = open_artifact(path, identity)
        plan = choose_plan(artifact.manifest, dram_bytes)
        clocks = [Clock(artifact.manifest, plan)] if modelled else []
        store = Store(artifact, plan, make_flash(artifact, plan, flash), *clocks)
        decoder = Decoder(artifact, store, Selection(artifact, plan), activations)
        decoder.begin_batch([0] * FEW_TOKENS)
        self._folder, self._store, self.decoder = artifact.folder, store, decoder
        """The last two are None once it is closed."""
        self._free = set(range(FEW_TOKENS))
        """Numbers of sequences that have not begun."""
        self._certainty, self._vocab_size = certainty, vocab_size
        self._num_tokens = self._num_passes = 0

    def close(self) -> None:
        """Frees its memory; a run that it drafts for goes on without drafts."""
        if self._store is not None:
            self._store.close()
            self._folder.close()
            self._store = self.decoder = None

    @contextmanager
    def drafting(self, context_length: int) -> Generator[Propose]:
        """Raises `DoesNotFitError` if its KV cache is too short, also for this sequence beside those that run."""
        assert self._store is not None
        assert self.decoder is not None
        plan, decoder = self._store.plan, self.decoder
        if context_length > plan.context_length:
            raise DoesNotFitError(
                f"the prompt and the new tokens make {context_length} tokens, the draft model's {plan.title} has a KV "
                f"cache for {plan.context_length}; ask for fewer tokens, or build for a longer context_length"
            )
        number = min(self._free)
        decoder.renew(number, context_length)
        self._free.remove(number)
        try:
            yield _Sequence(self, number, self._certainty).propose
        finally:
            self._free.add(number)
            decoder.end(number)

    def start_counting(self) -> None:
        """Begins a run, of one sequence or of several: its figures are zero."""
        self._num_tokens = self._num_passes = 0
        if self._store is not None:
            self._store.start_counting()

    def modelled_s(self) -> float:
        """Returns seconds on the device since the run began, without the prompts'; 0 once closed. See `modelled`."""
        if self._store is None:
            return 0.0
        return self._store.metrics(self._num_tokens, 0.0, 0.0, 0.0, self._num_passes).modelled_s

    def append(self, decoder: Decoder, sequence: int, tokens: Sequence[int]) -> np.ndarray:
        """Appends tokens of the run or of drafts, at least one; returns the logits after the last, float32 [V]."""
        if decoder.kv_cache(sequence).length == 0 or len(tokens) >= FEW_TOKENS:
            return decoder.prefill_each([np.array(tokens)], [sequence])[-1, : self._vocab_size]
        self._num_tokens += len(tokens)
        self._num_passes += 1
        return decoder.decode_each([np.array(tokens)], [sequence])[-1, : self._vocab_size]


class _Sequence:
    """A sequence of the run. The draft's KV cache holds its tokens, then the last pass's drafts but the last."""

    def __init__(self, model: DraftModel, number: int, certainty: float) -> None:
        self._model, self._number, self._least = model, number, certainty
        self._num_ids = 0
        """Tokens of the run at the last call."""
        self._drafts: list[int] = []
        self._seen = Acceptance()

    def propose(self, ids: Sequence[int], count: int, /) -> list[int]:
        """Drafts the next tokens, the likeliest ones, at most `count`; `ids` extend the ids of the previous call."""
        decoder = self._model.decoder
        if decoder is None:
            return []
        known = self._num_ids + min(self._accept(ids), max(0, len(self._drafts) - 1))
        decoder.roll_back(known, self._number)
        ratio, certainty, more = self._seen.ratio, 1.0, ids[known:]
        self._num_ids, self._drafts = len(ids), []
        while True:
            logits = self._model.append(decoder, self._number, more)
            (token,), (probability,) = likeliest(logits[None])
            self._drafts.append(int(token))
            certainty *= float(probability)
            self._seen.expected += certainty
            if len(self._drafts) == count or ratio * certainty < self._least:
                return self._drafts[:]
            more = self._drafts[-1:]

    def _accept(self, ids: Sequence[int]) -> int:
        """Counts the drafts of the last pass that the run accepted."""
        pairs = zip(self._drafts, ids[self._num_ids : -1], strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._seen.accepted += accepted
        return accepted


def likeliest(logits_TV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the likeliest token of each row of logits float32 [T, V], int64 [T], and its probability, float64 [T]."""
    below = logits_TV.astype(np.float64) - logits_TV.max(axis=1, keepdims=True)
    return logits_TV.argmax(axis=1), 1 / np.exp(below).sum(axis=1)
