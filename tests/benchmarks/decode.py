"""What of a decoded token's time is flash, computing and bookkeeping, and how much of it they share.

`python -m tests.benchmarks.decode [--cases swiglu-50 …] [--layers 2] [--tokens 8] [--cached 0.5] [--flash direct]`.
Layers of a 7B's shape with random weights and a random order on flash in int4, `cached` of the units pinned or cached,
read from this machine's disk by that file of runtime/flash. Three things are measured beside the run, in the same
process: its reads alone, two submissions at a time (`flash_s`); the same tokens with all units in DRAM
(`compute_s`, which has the lookups in it); and its requests replayed without data (`bookkeeping_s`). A run that
overlapped all it could would take max(flash_s, compute_s); one that overlaps nothing takes their sum.

Random weights give no token anything in common with the one before, so caches find what chance gives them. The last
line is {rows: [{case, tokens_per_s, share_of_bound, gain_over_serial, wait_share, bookkeeping_share, hit_rate}]}.
"""

import argparse
import itertools
import os
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime import _native, _plugins
from runtime._extents import Extents
from runtime.artifact.reader import Artifact
from runtime.budget import fixed_bytes
from runtime.flash import Landing, Ticket, simulated
from runtime.generate import Session
from runtime.opening import DEFAULT_FLASH
from runtime.simulate import replay
from runtime.store import Store
from runtime.trace import END, FETCH, Event, Recorder
from schemas.metrics import RunMetrics
from tests.benchmarks._report import finish, show
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
class Row:
    """Seconds per token of one case."""

    case: str
    metrics: RunMetrics
    token_s: float
    wait_s: float
    flash_s: float
    compute_s: float
    bookkeeping_s: float

    def figures(self) -> dict[str, object]:
        """A row of the last line."""
        return {
            "case": self.case,
            "tokens_per_s": 1 / self.token_s,
            "share_of_bound": max(self.flash_s, self.compute_s) / self.token_s,
            "gain_over_serial": (self.flash_s + self.compute_s) / self.token_s,
            "wait_share": self.wait_s / self.token_s,
            "bookkeeping_share": self.bookkeeping_s / self.token_s,
            "hit_rate": self.metrics.hit_rate,
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


class Noted(simulated.Flash):
    """A device that takes down what it is asked for."""

    def __init__(self, artifact: Artifact, queue_depth: int) -> None:
        """No data, only time."""
        super().__init__(artifact, queue_depth)
        self.calls: list[Extents] = []

    def submit(self, extents: Extents, into: np.ndarray, landing: Landing | None = None) -> simulated.Modelled:
        """See `runtime.flash.Reader`."""
        self.calls.append(extents)
        return super().submit(extents, into, landing)


def decoded(path: Path, tokens: np.ndarray, budget: int | None, flash: str) -> tuple[Session, RunMetrics, list[Event]]:
    """A session that has run the tokens twice: metrics and fetches of the second time, with warm caches."""
    recorder = Recorder()
    session = Session(path, dram_budget_bytes=budget, recorder=recorder, flash=flash)
    session.perplexity(tokens, sparse=True)
    recorder.events.clear()
    metrics = session.perplexity(tokens, sparse=True).metrics
    return session, metrics, [event for event in recorder.events if event.kind in (FETCH, END)]


def decided(session: Session, fetches: Sequence[Event]) -> tuple[float, list[Extents]]:
    """(seconds that the store takes to decide on these requests without data, the reads it makes for them)."""
    flash = Noted(session.artifact, session.plan.queue_depth)
    store = Store(session.artifact, session.plan, flash)
    replay(store, fetches)  # caches as full as in the run
    flash.calls.clear()
    start = time.perf_counter()
    replay(store, fetches)
    return time.perf_counter() - start, flash.calls


def reads_alone(session: Session, calls: Sequence[Extents], name: str) -> float:
    """Seconds that these reads take, two submissions under way at once, so that the device is never without work."""
    buffers = itertools.cycle([_native.aligned_buffer(READ_BUFFER_BYTES) for _ in range(2)])
    flash = _plugins.load("runtime.flash", name).Flash(session.artifact, session.plan.queue_depth)
    under_way: deque[Ticket] = deque()
    start = time.perf_counter()
    for extents in calls:
        under_way.append(flash.submit(extents, next(buffers)))
        if len(under_way) == 2:
            under_way.popleft().finish()
    for ticket in under_way:
        ticket.finish()
    return time.perf_counter() - start


def measure(case: str, path: Path, num_tokens: int, flash: str) -> Row:
    """One case."""
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, (1, num_tokens + 2))
    session, metrics, fetches = decoded(path, tokens, None, flash)
    bookkeeping_s, calls = decided(session, fetches)
    flash_s = reads_alone(session, calls, flash)
    manifest, count = session.artifact.manifest, metrics.num_tokens
    session.close()
    everything = fixed_bytes(session.plan) + manifest.flash.size_bytes
    with decoded(path, tokens, everything, flash)[0] as whole:
        in_dram = whole.perplexity(tokens, sparse=True).metrics
    if in_dram.misses:
        raise SystemExit(f"{case}: {in_dram.misses} misses with {everything} bytes of DRAM, expected none")
    return Row(
        case=case,
        metrics=metrics,
        token_s=metrics.decode_s / count,
        wait_s=metrics.flash_s / count,
        flash_s=flash_s / count,
        compute_s=in_dram.decode_s / count,
        bookkeeping_s=bookkeeping_s / count,
    )


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8)
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
            rows.append(measure(case, path, arguments.tokens, arguments.flash))
    names = ("token_s", "wait_s", "flash_s", "compute_s", "bookkeeping_s")
    show(
        f"seconds per token, {arguments.layers} layers, {os.cpu_count()} cores",
        ["case", *names, "of the bound", "over serial", "hits"],
        (
            [
                row.case,
                *(getattr(row, name) for name in names),
                *(row.figures()[name] for name in ("share_of_bound", "gain_over_serial", "hit_rate")),
            ]
            for row in rows
        ),
    )
    finish({"rows": [row.figures() for row in rows]})


if __name__ == "__main__":
    main()
