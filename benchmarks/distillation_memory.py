"""Whether distilling takes the memory that it says, at the width of a 7B model: peak of a process against the sum.

`python -m benchmarks.distillation_memory [--shape mistral-7b] [--layers 2 3] [--recipes lora relufy]`. For each
number of layers a planted checkpoint (bfloat16, random weights of the true width) is distilled for one step in a
process of its own, top-k at half on all linear layers; the sum is `coldpress.compiler.stages.distill.ram_bytes`. With
`relufy` it gets a ReLU instead, by adapters (`coldpress.compiler.stages.relufy.ram_bytes`). Layers add up, so two
numbers of them give the slope, and the whole model by it. The last line is {rows: [{recipe, layers, peak_bytes,
counted_bytes}], whole: {recipe: {peak_bytes, counted_bytes}}}.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.report import finish, show
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
ONE_STEP: Any = {
    "distill_blocks": 1,
    "validation_blocks": 1,
    "distill_evaluations": 1,
    "compute_device": "cpu",
}


def one_step(checkpoint: Path, folder: Path, recipe: str) -> dict[str, Any]:
    """Trains in this process; gives its peak and what was counted."""
    model = ingest.run(IngestConfig(model=str(checkpoint)), Workspace(folder / "ingest", "benchmark"))
    tokens = np.random.default_rng(0).integers(3, model.spec.vocab_size, (1, BLOCK_TOKENS)).astype(np.int32)
    arrays = save_arrays(folder / "tokens.safetensors", {"tokens": tokens})
    parts = tuple(TokenBlocks(split=split, arrays=arrays, num_blocks=1, block_tokens=BLOCK_TOKENS) for split in SPLITS)
    corpus, work = Corpus(name="random", text_sha256="0" * 64, splits=parts), Workspace(folder / recipe, "benchmark")
    size = Size.of(model, corpus, 1, FAMILIES)
    if recipe == RELUFY:
        relufy.run(
            RelufyConfig(relufy="relu", relufy_rank=relufy.USUAL_RANK, relufy_steps=1, **ONE_STEP),
            model,
            corpus,
            work,
            1,
        )
        counted_bytes = relufy.ram_bytes(size, relufy.USUAL_RANK)
    else:
        half = sparsity_of("topk", dict.fromkeys(FAMILIES, (0.5,) * model.spec.num_hidden_layers))
        sparsity = fitted(half.model_copy(update={"options": {"attention": True}}), model.spec, folder)
        distill.run(DistillConfig(recipe=recipe, distill_steps=1, **ONE_STEP), model, corpus, sparsity, work, 1)
        counted_bytes = distill.ram_bytes(size, recipe, {})
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layers = model.spec.num_hidden_layers
    return {"recipe": recipe, "layers": layers, "peak_bytes": peak_bytes, "counted_bytes": counted_bytes}


def measured(shape: str, layers: int, recipe: str) -> dict[str, Any]:
    """One row, from a process that does nothing else."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        plant = plant_of(shape, layers, 0.1, 0, hidden_act="silu")
        checkpoint = write(plant, Path(folder) / "checkpoint", 1024)
        call = [sys.executable, "-m", "benchmarks.distillation_memory", "--child", str(checkpoint), recipe]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        row = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(row), flush=True)
        return row


def whole(rows: list[dict[str, Any]], num_layers: int) -> dict[str, dict[str, int]]:
    """All layers, by the line through the first and the last row of each recipe."""
    found: dict[str, dict[str, int]] = {}
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        first, *_, last = (row for row in rows if row["recipe"] == recipe)
        per_layer = {
            key: (last[key] - first[key]) / (last["layers"] - first["layers"])
            for key in ("peak_bytes", "counted_bytes")
        }
        found[recipe] = {key: round(last[key] + (num_layers - last["layers"]) * per_layer[key]) for key in per_layer}
    return found


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="mistral-7b", choices=sorted(SHAPES))
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 3], metavar="N")
    parser.add_argument("--recipes", nargs="+", default=["lora", RELUFY], choices=["lora", "self", RELUFY])
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "RECIPE"), help="what the benchmark calls by itself")
    arguments = parser.parse_args()
    if arguments.child:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            print(json.dumps(one_step(Path(arguments.child[0]), Path(folder), arguments.child[1])))
        return
    rows = [measured(arguments.shape, layers, recipe) for recipe in arguments.recipes for layers in arguments.layers]
    columns = ["recipe", "layers", "peak_bytes", "counted_bytes"]
    show(
        f"memory of distilling layers of {arguments.shape}", columns, [[row[name] for name in columns] for row in rows]
    )
    figures: dict[str, Any] = {"rows": rows}
    if len(arguments.layers) > 1:
        figures["whole"] = whole(rows, SHAPES[arguments.shape].num_hidden_layers)
    finish(figures)


if __name__ == "__main__":
    main()
