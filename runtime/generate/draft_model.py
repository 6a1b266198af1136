"""Drafts with a second artifact: a smaller model proposes tokens greedily, and the larger model checks them.

The draft has a separate session, plan and cache; its DRAM counts in the one budget that a user gives. Both models must
have the same vocabulary. The draft's sequence follows the run: it rolls back tokens that the larger model rejects.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np

from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.drafts import Propose
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plan.budget import choose_plan
from coldpress.runtime.text.tokenizer import TOKENIZER_FILE
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.manifest import Manifest


class DraftModel:
    def __init__(self, session: Session, of: Artifact) -> None:
        """Takes the draft's session, which the caller closes, and the artifact `of` that it drafts for.

        Raises:
            ColdpressError: if the two have different vocabularies.
        """
        _check_same_vocabulary(session.artifact.manifest, of.manifest)
        self.session = session

    @contextmanager
    def drafting(self, context_length: int) -> Generator[Propose]:
        """Raises `ColdpressError` if the session is closed or busy, `DoesNotFitError` if its KV cache is too short."""
        planned = self.session.plan.context_length
        if context_length > planned:
            raise DoesNotFitError(
                f"the prompt and the new tokens make {context_length} tokens, the draft's {self.session.plan.title} "
                f"has a KV cache for {planned}; ask for fewer tokens, or build the draft for a longer context_length"
            )
        with self.session.sequence(context_length):
            yield _Sequence(self.session).propose


class _Sequence:
    """The tokens in the draft's KV cache: tokens of the run, then drafts."""

    def __init__(self, session: Session) -> None:
        self._decoder = session.decoder
        self._ids: list[int] = []
        self._agreed = 0
        """The number of leading ids that are known to equal the run's."""

    def propose(self, ids: Sequence[int], count: int, /) -> list[int]:
        """Drafts the next `count` tokens greedily; `ids` extend the ids of the previous call."""
        agreed = self._agreed
        while agreed < min(len(self._ids), len(ids) - 1) and self._ids[agreed] == ids[agreed]:
            agreed += 1
        self._decoder.roll_back(agreed)
        drafts = [int(np.argmax(self._append(ids[agreed:])))]
        while len(drafts) < count:
            drafts.append(int(np.argmax(self._decoder.decode(drafts[-1]))))
        self._ids, self._agreed = [*self._ids[:agreed], *ids[agreed:], *drafts[:-1]], len(ids)
        return drafts

    def _append(self, ids: Sequence[int]) -> np.ndarray:
        """Appends tokens of the run, at least one, and returns the logits after the last, float32 [vocab_size]. The
        prompt is prefilled densely; later tokens are decoded one by one."""
        if self._decoder.length == 0:
            return self._decoder.prefill_last(np.array(ids))
        return [self._decoder.decode(token) for token in ids][-1]


def beside_draft(manifest: Manifest, draft: Session, dram_budget_bytes: int | None) -> int:
    """Returns the bytes of a budget (None: the largest plan's) that a draft leaves for the larger model.

    Raises:
        DoesNotFitError: if the two do not fit together.
    """
    whole = choose_plan(manifest).dram_budget_bytes if dram_budget_bytes is None else dram_budget_bytes
    left = whole - draft.store.dram_used_bytes
    try:
        choose_plan(manifest, left)
    except DoesNotFitError as error:
        raise DoesNotFitError(
            f"the draft takes {draft.store.dram_used_bytes} of {whole} bytes of DRAM and leaves too little: {error}; "
            "give the draft less with --draft-budget, or take a smaller one"
        ) from error
    return left


def _check_same_vocabulary(draft: Manifest, of: Manifest) -> None:
    found, expected = draft.model.vocab_size, of.model.vocab_size
    if found != expected:
        raise ColdpressError(
            f"the draft '{draft.source.name}' has a vocabulary of {found} tokens, expected the {expected} of "
            f"'{of.source.name}'; take a draft of the same family of models"
        )
    if _tokenizer(draft) != _tokenizer(of):
        raise ColdpressError(
            f"the draft '{draft.source.name}' has another {TOKENIZER_FILE} than '{of.source.name}', expected the same; "
            "take a draft of the same family of models"
        )


def _tokenizer(manifest: Manifest) -> str | None:
    return next((entry.sha256 for entry in manifest.files if entry.path == TOKENIZER_FILE), None)
