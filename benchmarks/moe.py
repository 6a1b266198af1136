"""Compares ways to run a mixture of experts that does not fit in DRAM: bytes, reads, hits, seconds and divergence.

`chosen` is a build whose cache, pinned units and preloading the product chooses. The units that its tokens use on
test text are recorded, and replayed on the simulated device with the same buffers and DRAM under each cache policy
alone, under the best possible one (Belady), and with pinned units alone. Policies that a run can follow also decode the
text here: measured seconds are those of this machine's disk and processor, not of the device.
`inside` leaves out units of experts, and `prior` prefers experts in DRAM as far as a divergence on validation text
allows; each is a build of its own. What is not exact
diverges from the exact run of the same codes on the same text. `ahead` preloads whether or not it pays. What reading
an expert's matrices apart could save has a bound: no order of a request's reads takes less time than all of its reads,
or than all of its computing. Reading of `prior` is compared with exact routing of the
same artifact, with the same cache and DRAM. The share of DRAM is that of the experts' bytes; everything else is in DRAM
besides. A way that a budget does not hold has no row.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.builds import SHORT, artifact_in, build, settings
from benchmarks.shared.mixtures import planted, share_budget_bytes
from coldpress.compiler.io import load_arrays, load_record
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import refit
from coldpress.runtime.flash import simulated
from coldpress.runtime.generate.session import Session
from coldpress.runtime.routing import EXACT
from coldpress.runtime.simulate import replay, simulate
from coldpress.runtime.store.clock import Clock
from coldpress.runtime.store.facts import RequestFacts
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import FETCH, Event, Recorder
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import Plan
from coldpress.schemas.metrics import RunMetrics
from tests.support.planted_mixtures import SHAPES

REAL, CONTEXT_LENGTH = "tinystories-mixtral-8x", 256
REAL_FORMAT, PLANTED_FORMAT = "int8_group32", "int4_group32"
"""The format of the builds; int4 loses too much of the real mixture, which is tiny."""
POLICIES = ("lru", "lfu", "s3fifo", "static", "belady")
"""`lfu` is the contextual one."""
EXACT_POLICIES = POLICIES[:-1]
"""Those that a run can follow."""
CHOSEN, AHEAD, INSIDE, PRIOR = "chosen", "ahead", "inside", "prior"
BESIDES = (AHEAD, INSIDE, PRIOR)
"""Ways that are builds of their own."""
PROMPTS = (4, 32, 128)
"""Lengths of prompts whose prefill is measured, in tokens."""
LIMITS = (0.003, 0.01, 0.03)
DOES_NOT_FIT = ("are needed before any unit is cached", "leave nothing to preload")
"""What a refusal says where a budget does not hold a way."""
RIGHT = 1.05
"""A choice is right if it takes at most this times the seconds of the best alternative."""
ONLY: dict[str, dict[str, Any]] = {
    CHOSEN: {"preload": "auto"},
    AHEAD: {"preload": "on"},
    INSIDE: {"method": "topk", "density": 0.8},
    PRIOR: {"cache": "lru", "pinned_share": 0, "routing": "cache_prior"},
}
"""Settings of builds, beside those that all have."""


class Run(NamedTuple):
    """A text, token by token."""

    log_probabilities: np.ndarray
    """float64 [num_tokens, vocab_size]."""
    metrics: RunMetrics
    """Those of the simulated run, which reads what the run read."""
    trace: list[Event]
    measured_s: float | None
    """Seconds of a token here, the median over tokens; None if only simulated."""


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        (REAL,), full=(REAL, "qwen3-30b-a3b", "gpt-oss-20b"), choices=(REAL, *SHAPES), help="a real model, and shapes"
    )
    layers: int = option(2, help="layers of shapes, which have planted routing and a small vocabulary")
    device: str = option("pixel6", help="device profile whose law gives seconds")
    shares: tuple[float, ...] = option(
        (0.25, 0.5), smoke=(0.5,), full=(0.12, 0.25, 0.5, 0.75), help="shares of the experts' bytes in DRAM"
    )
    limits: tuple[float, ...] = option(
        LIMITS, smoke=(0.03,), choices=LIMITS, help="divergences that preferring experts in DRAM may cost, nats a token"
    )
    ways: tuple[str, ...] = option(
        BESIDES, choices=BESIDES, help="ways to measure beside the product's choice and the cache policies"
    )
    tokens: int = option(512, smoke=64, help="most test tokens to run")
    short: bool = option(False, smoke=True, help="calibrate on less text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].way": f"a cache policy, {CHOSEN}, {AHEAD}, {INSIDE}, or {PRIOR}",
        "rows[].limit?": f"{PRIOR}: the divergence allowed on validation text, nats a token",
        "rows[].budget_bytes": "DRAM budget",
        "rows[].read_bytes": "bytes read from flash per token",
        "rows[].reads": "reads from flash per token",
        "rows[].hit_rate": "share of the used units that were in DRAM",
        "rows[].token_s": "seconds of a token by the device's law",
        "rows[].measured_s?": "seconds of a token on this machine, the median over tokens; null for belady",
        "rows[].mean_kld": "divergence from the exact run on test text, nats a token; 0 for exact ways",
        "rows[].fewer_bytes?": f"{PRIOR}: bytes of exact routing over its bytes, same artifact, cache and DRAM",
        "rows[].apart_saves?": f"{CHOSEN}: share of token_s that reading experts' matrices apart saves at most",
        "rows[].prefill_over_used?": f"{CHOSEN}: bytes that prefills read, nothing in DRAM, over the bytes of the "
        "experts that their tokens use, each counted once; by prompt: 4, 32 and 128 tokens, and a whole block",
        **{
            f"gain_of_prior_at_kl.{limit:g}?": f"median of fewer_bytes at a limit of {limit:g}, over shares of DRAM"
            for limit in LIMITS
        },
        "prefill_reads": "largest prefill_over_used",
        "apart_saves": "largest apart_saves",
        "chosen_right": f"share of budgets under which {CHOSEN} takes at most {RIGHT} times the seconds of the best "
        f"policy, of {AHEAD}, and of reading matrices apart",
    }
    is_timing = True
    needs_data = True
    over = {"model": "models", "share": "shares"}
    full_minutes = 40

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per way."""
        model, share = cell["model"], cell["share"]
        folder = self.folder / model
        whole = artifact_in(self.once(model, lambda: self._built(model, "whole", "100%")))
        tokens = self._tokens(folder, whole)
        budget_bytes = share_budget_bytes(whole, share)
        path = artifact_in(self._built(model, f"{CHOSEN}-{share:g}", budget_bytes, **ONLY[CHOSEN]))
        opened, exact = open_artifact(path), run(path, tokens)
        over_used = prefill_over_used(path, tokens[0], exact.trace)
        saved = {"apart_saves": most_saved_s(path, exact.trace) / exact.metrics.modelled_s}
        yield {"way": CHOSEN, "budget_bytes": budget_bytes, **figures_of(exact), **EXACTLY | over_used | saved}
        for policy in POLICIES:
            plan = refit(opened.manifest, unpinned(opened.manifest.plans[0], policy), budget_bytes)
            measured_s = run(path, tokens, plan=plan).measured_s if policy in EXACT_POLICIES else None
            found = exact._replace(metrics=simulate(opened, plan, exact.trace), measured_s=measured_s)
            yield {"way": policy, "budget_bytes": budget_bytes, **figures_of(found), **EXACTLY}
        for way in (way for way in (AHEAD, INSIDE) if way in self.options.ways):
            try:
                path = artifact_in(self._built(model, f"{way}-{share:g}", budget_bytes, **ONLY[way]))
            except ColdpressError as error:
                if not any(reason in str(error) for reason in DOES_NOT_FIT):
                    raise
                print(f"{way}, {share:.0%} of the experts: {error}", file=sys.stderr)
                continue
            found = run(path, tokens)
            lost = {"mean_kld": divergence(exact, found)}
            yield {"way": way, "budget_bytes": budget_bytes, **figures_of(found), **EXACTLY | lost}
        for limit in self.options.limits if PRIOR in self.options.ways else ():
            named = f"{PRIOR}-{limit:g}-{share:g}"
            path = artifact_in(self._built(model, named, budget_bytes, **ONLY[PRIOR], routing_kl=limit))
            own, found = run(path, tokens, routing=EXACT), run(path, tokens)
            fewer = own.metrics.read_bytes / found.metrics.read_bytes
            lost = {"limit": limit, "mean_kld": divergence(own, found), "fewer_bytes": fewer}
            yield {"way": PRIOR, "budget_bytes": budget_bytes, **figures_of(found), **EXACTLY | lost}

    def figures(self, rows: Rows) -> Figures:
        by_share: dict[tuple[str, float], dict[str, Row]] = {}
        for row in rows:
            by_share.setdefault((row["model"], row["share"]), {})[row["way"]] = row
        right = [is_right(of) for of in by_share.values()]
        gains: dict[float, list[float]] = {}
        for row in rows:
            if row["way"] == PRIOR:
                gains.setdefault(row["limit"], []).append(row["fewer_bytes"])
        return {
            "gain_of_prior_at_kl": {f"{limit:g}": statistics.median(found) for limit, found in gains.items()},
            "chosen_right": sum(right) / len(right),
            "apart_saves": max(row["apart_saves"] for row in rows if row["way"] == CHOSEN),
            "prefill_reads": max(max(row["prefill_over_used"]) for row in rows if row["way"] == CHOSEN),
        }

    def _built(self, model: str, label: str, budget: str | int, **more: Any) -> Path:
        """Builds an artifact; returns its device's build folder."""
        form = REAL_FORMAT if model == REAL else PLANTED_FORMAT
        given: dict[str, Any] = {"method": "dense", "format": form, "max_ppl_ratio": "off", **more}
        if model == REAL:
            common = settings(model, self.options.device) | (SHORT if self.options.short else {"preflight": "off"})
        else:
            found = planted(self.folder / model / "checkpoint", model, self.options.layers)
            common = {**found, "device": self.options.device, **SHORT}
        text: dict[str, Any] = {"context_length": CONTEXT_LENGTH, "label": label.replace(".", "_")}
        config: dict[str, Any] = common | {"dram_budget": budget, **text, **given}
        return build(self.folder / model, **config)

    def _tokens(self, folder: Path, artifact: Path) -> np.ndarray:
        """Returns test text, int [num_blocks, T]."""
        corpus = load_record(next(folder.rglob("tokenize.json")), Corpus)
        blocks = load_arrays(corpus.split("test").arrays, "tokens")["tokens"]
        return blocks[: max(1, self.options.tokens // blocks.shape[1])]


EXACTLY: Row = {
    "limit": None,
    "mean_kld": 0.0,
    "fewer_bytes": None,
    "prefill_over_used": None,
    "apart_saves": None,
}


def is_right(ways: Mapping[str, Row]) -> bool:
    """Returns whether the product's choice under one budget is right, given the budget's rows by way."""
    chosen = ways[CHOSEN]
    seconds = [ways[name]["token_s"] for name in (*EXACT_POLICIES, AHEAD) if name in ways]
    seconds.append((1 - chosen["apart_saves"]) * chosen["token_s"])
    return chosen["token_s"] <= RIGHT * min(seconds)


class Unordered(Clock):
    """Sums up what requests take beyond all of their reads, or all of their computing: the longer of the two."""

    saved_s = 0.0

    def request(self, facts: RequestFacts) -> None:
        """See `Observer`."""
        flash_s, work_s, fetch_s = self.flash_s, self.work_s, self.fetch_s
        super().request(facts)
        self.saved_s += self.fetch_s - fetch_s - max(self.flash_s - flash_s, self.work_s - work_s)


def most_saved_s(path: Path, trace: Sequence[Event]) -> float:
    """Returns the most modelled seconds that another order of each request's reads could save a run."""
    artifact = open_artifact(path)
    plan = artifact.manifest.plans[0]
    clock = Unordered(artifact.manifest, plan)
    replay(Store(artifact, plan, simulated.Plugin(artifact, plan.queue_depth), clock), trace)
    return clock.saved_s


def unpinned(plan: Plan, cache: str) -> Plan:
    """Returns a plan with another cache policy and nothing pinned."""
    parts = tuple(part.model_copy(update={"num_pinned": 0}) for part in plan.parts)
    return plan.model_copy(update={"cache": cache, "cache_options": {}, "parts": parts})


def run(artifact: Path, tokens: np.ndarray, routing: str | None = None, plan: Plan | None = None) -> Run:
    """Decodes a text token by token, under an artifact's plan or another one."""
    found, seconds, recorder = list[np.ndarray](), list[float](), Recorder()
    with Session(artifact, routing=routing, plan=plan, recorder=recorder) as session:
        for block in tokens:
            session.decoder.begin(len(block))
            for token in block.tolist():
                started = time.perf_counter()
                found.append(session.decoder.decode(token))
                seconds.append(time.perf_counter() - started)
        metrics = simulate(session.artifact, session.plan, recorder.events)
        assert metrics.read_bytes == session.store.counters.read_bytes, "a simulation reads what a run reads"
    logits = np.stack(found).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return Run(log_probabilities, metrics, recorder.events, statistics.median(seconds))


def prefill_over_used(artifact: Path, tokens: np.ndarray, trace: Sequence[Event]) -> Row:
    """Returns the bytes that prefills of a text's beginnings read, over those of the experts that decoding them used.

    Args:
        artifact: Its plan runs with nothing pinned.
        tokens: The text, int [T].
        trace: A run that decoded it first, token by token.
    """
    found: list[float] = []
    for length in (*(length for length in PROMPTS if length < len(tokens)), len(tokens)):
        plan = unpinned(open_artifact(artifact).manifest.plans[0], "lru")
        with Session(artifact, plan=plan) as session:
            sizes = {
                (layer, section.family): section.unit_bytes
                for section in session.artifact.manifest.flash.sections
                for layer in section.layers
            }
            used: dict[tuple[int, str], set[int]] = {}
            for event in trace:
                if event.kind == FETCH and event.token <= length:
                    used.setdefault((event.layer, event.family), set()).update(event.ids.tolist())
            session.decoder.begin(length)
            session.decoder.prefill(tokens[:length])
            read_bytes = session.store.counters.prefill_read_bytes
        found.append(read_bytes / sum(sizes[key] * len(ids) for key, ids in used.items()))
    return {"prefill_over_used": found}


def divergence(expected: Run, found: Run) -> float:
    """Returns the mean Kullback-Leibler divergence of next-token distributions, nats a token."""
    differences = expected.log_probabilities - found.log_probabilities
    return float((np.exp(expected.log_probabilities) * differences).sum(axis=1).mean())


def figures_of(found: Run) -> Row:
    """Returns a run's figures of a token."""
    metrics, count = found.metrics, found.metrics.num_tokens
    return {
        "read_bytes": metrics.read_bytes / count,
        "reads": metrics.reads / count,
        "hit_rate": metrics.hits / max(1, metrics.hits + metrics.misses),
        "token_s": metrics.modelled_s / count,
        "measured_s": found.measured_s,
    }


if __name__ == "__main__":
    main("moe")
