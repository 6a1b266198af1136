"""Does the simulator say what a run does, and how long it takes?

`python -m tests.benchmarks.simulate [--cases relu-10 …] [--devices pixel6 …] [--dram 0.1 …] [--scale 0.25]
[--tokens 12]`, as root. The planted models of `tests.benchmarks.ladder` decode a passage in a process under the
kernel's caps of the device, scaled by one factor; the same requests are then replayed without data. Hits, misses,
evictions, reads and bytes, every offset and length, must be equal. The simulated device is the capped one: reads and
bytes per second are the caps, a first byte takes as long as a lone read of this disk, and memory is as fast as it was
while the same tokens were decoded with everything in DRAM and no caps, so that nothing is fitted to the run that is
told.

The last line is {rows: [{case, device, dram, equal, simulated_s, measured_s, ratio, flash_ratio}], worst_ratio}:
seconds per token, simulated over measured, the ratio that is farthest from 1; `flash_ratio` is that of the reads alone,
made again under the caps.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime import _native, budget
from runtime._counters import Counters
from runtime._extents import Extents
from runtime.artifact.reader import Artifact
from runtime.device_file import load_device
from runtime.emulation import emulate, emulated
from runtime.flash import direct
from runtime.generate import Session, on_device
from runtime.simulate import replay
from runtime.store import Store
from runtime.trace import Event, Recorder
from schemas.device import DeviceProfile, ReadPoint
from schemas.metrics import RunMetrics
from tests.benchmarks._report import finish, show
from tests.benchmarks.decode import Noted, reads_alone
from tests.benchmarks.ladder import CASES, ORDERS, OTHER_BYTES, plan_of, topic_tokens, write_artifacts

DECISIONS = ("hits", "misses", "evictions", "reads", "read_bytes", "extents_sha256")
LONE_READS = 64


def capped(device: DeviceProfile, bytes_per_s: float, latency_s: float) -> DeviceProfile:
    """The device as the caps that this process runs under leave it, with the memory of this machine."""
    caps = emulated()
    if caps is None:
        raise SystemExit("this process runs under no caps; start the benchmark without --one")
    flash, page = device.flash, device.flash.page_bytes.value
    curve = (
        ReadPoint(read_bytes=page, bytes_per_s=min(caps.bytes_per_s, caps.reads_per_s * page)),
        ReadPoint(read_bytes=1 << 20, bytes_per_s=caps.bytes_per_s),
    )
    changed = flash.model_copy(
        update={
            "read_curve": flash.read_curve.model_copy(update={"value": curve}),
            "latency_s": flash.latency_s.model_copy(update={"value": latency_s}),
        }
    )
    memory = device.dram_bytes_per_s.model_copy(update={"value": bytes_per_s})
    return device.model_copy(update={"flash": changed, "dram_bytes_per_s": memory})


def memory_bytes_per_s(path: Path, tokens: np.ndarray) -> float:
    """How fast tokens are computed from DRAM: the bytes that the simulator counts over measured seconds."""
    _, plan = plan_of(path, 1.0)
    with Session(path, plan=plan) as session:
        session.perplexity(tokens[1:], sparse=True)  # all that they use is in DRAM from now on
        found = session.perplexity(tokens[1:], sparse=True).metrics
        if found.misses:
            raise SystemExit(f"{path.name}: {found.misses} misses with everything in DRAM, expected none")
        return found.modelled_dram_s * session.artifact.manifest.device.dram_bytes_per_s.value / found.decode_s


def lone_read_s(artifact: Artifact) -> float:
    """Seconds of a read of a page with nothing else under way; the median."""
    page, flash = artifact.manifest.flash.page_bytes, direct.Flash(artifact, 1)
    buffer, taken = _native.aligned_buffer(page), list[float]()
    for number in range(LONE_READS):
        start = time.perf_counter()
        flash.submit(Extents(np.array([number * page]), np.array([page])), buffer).finish()
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def replayed(session: Session, device: DeviceProfile, first: Sequence[Event], then: Sequence[Event]) -> Any:
    """(metrics of `then` behind `first`, its reads call by call), without data."""
    artifact = on_device(session.artifact, device)
    flash = Noted(artifact, session.plan.queue_depth)
    store = Store(artifact, session.plan, flash)
    replay(store, first)
    flash.calls.clear()
    store.counters = Counters()
    replay(store, then)
    return store, flash.calls


def one(case: str, device: str, dram: float, num_tokens: int, rate: float, folder: Path) -> dict[str, Any]:
    """A row, in this process, which runs under the caps."""
    path, tokens = folder / f"{case}-{ORDERS[1]}", topic_tokens(num_tokens + 2)
    recorder = Recorder()
    with Session(path, plan=plan_of(path, dram)[1], recorder=recorder) as session:
        session.perplexity(tokens[:1], sparse=True)
        first, recorder.events = recorder.events, []
        real: RunMetrics = session.perplexity(tokens[1:], sparse=True).metrics
        profile = capped(load_device(device), rate, lone_read_s(session.artifact))
        store, calls = replayed(session, profile, first, recorder.events)
        told: RunMetrics = store.metrics(real.num_tokens, 0.0, 0.0, 0.0)
        alone_s = reads_alone(session, [extents for extents in calls if len(extents)], "direct")
    return {
        "case": case,
        "device": device,
        "dram": dram,
        "equal": all(getattr(real, name) == getattr(told, name) for name in DECISIONS),
        "simulated_s": told.modelled_s / told.num_tokens,
        "measured_s": real.decode_s / real.num_tokens,
        "ratio": told.modelled_s / real.decode_s,
        "flash_ratio": (told.modelled_flash_s + store.counters.prefill_flash_s) / alone_s,
    }


def emulated_row(case: str, device: str, dram: float, rate: float, arguments: argparse.Namespace, folder: Path) -> Any:
    """The row of a combination, measured in a process under the device's caps."""
    manifest, plan = plan_of(folder / f"{case}-{ORDERS[1]}", dram)
    needed = budget.used_bytes(manifest, plan) + OTHER_BYTES
    emulation = emulate(load_device(device), folder.resolve(), arguments.scale, needed)
    print(f"{case}, {dram:.0%} in DRAM, {emulation.title()}", flush=True)
    output = folder / "row.json"
    what = ["--one", case, device, str(dram), str(rate), str(output)]
    what += ["--tokens", str(arguments.tokens), "--folder", str(folder)]
    code = emulation.run([sys.executable, "-m", "tests.benchmarks.simulate", *what])
    if code:
        raise SystemExit(f"the measuring process ended with {code}")
    return json.loads(output.read_text())


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--devices", nargs="+", default=["pixel6", "oneplus12"], metavar="DEVICE")
    parser.add_argument("--dram", nargs="+", type=float, default=[0.1, 0.5], metavar="SHARE")
    parser.add_argument("--scale", type=float, default=0.25, help="of the devices' rates (default: 0.25)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="where artifacts are kept for the next run")
    parser.add_argument("--one", nargs=5, metavar=("CASE", "DEVICE", "SHARE", "RATE", "FILE"), help="one row, here")
    arguments = parser.parse_args()
    if arguments.one:
        case, device, dram, rate, output = arguments.one
        row = one(case, device, float(dram), arguments.tokens, float(rate), arguments.folder)
        Path(output).write_text(json.dumps(row))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        folder = arguments.folder or Path(temporary)
        for case in arguments.cases:
            if not (folder / f"{case}-{ORDERS[-1]}").exists():
                write_artifacts(case, arguments.layers, folder)
            rate = memory_bytes_per_s(folder / f"{case}-{ORDERS[1]}", topic_tokens(arguments.tokens + 2))
            for device in arguments.devices:
                rows += [emulated_row(case, device, dram, rate, arguments, folder) for dram in arguments.dram]
    show("simulated and measured", list(rows[0]), (list(row.values()) for row in rows))
    worst = max((row["ratio"] for row in rows), key=lambda ratio: abs(np.log(ratio)))
    finish({"rows": rows, "worst_ratio": worst})


if __name__ == "__main__":
    main()
