"""Perplexity of every selector at equal density of the MLP, in the form of DIP's Table 1.

`python -m benchmarks.sparsity [--models prose7m …] [--methods DIP …] [--densities 0.5 …] [--fit]`. Density counts
all matrices of the MLP: a method that needs the gate in full spends a third of it there. Thresholds and norms are
fitted on calibration text; what is scored is test text. `--fit` searches DIP's division of densities (B.1) on
validation text instead and prints the line through the best ones. DIP and CATS are shown with adapters, too, which the
build's own `distill` trains on text of their own; predictors are trained by `predict`, and are the largest that it
tries. Two rows are no selectors, but weights that no token uses. The last line is {rows: [{model, method, lora,
density, ppl, task_accuracy}]}, where `density` is what the text used (of a mixture's experts those that a router
chose), `asked` is what was asked for, and `task_accuracy` is null for models that no task is for. A mixture has no rows
with adapters or of pruned weights.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.evaluation.evaluate import Score, Sparse, evaluate
from benchmarks.evaluation.tasks import Encode, Item, read_items, right_answers
from benchmarks.shared.cases import WITH_MIXTURES, Case, Parts, Replaced, case_of
from benchmarks.shared.predicting import predicting
from benchmarks.shared.pruning import pruned
from benchmarks.shared.report import finish, show
from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.layer_counts import Activity
from coldpress.compiler.activity.unit_statistics import all_statistics, fit_all
from coldpress.compiler.io import Workspace, load_arrays, save_arrays
from coldpress.compiler.stages import distill, gram
from coldpress.compiler.stages.distill import DistillConfig
from coldpress.compiler.stages.gram import GramConfig
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations
from coldpress.schemas.families import WHOLE_MLP, used_share
from coldpress.schemas.gram import INPUT_OF
from coldpress.schemas.model import MLP_ROLES
from coldpress.schemas.sparsity import Sparsity
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
PREDICTED = "predictor"
"""A row of trained predictors (runtime/sparsity/predictor.py), as many neurons of each token as the density says."""
STATIC = {"Wanda, unstructured": False, "Wanda, 2:4": True}
"""Rows that are no selectors: weights left out for all tokens alike; whether two of four are kept."""
STATIC_DENSITY = 0.5
"""Of 2:4."""
TASKS = {"tinystories": "tinystories_cloze"}
"""Corpus -> the task that models of it are asked. Of WikiText there is none that a small model can answer."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """What is scored: a model, and what is left out of it."""

    stream: LayerStream
    sparse: Sparse | None
    density: float = 1.0
    """Of the MLP, where no selector says it."""

    def score(self, tokens: np.ndarray) -> tuple[float, int, float]:
        """(nats, number of predicted tokens, density of the MLP) of blocks."""
        if self.sparse is None:
            return *self.stream.nll(tokens), self.density
        found = evaluate(self.stream, tokens, self.sparse)
        return found.nll, found.num_predicted, found.mlp_density


@dataclass(frozen=True)
class Questions:
    """A task that a model of such text can answer."""

    items: Sequence[Item]
    encode: Encode

    @staticmethod
    def of(case: Case, count: int) -> "Questions | None":
        """The first `count` items; None where there is no task for the model's text."""
        if WITH_MIXTURES[case.name] not in TASKS or not count:
            return None
        items = read_items(case.source.parents[1] / "tasks" / TASKS[WITH_MIXTURES[case.name]] / "eval.jsonl")
        tokenizer = Tokenizer.from_file(str(case.source / "tokenizer.json"))
        return Questions(items[:count], lambda text: tokenizer.encode(text).ids)

    def accuracy(self, found: Contender) -> float:
        """Share of right answers."""
        return float(right_answers(found.stream, self.items, self.encode, found.sparse).mean())


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
    selector, oracle = load("coldpress.runtime.sparsity", Selector, method), bool(options.get("oracle"))
    own = options_of(selector, {key: value for key, value in options.items() if key != "oracle"})
    asked = family_density(method, oracle, density)
    if asked is None:
        return None
    families = selector.families(case.model.spec, own)
    divided = selector.densities(False) == "divided"
    shares = selector.divide(asked, case.model.spec, own) if divided else dict.fromkeys(families, asked)
    layers = case.model.spec.num_hidden_layers
    per_layer = {name: (used_share(name, case.model.spec) * share,) * layers for name, share in shares.items()}
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


def adapted(
    case: Case, activations: Activations, label: str, density: float, folder: Path, steps: int
) -> Contender | None:
    """The model whose pruned matrices were adapted (DIP 4), by the build's own stage, under the method."""
    found = chosen(case, activations, *METHODS[label], density)
    if found is None:
        return None
    sparse, sparsity = found
    arrays = {f"{key[0]}.{key[1]}.{name}": array for key, part in sparse.arrays.items() for name, array in part.items()}
    sparsity = sparsity.model_copy(update={"arrays": save_arrays(folder / "selector.safetensors", arrays)})
    config = DistillConfig(
        recipe="lora", distill_steps=steps, learning_rate=LORA_RATE, distill_dense_share=0.0, compute_device="cpu"
    )
    work = Workspace(folder / f"{label}-{density}", "benchmark")
    student = distill.run(config, case.model, case.corpus("training"), sparsity, work, case.stream.threads)
    return Contender(LayerStream(student, case.stream.threads), sparse)


def norms_of(case: Case, folder: Path) -> dict[str, np.ndarray]:
    """Role -> norms of the inputs of the MLPs' matrices on calibration text, float32 [inputs]."""
    whole = sparsity_of("dense", {"neuron": (1.0,) * case.model.spec.num_hidden_layers})
    work = Workspace(folder / "gram", "benchmark")
    grams = gram.run(GramConfig(), case.model, case.corpus(), whole, work, case.stream.threads)
    found = {}
    for layer in grams.layers:
        arrays = load_arrays(layer.arrays)
        for role in MLP_ROLES:
            found[f"layers.{layer.layer}.{role}.weight"] = np.sqrt(np.diag(arrays[INPUT_OF[role]]))
    return found


def contenders(
    case: Case, activations: Activations, label: str, density: float, folder: Path, lora_steps: int
) -> Iterator[tuple[bool, Contender]]:
    """(whether adapters help, what is scored) of a selector's row at a density; nothing where it is out of reach."""
    found = chosen(case, activations, *METHODS[label], density)
    if found is not None:
        yield False, Contender(case.stream, found[0])
    if label in ADAPTED and lora_steps and not case.model.spec.is_mixture:  # which is not trained
        helped = adapted(case, activations, label, density, folder, lora_steps)
        if helped is not None:
            yield True, helped


def static(case: Case, norms: Mapping[str, np.ndarray], label: str, density: float) -> Iterator[tuple[bool, Contender]]:
    """As `contenders`, of a row of pruned weights."""
    if density == STATIC_DENSITY or not STATIC[label]:
        matrices = pruned(case.model, norms, density, STATIC[label])
        yield False, Contender(Replaced(case.model, matrices, case.stream.threads), None, density)


def rows_of(case: Case, activations: Activations, folder: Path, arguments: argparse.Namespace) -> Iterator[Row]:
    """A row per method and density, with and without adapters, the dense model first."""
    questions = Questions.of(case, arguments.items)
    yield _row(case, "dense", False, 1.0, Contender(case.stream, None), questions)
    # of experts no inputs are measured (compiler/stages/gram.py)
    labels = [label for label in arguments.methods if label not in STATIC or not case.model.spec.is_mixture]
    norms = norms_of(case, folder) if set(STATIC) & set(labels) else {}
    for label in labels:
        for density in arguments.densities:
            if label in STATIC:
                scored = static(case, norms, label, density)
            elif label == PREDICTED:
                scored = [(False, Contender(case.stream, predicting(case, density, folder)))]
            else:
                scored = contenders(case, activations, label, density, folder, arguments.lora_steps)
            for lora, found in scored:
                yield _row(case, label, lora, density, found, questions)


def _row(case: Case, label: str, lora: bool, asked: float, found: Contender, questions: Questions | None) -> Row:
    nll, count, density = found.score(case.splits["test"])
    of_chosen = density / used_share(WHOLE_MLP, case.model.spec) if found.sparse else density
    row: Row = {"model": case.name, "method": label, "lora": lora, "asked": asked, "density": of_chosen}
    row |= {"ppl": math.exp(nll / count), "task_accuracy": questions.accuracy(found) if questions else None}
    print(json.dumps(row), flush=True)
    return row


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
    parser.add_argument("--models", nargs="+", default=["prose7m", "tinystories656k"], choices=list(WITH_MIXTURES))
    rows_known = [*METHODS, PREDICTED, *STATIC]
    parser.add_argument("--methods", nargs="+", default=rows_known, choices=rows_known, metavar="METHOD")
    parser.add_argument("--densities", nargs="+", type=float, default=list(DENSITIES), metavar="X")
    parser.add_argument("--items", type=int, default=200, metavar="N", help="questions of the task; 0: none are asked")
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
                rows += rows_of(case, activations, Path(folder), arguments)
    if arguments.fit:
        finish(fitted)
        return
    for row in rows:
        row["label"] = row["method"] + (" + LoRA" if row["lora"] else "")
    found, columns = dict.fromkeys((row["model"], row["label"]) for row in rows), arguments.densities
    for figure, title in (("ppl", "perplexity on test text"), ("task_accuracy", "share of right answers")):
        cells = {(row["model"], row["label"], row["asked"]): row[figure] for row in rows}
        table = [
            [*key, *(cells.get((*key, at), cells.get((*key, 1.0))) for at in arguments.densities)] for key in found
        ]
        show(f"{title}, by density of the MLP", ["model", "method", *map(str, columns)], table)
    finish({"rows": rows})


if __name__ == "__main__":
    main()
