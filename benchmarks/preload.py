"""Measures the gain of preloading by similarity of layers (ActiveFlow 3, Figs. 16 and 17a) over not doing so.

Layers of a 7B's proportions, `width` wide, in int4, have MLP inputs with the planted cosine from layer to layer
(tests/support/similar.py); `cached` of the units are in DRAM. Each artifact decodes the same tokens with and without
preloading, in turn, from this machine's disk. Both have the same DRAM budget, which includes the preload
buffer. The benchmark first measures this machine as `coldpress device measure` does. That law gives the size of the
buffer, and decides whether `preload=auto` would preload. Only `mlp_in`, the family that is preloaded, lies in groups;
the other one lies layer by layer.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, gain, main, option, spread
from benchmarks.shared.emulated import SAMPLE_BYTES
from coldpress.compiler.device.measure import measure
from coldpress.compiler.stages.plan import preloading
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.generate.choice import choose_plan
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import on_device
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.layout import Plan
from coldpress.schemas.metrics import RunMetrics
from tests.support.artifacts import Recipe, build_artifact
from tests.support.shapes import spec_7b
from tests.support.similar import similar_weights

CASES = {"relu-10": ("relu", 0.1), "swiglu-50": ("silu", 0.5)}
"""Case -> activation, density of top-k. The ReLU case, too, chooses by magnitude: random weights leave half active."""
VOCAB_SIZE = 1024
MEASURE = "measure"


def write_artifact(cell: Cell, options: "Options", path: Path) -> Path:
    """Writes the artifact of a case and returns its path."""
    (act, density), width = CASES[cell["case"]], options.width
    changes: dict[str, Any] = {"hidden_size": width, "intermediate_size": width * 7 // 2}
    changes |= {"num_attention_heads": width // 128, "num_key_value_heads": width // 512}
    spec = spec_7b(options.layers, VOCAB_SIZE, act).model_copy(update=changes)
    recipe = Recipe(
        spec=spec,
        method="topk",
        format="int4_group32",
        cache="lfu",
        pinned_share=0,
        slots_share=options.cached,
        read_buffer_bytes=4 << 20,
        collapse_gap_bytes=16384,
        context_length=64,
        density=density,
        layers_per_group=cell["layers_per_group"],
        grouped=("mlp_in",),
    )
    return build_artifact(path, recipe, similar_weights(spec, cell["similarity"])).path


def decoded(
    path: Path, plans: dict[str, Plan], tokens: np.ndarray, device: DeviceProfile
) -> dict[str, list[RunMetrics]]:
    """Returns the metrics of each plan on each row of tokens after the first, which fills the caches, in turn."""
    found: dict[str, list[RunMetrics]] = {name: [] for name in plans}
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(Session(path, plan=plan, device=device, modelled=True))
            for name, plan in plans.items()
        }
        for row in tokens:
            for name, session in sessions.items():
                found[name].append(session.perplexity(row[None], sparse=True).metrics)
    return {name: runs[1:] for name, runs in found.items()}


@dataclass(frozen=True)
class Options:
    cases: tuple[str, ...] = option(tuple(CASES), smoke=("relu-10",), choices=CASES, help="activation, density")
    similarity: tuple[float, ...] = option(
        (0.5, 0.95), smoke=(0.95,), full=(0.2, 0.5, 0.8, 0.95), help="cosines of the MLP inputs from layer to layer"
    )
    groups: tuple[int, ...] = option((1,), full=(1, 2, 4), help="layers whose units lie together on flash")
    layers: int = option(8, smoke=2, help="layers of the model")
    width: int = option(2048, smoke=1024, help="hidden_size, a multiple of 512 (a 7B's: 4096)")
    tokens: int = option(8, smoke=2, help="tokens per round")
    rounds: int = option(6, smoke=2, help="rounds; each runs both ways in turn")
    cached: float = option(0.5, help="share of the units in DRAM")
    device: str = option(MEASURE, smoke="host", help=f"profile of the law: name or file, or {MEASURE} for this machine")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].token_s": "seconds per token with preloading",
        "rows[].token_s_before": "seconds per token without preloading",
        "rows[].tokens_per_s": "tokens per second with preloading: 1 over the median of token_s",
        "rows[].gain": "seconds per token without preloading over those with it, taken in each round",
        "rows[].modelled_gain": "modelled seconds without preloading over those with it, by the device's law",
        "rows[].auto": "whether preload=auto preloads at this modelled gain",
        "rows[].precision": "share of the bytes of units preloaded that were requested afterwards",
        "rows[].share_read_ahead": "share of the bytes of units both read and used that were preloaded",
        "rows[].wasted_bytes_per_token": "bytes of units that were preloaded and never requested, per token",
        "rows[].read_bytes_per_token": "bytes read from flash per token with preloading",
        "rows[].read_bytes_per_token_before": "bytes read from flash per token without preloading",
        "rows[].preload_buffer_bytes": "bytes of the buffer for preloading",
        "wrong_rows": "rows in which auto preloads though every round is slower with it, or does not though every "
        "round gains more than auto asks for",
    }
    is_timing = True
    over = {"case": "cases", "similarity": "similarity", "layers_per_group": "groups"}
    full_minutes = 20

    def measure(self, cell: Cell) -> Iterator[Row]:
        shutil.rmtree(self.folder / "a", ignore_errors=True)
        path, options = write_artifact(cell, self.options, self.folder / "a"), self.options
        manifest = on_device(open_artifact(path), self.device).manifest
        plans = {preload: choose_plan(manifest, preload=preload) for preload in ("off", "on")}
        shape = (1 + options.rounds, options.tokens + 2)
        tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, shape)
        found = decoded(path, plans, tokens, self.device)
        row = row_of(found["off"], found["on"])
        row["auto"] = 1 / row["modelled_gain"] < preloading.worth(manifest.flash.sections)
        yield row | {"preload_buffer_bytes": plans["on"].preload_buffer_bytes}

    def figures(self, rows: Rows) -> Figures:
        least = 1 / preloading.WORTH
        wrong = [row["gain"]["high"] < 1 if row["auto"] else row["gain"]["low"] > least for row in rows]
        return {"wrong_rows": sum(wrong)}

    @cached_property
    def device(self) -> DeviceProfile:
        """The device whose law is compared with this machine."""
        name = self.options.device
        return measure("here", self.folder, SAMPLE_BYTES, print) if name == MEASURE else load_device(name)


def row_of(before: list[RunMetrics], after: list[RunMetrics]) -> Row:
    """Returns the figures; counts are those of the first round."""
    off, on, count = before[0], after[0], after[0].num_tokens
    token_s = {name: [run.decode_s / run.num_tokens for run in runs] for name, runs in (("off", before), ("on", after))}
    return {
        "token_s": spread(token_s["on"]),
        "token_s_before": spread(token_s["off"]),
        "tokens_per_s": 1 / spread(token_s["on"])["median"],
        "gain": gain(token_s["off"], token_s["on"]),
        "modelled_gain": off.modelled_s / on.modelled_s,
        "precision": on.preload_precision,
        "share_read_ahead": on.preload_used_bytes / on.used_bytes,
        "wasted_bytes_per_token": (on.preloaded_bytes - on.preload_used_bytes) // count,
        "read_bytes_per_token_before": off.read_bytes // count,
        "read_bytes_per_token": on.read_bytes // count,
    }


if __name__ == "__main__":
    main("preload")
