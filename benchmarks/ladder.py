"""What each mechanism brings, on emulated devices: layers of a 7B with planted activity, one setting more at a step.

`python -m benchmarks.ladder [--cases relu-10 …] [--devices pixel6 …] [--dram 0.1 …] [--scale 0.3] [--layers 4]
[--tokens 40]`, as root, with the extra `llama`. Models are planted (`_planted.py`); `dram` is the share of the bytes on
flash that DRAM holds, beside what is always resident: attention, embeddings, predictors. The steps are those of
runtime/cli/ladder.py, and three that are other layouts of the same weights: before `+bundling` the slices of a unit lie
apart (`unbundled.py`), before `+ordering` units lie by their number and not as the order stage puts them, and with
`+groups` the units of consecutive layers lie side by side and are read ahead together.

Each combination runs in a process of its own under the kernel's caps of the device, scaled by one factor for all; all
steps of it in turn, on the same two passages of one document, of which the first one fills the caches and is not
counted. The second is to be long: the kernel counts in slices of 0.1 s, and lets through a slice's reads at once. A
step that loses is shown and not taken along, unless others stand on it. llama.cpp with the same weights mapped
(`llama_mmap.py`) runs under the same caps. Beside the steps stand `over_llama`, the best setting's speed over
llama.cpp's; `layout`, what order, collapse and cache bring over LLM in a flash's setting (selector, window, bundles
by number), in tokens per second, in seconds waited for flash, and in those of the device's own law; and `overlap`,
what reading while computing brings. Bounds are what each could be at most: no cache misses less than Belady's, no
read is faster than the device's bandwidth, and a token takes as long as its reads or its computing. The last line is
{rows: [{case, device, dram, scale, artifact_over_budget, llama_tokens_per_s, over_llama, layout, layout_bound,
layout_flash, layout_flash_bound, layout_modelled, overlap, overlap_bound, in_a_flash, steps}], layout_median,
layout_flash_median}, the latter over the rows whose bound is at least Ripple's mean gain of 1.68.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared import llama_mmap, unbundled
from benchmarks.shared.emulated import OTHER_BYTES, Task, answered, folder_of, measured_apart, parser, tasks
from benchmarks.shared.llama import llama_extra
from benchmarks.shared.planted import (
    GROUP_LAYERS,
    GROUPED,
    ORDERED,
    STRUCTURAL,
    artifact_of,
    plan_of,
    topic_tokens,
    write_artifacts,
)
from benchmarks.shared.report import finish, show
from coldpress.runtime import _native
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli import ladder
from coldpress.runtime.generate.session import Session
from coldpress.runtime.profiles.devices import load_device
from coldpress.runtime.simulate import simulate
from coldpress.runtime.store.ahead_room import NOTHING, fitting
from coldpress.runtime.trace import FETCH, Event, Recorder
from coldpress.schemas.device import DeviceProfile, flash_seconds
from coldpress.schemas.layout import Plan
from coldpress.schemas.metrics import RunMetrics

FILLING_TOKENS, DENSE_TOKENS, LLAMA_TOKENS = 16, 6, 8
COLLAPSE, OVERLAP = "+collapse", "+overlap"
"""Steps of runtime/cli/ladder.py, by the beginning of their names."""
MEAN_GAIN = 1.68
"""Of ordering and collapse, over five models (Ripple 6.3)."""
LLAMA = "llama.cpp"


@dataclass(frozen=True)
class Placed(ladder.Setting):
    """A setting, which of the case's artifacts it runs on, and the image that its units are read from, if not its
    own."""

    path: Path
    image: Path | None


@dataclass(frozen=True)
class Measured:
    """Per decoded token."""

    tokens_per_s: float
    reads_per_token: float
    read_bytes_per_token: float
    hit_rate: float
    flash_s_per_token: float
    modelled_flash_s_per_token: float
    """By the device's own law, at its own rates."""
    peak_rss_bytes: int


@dataclass
class Trace:
    """What the last run asked for: the passage that fills the caches, and those behind it."""

    first: Sequence[Event] = ()
    then: Sequence[Event] = ()
    num_tokens: int = 0


def measure(setting: Placed, passages: np.ndarray, device: DeviceProfile, trace: Trace) -> Measured:
    """Decodes the passages one after another, and counts all but the first."""
    recorder, is_dense = Recorder(), setting.plan.method == "dense"
    if is_dense:  # every token is like every other
        passages = passages[:, : DENSE_TOKENS + 2]
    opened = Session(
        setting.path, plan=setting.plan, flash=setting.flash, recorder=recorder, device=device, modelled=True
    )
    with opened as session:
        apart = None
        if setting.image:
            depth = setting.plan.queue_depth
            apart = unbundled.Flash(session.artifact, depth, setting.image, lambda: is_decoding(recorder))
            session.store._device.flash = apart
        _decode(session, passages[0, : FILLING_TOKENS + 2])
        trace.first, recorder.events = recorder.events, []
        if apart:
            apart.forget()
        found = _decode(session, passages[1])
        trace.then, trace.num_tokens = recorder.events, found.num_tokens
    reads, read_bytes, modelled_s, moved_s = found.reads, found.read_bytes, found.modelled_flash_s, 0.0
    if apart:
        reads, read_bytes, moved_s = apart.reads, apart.read_bytes, apart.moved_s
        modelled_s = float(flash_seconds(device.flash.issuing(setting.plan.queue_depth), reads, read_bytes))
    count = found.num_tokens
    return Measured(
        tokens_per_s=count / (found.decode_s - moved_s),
        reads_per_token=reads / count,
        read_bytes_per_token=read_bytes / count,
        hit_rate=found.hit_rate,
        flash_s_per_token=found.flash_s / count,
        modelled_flash_s_per_token=modelled_s / count,
        peak_rss_bytes=found.peak_rss_bytes,
    )


def is_decoding(recorder: Recorder) -> bool:
    """Whether what the store was asked for last were single units."""
    return bool(recorder.events) and recorder.events[-1].kind == FETCH


def _decode(session: Session, passage: np.ndarray) -> RunMetrics:
    return session.perplexity(passage[None], sparse=True).metrics


def changes_of(task: Task) -> tuple[Placed, list[tuple[str, ladder.Change]]]:
    """The first setting, and all steps."""
    structural, ordered = (artifact_of(task.case, order, task.folder) for order in (STRUCTURAL, ORDERED))
    manifest, plan = plan_of(structural, task.dram)
    device = load_device(task.device).flash
    # the gap at which a read costs what the bytes between cost; Ripple 5.1 has a threshold, and no formula for it
    gap_bytes = int(device.bytes_per_s / device.iops)
    first, steps = ladder.steps(manifest, plan.model_copy(update={"collapse_gap_bytes": gap_bytes}))
    image = image_of(task.case, task.folder)

    def apart(change: ladder.Change) -> ladder.Change:
        return lambda before: _put(change(before), image=image)

    # whole matrices, which are all that is read before a selector, are read the same in both layouts
    steps = [(name, apart(change) if name.startswith(("+selector", "+window")) else change) for name, change in steps]
    where = next(number for number, (name, _) in enumerate(steps) if name.startswith(COLLAPSE))
    steps[where:where] = [
        ("+bundling", lambda before: _put(before, image=None)),
        ("+ordering", lambda before: _put(before, path=ordered)),
    ]
    grouped = artifact_of(task.case, GROUPED, task.folder)
    steps += [(f"+groups of {GROUP_LAYERS}", lambda before: in_groups(before, grouped))]
    return Placed(first.plan, first.flash, structural, None), steps


def in_groups(before: ladder.Setting, grouped: Path) -> ladder.Setting:
    """Where units of consecutive layers lie side by side and are read ahead together (ActiveFlow 3)."""
    manifest, plan = open_artifact(grouped).manifest, before.plan.model_copy(update=NOTHING.fields)
    return ladder.with_preload(manifest, _put(before, plan=plan, path=grouped), fitting(manifest, plan))


def _put(before: ladder.Setting, **changes: Any) -> ladder.Setting:
    return replace(before, **changes)


def image_of(case: str, folder: Path) -> Path:
    """Where the image without bundles lies."""
    return folder / f"{case}-unbundled.img"


def climb(task: Task) -> dict[str, Any]:
    """All steps of a combination, or llama.cpp, in this process."""
    passages = topic_tokens(2, task.num_tokens + 2)
    if task.extra == LLAMA:
        return llama_mmap.measure(gguf_of(task.case, task.folder), topic_tokens(3, 2), LLAMA_TOKENS)
    _native.set_num_threads(os.cpu_count() or 1)
    first, changes = changes_of(task)
    trace, device = Trace(), load_device(task.device)
    found = ladder.run(first, changes, lambda setting: measure(setting, passages, device, trace))
    earlier = measure(in_a_flash(first, dict(changes)), passages, device, trace)
    least = least_bytes(first.path, plan_of(first.path, task.dram)[1], trace)
    return {"steps": [as_data(step) for step in found], "in_a_flash": asdict(earlier), "least_bytes": least}


def in_a_flash(first: Placed, changes: Mapping[str, ladder.Change]) -> ladder.Setting:
    """What LLM in a flash has: a selector, a window and bundles, which Ripple is measured against."""
    wanted = [change for name, change in changes.items() if name.startswith(("+selector", "+window", "+bundling"))]
    return reduce(lambda before, change: change(before), wanted, first)


def gguf_of(case: str, folder: Path) -> Path:
    """Where llama.cpp's file lies."""
    return folder / f"{case}.gguf"


def least_bytes(path: Path, plan: Plan, trace: Trace) -> float:
    """Bytes of units that a token cannot do without reading, whatever is cached in as much memory (Belady)."""
    parts = tuple(
        part.model_copy(update={"num_pinned": 0, "cache_slots": part.num_pinned + part.cache_slots})
        for part in plan.parts
    )
    plan = plan.model_copy(update={"cache": "belady", "cache_options": {}, "parts": parts})
    found = simulate(open_artifact(path), plan, trace.then, before=trace.first)
    return found.used_bytes / trace.num_tokens


def row_of(task: Task, scale: float | None, with_llama: bool) -> dict[str, Any]:
    """The row of a combination, measured in processes under the device's caps."""
    path = artifact_of(task.case, STRUCTURAL, task.folder)
    manifest, plan = plan_of(path, task.dram)
    room, fixed = plan.dram_budget_bytes, plan.resident_bytes + plan.predictor_bytes
    found, caps = measured_apart("benchmarks.ladder", task, scale, room + OTHER_BYTES)
    row = {
        "case": task.case,
        "device": task.device,
        "dram": task.dram,
        "scale": caps.scale,
        "artifact_over_budget": (fixed + manifest.flash.size_bytes) / room,
        **gains(found["steps"], found["in_a_flash"], found["least_bytes"] / caps.bytes_per_s),
        "in_a_flash": found["in_a_flash"],
        "steps": found["steps"],
    }
    if with_llama:
        asked = replace(task, extra=LLAMA)
        own_bytes = measured_apart("benchmarks.ladder", asked, scale, room + (4 << 30))[0]["own_bytes"]
        memory_bytes = room + own_bytes + llama_mmap.SLACK_BYTES
        theirs = measured_apart("benchmarks.ladder", asked, scale, memory_bytes)[0]["tokens_per_s"]
        row |= {"llama_tokens_per_s": theirs, "over_llama": best(found["steps"])["tokens_per_s"] / theirs}
    return row


def best(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last that was kept."""
    return [step for step in steps if step["kept"]][-1]


def gains(steps: Sequence[dict[str, Any]], before: dict[str, Any], least_s: float) -> dict[str, float]:
    """What layout and cache bring over what was `before`, and the most that they could; what overlapping brings, and
    the most that it could. `least_s` is a token's least time on flash."""
    names = [step["name"].partition(" ")[0] for step in steps]
    after = best(steps[: names.index(OVERLAP)])
    token_s, flash_s = 1 / before["tokens_per_s"], before["flash_s_per_token"]
    serial_s, read_s = 1 / after["tokens_per_s"], after["flash_s_per_token"]
    return {
        "layout": after["tokens_per_s"] / before["tokens_per_s"],
        "layout_bound": token_s / (token_s - flash_s + least_s),
        "layout_flash": flash_s / read_s,
        "layout_flash_bound": flash_s / least_s,
        "layout_modelled": before["modelled_flash_s_per_token"] / after["modelled_flash_s_per_token"],
        "overlap": best(steps)["tokens_per_s"] * serial_s,
        "overlap_bound": serial_s / max(read_s, serial_s - read_s),
    }


def as_data(step: ladder.Step) -> dict[str, Any]:
    """A step of the last line."""
    found = asdict(step)
    return found | found.pop("row")


def prepare(case: str, layers: int, folder: Path, with_llama: bool) -> None:
    """Writes what is not there yet."""
    write_artifacts(case, layers, folder)
    path, image = artifact_of(case, STRUCTURAL, folder), image_of(case, folder)
    if not image.exists():
        unbundled.write(path, image)
    if with_llama:
        llama_mmap.export(path, gguf_of(case, folder))


def main() -> None:
    """Prints the tables and the figures."""
    options = parser(__doc__)
    options.add_argument("--without-llama", action="store_true", help="no comparison with llama.cpp")
    arguments = options.parse_args()
    llama_extra()  # before minutes of work
    if answered(arguments, climb):
        return
    rows: list[dict[str, Any]] = []
    with folder_of(arguments) as folder:
        for case in arguments.cases:
            prepare(case, arguments.layers, folder, not arguments.without_llama)
            for task in tasks(arguments, case, folder):
                rows.append(row_of(task, arguments.scale, not arguments.without_llama))
                print_row(rows[-1])
    allowed = [row["layout"] for row in rows if row["layout_bound"] >= MEAN_GAIN]
    allowed_flash = [row["layout_flash"] for row in rows if row["layout_flash_bound"] >= MEAN_GAIN]
    medians = {
        "layout_median": float(np.median(allowed)) if allowed else None,
        "layout_flash_median": float(np.median(allowed_flash)) if allowed_flash else None,
    }
    finish({"rows": rows, **medians})


def print_row(row: dict[str, Any]) -> None:
    """The waterfall of a combination, and what stands beside it."""
    columns = list(row["steps"][0])
    title = f"{row['case']}, {row['device']} × {row['scale']:g}, {row['dram']:.0%} of the units in DRAM"
    show(title, columns, (list(step.values()) for step in row["steps"]))
    print({name: value for name, value in row.items() if isinstance(value, float)}, flush=True)


if __name__ == "__main__":
    main()
