"""What of a decoded token's time is flash, computing and bookkeeping, and how much of it they share.

`python -m benchmarks.decode [--cases swiglu-50 …] [--layers 2] [--tokens 8] [--rounds 5] [--cached 0.5]`.
Layers of a 7B's shape with random weights and a random order on flash in int4, `cached` of the units pinned or cached,
read from this machine's disk by a file of runtime/flash. Four things are measured beside the run, in the same
process: its reads alone, two submissions at a time (`flash_s`); the same tokens with all units in DRAM
(`compute_s`, which has the lookups in it), and what of that comes before reads can begin (`before_s`: attention, norms,
and whatever says which units are used); the same run where whoever asks for units waits until all are there
(`serial_s`, of runtime/flash/serial.py); and its requests replayed without data (`bookkeeping_s`). A run that
overlapped all it could would take max(flash_s, compute_s); one that guesses nothing cannot take less than before_s +
max(flash_s, compute_s - before_s), which is its reach. All are measured in turn, in rounds, and the medians over rounds
of seconds and of shares are told.

Random weights give no token anything in common with the one before, so caches find what chance gives them. The last
line is {rows: [{case, tokens_per_s, share_of_bound, shares_of_bound (least and largest), share_of_reach,
gain_over_serial, wait_share, bookkeeping_share, hit_rate}]}.
"""

import argparse
import itertools
import operator
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.shared.report import finish, show
from coldpress.runtime import _native, plugins
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import Flash, Landing, Ticket, simulated
from coldpress.runtime.generate.choice import DEFAULT_FLASH
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plan.budget import fixed_bytes
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
"""Case -> selector, activation, density. What a ReLU leaves is chosen by magnitude: random weights are half active."""
PINNED_SHARE = 0.4
"""Of the units in DRAM, those that are pinned."""
READ_BUFFER_BYTES = 4 << 20
VOCAB_SIZE = 1024


@dataclass(frozen=True)
class Round:
    """Seconds of one token, measured within a second or two of each other: what a disk gives changes by the minute."""

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
        """1: nothing but the device, or nothing but computing."""
        return max(self.flash_s, self.compute_s) / self.token_s

    @property
    def share_of_reach(self) -> float:
        """1: reads begin when their layer knows what it wants, and all there is to do meanwhile is done meanwhile."""
        return (self.before_s + max(self.flash_s, self.compute_s - self.before_s)) / self.token_s

    @property
    def gain_over_serial(self) -> float:
        """What overlapping brings."""
        return self.serial_s / self.token_s


@dataclass(frozen=True)
class Row:
    """One case in all its rounds."""

    case: str
    rounds: list[Round]

    def median(self, figure: Callable[[Round], float]) -> float:
        """Of all rounds."""
        return statistics.median(map(figure, self.rounds))

    def figures(self) -> dict[str, object]:
        """A row of the last line: medians, and the least and largest share of the bound."""
        shares = [of.share_of_bound for of in self.rounds]
        return {
            "case": self.case,
            "tokens_per_s": 1 / self.median(lambda of: of.token_s),
            "share_of_bound": statistics.median(shares),
            "shares_of_bound": [min(shares), max(shares)],
            "share_of_reach": self.median(lambda of: of.share_of_reach),
            "gain_over_serial": self.median(lambda of: of.gain_over_serial),
            "wait_share": self.median(lambda of: of.wait_s / of.token_s),
            "bookkeeping_share": self.median(lambda of: of.bookkeeping_s / of.token_s),
            "hit_rate": self.median(lambda of: of.hit_rate),
        }


def write_artifact(case: str, layers: int, cached: float, folder: Path) -> Path:
    """The artifact of a case."""
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
    """A device that takes down what it is asked for."""

    def __init__(self, artifact: Artifact, queue_depth: int) -> None:
        """No data, only time."""
        super().__init__(artifact, queue_depth)
        self.calls: list[Extents] = []

    def submit(self, extents: Extents, into: np.ndarray, landing: Landing | None = None) -> simulated.Modelled:
        """See `coldpress.runtime.flash.Reader`."""
        self.calls.append(extents)
        return super().submit(extents, into, landing)


def decoded(session: Session, tokens: np.ndarray, recorder: Recorder) -> tuple[RunMetrics, list[Event]]:
    """Metrics and fetches of running the tokens once more."""
    recorder.events.clear()
    metrics = session.perplexity(tokens, sparse=True).metrics
    return metrics, [event for event in recorder.events if event.kind in (FETCH, END)]


def decided(session: Session, fetches: Sequence[Event]) -> tuple[float, list[Extents]]:
    """(seconds that the store takes to decide on these requests without data, the reads it makes for them)."""
    flash = Noted(session.artifact, session.plan.queue_depth)
    store = Store(session.artifact, session.plan, flash)
    replay(store, fetches)  # caches as full as in the run
    flash.calls.clear()
    start = time.perf_counter()
    replay(store, fetches)
    return time.perf_counter() - start, flash.calls


def read_buffers() -> list[np.ndarray]:
    """Two, for all rounds: reads into memory that was not read into before take half as long again."""
    buffers = [_native.aligned_buffer(READ_BUFFER_BYTES) for _ in range(2)]
    for buffer in buffers:
        buffer.fill(0)
    return buffers


def reads_alone(session: Session, calls: Sequence[Extents], name: str, buffers: Sequence[np.ndarray]) -> float:
    """Seconds of these reads, a submission under way for each buffer, so that the device is never without work."""
    flash = plugins.load_class("coldpress.runtime.flash", Flash, name)(session.artifact, session.plan.queue_depth)
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
    """Seconds in which units are fetched and computed with, of a store's fetches from now on."""

    def __init__(self, store: Store) -> None:
        """Stands before the store."""
        self.seconds, self._submit = 0.0, store.submit
        store.submit = self.submit  # type: ignore[method-assign, assignment]

    def submit(self, key: Key, ids: np.ndarray, kept: np.ndarray | None = None) -> Iterator[Batch]:
        """See `Store.submit`; what is done between two batches counts."""
        start = time.perf_counter()
        yield from self._submit(key, ids, kept)
        self.seconds += time.perf_counter() - start


def in_dram(whole: Session, within: Within, tokens: np.ndarray) -> tuple[float, float]:
    """(seconds of these tokens with all units in DRAM, those of them before units can be asked for)."""
    within.seconds = 0.0
    metrics = whole.perplexity(tokens, sparse=True).metrics
    if metrics.misses:
        raise SystemExit(f"{metrics.misses} misses with {whole.plan.dram_budget_bytes} bytes of DRAM, expected none")
    return metrics.decode_s, metrics.decode_s - within.seconds


def measure(case: str, path: Path, num_tokens: int, flash: str, rounds: int) -> Row:
    """One case: the run, its decisions, its reads and its computing in turn, as often as there are rounds."""
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
                if not turn:  # caches and buffers were cold, and sums were made in the order of arrival: twice,
                    for _ in range(2):  # since another rounding may choose a few other units
                        whole.perplexity(tokens, sparse=True)
                    continue
                compute_s, before_s = in_dram(whole, within, tokens)
                seconds = (metrics.decode_s, metrics.flash_s, flash_s, compute_s, before_s, serial_s, bookkeeping_s)
                measured.append(Round(metrics.hit_rate, *(each / metrics.num_tokens for each in seconds)))
    return Row(case, measured)


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts")
    parser.add_argument("--cached", type=float, default=0.5, help="share of the units in DRAM")
    parser.add_argument("--flash", default=DEFAULT_FLASH, help="a file of runtime/flash that reads flash.img")
    parser.add_argument("--folder", type=Path, help="where artifacts are kept for the next run")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        folder = arguments.folder or Path(temporary)
        for case in arguments.cases:
            path = folder / case
            if not path.exists():
                write_artifact(case, arguments.layers, arguments.cached, folder)
            rows.append(measure(case, path, arguments.tokens, arguments.flash, arguments.rounds))
    names = ("token_s", "wait_s", "flash_s", "compute_s", "before_s", "serial_s", "bookkeeping_s")
    show(
        f"seconds per token, {arguments.layers} layers, {os.cpu_count()} cores",
        ["case", *names, "of the bound", "of its reach", "over serial", "hits"],
        (
            [
                row.case,
                *(row.median(operator.attrgetter(name)) for name in names),
                *(row.figures()[name] for name in ("share_of_bound", "share_of_reach", "gain_over_serial", "hit_rate")),
            ]
            for row in rows
        ),
    )
    finish({"rows": [row.figures() for row in rows]})


if __name__ == "__main__":
    main()
