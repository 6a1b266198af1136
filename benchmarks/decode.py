"""Measures how much of a decoded token's time is flash, computing and bookkeeping, and how far they overlap.

Layers of a 7B's shape have random weights and lie on flash in random order in int4; part of the units is pinned or
cached, the others are read from this machine's disk by a plug-in of runtime/flash. Four things are measured beside the
run, in the same process: its reads alone, two submissions at a time (`flash_s`); the same tokens with all units in DRAM
(`compute_s`, lookups included), and the part of that before reads can begin (`before_s`: attention, norms, the choice
of units); the same run where every request waits until all its units are there (`serial_s`, runtime/flash/serial.py);
and its requests replayed without data (`bookkeeping_s`). Complete overlap takes max(flash_s, compute_s), the bound; a
run that guesses nothing cannot take less than before_s + max(flash_s, compute_s - before_s), its reach. Every round
measures all of them in turn. Random weights give successive tokens nothing in common, so caches hit by chance.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Row, gain, main, option, spread
from coldpress.runtime import _native, plugins
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.dram.budget import fixed_bytes
from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import Flash, Landing, Ticket, simulated
from coldpress.runtime.generate.choice import DEFAULT_FLASH
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import replay
from coldpress.runtime.store.facts import Key
from coldpress.runtime.store.request import Batch
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import END, FETCH, Event, Recorder
from coldpress.schemas.metrics import RunMetrics
from tests.support.artifacts import Recipe, build_artifact
from tests.support.shapes import spec_7b

CASES = {
    "swiglu-50": ("topk", "silu", 0.5),
    "relu-10": ("topk", "relu", 0.1),
    "relu-3": ("topk", "relu", 0.03),
}
"""Case -> selector, activation, density. The ReLU cases, too, choose by magnitude: random weights leave half active."""
PINNED_SHARE = 0.4
"""Pinned share of the units in DRAM."""
READ_BUFFER_BYTES = 4 << 20
VOCAB_SIZE = 1024


@dataclass(frozen=True)
class Round:
    """Seconds of one token, all measured within a second or two, since the rate of a disk changes by the minute."""

    hit_rate: float
    token_s: float
    wait_s: float
    flash_s: float
    compute_s: float
    before_s: float
    serial_s: float
    bookkeeping_s: float

    @property
    def share_of_bound(self) -> float:
        """Returns the bound over the token's time; at 1 the token takes as long as its reads or its computing."""
        return max(self.flash_s, self.compute_s) / self.token_s

    @property
    def share_of_reach(self) -> float:
        """Returns the reach over the token's time; at 1, reads overlap with all the work left once units are known."""
        return (self.before_s + max(self.flash_s, self.compute_s - self.before_s)) / self.token_s


def figures_of(rounds: Sequence[Round]) -> Row:
    """Returns a row: every figure with its spread over the rounds."""
    names = ("token_s", "wait_s", "flash_s", "compute_s", "before_s", "serial_s", "bookkeeping_s")
    seconds = {name: spread([getattr(one, name) for one in rounds]) for name in names}
    return {
        **seconds,
        "tokens_per_s": 1 / seconds["token_s"]["median"],
        "share_of_bound": spread([one.share_of_bound for one in rounds]),
        "share_of_reach": spread([one.share_of_reach for one in rounds]),
        "gain_over_serial": gain([one.serial_s for one in rounds], [one.token_s for one in rounds]),
        "wait_share": spread([one.wait_s / one.token_s for one in rounds]),
        "bookkeeping_share": spread([one.bookkeeping_s / one.token_s for one in rounds]),
        "hit_rate": spread([one.hit_rate for one in rounds]),
    }


def write_artifact(case: str, layers: int, cached: float, folder: Path) -> Path:
    """Writes the artifact of a case and returns its path."""
    method, act, density = CASES[case]
    recipe = Recipe(
        spec=spec_7b(layers, VOCAB_SIZE, act),
        method=method,
        format="int4_group32",
        pinned_share=cached * PINNED_SHARE,
        slots_share=cached * (1 - PINNED_SHARE),
        read_buffer_bytes=READ_BUFFER_BYTES,
        collapse_gap_bytes=16384,
        context_length=64,
        density=density,
    )
    return build_artifact(folder / case, recipe).path


class Noted(simulated.Plugin):
    """A simulated device that records the reads it is asked for."""

    def __init__(self, artifact: Artifact, queue_depth: int) -> None:
        """Opens the simulated device, which moves no data."""
        super().__init__(artifact, queue_depth)
        self.calls: list[Extents] = []

    def submit(self, extents: Extents, into: np.ndarray, landing: Landing | None = None) -> simulated.Modelled:
        """See `coldpress.runtime.flash.Flash`."""
        self.calls.append(extents)
        return super().submit(extents, into, landing)


def decoded(session: Session, tokens: np.ndarray, recorder: Recorder) -> tuple[RunMetrics, list[Event]]:
    """Runs the tokens once more; returns metrics and fetches."""
    recorder.events.clear()
    metrics = session.perplexity(tokens, sparse=True).metrics
    return metrics, [event for event in recorder.events if event.kind in (FETCH, END)]


def decided(session: Session, fetches: Sequence[Event]) -> tuple[float, list[Extents]]:
    """Replays requests without data; returns (the store's seconds to decide on them, the reads that it makes)."""
    flash = Noted(session.artifact, session.plan.queue_depth)
    store = Store(session.artifact, session.plan, flash)
    replay(store, fetches)  # fills the caches as they were in the run
    flash.calls.clear()
    start = time.perf_counter()
    replay(store, fetches)
    return time.perf_counter() - start, flash.calls


def read_buffers() -> list[np.ndarray]:
    """Returns two buffers for all rounds: reads into memory that was never read into take half as long again."""
    buffers = [_native.aligned_buffer(READ_BUFFER_BYTES) for _ in range(2)]
    for buffer in buffers:
        buffer.fill(0)
    return buffers


def reads_alone(session: Session, calls: Sequence[Extents], name: str, buffers: Sequence[np.ndarray]) -> float:
    """Returns the seconds of these reads, a submission under way for each buffer so that the device never idles."""
    kind: Any = plugins.load_class("coldpress.runtime.flash", Flash, name)
    flash: Flash = kind(session.artifact, session.plan.queue_depth)
    under_way: deque[Ticket] = deque()
    start = time.perf_counter()
    for extents, buffer in zip(calls, itertools.cycle(buffers), strict=False):
        if len(under_way) == len(buffers):
            under_way.popleft().finish()
        under_way.append(flash.submit(extents, buffer))
    for ticket in under_way:
        ticket.finish()
    seconds = time.perf_counter() - start
    flash.close()
    return seconds


class Within:
    """Sums the seconds in which a store's fetches, from now on, bring units and the decoder computes with them."""

    def __init__(self, store: Store) -> None:
        """Replaces the store's `submit` by its own."""
        self.seconds, self._submit = 0.0, store.submit
        store.submit = self.submit  # type: ignore[method-assign, assignment]

    def submit(self, key: Key, ids: np.ndarray, kept: np.ndarray | None = None) -> Iterator[Batch]:
        """See `Store.submit`; the time between two batches counts."""
        start = time.perf_counter()
        yield from self._submit(key, ids, kept)
        self.seconds += time.perf_counter() - start


def in_dram(whole: Session, within: Within, tokens: np.ndarray) -> tuple[float, float]:
    """Returns (seconds of these tokens with all units in DRAM, the part of them before units can be asked for)."""
    within.seconds = 0.0
    metrics = whole.perplexity(tokens, sparse=True).metrics
    if metrics.misses:
        raise SystemExit(f"{metrics.misses} misses with {whole.plan.dram_budget_bytes} bytes of DRAM, expected none")
    return metrics.decode_s, metrics.decode_s - within.seconds


def rounds_of(path: Path, num_tokens: int, flash: str, rounds: int) -> list[Round]:
    """Measures one case: in every round the run, its decisions, its reads and its computing, in turn."""
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, (1, num_tokens + 2))
    recorder = Recorder()
    measured: list[Round] = []
    buffers = read_buffers()
    with Session(path, recorder=recorder, flash=flash) as session, Session(path, flash="serial") as serial:
        everything = fixed_bytes(session.artifact.manifest, session.plan) + session.artifact.manifest.flash.size_bytes
        with Session(path, dram_budget_bytes=everything, flash=flash) as whole:
            within = Within(whole.store)
            for turn in range(1 + rounds):
                metrics, fetches = decoded(session, tokens, recorder)
                serial_s = serial.perplexity(tokens, sparse=True).metrics.decode_s
                bookkeeping_s, calls = decided(session, fetches)
                flash_s = reads_alone(session, calls, flash, buffers)
                if not turn:  # a cold round does not count; two passes bring all units into DRAM:
                    for _ in range(2):  # the second sums in another order, and may choose a few other units
                        whole.perplexity(tokens, sparse=True)
                    continue
                compute_s, before_s = in_dram(whole, within, tokens)
                seconds = (metrics.decode_s, metrics.flash_s, flash_s, compute_s, before_s, serial_s, bookkeeping_s)
                measured.append(Round(metrics.hit_rate, *(each / metrics.num_tokens for each in seconds)))
    return measured


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = option(tuple(CASES), smoke=("relu-3",), choices=CASES, help="activation, density")
    layers: int = option(2, smoke=1, full=4, help="layers of the model")
    tokens: int = option(8, smoke=2, help="tokens per round")
    rounds: int = option(5, smoke=2, full=9, help="timed rounds")
    cached: float = option(0.5, help="share of the units in DRAM")
    flash: str = option(DEFAULT_FLASH, help="a plug-in of runtime/flash that reads flash.img")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].tokens_per_s": "tokens per second: 1 over the median of token_s",
        **{
            f"rows[].{name}_s": f"seconds per token: {meaning}"
            for name, meaning in (
                ("token", "the run itself"),
                ("wait", "waiting for flash in the run"),
                ("flash", "the reads of the run alone"),
                ("compute", "a run with all units in DRAM"),
                ("before", "part of compute_s before reads can begin"),
                ("serial", "a run in which every request waits for all its units"),
                ("bookkeeping", "the requests of the run replayed without data"),
            )
        },
        "rows[].share_of_bound": "max(flash_s, compute_s), the bound, over token_s, per round",
        "rows[].share_of_reach": "before_s + max(flash_s, compute_s - before_s), the reach, over token_s, per round",
        "rows[].gain_over_serial": "serial_s over token_s, taken in each round",
        "rows[].wait_share": "wait_s over token_s, taken in each round",
        "rows[].bookkeeping_share": "bookkeeping_s over token_s, taken in each round",
        "rows[].hit_rate": "share of requested units that were in DRAM",
    }
    is_timing = True
    over = {"case": "cases"}
    full_minutes = 6

    def measure(self, cell: Cell) -> Iterator[Row]:
        case, options = cell["case"], self.options
        path = write_artifact(case, options.layers, options.cached, self.folder)
        yield figures_of(rounds_of(path, options.tokens, options.flash, options.rounds))


if __name__ == "__main__":
    main("decode")
