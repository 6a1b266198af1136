"""Reading ahead by similarity of layers (ActiveFlow 3, Figs. 16 and 17a) against reading nothing ahead.

`python -m benchmarks.preload [--similarity 0.2 0.5 …] [--cases …] [--groups 1 2 4] [--layers 8] [--width 2048]
[--rooms 1 4]`.
Layers of a 7B's proportions, `width` wide, whose MLP inputs have the planted cosine from layer to layer
(tests/support/similar.py), in int4, `cached` of the units in DRAM. Each artifact decodes the same tokens with and
without reading ahead, in turn, under the same DRAM budget, of which the buffer takes its part, from this machine's
disk. `--rooms`: as many times what the law of the artifact's device says can be read while nothing is asked for, since
this machine computes more slowly than that law has it. Groups are of the family that is read ahead, `mlp_in`; the other
one lies layer by layer. `precision` is the share of the units read ahead that were asked for, `modelled` the gain by
the device's law. The last line is {rows: [{case, similarity, layers_per_group, room, tokens_per_s, gain, modelled_gain,
precision, wasted_bytes_per_token, …}]}.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.report import finish, show
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.choice import choose_plan
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plan.budget import refit
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import RunMetrics
from tests.support.artifacts import Recipe, build_artifact
from tests.support.shapes import spec_7b
from tests.support.similar import similar_weights

CASES = {"relu-10": ("relu", 0.1), "swiglu-50": ("silu", 0.5)}
"""Case -> activation, density of top-k: what a ReLU leaves is chosen by magnitude, random weights are half active."""
VOCAB_SIZE = 1024
ROUNDS = 3


def write_artifact(case: str, similarity: float, size: int, layers: int, width: int, cached: float, path: Path) -> None:
    """The artifact of a case, in groups of `size` layers."""
    act, density = CASES[case]
    changes: dict[str, Any] = {"hidden_size": width, "intermediate_size": width * 7 // 2}
    changes |= {"num_attention_heads": width // 128, "num_key_value_heads": width // 512}
    spec = spec_7b(layers, VOCAB_SIZE, act).model_copy(update=changes)
    recipe = Recipe(
        spec=spec,
        method="topk",
        format="int4_group32",
        cache="lfu",
        pinned_share=0,
        slots_share=cached,
        read_buffer_bytes=4 << 20,
        collapse_gap_bytes=16384,
        context_length=64,
        density=density,
        layers_per_group=size,
        grouped=("mlp_in",),
    )
    build_artifact(path, recipe, similar_weights(spec, similarity))


def decoded(path: Path, plan: Plan, tokens: np.ndarray) -> list[RunMetrics]:
    """Metrics of a run of each row of tokens but the first, which fills the caches."""
    with Session(path, plan=plan, modelled=True) as session:
        return [session.perplexity(row[None], sparse=True).metrics for row in tokens][1:]


def with_room(manifest: Manifest, room: float) -> Plan:
    """The plan that reads ahead, its buffer so many times as large, under the same budget."""
    plan, page_bytes = choose_plan(manifest, preload="on"), manifest.flash.page_bytes
    wanted = int(room * plan.preload_buffer_bytes) // page_bytes * page_bytes
    return refit(manifest, plan.model_copy(update={"preload_buffer_bytes": wanted}), plan.dram_budget_bytes)


def measure(path: Path, num_tokens: int, room: float) -> dict[str, Any]:
    """One row: with and without reading ahead, twice each, in turn."""
    manifest = open_artifact(path).manifest
    plans = {"off": choose_plan(manifest, preload="off"), "on": with_room(manifest, room)}
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, (1 + ROUNDS, num_tokens + 2))
    found: dict[str, list[RunMetrics]] = {"off": [], "on": []}
    for ahead in ("off", "on", "on", "off"):
        found[ahead] += decoded(path, plans[ahead], tokens)
    seconds = {ahead: statistics.median(run.decode_s / run.num_tokens for run in runs) for ahead, runs in found.items()}
    waits = {ahead: statistics.median(run.flash_s / run.decode_s for run in runs) for ahead, runs in found.items()}
    off, on = found["off"][0], found["on"][0]  # their first row of tokens, counted alike in every run
    count = on.num_tokens
    return {
        "tokens_per_s": 1 / seconds["on"],
        "gain": seconds["off"] / seconds["on"],
        "modelled_gain": off.modelled_s / on.modelled_s,
        "precision": on.preload_precision,
        "share_read_ahead": on.preload_used_bytes / on.used_bytes,
        "wait_share_before": waits["off"],
        "wait_share": waits["on"],
        "wasted_bytes_per_token": (on.preloaded_bytes - on.preload_used_bytes) // count,
        "read_bytes_per_token_before": off.read_bytes // count,
        "read_bytes_per_token": on.read_bytes // count,
        "reads_per_token_before": off.reads // count,
        "reads_per_token": on.reads // count,
        "preload_buffer_bytes": plans["on"].preload_buffer_bytes,
    }


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--similarity", nargs="+", type=float, default=[0.2, 0.5, 0.8, 0.95])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 2, 4], metavar="LAYERS")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048, help="hidden_size, a multiple of 512 (a 7B's: 4096)")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--cached", type=float, default=0.5, help="share of the units in DRAM")
    parser.add_argument("--rooms", nargs="+", type=float, default=[1.0], metavar="TIMES")
    parser.add_argument("--folder", type=Path, help="where artifacts are kept for the next run")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        for case in arguments.cases:
            for similarity in arguments.similarity:
                for size in arguments.groups:
                    name = f"{case}-{similarity}-{size}-{arguments.layers}-{arguments.width}-{arguments.cached}"
                    path = (arguments.folder or Path(temporary)) / name
                    if not path.exists():
                        shape = arguments.layers, arguments.width, arguments.cached
                        write_artifact(case, similarity, size, *shape, path)
                    for room in arguments.rooms:
                        row = {"case": case, "similarity": similarity, "layers_per_group": size, "room": room}
                        rows.append(row | measure(path, arguments.tokens, room))
                        print(json.dumps(rows[-1]), flush=True)
    columns = ["case", "similarity", "layers_per_group", "room", "tokens_per_s", "gain", "modelled_gain", "precision"]
    columns += ["share_read_ahead", "wait_share_before", "wait_share"]
    show("reading ahead against none", columns, ([row[name] for name in columns] for row in rows))
    finish({"rows": rows})


if __name__ == "__main__":
    main()
