"""Compares the simulator with a run, and measures the simulator's own speed.

Planted layers of a 7B (benchmarks/shared/planted.py) decode a passage in a process under the kernel's caps of a device,
scaled by one factor; the same requests are then replayed without data. Hits, misses, evictions, reads and bytes, every
offset and length, must be equal. The simulated device is the capped one: reads and bytes per second are the caps, a
first byte takes as long as a lone read of this disk, and computing has the rates that `device measure` finds here.
Those rates come from other weights and other tokens, so nothing is fitted to the simulated run.

The simulator's own speed is measured on a drawn trace (runtime/synthetic) of the case's density. Its hottest units have
the share of the uses that PowerInfer found in models with ReLU and with SwiGLU (3.1, Fig. 4a), and its tokens repeat as
many units as LLM in a flash's window implies (C.1). Seconds are processor time; drawing does not count.
"""

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.decode import Noted, read_buffers, reads_alone
from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, Spread, interleaved, main, option, spread
from benchmarks.shared.emulated import OTHER_BYTES, apart_under_caps, capped
from benchmarks.shared.planted import CASES, ORDERED, WIDTH_7B, artifact_of, plan_of, topic_tokens, write_artifacts
from benchmarks.shared.synthetic.statistics import Statistics
from benchmarks.shared.synthetic.trace import Synthetic
from coldpress.compiler.device.measure import computing
from coldpress.runtime import _native
from coldpress.runtime.artifact.reader import Artifact, open_artifact
from coldpress.runtime.cli.emulation import emulated
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.dram import budget
from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import direct
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import on_device, replay, simulate
from coldpress.runtime.store.clock import Clock
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import Event, Recorder
from coldpress.schemas.compute import Compute
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.metrics import RunMetrics

DECISIONS = ("hits", "misses", "evictions", "reads", "read_bytes", "extents_sha256")
DRAWN = {"relu": Statistics(hot_share=0.26, repeated=0.57), "swiglu": Statistics(hot_share=0.69, repeated=0.6)}
"""First word of the case -> statistics of the drawn trace; density and tokens are added."""
LONE_READS = 64


def lone_read_s(artifact: Artifact) -> float:
    """Returns the median seconds of a read of one page with nothing else under way."""
    page, flash = artifact.manifest.flash.page_bytes, direct.Plugin(artifact, 1)
    buffer, taken = _native.aligned_buffer(page), list[float]()
    for number in range(LONE_READS):
        start = time.perf_counter()
        flash.submit(Extents(np.array([number * page]), np.array([page])), buffer).finish()
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def replayed(
    session: Session, device: DeviceProfile, first: Sequence[Event], then: Sequence[Event]
) -> tuple[Store, list[Extents]]:
    """Replays events without data, by a device's law; returns (the store that counted `then`, its reads by call)."""
    artifact = on_device(session.artifact, device)
    flash = Noted(artifact, session.plan.queue_depth)
    store = Store(artifact, session.plan, flash, Clock(artifact.manifest, session.plan))
    replay(store, first)
    flash.calls.clear()
    store.start_counting()
    replay(store, then)
    return store, flash.calls


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = option(
        ("swiglu-50", "relu-10"), smoke=("relu-10",), full=tuple(CASES), choices=CASES, help="activation, density"
    )
    devices: tuple[str, ...] = option(("pixel6",), full=("pixel6", "oneplus12"), help="device profiles")
    dram: tuple[float, ...] = option((0.1,), full=(0.1, 0.5), help="shares of the units in DRAM")
    scale: float = option(0.0, smoke=0.3, help="share of the device's rates; 0: as much as the disk gives")
    layers: int = option(2, smoke=1, full=4, help="layers of the model")
    width: int = option(WIDTH_7B, smoke=512, help="hidden_size, a multiple of 512")
    tokens: int = option(16, smoke=4, full=40, help="tokens of the passage")
    drawn_tokens: int = option(200, smoke=8, help="tokens of the drawn trace")
    rounds: int = option(9, smoke=1, full=15, help="timed simulations of the drawn trace")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].equal": "whether all decisions and all reads are equal in the run and in its simulation",
        "rows[].simulated_s": "simulated seconds per token",
        "rows[].measured_s": "measured seconds per token",
        "rows[].ratio": "simulated_s over measured_s",
        "rows[].flash_ratio": "simulated seconds of the reads over the seconds of the same reads alone, under the caps",
        "rows[].unit_requests_per_s": "units of the drawn trace that are simulated per second of processor time",
        "least_unit_requests_per_s": "least median of unit_requests_per_s of all rows",
        "worst_ratio": "ratio that is farthest from 1",
    }
    is_timing = True
    needs_root = True
    over = {"case": "cases", "device": "devices", "dram": "dram"}
    full_minutes = 20

    def measure(self, cell: Cell) -> Iterator[Row]:
        case, dram = cell["case"], cell["dram"]
        path, rates = self.once(case, lambda: self.artifact(case))
        memory_bytes = budget.used_bytes(*plan_of(path, dram)) + OTHER_BYTES
        row, _ = apart_under_caps(self, "row", cell["device"], self.options.scale, memory_bytes, {**cell}, rates)
        yield row | {"unit_requests_per_s": self.unit_requests_per_s(case, dram)}

    def unit_requests_per_s(self, case: str, dram: float) -> Spread:
        """Returns the units requested per second of processor time, over the rounds."""
        path, density = artifact_of(case, ORDERED, self.folder / "artifacts"), CASES[case][2]
        artifact, plan = open_artifact(path), plan_of(path, dram)[1]
        asked = {"density": density, "tokens": self.options.drawn_tokens}
        trace = list(Synthetic(artifact, DRAWN[case.partition("-")[0]].model_copy(update=asked)))
        works = {"simulate": lambda: simulate(artifact, plan, trace)}
        num_units = sum(event.ids.size for event in trace)
        return spread([num_units / s for s in interleaved(works, self.options.rounds, time.process_time)["simulate"]])

    def artifact(self, case: str) -> tuple[Path, str]:
        """Returns a case's artifact, and this machine's rates of computing as JSON; removes the artifact before."""
        folder, options = self.folder / "artifacts", self.options
        shutil.rmtree(folder, ignore_errors=True)
        write_artifacts(case, options.layers, folder, [ORDERED], options.width)
        path = artifact_of(case, ORDERED, folder)
        compute = computing(load_device("host"), self.folder, "measured: this machine", lambda _: None)
        return path, compute.to_json()

    def row(self, cell: Cell, rates: str) -> Row:
        """Returns a row; runs in a process under the caps."""
        path = artifact_of(cell["case"], ORDERED, self.folder / "artifacts")
        tokens, recorder = topic_tokens(2, self.options.tokens + 2), Recorder()
        with Session(path, plan=plan_of(path, cell["dram"])[1], recorder=recorder) as session:
            session.perplexity(tokens[:1], sparse=True)
            first, recorder.events = recorder.events, []
            real: RunMetrics = session.perplexity(tokens[1:], sparse=True).metrics
            compute, caps = Compute.model_validate_json(rates), emulated()
            assert caps is not None
            profile = capped(load_device(cell["device"]), caps, compute, lone_read_s(session.artifact))
            store, calls = replayed(session, profile, first, recorder.events)
            told: RunMetrics = store.metrics(real.num_tokens, 0.0, 0.0, 0.0)
            alone_s = reads_alone(session, [extents for extents in calls if len(extents)], "direct", read_buffers())
        return {
            "equal": all(getattr(real, name) == getattr(told, name) for name in DECISIONS),
            "simulated_s": told.modelled_s / told.num_tokens,
            "measured_s": real.decode_s / real.num_tokens,
            "ratio": told.modelled_s / real.decode_s,
            "flash_ratio": (told.modelled_flash_s + store.counters.prefill_flash_s) / alone_s,
        }

    def figures(self, rows: Rows) -> Figures:
        return {
            "worst_ratio": max((row["ratio"] for row in rows), key=lambda ratio: abs(math.log(ratio))),
            "least_unit_requests_per_s": min(row["unit_requests_per_s"]["median"] for row in rows),
        }


if __name__ == "__main__":
    main("simulate")
