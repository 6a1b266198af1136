"""What each mechanism brings, on emulated devices: layers of a 7B with planted activity, one setting more at a step.

`dram` is the share of the bytes on flash that DRAM holds, beside what is always resident: attention, embeddings,
predictors. The steps are those of runtime/cli/ladder.py, and three that are other layouts of the same weights: before
`+bundling` the slices of a unit lie apart (benchmarks/shared/unbundled.py), before `+ordering` units lie by their
number and not as the order stage puts them, and with `+groups` the units of consecutive layers lie side by side and are
read ahead together.

Each combination runs in a process under the kernel's caps of the device, scaled by one factor for all. A step and the
best setting before it decode the same passages of one document, in turn; the passage before these fills the caches. A
passage is to be long: the kernel counts in slices of 0.1 s, and lets through a slice's reads at once. A step whose gain
is within its spread, or a loss, is shown and not taken along, unless later steps need it. llama.cpp with the same
weights mapped (benchmarks/shared/llama_mmap.py) runs under the same caps.

LLM in a flash's setting (selector, window, bundles by number), the best setting without overlap and the best of all are
then measured in turn. Bounds are what each gain could be at most: no cache misses less than Belady's, no read is faster
than the device's bandwidth, and a token takes as long as its reads or its computing.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import reduce
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Gain, Row, Rows, gain, main, option, spread
from benchmarks.shared import llama_mmap, unbundled
from benchmarks.shared.emulated import OTHER_BYTES, apart_under_caps
from benchmarks.shared.planted import (
    CASES,
    GROUP_LAYERS,
    GROUPED,
    ORDERED,
    STRUCTURAL,
    WIDTH_7B,
    artifact_of,
    plan_of,
    topic_tokens,
    write_artifacts,
)
from coldpress.runtime import _native
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli import ladder
from coldpress.runtime.cli.emulation import emulated
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
LEAST_S = 1e-6
AT_ONCE = 3
"""Settings that are open at the same time, each with its DRAM budget."""


@dataclass(frozen=True)
class Placed(ladder.Setting):
    """A setting, the artifact that it runs on, and the image that its units are read from, if not the artifact's."""

    path: Path
    image: Path | None


@dataclass(frozen=True)
class Measured:
    """Per decoded token of a passage."""

    token_s: float
    reads_per_token: float
    read_bytes_per_token: float
    hit_rate: float
    flash_s_per_token: float
    modelled_flash_s_per_token: float
    """By the device's own law, at its own rates."""


@dataclass
class Trace:
    """What a setting asked for: in the passage that fills the caches, and in the first one behind it."""

    first: Sequence[Event] = ()
    then: Sequence[Event] = ()
    num_tokens: int = 0


Run = Callable[[np.ndarray], Measured]
"""Decodes a passage."""


@contextmanager
def opened(setting: Placed, filling: np.ndarray, device: DeviceProfile, trace: Trace) -> Iterator[Run]:
    """Opens a setting whose caches a passage fills."""
    recorder, depth, is_dense = Recorder(), setting.plan.queue_depth, setting.plan.method == "dense"
    session = Session(
        setting.path, plan=setting.plan, flash=setting.flash, recorder=recorder, device=device, modelled=True
    )
    with session:
        apart = None
        if setting.image:
            apart = unbundled.Flash(session.artifact, depth, setting.image, lambda: is_decoding(recorder))
            device_of_store: Any = session.store._device
            device_of_store.flash = apart

        def decode(passage: np.ndarray) -> RunMetrics:
            recorder.events = []
            if apart:
                apart.forget()
            cut = passage[: DENSE_TOKENS + 2] if is_dense else passage  # dense: every token is like every other
            return session.perplexity(cut[None], sparse=True).metrics

        def run(passage: np.ndarray) -> Measured:
            found = decode(passage)
            if not trace.then:
                trace.then, trace.num_tokens = recorder.events, found.num_tokens
            return measured(found, apart, device, depth)

        decode(filling)
        trace.first, trace.then = recorder.events, ()
        yield run


def measured(found: RunMetrics, apart: unbundled.Flash | None, device: DeviceProfile, depth: int) -> Measured:
    """The figures of a run; those of a device whose slices lie apart are counted there."""
    reads, read_bytes, modelled_s, moved_s = found.reads, found.read_bytes, found.modelled_flash_s, 0.0
    if apart:
        reads, read_bytes, moved_s = apart.reads, apart.read_bytes, apart.moved_s
        modelled_s = float(flash_seconds(device.flash.issuing(depth), reads, read_bytes))
    count = found.num_tokens
    return Measured(
        token_s=(found.decode_s - moved_s) / count,
        reads_per_token=reads / count,
        read_bytes_per_token=read_bytes / count,
        hit_rate=found.hit_rate,
        flash_s_per_token=found.flash_s / count,
        modelled_flash_s_per_token=modelled_s / count,
    )


def is_decoding(recorder: Recorder) -> bool:
    """Whether the store was asked for single units last."""
    return bool(recorder.events) and recorder.events[-1].kind == FETCH


class Climb:
    """Measures settings on the same passages of a document."""

    def __init__(self, device: DeviceProfile, passages: np.ndarray, num_tokens: int) -> None:
        """The first passage fills caches; `num_tokens` of each other one are a round."""
        self._device, self.trace = device, Trace()
        self._filling, self._passages = passages[0, : FILLING_TOKENS + 2], passages[1:, : num_tokens + 2]

    def rounds(self, *settings: Placed) -> list[list[Measured]]:
        """The figures of each setting in every round, settings in turn; the trace is of the first setting."""
        with ExitStack() as stack:
            traces = [self.trace, *(Trace() for _ in settings[1:])]
            runs = [
                stack.enter_context(opened(setting, self._filling, self._device, trace))
                for setting, trace in zip(settings, traces, strict=True)
            ]
            found = [[run(passage) for run in runs] for passage in self._passages]
        return [list(of_setting) for of_setting in zip(*found, strict=True)]

    def steps(self, first: Placed, changes: Sequence[tuple[str, ladder.Change]]) -> Iterator[tuple[Row, Placed]]:
        """The row and the setting of every step, each measured in turn with the best setting before it."""
        (found,) = self.rounds(first)
        best, lowest = first, row_of(found)["tokens_per_s"]
        yield {"name": "naive", "gain": None, "total_gain": 1.0, "kept": True, **row_of(found)}, first
        for name, change in changes:
            print(name, file=sys.stderr, flush=True)
            setting = cast("Placed", change(best))
            before, after = self.rounds(best, setting)
            gained = gain_of(before, after)
            kept = gained["low"] > 1 or name.startswith(ladder.GROUND)
            best = setting if kept else best
            total = row_of(after if kept else before)["tokens_per_s"] / lowest
            yield {"name": name, "gain": gained, "total_gain": total, "kept": kept, **row_of(after)}, setting


def row_of(rounds: Sequence[Measured]) -> Row:
    """The medians over the rounds, and the spread of time."""
    found = {one.name: median(getattr(each, one.name) for each in rounds) for one in fields(Measured)}
    return found | {
        "token_s": spread([each.token_s for each in rounds]),
        "tokens_per_s": 1 / found["token_s"],
    }


def gain_of(before: Sequence[Measured], after: Sequence[Measured], name: str = "token_s") -> Gain:
    """How many times less time a token takes, formed in each round; no time counts as a microsecond."""
    return gain(
        [max(LEAST_S, getattr(each, name)) for each in before], [max(LEAST_S, getattr(each, name)) for each in after]
    )


def changes_of(cell: Cell, folder: Path) -> tuple[Placed, list[tuple[str, ladder.Change]]]:
    """The first setting, and all steps."""
    structural, ordered = (artifact_of(cell["case"], order, folder) for order in (STRUCTURAL, ORDERED))
    manifest, plan = plan_of(structural, cell["dram"])
    device = load_device(cell["device"]).flash
    # the gap at which a read costs what the bytes between cost; Ripple 5.1 has a threshold, and no formula for it
    gap_bytes = int(device.bytes_per_s / device.iops)
    first, steps = ladder.steps(manifest, plan.model_copy(update={"collapse_gap_bytes": gap_bytes}))
    image = image_of(cell["case"], folder)

    def apart(change: ladder.Change) -> ladder.Change:
        return lambda before: _put(change(before), image=image)

    # whole matrices, which are all that is read before a selector, are read the same in both layouts
    steps = [(name, apart(change) if name.startswith(("+selector", "+window")) else change) for name, change in steps]
    where = next(number for number, (name, _) in enumerate(steps) if name.startswith(COLLAPSE))
    steps[where:where] = [
        ("+bundling", lambda before: _put(before, image=None)),
        ("+ordering", lambda before: _put(before, path=ordered)),
    ]
    grouped = artifact_of(cell["case"], GROUPED, folder)
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


def in_a_flash(first: Placed, changes: Mapping[str, ladder.Change]) -> Placed:
    """What LLM in a flash has: a selector, a window and bundles, which Ripple is measured against."""
    wanted = [change for name, change in changes.items() if name.startswith(("+selector", "+window", "+bundling"))]
    return cast("Placed", reduce(lambda before, change: change(before), wanted, cast("ladder.Setting", first)))


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


def gains(
    earlier: Sequence[Measured], serial: Sequence[Measured], best: Sequence[Measured], least_s: float
) -> dict[str, Any]:
    """What layout and cache bring over what was `earlier`, and the most that they could; what overlapping brings, and
    the most that it could. `least_s` is a token's least time on flash."""
    before, after = row_of(earlier), row_of(serial)
    token_s, flash_s = before["token_s"]["median"], before["flash_s_per_token"]
    serial_s, read_s = after["token_s"]["median"], after["flash_s_per_token"]
    return {
        "layout": gain_of(earlier, serial),
        "layout_bound": token_s / max(LEAST_S, token_s - flash_s + least_s),
        "layout_flash": gain_of(earlier, serial, "flash_s_per_token"),
        "layout_flash_bound": flash_s / max(LEAST_S, least_s),
        "layout_modelled": before["modelled_flash_s_per_token"] / max(LEAST_S, after["modelled_flash_s_per_token"]),
        "overlap": gain_of(serial, best),
        "overlap_bound": serial_s / max(read_s, serial_s - read_s),
    }


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = option(("relu-10",), full=tuple(CASES), choices=CASES, help="selector, density")
    devices: tuple[str, ...] = option(("pixel6",), full=("pixel6", "oneplus12"), help="device profiles")
    dram: tuple[float, ...] = option((0.1,), full=(0.1, 0.5), help="shares of the units in DRAM")
    scale: float = option(0.0, smoke=0.3, help="share of the devices' rates; 0: as much as the disk gives")
    layers: int = option(2, full=4, help="layers")
    width: int = option(WIDTH_7B, smoke=512, help="hidden_size, a multiple of 512")
    tokens: int = option(8, smoke=4, full=40, help="tokens of a passage")
    rounds: int = option(5, smoke=1, help="interleaved rounds")
    llama: bool = option(True, help="compare with llama.cpp")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].scale": "share of the device's rates",
        "rows[].artifact_over_budget": "bytes of the artifact over the DRAM budget",
        "rows[].llama_tokens_per_s?": "tokens per second of llama.cpp",
        "rows[].over_llama?": "tokens per second of the best setting over llama.cpp's",
        "rows[].layout": "gain of order, collapse and cache over LLM in a flash's setting, formed in each round",
        "rows[].layout_bound": "the most that it could be",
        "rows[].layout_flash": "the same in seconds waited for flash",
        "rows[].layout_flash_bound": "the most that it could be",
        "rows[].layout_modelled": "the same in flash seconds of the device's law",
        "rows[].overlap": "gain of reading while computing, formed in each round",
        "rows[].overlap_bound": "the most that it could be",
        **{
            f"rows[].{place}.{name}": meaning
            for place in ("in_a_flash", "steps[]")
            for name, meaning in (
                ("tokens_per_s", "tokens per second, by the median"),
                ("token_s", "seconds of a token"),
                ("reads_per_token", "reads of a token"),
                ("read_bytes_per_token", "bytes read for a token"),
                ("hit_rate", "share of the used units in DRAM"),
                ("flash_s_per_token", "seconds of a token that wait for flash"),
                ("modelled_flash_s_per_token", "flash seconds of a token by the device's law"),
            )
        },
        "rows[].steps[].name": "step",
        "rows[].steps[].gain?": "gain over the best setting before it, formed in each round",
        "rows[].steps[].total_gain": "tokens per second of the best setting so far over the first one's",
        "rows[].steps[].kept": "whether the next steps build on it",
        "layout_median?": f"median layout of the rows whose bound is at least Ripple's mean gain, {MEAN_GAIN}",
        "layout_flash_median?": "median layout_flash of the rows whose bound is at least that",
    }
    is_timing = True
    needs_root = True
    extra = "llama: xllamacpp"
    over = {"case": "cases", "device": "devices", "dram": "dram"}
    full_minutes = 150

    def measure(self, cell: Cell) -> Iterator[Row]:
        case, scale, device = cell["case"], self.options.scale, cell["device"]
        folder = self.once(case, lambda: self.artifacts(case))
        manifest, plan = plan_of(artifact_of(case, STRUCTURAL, folder), cell["dram"])
        room, fixed = plan.dram_budget_bytes, plan.resident_bytes + plan.predictor_bytes
        row, caps = apart_under_caps(self, "climb", device, scale, AT_ONCE * room + OTHER_BYTES, {**cell})
        row |= {"scale": caps.scale, "artifact_over_budget": (fixed + manifest.flash.size_bytes) / room}
        if self.options.llama:
            scale = caps.scale  # a second look at the disk may find another one
            own_bytes = apart_under_caps(self, "llama", device, scale, room + (4 << 30), case)[0]["own_bytes"]
            memory_bytes = room + own_bytes + llama_mmap.SLACK_BYTES
            theirs = apart_under_caps(self, "llama", device, scale, memory_bytes, case)[0]["tokens_per_s"]
            best = [step for step in row["steps"] if step["kept"]][-1]
            row |= {"llama_tokens_per_s": theirs, "over_llama": best["tokens_per_s"] / theirs}
        yield row

    def artifacts(self, case: str) -> Path:
        """The folder with the artifacts of a case; those of the case before are removed."""
        folder = self._folder
        shutil.rmtree(folder, ignore_errors=True)
        write_artifacts(case, self.options.layers, folder, width=self.options.width)
        path = artifact_of(case, STRUCTURAL, folder)
        unbundled.write(path, image_of(case, folder))
        if self.options.llama:
            llama_mmap.export(path, gguf_of(case, folder))
        return folder

    @property
    def _folder(self) -> Path:
        return self.folder / "artifacts"

    def climb(self, cell: Cell) -> Row:
        """All steps of a combination, in a process under the caps."""
        _native.set_num_threads(os.cpu_count() or 1)
        first, changes = changes_of(cell, self._folder)
        passages = topic_tokens(1 + self.options.rounds, max(self.options.tokens, FILLING_TOKENS) + 2)
        device = load_device(cell["device"])
        climb = Climb(device, passages, self.options.tokens)
        found = list(climb.steps(first, changes))
        where = next(number for number, (row, _) in enumerate(found) if row["name"].startswith(OVERLAP))
        serial, best = ([setting for row, setting in part if row["kept"]][-1] for part in (found[:where], found))
        earlier, before, after = climb.rounds(in_a_flash(first, dict(changes)), serial, best)
        least = least_bytes(first.path, plan_of(first.path, cell["dram"])[1], climb.trace)
        caps = emulated()
        assert caps is not None
        return {
            **gains(earlier, before, after, least / caps.bytes_per_s),
            "in_a_flash": row_of(earlier),
            "steps": [row for row, _ in found],
        }

    def llama(self, case: str) -> dict[str, float]:
        """llama.cpp's speed and memory, in a process under the caps."""
        return llama_mmap.measure(gguf_of(case, self._folder), topic_tokens(3, 2), LLAMA_TOKENS)

    def figures(self, rows: Rows) -> Figures:
        found = {}
        for name in ("layout", "layout_flash"):
            allowed = [row[name]["median"] for row in rows if row[f"{name}_bound"] >= MEAN_GAIN]
            found[f"{name}_median"] = median(allowed) if allowed else None
        return found


if __name__ == "__main__":
    main("ladder")
