"""Compares the peak memory of distilling at the width of a 7B model with the sum that the stage declares.

For each number of layers a planted checkpoint (bfloat16, random weights of the true width) is distilled for one step in
a process of its own, with top-k at half on all linear layers; the sum is `coldpress.compiler.stages.distill.ram_bytes`.
With `relufy` it gets a ReLU by adapters instead (`coldpress.compiler.stages.relufy.ram_bytes`). Layers add up, so two
numbers of layers give the slope, and the slope gives the whole model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.harness.apart import apart, peak_rss_bytes
from coldpress.compiler.io import Workspace, save_arrays
from coldpress.compiler.stages import distill, ingest, relufy
from coldpress.compiler.stages.distill import DistillConfig, Size
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.relufy import RelufyConfig
from coldpress.schemas.corpus import SPLITS, Corpus, TokenBlocks
from tests.support.methods import fitted
from tests.support.planted import SHAPES, plant_of, write
from tests.support.statistics import sparsity_of

FAMILIES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
BLOCK_TOKENS = 128
RELUFY = "relufy"
BYTES = ("peak_bytes", "counted_bytes")
ONE_STEP: Any = {"distill_blocks": 1, "validation_blocks": 1, "distill_evaluations": 1, "compute_device": "cpu"}


def one_step(checkpoint: Path, folder: Path, recipe: str) -> Row:
    """Trains one step in this process; returns its peak memory and the declared sum, in bytes."""
    model = ingest.run(IngestConfig(model=str(checkpoint)), Workspace(folder / "ingest", "benchmark"))
    tokens = np.random.default_rng(0).integers(3, model.spec.vocab_size, (1, BLOCK_TOKENS)).astype(np.int32)
    arrays = save_arrays(folder / "tokens.safetensors", {"tokens": tokens})
    parts = tuple(TokenBlocks(split=split, arrays=arrays, num_blocks=1, block_tokens=BLOCK_TOKENS) for split in SPLITS)
    corpus, work = Corpus(name="random", text_sha256="0" * 64, splits=parts), Workspace(folder / recipe, "benchmark")
    size = Size.of(model, corpus, 1, FAMILIES)
    if recipe == RELUFY:
        asked = RelufyConfig(relufy="relu", relufy_rank=relufy.USUAL_RANK, relufy_steps=1, **ONE_STEP)
        relufy.run(asked, model, corpus, work, 1)
        counted_bytes = relufy.ram_bytes(size, relufy.USUAL_RANK)
    else:
        half = sparsity_of("topk", dict.fromkeys(FAMILIES, (0.5,) * model.spec.num_hidden_layers))
        sparsity = fitted(half.model_copy(update={"options": {"attention": True}}), model.spec, folder)
        distill.run(DistillConfig(recipe=recipe, distill_steps=1, **ONE_STEP), model, corpus, sparsity, work, 1)
        counted_bytes = distill.ram_bytes(size, recipe, {})
    return {"peak_bytes": peak_rss_bytes(), "counted_bytes": counted_bytes}


def whole(rows: Rows, num_layers: int) -> dict[str, dict[str, int]]:
    """Returns the bytes for all layers, on the line through the first and the last row of each recipe."""
    found: dict[str, dict[str, int]] = {}
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        first, *_, last = (row for row in rows if row["recipe"] == recipe)
        beyond = (num_layers - last["layers"]) / (last["layers"] - first["layers"])
        found[recipe] = {key: round(last[key] + beyond * (last[key] - first[key])) for key in BYTES}
    return found


@dataclass(frozen=True)
class Options:
    shape: str = option("mistral-7b", smoke="small", choices=sorted(SHAPES), help="model whose layers are copied")
    layers: tuple[int, ...] = option((1, 2), smoke=(1,), help="numbers of layers, one checkpoint each")
    recipes: tuple[str, ...] = option(
        ("lora", RELUFY), full=("lora", "self", RELUFY), choices=("lora", "self", RELUFY), help="recipe, or relufy"
    )


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].peak_bytes": "peak resident bytes of the training process",
        "rows[].counted_bytes": "bytes that the stage's ram_bytes declares beforehand",
        "whole.*.peak_bytes?": "peak bytes for all layers, extrapolated from the fewest and the most layers, by recipe",
        "whole.*.counted_bytes?": "declared bytes for all layers, extrapolated in the same way, by recipe",
    }
    over = {"layers": "layers", "recipe": "recipes"}
    full_minutes = 15

    def measure(self, cell: Cell) -> Iterator[Row]:
        layers = cell["layers"]
        checkpoint = self.once(layers, lambda: apart(self, "planted", layers))
        yield apart(self, "step", checkpoint, cell["recipe"])

    def planted(self, layers: int) -> str:
        """Writes the checkpoint in another process, since a child's peak includes its parent's memory."""
        plant = plant_of(self.options.shape, layers, 0.1, 0, hidden_act="silu")
        return str(write(plant, self.folder / f"layers-{layers}", 1024))

    def step(self, checkpoint: str, recipe: str) -> Row:
        """Trains in this process."""
        return one_step(Path(checkpoint), Path(checkpoint).with_suffix(f".{recipe}"), recipe)

    def figures(self, rows: Rows) -> Figures:
        several = len(self.options.layers) > 1
        return {"whole": whole(rows, SHAPES[self.options.shape].num_hidden_layers)} if several else {}


if __name__ == "__main__":
    main("distillation_memory")
