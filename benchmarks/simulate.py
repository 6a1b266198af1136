"""Does the simulator say what a run does, and how long it takes?

`python -m benchmarks.simulate [--cases relu-10 …] [--devices pixel6 …] [--dram 0.1 …] [--scale 0.3]
[--tokens 12]`, as root. The planted models of `benchmarks.ladder` decode a passage in a process under the
kernel's caps of the device, scaled by one factor; the same requests are then replayed without data. Hits, misses,
evictions, reads and bytes, every offset and length, must be equal. The simulated device is the capped one: reads and
bytes per second are the caps, a first byte takes as long as a lone read of this disk, and memory is as fast as it was
while the same tokens were decoded with everything in DRAM and no caps, so that nothing is fitted to the run that is
told.

The last line is {rows: [{case, device, dram, equal, simulated_s, measured_s, ratio, flash_ratio, cap_ratio}],
worst_ratio, worst_cap_ratio}: seconds per token, simulated over measured, the ratio that is farthest from 1;
`flash_ratio` is that of the reads alone, made again under the caps. A cap is no device: what is not read while a
program computes may be read later, up to a slice of a tenth of a second, as fast as the disk does it. `cap_ratio` is
simulated with that, and with the disk's rates as they were before the caps.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decode import Noted, read_buffers, reads_alone
from benchmarks.shared.emulated import OTHER_BYTES, Task, answered, folder_of, measured_apart, parser, tasks
from benchmarks.shared.planted import ORDERED, artifact_of, plan_of, topic_tokens, write_artifacts
from benchmarks.shared.report import finish, show
from coldpress.runtime import _native
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.cli.emulation import emulated
from coldpress.runtime.cli.emulation.disk import disk_of
from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import direct
from coldpress.runtime.generate.choice import on_device
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plan import budget
from coldpress.runtime.profiles.devices import load_device
from coldpress.runtime.simulate import replay
from coldpress.runtime.store.clock import Clock, FlashQueue, bytes_before, computed_bytes, fetch_seconds
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import Event, Recorder
from coldpress.schemas.device import DeviceProfile, ReadPoint
from coldpress.schemas.layout import Plan
from coldpress.schemas.metrics import RunMetrics

DECISIONS = ("hits", "misses", "evictions", "reads", "read_bytes", "extents_sha256")
LONE_READS = 64
SLICE_S = 0.1
"""Of the kernel's throttle, on a disk that does not say that it has no moving parts."""


class Cap(FlashQueue):
    """The kernel's cap in a device's place: it saves up while nothing is asked for."""

    def __init__(self, device: DeviceProfile, least_share: float) -> None:
        """See `FlashQueue`; the disk itself takes at least this share of what the caps make of a request."""
        super().__init__(device)
        self._least_share = least_share

    def compute(self, num_bytes: int) -> None:
        """See `FlashQueue`."""
        self._left_s = max(-SLICE_S, self._left_s - num_bytes / self._device.dram_bytes_per_s.value)

    def fetch_s(self, flash_s: float, active_bytes: int, kept_bytes: int, *, early: bool) -> float:
        """See `FlashQueue`; nothing is read early."""
        waits_s = max(self._least_share * flash_s, self._left_s + flash_s)
        seconds = fetch_seconds(self._device, waits_s, active_bytes, kept_bytes)
        self._left_s = max(-SLICE_S, self._left_s + flash_s - seconds)
        return seconds


def put_cap(store: Store, artifact: Artifact, plan: Plan, least_share: float) -> None:
    """Replays behind this one are by the cap's law."""
    clock = store.clock
    assert clock is not None
    clock._queue = Cap(artifact.manifest.device, least_share)
    before = bytes_before(artifact.manifest, plan)
    rest = computed_bytes(artifact.manifest, plan) - sum(before.values())
    clock._bytes_before = {**before, min(before): before[min(before)] + rest}  # the head of the token before


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
    with Session(path, plan=plan, modelled=True) as session:
        for _ in range(2):  # sums in the order of arrival, and as units lie, may choose a few other units
            session.perplexity(tokens[1:], sparse=True)  # all that they use is in DRAM from now on
        found = session.perplexity(tokens[1:], sparse=True).metrics
        if found.misses:
            raise SystemExit(f"{path.name}: {found.misses} misses with everything in DRAM, expected none")
        return found.modelled_dram_s * session.artifact.manifest.device.dram_bytes_per_s.value / found.decode_s


def rates_of(path: Path, tokens: np.ndarray) -> dict[str, float]:
    """Of memory and of the disk without caps."""
    return {"memory_bytes_per_s": memory_bytes_per_s(path, tokens), **asdict(disk_of(path).measured())}


def least_share(rates: Mapping[str, float]) -> float:
    """What the disk takes by itself of a request's seconds under the caps of this process."""
    caps = emulated()
    assert caps is not None
    return max(caps.reads_per_s / rates["reads_per_s"], caps.bytes_per_s / rates["bytes_per_s"])


def lone_read_s(artifact: Artifact) -> float:
    """Seconds of a read of a page with nothing else under way; the median."""
    page, flash = artifact.manifest.flash.page_bytes, direct.Plugin(artifact, 1)
    buffer, taken = _native.aligned_buffer(page), list[float]()
    for number in range(LONE_READS):
        start = time.perf_counter()
        flash.submit(Extents(np.array([number * page]), np.array([page])), buffer).finish()
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def replayed(
    session: Session, device: DeviceProfile, first: Sequence[Event], then: Sequence[Event], cap: float | None = None
) -> tuple[Store, list[Extents]]:
    """(the store that counted `then` behind `first`, its reads call by call), without data; by a device's law, or a
    cap's on a disk that takes at least such a share of it."""
    artifact = on_device(session.artifact, device)
    flash = Noted(artifact, session.plan.queue_depth)
    store = Store(artifact, session.plan, flash, Clock(artifact.manifest, session.plan))
    if cap is not None:
        put_cap(store, artifact, session.plan, cap)
    replay(store, first)
    flash.calls.clear()
    store.start_counting()
    replay(store, then)
    return store, flash.calls


def one(task: Task) -> dict[str, Any]:
    """A row, in this process, which runs under the caps; `extra` is what `rates_of` gave."""
    path, tokens = artifact_of(task.case, ORDERED, task.folder), topic_tokens(2, task.num_tokens + 2)
    recorder = Recorder()
    with Session(path, plan=plan_of(path, task.dram)[1], recorder=recorder) as session:
        session.perplexity(tokens[:1], sparse=True)
        first, recorder.events = recorder.events, []
        real: RunMetrics = session.perplexity(tokens[1:], sparse=True).metrics
        profile = capped(load_device(task.device), task.extra["memory_bytes_per_s"], lone_read_s(session.artifact))
        store, calls = replayed(session, profile, first, recorder.events)
        told: RunMetrics = store.metrics(real.num_tokens, 0.0, 0.0, 0.0)
        under_cap, _ = replayed(session, profile, first, recorder.events, least_share(task.extra))
        cap_s = under_cap.metrics(real.num_tokens, 0.0, 0.0, 0.0).modelled_s
        alone_s = reads_alone(session, [extents for extents in calls if len(extents)], "direct", read_buffers())
    return {
        "case": task.case,
        "device": task.device,
        "dram": task.dram,
        "equal": all(getattr(real, name) == getattr(told, name) for name in DECISIONS),
        "simulated_s": told.modelled_s / told.num_tokens,
        "measured_s": real.decode_s / real.num_tokens,
        "ratio": told.modelled_s / real.decode_s,
        "flash_ratio": (told.modelled_flash_s + store.counters.prefill_flash_s) / alone_s,
        "cap_ratio": cap_s / real.decode_s,
    }


def row_of(task: Task, scale: float | None) -> dict[str, Any]:
    """The row of a combination, measured in a process under the device's caps."""
    manifest, plan = plan_of(artifact_of(task.case, ORDERED, task.folder), task.dram)
    return measured_apart("benchmarks.simulate", task, scale, budget.used_bytes(manifest, plan) + OTHER_BYTES)[0]


def main() -> None:
    """Prints the table and the figures."""
    arguments = parser(__doc__).parse_args()
    if answered(arguments, one):
        return
    rows: list[dict[str, Any]] = []
    with folder_of(arguments) as folder:
        for case in arguments.cases:
            write_artifacts(case, arguments.layers, folder)
            rates = rates_of(artifact_of(case, ORDERED, folder), topic_tokens(2, arguments.tokens + 2))
            rows += [row_of(task, arguments.scale) for task in tasks(arguments, case, folder, rates)]
    show("simulated and measured", list(rows[0]), (list(row.values()) for row in rows))

    def worst(name: str) -> float:
        return max((row[name] for row in rows), key=lambda ratio: abs(np.log(ratio)))

    finish({"rows": rows, "worst_ratio": worst("ratio"), "worst_cap_ratio": worst("cap_ratio")})


if __name__ == "__main__":
    main()
