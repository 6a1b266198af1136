"""Measures on emulated devices what each mechanism brings, with one setting more at a step.

The cases are layers of a 7B with planted activity, and a small real model whose units have a 7B's bytes
(benchmarks/shared/widened.py). `dram` is the share of the bytes on flash that DRAM holds, beside the parts that are
always resident: attention, embeddings, predictors, the gate where the selector reads it. The steps are those of
runtime/cli/ladder.py and two other layouts of the same weights. Before `+bundling` the slices of a unit lie apart
(benchmarks/shared/unbundled.py). Before `+ordering` units lie by their number and not as the order stage puts them.

Each combination runs in a process under the kernel's caps of the device, all scaled by one factor. A step and the best
setting before it decode the same passages of one document, in turn; the passage before these fills the caches. Passages
should be long: the kernel counts in slices of 0.1 s, and lets through a slice's reads at once. A step whose gain is
within its spread, or a loss, is shown and dropped, unless later steps need it. llama.cpp with the same weights mapped
(benchmarks/shared/llama_mmap.py) runs under the same caps.

The caches come before `+bundling`, so that both sides of `layout` have the same one. Then the best settings before
`+ordering`, without overlap and of all take turns. Bounds are the most that each gain could be: no cache misses less
than Belady's, no read is faster than the device's bandwidth, and a token takes as long as its reads or its computing.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared import llama_mmap, planted, unbundled, widened
from benchmarks.shared.climb import FILLING_TOKENS, Climb, Placed, best_before, gains, least_bytes, row_of
from benchmarks.shared.emulated import OTHER_BYTES, apart_under_caps
from benchmarks.shared.planted import CASES, ORDERED, STRUCTURAL, WIDTH_7B, artifact_of, plan_of, topic_tokens
from coldpress.runtime import _native
from coldpress.runtime.cli import ladder
from coldpress.runtime.cli.emulation import emulated
from coldpress.runtime.device_profiles.devices import load_device

ARTIFACTS, LLAMA_TOKENS = "artifacts", 8
ORDERING, OVERLAP = "+ordering", "+overlap"
MEAN_GAIN = 1.68
"""Mean gain of ordering and collapse over five models (Ripple 6.3)."""
AT_ONCE = 3
"""Number of settings that are open at the same time, each with its own DRAM budget."""


def changes_of(cell: Cell, folder: Path) -> tuple[Placed, list[tuple[str, ladder.Change]]]:
    """Returns the first setting and all steps."""
    structural, ordered = (artifact_of(cell["case"], order, folder) for order in (STRUCTURAL, ORDERED))
    manifest, plan = plan_of(structural, cell["dram"])
    device = load_device(cell["device"]).flash
    # at this gap a read costs as much as the bytes between; Ripple 5.1 has a threshold, and no formula for it
    gap_bytes = int(device.bytes_per_s / device.iops)
    first, steps = ladder.steps(manifest, plan.model_copy(update={"collapse_gap_bytes": gap_bytes}))
    caches = [step for step in steps if step[0].startswith("+cache")]
    hybrid, selector, window, *others = [step for step in steps if step not in caches]
    choosing = [selector, window, *caches]
    if cell["case"] == widened.CASE:  # one cache on both sides, whatever it gains
        choosing = [(f"{selector[0]}, {name}", change) for name, change in caches]
    image = image_of(cell["case"], folder)

    def apart(change: ladder.Change) -> ladder.Change:
        return lambda before: _put(change(before), image=image)

    return Placed(first.plan, first.flash, structural, None), [
        hybrid,  # without a selector only whole matrices are read: the layout of units makes no difference
        *[(name, apart(change)) for name, change in choosing],
        ("+bundling", lambda before: _put(before, image=None)),
        (ORDERING, lambda before: _put(before, path=ordered)),
        *others,
    ]


def _put(before: ladder.LadderSetting, **changes: Any) -> ladder.LadderSetting:
    return replace(before, **changes)


def image_of(case: str, folder: Path) -> Path:
    """Returns the path of the image without bundles."""
    return folder / f"{case}-unbundled.img"


def gguf_of(case: str, folder: Path) -> Path:
    """Returns the path of llama.cpp's file."""
    return folder / f"{case}.gguf"


def passages_of(case: str, num_passages: int, num_tokens: int) -> np.ndarray:
    """Returns passages of one document, int [num_passages, num_tokens]."""
    return (widened.passages if case == widened.CASE else topic_tokens)(num_passages, num_tokens)


MEASURED = {
    "tokens_per_s": "tokens per second: 1 over the median of token_s",
    "token_s": "seconds per token",
    "reads_per_token": "reads from flash per token",
    "read_bytes_per_token": "bytes read from flash per token",
    "hit_rate": "share of the used units that were in DRAM",
    "flash_s_per_token": "seconds per token that wait for flash",
    "modelled_flash_s_per_token": "flash seconds per token by the device's law",
}


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = option(
        ("relu-10", widened.CASE),
        smoke=("relu-10",),
        full=(*CASES, widened.CASE),
        choices=(*CASES, widened.CASE),
        help="selector, density of planted layers; a real model",
    )
    devices: tuple[str, ...] = option(("pixel6",), full=("pixel6", "oneplus12"), help="device profiles")
    dram: tuple[float, ...] = option((0.1,), full=(0.1, 0.5), help="shares of the units in DRAM")
    scale: float = option(0.0, smoke=0.3, help="share of the devices' rates; 0: as much as the disk gives")
    layers: int = option(2, full=4, help="planted layers")
    width: int = option(WIDTH_7B, smoke=512, help="hidden_size, a multiple of 512")
    tokens: int = option(8, smoke=4, full=40, help="tokens of a passage")
    rounds: int = option(4, smoke=1, full=5, help="interleaved rounds")
    llama: bool = option(True, help="compare with llama.cpp")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].scale": "share of the device's rates",
        "rows[].artifact_over_budget": "bytes of the artifact over the DRAM budget",
        "rows[].llama_tokens_per_s?": "tokens per second of llama.cpp",
        "rows[].over_llama?": "tokens per second of the best setting over llama.cpp's",
        "rows[].layout": "seconds per token without order, collapse and admission over those with them, in each round",
        "rows[].layout_bound": "largest possible layout",
        "rows[].layout_flash": "layout in seconds that wait for flash",
        "rows[].layout_flash_bound": "largest possible layout_flash",
        "rows[].layout_modelled": "layout in flash seconds by the device's law",
        "rows[].overlap": "seconds per token without over those with reading while computing, in each round",
        "rows[].overlap_bound": "largest possible overlap",
        **{
            f"rows[].{place}.{name}": meaning
            for place in ("unordered", "steps[]")
            for name, meaning in MEASURED.items()
        },
        "rows[].steps[].name": "setting that the step adds",
        "rows[].steps[].gain?": "gain over the best setting before it, formed in each round",
        "rows[].steps[].total_gain": "tokens per second of the best setting so far over the first one's",
        "rows[].steps[].kept": "whether the next steps build on it",
        "layout_median?": f"median layout of the rows whose bound is at least Ripple's mean gain, {MEAN_GAIN}",
        "layout_flash_median?": f"median layout_flash of the rows whose bound is at least {MEAN_GAIN}",
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
            scale = caps.scale  # another look at the disk may find another scale
            alone = apart_under_caps(self, "llama", device, scale, room + llama_mmap.UNCAPPED_BYTES, case, 2)[0]
            memory_bytes = llama_mmap.limit_bytes(room, alone)
            theirs = apart_under_caps(self, "llama", device, scale, memory_bytes, case, LLAMA_TOKENS)[0]["tokens_per_s"]
            best = [step for step in row["steps"] if step["kept"]][-1]
            row |= {"llama_tokens_per_s": theirs, "over_llama": best["tokens_per_s"] / theirs}
        yield row

    def artifacts(self, case: str) -> Path:
        """Returns the folder with the artifacts of a case; removes those of the case before."""
        folder, layers, width = self.folder / ARTIFACTS, self.options.layers, self.options.width
        shutil.rmtree(folder, ignore_errors=True)
        is_real = case == widened.CASE
        material = widened.material(self.folder, width) if is_real else planted.material(case, layers, width)
        planted.write(case, material, folder, (STRUCTURAL, ORDERED))
        path = artifact_of(case, STRUCTURAL, folder)
        unbundled.write(path, image_of(case, folder))
        if self.options.llama:
            llama_mmap.export(path, gguf_of(case, folder))
        return folder

    def climb(self, cell: Cell) -> Row:
        """Returns the row of all steps of a combination; runs in a process under the caps."""
        _native.set_num_threads(os.cpu_count() or 1)
        first, changes = changes_of(cell, self.folder / ARTIFACTS)
        passages = passages_of(cell["case"], 1 + self.options.rounds, max(self.options.tokens, FILLING_TOKENS) + 2)
        climb = Climb(load_device(cell["device"]), passages, self.options.tokens)
        found = list(climb.steps(first, changes))
        earlier, before, after = climb.rounds(*(best_before(found, name) for name in (ORDERING, OVERLAP, None)))
        least = least_bytes(first.path, plan_of(first.path, cell["dram"])[1], climb.trace)
        caps = emulated()
        assert caps is not None
        return {
            **gains(earlier, before, after, least / caps.bytes_per_s),
            "unordered": row_of(earlier),
            "steps": [row for row, _ in found],
        }

    def llama(self, case: str, num_tokens: int) -> dict[str, float]:
        """Returns llama.cpp's speed and memory after some tokens; runs in a process under the caps."""
        return llama_mmap.measure(gguf_of(case, self.folder / ARTIFACTS), passages_of(case, 3, 2), num_tokens)

    def figures(self, rows: Rows) -> Figures:
        found = {}
        for name in ("layout", "layout_flash"):
            allowed = [row[name]["median"] for row in rows if row[f"{name}_bound"] >= MEAN_GAIN]
            found[f"{name}_median"] = median(allowed) if allowed else None
        return found


if __name__ == "__main__":
    main("ladder")
