"""Runs an artifact: a session holds its store and its decoder under one plan, generates, and measures perplexity.

The plan is the largest that fits the budget (runtime/dram/budget.py); a selector or a cache policy that the user names
replaces the plan's. The prefill is dense; every later token goes through the selector.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.decoder.decoder import PREFILL_CHUNK_TOKENS, Decoder
from coldpress.runtime.decoder.selection import Selection
from coldpress.runtime.drafts import DRAFT_TOKENS, Draft, Drafting, Propose
from coldpress.runtime.dram import budget
from coldpress.runtime.dram.memory import give_back_heap
from coldpress.runtime.generate.choice import DEFAULT_FLASH, SIMULATED, choices, draft_of, make_flash
from coldpress.runtime.generate.draft_model import DraftModel
from coldpress.runtime.generate.likelihood import Quality, sum_nll
from coldpress.runtime.generate.sampling import Chooser, Sampling
from coldpress.runtime.generate.speculation import Drafts, Pass, Turn, decode
from coldpress.runtime.generate.statistics import Timer, Token
from coldpress.runtime.generate.token_ids import token_array
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.kernels.activations import ACTIVATIONS, DEFAULT_ACTIVATIONS, ActivationFormat
from coldpress.runtime.simulate import on_device
from coldpress.runtime.store.clock import Clock
from coldpress.runtime.store.facts import Observer
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import Recorder
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError, DoesNotFitError, known_name
from coldpress.schemas.layout import Collapse, Plan, Preload
from coldpress.schemas.manifest import DRAFT_FOLDER, DRAFT_MANIFEST
from coldpress.schemas.metrics import RunMetrics


@dataclass(frozen=True)
class Generation:
    """The new tokens, without the prompt; an end-of-sequence token that stopped the run is the last one."""

    tokens: tuple[Token, ...]
    metrics: RunMetrics

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


class Session(AbstractContextManager["Session"]):
    """An artifact ready to run; a context manager, which closes it.

    It holds one sequence at a time, and units stay cached from one call to the next. It refuses a call while another
    one runs, in this thread or another: threads that run at the same time need a session each.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dram_budget_bytes: int | None = None,
        selector: str | None = None,
        cache: str | None = None,
        plan: Plan | None = None,
        flash: str = DEFAULT_FLASH,
        activations: str = DEFAULT_ACTIVATIONS,
        kv_cache: str | None = None,
        collapse: Collapse | None = None,
        preload: Preload | None = None,
        routing: str | None = None,
        device: DeviceProfile | None = None,
        recorder: Recorder | None = None,
        observers: Sequence[Observer] = (),
        modelled: bool = False,
        identity: str | None = None,
        started_s: float | None = None,
    ) -> None:
        """Opens the artifact, divides the budget, and loads what stays in DRAM.

        Args:
            dram_budget_bytes: None takes the artifact's largest plan; with room for all, nothing is read later.
            selector: A method of runtime/sparsity; None for the plan's.
            cache: A policy of runtime/cache, with options as `window:window_tokens=3`; None for the plan's.
            plan: A plan made from one of the artifact's, used as is in place of budget, selector, cache and the like.
            flash: A module of runtime/flash; `simulated` reads flash.img, too, but counts the device profile's seconds.
            activations: The type that decoding rounds vectors to before products: `fp32`, `int16` or `int8`.
            kv_cache: The format of keys and values, `fp16` or `int8`; None for the plan's.
            collapse: Whether reads are joined over the plan's gap or an adaptive one; None for the plan's setting.
            preload: Whether units that later layers will probably ask for are preloaded; None for the plan's setting.
            routing: How routers choose experts, `top_k` or as `cache_prior:0.2`; None for the plan's.
            device: The device to simulate; None for the one that the artifact was compiled for.
            modelled: Whether metrics also tell modelled seconds on the artifact's device; with `simulated` flash too.
            identity: sha256 that the artifact's manifest must have; None takes any.
            started_s: time.perf_counter() from which the first token's time counts; None for now.

        Raises:
            ArtifactError, DoesNotFitError: if the artifact is damaged; if the budget cannot hold what must be in DRAM.
            ColdpressError: for an unknown name, or a selector or draft that the artifact cannot serve.
        """
        self._started_s: float | None = time.perf_counter() if started_s is None else started_s
        self._running, self.step, self._closed = threading.Lock(), threading.Lock(), False
        """`step` is held while a token is computed; what may change between tokens changes while it is free."""
        self._opened = open_artifact(path, identity)  # owns the folder's descriptor; `artifact` may be a copy
        self.artifact = on_device(self._opened, device)
        self._choose: Callable[[int], Plan] | None = None  # for another budget; a given plan stays
        if plan is None:
            settings = dram_budget_bytes, selector, cache, collapse, preload, kv_cache, routing
            plan, self._choose = choices(self.artifact.manifest, *settings)
        self._wanted_plan, self._flash = plan, flash
        clock = Clock(self.artifact.manifest, plan) if modelled or flash == SIMULATED else None  # it takes a run time
        watching = filter(None, [recorder, *observers, clock])
        self.store = Store(self.artifact, plan, make_flash(self.artifact, plan, flash), *watching)
        self._activations: ActivationFormat = known_name("activation format", activations, ACTIVATIONS)
        self.decoder = Decoder(self.artifact, self.store, Selection(self.artifact, plan), self._activations)
        planned, _ = draft_of(self.plan, self.artifact.manifest)
        self._draft_model = self._opened_draft_model() if planned.NEEDS_MODEL else None

    def _opened_draft_model(self) -> DraftModel:
        """Returns the artifact's draft model, opened; raises `ColdpressError` if the plan has no DRAM for it."""
        if not self.plan.draft_bytes:
            raise ColdpressError(
                f"the draft 'model' was asked for, and {self.plan.title} has no DRAM for one; use --draft lookup, or "
                "build with draft_model=NAME and a budget that the whole model does not fit into"
            )
        return DraftModel(
            os.path.join(self._opened.path, DRAFT_FOLDER),
            self.decoder.spec.vocab_size,
            dram_bytes=self.plan.draft_bytes,
            identity=self._opened.entry(DRAFT_MANIFEST).sha256,
            certainty=self.plan.draft_certainty,
            flash=self._flash,
            activations=self._activations,
            modelled=self.store.clock is not None,
        )

    def _close_draft_model(self) -> None:
        if self._draft_model is not None:
            self._draft_model.close()
            self._draft_model = None

    @property
    def plan(self) -> Plan:
        """Returns the plan that the session runs with; after `resize`, the new one."""
        return self.store.plan

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the artifact's files; later calls are refused. Memory is freed with the object itself. Raises
        `ColdpressError` if a call is running."""
        if self._closed:
            return
        with self._exclusive(), self.step:  # `step` too: `resize` takes only that one
            self._closed = True
            self.store.close()
            self._close_draft_model()
            self._opened.folder.close()

    @contextmanager
    def _exclusive(self) -> Generator[None]:
        if not self._running.acquire(blocking=False):
            raise ColdpressError(
                "this session is in use by another call, expected one at a time; wait for it or close its generator, "
                "or open a session per thread"
            )
        try:
            if self._closed:
                raise ColdpressError("this session is closed, expected an open one; open the artifact again")
            yield
        finally:
            self._running.release()

    def resize(self, dram_budget_bytes: int) -> None:
        """Changes the DRAM budget from the next token on; a run in this thread or another goes on.

        The artifact's largest plan that fits takes over, of those with the session's selector and KV cache: from then
        on tokens have its densities, and its caches begin with its pinned units. As long as it is the same plan, the
        text stays the same up to the rounding of sums, unless the selector sees what is in DRAM; the caches grow, or
        evict in their policies' order, and the units that the plan at opening pins stay pinned. With room for the whole
        model, the rest of it is loaded and nothing is read afterwards. A session that was given a plan keeps it. Raises
        `ColdpressError` if the session is closed, `DoesNotFitError` if the budget cannot hold what must stay in DRAM;
        then nothing has changed.
        """
        with self.step:
            if self._closed:
                raise ColdpressError("this session is closed, expected an open one; open the artifact again")
            wanted = self._for_budget(dram_budget_bytes)
            plan = budget.refit(self.artifact.manifest, wanted, dram_budget_bytes)
            if wanted.name == self._wanted_plan.name:
                self.store.resize(self.artifact, plan)
            else:
                selection, before = Selection(self.artifact, plan), self.store.plan
                try:
                    self.store.switch(self.artifact, plan)
                finally:
                    if self.store.plan is not before:  # also where pinned units could not be read
                        self.decoder.selection = selection
                        self._wanted_plan = wanted
            if not self.plan.draft_bytes:
                self._close_draft_model()
        give_back_heap()

    def _for_budget(self, dram_budget_bytes: int) -> Plan:
        now = self._wanted_plan
        found = now if self._choose is None else self._choose(dram_budget_bytes)
        if found.name != now.name:
            return found.model_copy(update={"kv_cache_bytes": now.kv_cache_bytes})
        # room for the whole model leaves the draft model out, another budget brings it back
        return now.model_copy(update={name: getattr(found, name) for name in budget.WITHOUT_DRAFT})

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
        draft: Drafting | None = None,
        draft_tokens: int = DRAFT_TOKENS,
        on_token: Callable[[Token], bool | None] | None = None,
    ) -> Generation:
        """Continues a prompt.

        Args:
            prompt_ids: At least one token id.
            max_new_tokens: At least 1.
            sampling: How tokens are chosen; None is greedy.
            ignore_eos: Go on after end-of-sequence tokens.
            draft: Proposes next tokens, which the model checks in one pass; the text stays the same. None for the draft
                of the plan in use as the run begins, which it keeps; `off` of runtime/drafts for none.
            draft_tokens: Most drafts per pass of a given draft; the plan says how many its own proposes.
            on_token: Called with every new token as soon as it is known; its time is not counted. The run ends after a
                token for which it returns True.

        Raises:
            ColdpressError: for an empty prompt, an id outside the vocabulary, logits that are not finite, a session
                that is closed or in use, or drafts under a plan where a token changes what the next one uses.
            DoesNotFitError: if prompt and new tokens exceed the plan's context.
            CorruptPageError: if a page of flash.img is damaged.
        """
        ended = None
        steps = self.stream(
            prompt_ids, max_new_tokens, sampling=sampling, ignore_eos=ignore_eos, draft=draft, draft_tokens=draft_tokens
        )
        with closing(steps):
            while True:
                try:
                    token = steps.send(ended)
                except StopIteration as done:
                    return done.value
                ended = on_token(token) if on_token else None

    def stream(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
        draft: Drafting | None = None,
        draft_tokens: int = DRAFT_TOKENS,
    ) -> Generator[Token, bool | None, Generation]:
        """Generates as `generate` does, and yields each token at once; returns all new tokens, and the metrics.

        The session is in use from the first token to the last, or until the generator is closed. Sending True ends the
        run after the token.
        """
        if max_new_tokens < 1:
            raise ColdpressError(f"the number of new tokens is {max_new_tokens}, expected at least 1")
        stop_ids = frozenset(() if ignore_eos else self.decoder.spec.eos_token_ids)
        context_length = len(prompt_ids) + max_new_tokens
        with self._exclusive(), ExitStack() as drafted:
            draft, draft_tokens = self.checked_draft(draft, draft_tokens)
            drafts = Drafts(drafted.enter_context(self.drafting(draft, context_length)))
            timer = self._start()
            self.decoder.begin(context_length)
            prompt = token_array(prompt_ids)
            ids, tokens = prompt.tolist(), list[Token]()
            chooser = Chooser(sampling or Sampling(), ids)
            with self.step, timer.prefill():
                found = Pass((chooser.choose(self.decoder.prefill_last(prompt)),), 0)
            while True:
                last, left = found.token_ids[-1], max_new_tokens - len(tokens) - len(found.token_ids)
                if left > 0 and last not in stop_ids and not draft_tokens:
                    with self.step:
                        self.decoder.expect(last)
                for token in timer.tokens(found.token_ids, found.drafted):
                    tokens.append(token)
                    if (yield token) or token.id in stop_ids or len(tokens) == max_new_tokens:
                        return Generation(tuple(tokens), self.with_drafts(draft, timer.metrics(self.store)))
                ids += found.token_ids
                with self.step, timer.decode():
                    most = min(draft_tokens, max_new_tokens - len(tokens) - 1)
                    ((found, _),) = decode(self.decoder, [Turn(0, ids, drafts, most, chooser.choose)])

    def checked_draft(self, draft: Drafting | None, draft_tokens: int) -> tuple[Drafting, int]:
        """Returns the draft to use, the plan's if `draft` is None, and the most drafts per pass, 0 if it proposes none.
        Raises `ColdpressError` if one pass cannot check as many, or the plan refuses several tokens in one pass."""
        if draft is None:
            draft, draft_tokens = draft_of(self.plan, self.artifact.manifest)
        if isinstance(draft, Draft) and not draft.PROPOSES:
            return draft, 0
        if not 1 <= draft_tokens < FEW_TOKENS:
            raise ColdpressError(f"the number of drafts of a pass is {draft_tokens}, expected 1 to {FEW_TOKENS - 1}")
        self.decoder.selection.check_many()
        if isinstance(draft, Draft) and draft.NEEDS_MODEL:  # the plan may have changed since the opening
            self._draft_model = self._draft_model or self._opened_draft_model()
        return draft, draft_tokens

    def drafting(self, draft: Drafting, context_length: int) -> AbstractContextManager[Propose]:
        """Begins a sequence of drafts; raises `DoesNotFitError` if the draft model has no room for one."""
        if not isinstance(draft, Draft) or not draft.NEEDS_MODEL:
            return draft.drafting(context_length)
        if self._draft_model is None:
            raise DoesNotFitError("the new DRAM budget has no room for the draft model; go on without drafts")
        return draft.drafting(context_length, self._draft_model)

    def with_drafts(self, draft: Drafting, metrics: RunMetrics) -> RunMetrics:
        """Adds the modelled seconds of the draft model, which computes while no other layer does."""
        is_model = isinstance(draft, Draft) and draft.NEEDS_MODEL
        if not is_model or self._draft_model is None or self.store.clock is None:
            return metrics
        spent_s = self._draft_model.modelled_s()
        figures = {name: getattr(metrics, name) + spent_s for name in ("modelled_dram_s", "modelled_s")}
        return metrics.model_copy(update=figures)

    def perplexity(
        self,
        token_blocks: np.ndarray,
        *,
        sparse: bool,
        prefill_tokens: int = 1,
        tokens_per_pass: int = 1,
        on_logits: Callable[[np.ndarray], None] | None = None,
    ) -> Quality:
        """Predicts each token of a block, except its first, from the block's true tokens before it (teacher forcing).

        Args:
            token_blocks: int [num_blocks, block_tokens], at least two tokens each.
            sparse: Whether tokens go through selector and store one by one, as in decoding; else densely, as in the
                prefill.
            prefill_tokens: With `sparse`, the number of leading tokens of each block that are prefilled densely, at
                least one.
            tokens_per_pass: With `sparse`, tokens that are decoded together; results are equal up to the rounding of
                sums.
            on_logits: Called with the logits of consecutive positions, float32 [n, vocab_size], in order: of all
                positions of a block, or with `sparse` of all but the last. Its time is not counted.

        Raises:
            ColdpressError, DoesNotFitError, CorruptPageError: as `generate`.
        """
        block_tokens = token_blocks.shape[1]
        if block_tokens < 2 or not len(token_blocks) or not 1 <= prefill_tokens <= block_tokens:
            raise ColdpressError(
                f"found {len(token_blocks)} blocks of {block_tokens} tokens with {prefill_tokens} prefilled, expected "
                "at least one block of two tokens, and at least one of them prefilled"
            )
        with self._exclusive():
            timer = self._start()
            block_nll: list[float] = []
            rates: list[float] = []
            for block in token_blocks:
                done, total, before = 0, 0.0, timer.decoded()
                for logits in self._teach(block, prefill_tokens if sparse else block_tokens, tokens_per_pass, timer):
                    total += sum_nll(logits, block[done + 1 : done + 1 + len(logits)])
                    done += len(logits)
                    if on_logits:
                        on_logits(logits)
                block_nll.append(total / (block_tokens - 1))
                decoded, seconds = (now - then for now, then in zip(timer.decoded(), before, strict=True))
                rates += [decoded / seconds] if decoded else []
            num_predicted = len(token_blocks) * (block_tokens - 1)
            return Quality(tuple(block_nll), num_predicted, timer.metrics(self.store), tuple(rates))

    def _teach(self, block: np.ndarray, num_dense: int, tokens_per_pass: int, timer: Timer) -> Iterator[np.ndarray]:
        """Yields the logits of a block: prefills its first `num_dense` tokens, decodes the rest except the last."""
        self.decoder.begin(len(block))
        for start in range(0, num_dense, PREFILL_CHUNK_TOKENS):
            with self.step, timer.prefill():
                logits = self.decoder.prefill(block[start : min(start + PREFILL_CHUNK_TOKENS, num_dense)])
            yield logits
        for start in range(num_dense, len(block) - 1, tokens_per_pass):
            tokens = block[start : min(start + tokens_per_pass, len(block) - 1)]
            with self.step, timer.decode(len(tokens)):
                logits = self.decoder.decode_many(tokens)
            yield logits

    @contextmanager
    def batch(self, longest: int, num_tokens: int) -> Generator[Timer]:
        """Reserves `decoder` for several sequences that run at once, and yields the timer; counters start at zero.

        If the plan's KV cache is too small for them, a larger one takes room from cached and pinned units until the
        batch ends. The caller holds `step` while sequences begin and tokens are computed.

        Args:
            longest: Most tokens of one sequence, prompt and new tokens together.
            num_tokens: Most tokens of all sequences that run at the same time.

        Raises:
            ColdpressError: if the session is closed or in use.
            DoesNotFitError: if the plan's context is too short for a sequence, or the budget cannot hold the KV caches.
        """
        with self._exclusive(), self._kv_room(longest, num_tokens):
            try:
                yield self._start()
            finally:
                self.decoder.end_batch()

    def has_kv_room(self, num_tokens: int) -> bool:
        """Returns whether the DRAM budget can hold the KV cache of `num_tokens` tokens in place of units."""
        needed = self.decoder.kv_cache_bytes(num_tokens)
        try:
            budget.with_kv_cache(self.artifact.manifest, self._wanted_plan, needed, self.plan.dram_budget_bytes)
        except DoesNotFitError:
            return False
        return True

    @contextmanager
    def _kv_room(self, longest: int, num_tokens: int) -> Generator[None]:
        self.decoder.check_context(longest)
        opened, before = self._wanted_plan, self.plan
        needed = self.decoder.kv_cache_bytes(num_tokens)
        if needed <= before.kv_cache_bytes:
            yield
            return
        manifest = self.artifact.manifest
        with self.step:
            plan = budget.with_kv_cache(manifest, opened, needed, before.dram_budget_bytes)
            self.store.resize(self.artifact, plan)
            self._wanted_plan = opened.model_copy(update={"kv_cache_bytes": needed})
        try:
            yield
        finally:
            with self.step:
                now, now_bytes = self._wanted_plan, self.plan.dram_budget_bytes
                self._wanted_plan = now.model_copy(update={"kv_cache_bytes": opened.kv_cache_bytes})
                same = now_bytes == before.dram_budget_bytes  # else the caller has resized the session meanwhile
                plan = before if same else budget.refit(manifest, self._wanted_plan, now_bytes)
                self.store.resize(self.artifact, plan)

    def _start(self) -> Timer:
        """Starts a run with counters at zero; the first run's clock started when the session began to open."""
        started_s, self._started_s = self._started_s, None
        self.store.start_counting()
        if self._draft_model is not None:
            self._draft_model.start_counting()
        return Timer(time.perf_counter() if started_s is None else started_s, self.store.counters)
