"""Whether distilling takes the memory that it says, at the width of a 7B model: peak of a process against the sum.

`python -m tests.benchmarks.distillation_memory [--shape mistral-7b] [--layers 2 3] [--recipes lora]`. For each number
of layers a planted checkpoint (bfloat16, random weights of the true width) is distilled for one step in a process of
its own, top-k at half on all linear layers; the sum is `compiler.distill.ram_bytes`. Layers add up, so two numbers of
them give the slope, and the whole model by it. The last line is {rows: [{recipe, layers, peak_bytes, counted_bytes}],
whole: {recipe: {peak_bytes, counted_bytes}}}.
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

from compiler import distill, ingest
from compiler._io import Workspace, save_arrays
from compiler.distill import DistillConfig, Size
from compiler.ingest import IngestConfig
from schemas.corpus import SPLITS, Corpus, TokenBlocks
from schemas.model import Model
from tests.benchmarks._report import finish, show
from tests.support.methods import fitted
from tests.support.planted import SHAPES, plant_of, write
from tests.support.statistics import sparsity_of

FAMILIES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
BLOCK_TOKENS = 128


def one_step(checkpoint: Path, folder: Path, recipe: str) -> dict[str, Any]:
    """Distils in this process; gives its peak and what was counted."""
    model = ingest.run(IngestConfig(model=str(checkpoint)), Workspace(folder / "ingest", "benchmark"))
    tokens = np.random.default_rng(0).integers(3, model.spec.vocab_size, (1, BLOCK_TOKENS)).astype(np.int32)
    arrays = save_arrays(folder / "tokens.safetensors", {"tokens": tokens})
    parts = tuple(TokenBlocks(split=split, arrays=arrays, num_blocks=1, block_tokens=BLOCK_TOKENS) for split in SPLITS)
    corpus = Corpus(name="random", text_sha256="0" * 64, splits=parts)
    half = sparsity_of("topk", dict.fromkeys(FAMILIES, (0.5,) * model.spec.num_hidden_layers))
    sparsity = fitted(half.model_copy(update={"options": {"attention": True}}), model.spec, folder)
    config = DistillConfig(
        recipe=recipe, steps=1, blocks_per_step=1, validation_blocks=1, evaluations=1, compute_device="cpu"
    )
    distill.run(config, model, corpus, sparsity, Workspace(folder / recipe, "benchmark"), 1)
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"recipe": recipe, "layers": model.spec.num_hidden_layers, **_both(model, recipe, peak_bytes)}


def _both(model: Model, recipe: str, peak_bytes: int) -> dict[str, int]:
    shapes = {role: source.shape for role, source in model.tensors.items()}
    size = Size(model.spec, shapes, FAMILIES, BLOCK_TOKENS, 1, 2 * model.num_parameters, "fp16")
    return {"peak_bytes": peak_bytes, "counted_bytes": distill.ram_bytes(size, recipe, {})}


def measured(shape: str, layers: int, recipe: str) -> dict[str, Any]:
    """One row, from a process that does nothing else."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        plant = plant_of(shape, layers, 0.1, 0, hidden_act="silu")
        checkpoint = write(plant, Path(folder) / "checkpoint", 1024)
        call = [sys.executable, "-m", "tests.benchmarks.distillation_memory", "--child", str(checkpoint), recipe]
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
    parser.add_argument("--recipes", nargs="+", default=["lora"], choices=["lora", "self"])
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
