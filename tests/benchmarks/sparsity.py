"""Perplexity of every selector at equal density of the MLP, in the form of DIP's Table 1.

`python -m tests.benchmarks.sparsity [--models prose7m …] [--methods dip …] [--lora-steps N] [--fit]`. Density counts
all matrices of the MLP: a method that needs the gate in full spends a third of it there. Thresholds and norms are
fitted on calibration text; what is scored is test text. `--fit` searches DIP's division of densities (B.1) on
validation text instead and prints the line through the best ones. DIP and CATS are shown with adapters, too, which the
build's own `distill` trains on text of their own. The last line is {rows: [{model, method, lora, density, ppl}]}, where
`density` is what the text used; `asked` is what was asked for.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compiler import distill
from compiler._io import Workspace, save_arrays
from compiler.activity.calibration_pass import PassConfig, count_activity
from compiler.activity.forward import LayerStream
from compiler.activity.layer_counts import Activity
from compiler.activity.unit_statistics import all_statistics, fit_all
from compiler.distill import DistillConfig
from compiler.evaluate import Score, Sparse, evaluate
from runtime._plugins import load, options_of
from schemas.activations import Activations
from schemas.sparsity import Sparsity
from tests.benchmarks._cases import MODELS, Case, Parts, case_of
from tests.benchmarks._report import finish, show
from tests.support.statistics import sparsity_of

DENSITIES = (0.6, 0.5, 0.4)
SEARCHED = (0.3, 0.4, 0.5, 0.6, 0.7)
"""Densities that DIP's division is searched for."""
SPLITS: Parts = {
    "calibration": ("fit", slice(0, 64)),
    "validation": ("fit", slice(64, 80)),
    "training": ("fit", slice(80, 592)),
    "test": ("test", slice(0, 64)),
}
"""What adapters are trained on is the text behind that of thresholds and norms."""
ADAPTED = ("DIP", "CATS")
"""Rows that are shown with adapters, too (DIP, Tables 1 and 3)."""
LORA_RATE = 1e-3
COUNTED = ("mlp_in", "mlp_mid", "up_down", "gate_down")
METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "GLU (oracle)": ("glu", {"oracle": True}),
    "gate (oracle)": ("gate", {"oracle": True}),
    "up (oracle)": ("up", {"oracle": True}),
    "gate": ("gate", {}),
    "CATS": ("cats", {}),
    "up": ("up", {}),
    "top-k, one density": ("topk", {}),
    "threshold (TEAL)": ("threshold", {}),
    "WINA": ("wina", {}),
    "DIP": ("dip", {}),
}
"""Row -> the selector and its options."""


def calibrated(case: Case, folder: Path) -> Activations:
    """One pass over the calibration text."""
    work = Workspace(folder / "calibrate", "benchmark")
    return count_activity(
        PassConfig(), case.model, case.corpus(), COUNTED, Activity(frozenset()), work, case.stream.threads
    )


def family_density(method: str, oracle: bool, density: float) -> float | None:
    """Density of what a method prunes, so that all three matrices have `density`; None where it cannot."""
    whole = 0 if oracle else {"gate": 1, "cats": 1, "up": 1, "glu": 2}.get(method, 0)
    found = (3 * density - whole) / (3 - whole)
    return found if found > 0 else None


def chosen(
    case: Case, activations: Activations, method: str, options: dict[str, Any], density: float
) -> tuple[Sparse, Sparsity] | None:
    """The method at a density of the whole MLP, to evaluate and as a record; None where it is out of reach."""
    selector, oracle = load("runtime.sparsity", method), bool(options.get("oracle"))
    own = options_of(selector, {key: value for key, value in options.items() if key != "oracle"})
    asked = family_density(method, oracle, density)
    if asked is None:
        return None
    families = selector.families(case.model.spec, own)
    divided = selector.densities(False) == "divided"
    shares = selector.divide(asked, case.model.spec, own) if divided else dict.fromkeys(families, asked)
    layers = case.model.spec.num_hidden_layers
    per_layer = {name: (share,) * layers for name, share in shares.items()}
    statistics = all_statistics(case.model, activations, families)
    arrays = fit_all(selector, own, per_layer, case.model.spec, statistics)
    asked_for = sparsity_of(method, per_layer).model_copy(update={"options": own.model_dump()})
    return Sparse(selector, families, arrays, oracle), asked_for


def score(
    case: Case, activations: Activations, method: str, options: dict[str, Any], density: float, split: str
) -> Score | None:
    """What the method costs; None where it does not reach the density."""
    found = chosen(case, activations, method, options, density)
    return None if found is None else evaluate(case.stream, case.splits[split], found[0])


def adapted(case: Case, activations: Activations, label: str, density: float, folder: Path, steps: int) -> Score | None:
    """As `score` on test text, of the model whose pruned matrices were adapted (DIP 4), by the build's own stage."""
    found = chosen(case, activations, *METHODS[label], density)
    if found is None:
        return None
    sparse, sparsity = found
    arrays = {f"{key[0]}.{key[1]}.{name}": array for key, part in sparse.arrays.items() for name, array in part.items()}
    sparsity = sparsity.model_copy(update={"arrays": save_arrays(folder / "selector.safetensors", arrays)})
    config = DistillConfig(recipe="lora", steps=steps, learning_rate=LORA_RATE, dense_share=0.0, compute_device="cpu")
    work = Workspace(folder / f"{label}-{density}", "benchmark")
    student = distill.run(config, case.model, case.corpus("training"), sparsity, work, case.stream.threads)
    return evaluate(LayerStream(student, case.stream.threads), case.splits["test"], sparse)


def rows_of(
    name: str, case: Case, activations: Activations, methods: list[str], folder: Path, lora_steps: int
) -> Iterator[dict[str, Any]]:
    """A row per method and density, with and without adapters, the dense model first."""
    nll, count = case.stream.nll(case.splits["test"])
    common = {"model": name, "lora": False}
    yield {**common, "method": "dense", "asked": 1.0, "density": 1.0, "ppl": math.exp(nll / count)}
    for label in methods:
        for density in DENSITIES:
            scores = {False: score(case, activations, *METHODS[label], density, "test")}
            if label in ADAPTED and lora_steps:
                scores[True] = adapted(case, activations, label, density, folder, lora_steps)
            for lora, found in scores.items():
                if found is not None:
                    row = {"model": name, "method": label, "lora": lora, "asked": density}
                    row |= {"density": found.mlp_density, "ppl": found.ppl}
                    print(json.dumps(row), flush=True)
                    yield row


def fit_dip(case: Case, activations: Activations) -> dict[str, Any]:
    """The line through the best divisions (B.1): logit of the inputs' density over logit of the MLP's."""
    tried: list[tuple[float, float, float]] = []
    for density in SEARCHED:
        for inputs in np.arange(0.2, 1.0, 0.05):
            glu = 3 * density - 2 * inputs
            if 0.02 <= glu <= 1:
                options = {"input_density": float(inputs), "glu_density": float(glu)}
                found = score(case, activations, "dip", options, density, "validation")
                assert found is not None
                tried.append((density, float(inputs), found.ppl))
                print(json.dumps({"density": density, "inputs": round(float(inputs), 3), "ppl": found.ppl}), flush=True)
    best = [
        min((entry for entry in tried if entry[0] == at), key=lambda entry: entry[2])
        for at in (0.3, 0.4, 0.5, 0.6, 0.7)
    ]
    x, y = (np.array([math.log(entry[i] / (1 - entry[i])) for entry in best]) for i in (0, 1))
    slope, offset = np.polyfit(x, y, 1)
    return {"best": best, "slope": float(slope), "offset": float(offset)}


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["prose7m", "tinystories656k"], choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--lora-steps", type=int, default=60, metavar="N", help="updates of adapters; 0: none")
    parser.add_argument("--fit", action="store_true", help="search DIP's division of densities on validation text")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    fitted: dict[str, Any] = {}
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            case = case_of(name, Path(folder), SPLITS)
            activations = calibrated(case, Path(folder))
            if arguments.fit:
                fitted[name] = fit_dip(case, activations)
            else:
                rows += rows_of(name, case, activations, arguments.methods, Path(folder), arguments.lora_steps)
    if arguments.fit:
        finish(fitted)
        return
    for row in rows:
        row["label"] = row["method"] + (" + LoRA" if row["lora"] else "")
    cells = {(row["model"], row["label"], row["asked"]): row["ppl"] for row in rows}
    found = dict.fromkeys((row["model"], row["label"]) for row in rows)
    table = [[*key, *(cells.get((*key, at), cells.get((*key, 1.0), math.nan)) for at in DENSITIES)] for key in found]
    show("perplexity on test text, by density of the MLP", ["model", "method", *map(str, DENSITIES)], table)
    finish({"rows": rows})


if __name__ == "__main__":
    main()
