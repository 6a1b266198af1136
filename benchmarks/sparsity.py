"""Measures perplexity of every selector at equal density of the MLP, in the form of DIP's Table 1.

Density counts all matrices of the MLP: a method that needs the gate in full spends a third of it there. Thresholds and
norms are fitted on calibration text; test text is scored. DIP and CATS are shown with adapters, too, which the build's
own `distill` trains on other text; predictors are trained by `predict`, and are the largest that it tries. Two rows are
no selectors, but weights that no token uses. A mixture has no rows with adapters or pruned weights, and its density is
a share of the experts that a router chose.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.evaluation.evaluate import Sparse, evaluate
from benchmarks.evaluation.tasks import Encode, Item, read_items, right_answers
from benchmarks.harness import Benchmark, Cell, Row, main, option
from benchmarks.shared.cases import MODELS, WITH_MIXTURES, Case, Parts, Replaced, case_of
from benchmarks.shared.grams import grams_of
from benchmarks.shared.predicting import predicting
from benchmarks.shared.pruning import pruned
from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.layer_counts import ActivityRule
from coldpress.compiler.activity.unit_statistics import all_statistics, fit_all
from coldpress.compiler.io import Workspace, save_arrays
from coldpress.compiler.stages import distill
from coldpress.compiler.stages.distill import DistillConfig
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations
from coldpress.schemas.families import WHOLE_MLP, resident_share, used_share
from coldpress.schemas.sparsity import Sparsity
from tests.support.statistics import sparsity_of

DENSITIES = (0.6, 0.5, 0.4)
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
"""Row -> (the selector, its options)."""
PREDICTED = "predictor"
"""The row of trained predictors (runtime/sparsity/predictor.py), which use `density` of each token's neurons."""
STATIC = {"Wanda, unstructured": False, "Wanda, 2:4": True}
"""Row of weights pruned once for all tokens -> whether two of four are kept."""
STATIC_DENSITY = 0.5
"""Density of 2:4."""
TASKS = {"tinystories": "tinystories_cloze"}
"""Corpus -> the task for its models. WikiText has none that a small model can answer."""
NONE = "dense"
ROWS = (*METHODS, PREDICTED, *STATIC)


@dataclass(frozen=True)
class Contender:
    """A model to score, with its selector or pruned weights."""

    stream: LayerStream
    sparse: Sparse | None
    density: float = 1.0
    """Density of the MLP, where no selector gives it."""

    def score(self, tokens: np.ndarray) -> tuple[float, int, float]:
        """Returns (nats, number of predicted tokens, density of the MLP) of blocks."""
        if self.sparse is None:
            return *self.stream.nll(tokens), self.density
        found = evaluate(self.stream, tokens, self.sparse)
        return found.nll, found.num_predicted, found.mlp_density


@dataclass(frozen=True)
class Questions:
    """A task that a model of its corpus can answer."""

    items: Sequence[Item]
    encode: Encode

    @staticmethod
    def of(case: Case, count: int) -> "Questions | None":
        """Returns the first `count` items; None if there is no task for the model's text."""
        if WITH_MIXTURES[case.name] not in TASKS or not count:
            return None
        items = read_items(case.source.parents[1] / "tasks" / TASKS[WITH_MIXTURES[case.name]] / "eval.jsonl")
        tokenizer = Tokenizer.from_file(str(case.source / "tokenizer.json"))
        return Questions(items[:count], lambda text: tokenizer.encode(text).ids)

    def accuracy(self, found: Contender) -> float:
        """Returns the share of right answers."""
        return float(right_answers(found.stream, self.items, self.encode, found.sparse).mean())


def calibrated(case: Case, folder: Path) -> Activations:
    """Returns the activations of one pass over the calibration text."""
    work, activity = Workspace(folder / "calibrate", "benchmark"), ActivityRule(frozenset())
    return count_activity(PassConfig(), case.model, case.corpus(), COUNTED, activity, work, case.stream.threads)


def chosen(
    case: Case, activations: Activations, method: str, options: dict[str, Any], density: float
) -> tuple[Sparse, Sparsity] | None:
    """Fits the method at a density of the whole MLP, to evaluate and as a record; None if out of reach."""
    selector, oracle = load("coldpress.runtime.sparsity", Selector, method), bool(options.get("oracle"))
    own = options_of(selector, {key: value for key, value in options.items() if key != "oracle"})
    families = selector.families(case.model.spec, own)
    if not oracle and density <= resident_share(families, case.model.spec):
        return None
    shares = dict.fromkeys(families, density) if oracle else selector.divide(density, case.model.spec, own)
    layers = case.model.spec.num_hidden_layers
    per_layer = {name: (used_share(name, case.model.spec) * share,) * layers for name, share in shares.items()}
    statistics = all_statistics(case.model, activations, families)
    arrays = fit_all(selector, own, per_layer, case.model.spec, statistics)
    asked_for = sparsity_of(method, per_layer).model_copy(update={"options": own.model_dump()})
    return Sparse(selector, families, arrays, oracle), asked_for


def adapted(
    case: Case, activations: Activations, label: str, density: float, folder: Path, steps: int
) -> Contender | None:
    """Returns the model with adapters on its pruned matrices (DIP 4), trained by the build's stage under the method."""
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


def norms_of(case: Case) -> dict[str, np.ndarray]:
    """Returns role -> norms of the inputs of the MLPs' matrices on calibration text, float32 [inputs]."""
    return {role: np.sqrt(np.diag(inputs)) for role, inputs in grams_of(case).items()}


@dataclass
class Prepared:
    """A model, its activations on calibration text, its questions, and what its cells share."""

    case: Case
    activations: Activations
    questions: Questions | None
    norms: Mapping[str, np.ndarray] | None = None


def contender(at: Prepared, label: str, lora: bool, density: float, lora_steps: int) -> Contender | None:
    """Returns the contender of a row at a density; None if it cannot reach the density."""
    case, threads = at.case, at.case.stream.threads
    if label == NONE:
        return Contender(case.stream, None)
    if label in STATIC:
        if STATIC[label] and density != STATIC_DENSITY:
            return None
        at.norms = at.norms or norms_of(case)
        weights = pruned(case.model, at.norms, density, STATIC[label])
        return Contender(Replaced(case.model, weights.get, threads), None, density)
    if label == PREDICTED:
        return Contender(case.stream, predicting(case, density, case.folder))
    if lora:
        return adapted(case, at.activations, label, density, case.folder, lora_steps)
    found = chosen(case, at.activations, *METHODS[label], density)
    return found and Contender(case.stream, found[0])


def row_of(at: Prepared, found: Contender) -> Row:
    """Returns the figures of a contender on test text."""
    nll, count, density = found.score(at.case.splits["test"])
    of_chosen = density / used_share(WHOLE_MLP, at.case.model.spec) if found.sparse else density
    accuracy = at.questions.accuracy(found) if at.questions else None
    return {"density": of_chosen, "ppl": math.exp(nll / count), "task_accuracy": accuracy}


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m",), smoke=("stories260k",), full=("prose7m", "tinystories656k"), choices=WITH_MIXTURES, help="models"
    )
    methods: tuple[str, ...] = option(
        tuple(label for label in ROWS if label != PREDICTED),
        smoke=("DIP", "Wanda, 2:4"),
        full=ROWS,
        choices=ROWS,
        help="rows of the table",
    )
    densities: tuple[float, ...] = option((0.5,), full=DENSITIES, help="densities: shares of the MLP's weights")
    items: int = option(200, smoke=4, help="questions of the task; 0: none")
    lora_steps: int = option(0, smoke=1, full=60, help="updates of the adapters; 0: no rows with adapters")
    test_blocks: int = option(16, smoke=2, full=64, help="blocks of 256 tokens of test text")
    calibration_blocks: int = option(64, smoke=8, help="blocks of 256 tokens of calibration text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].model": "model",
        "rows[].method": "row of the table: selector or kind of pruned weights; dense: nothing is pruned",
        "rows[].lora": "whether the model has trained adapters",
        "rows[].asked": "density that was asked for",
        "rows[].density": "share of the MLP's weights, in a mixture of its chosen experts', that a token uses",
        "rows[].ppl": "perplexity on test text",
        "rows[].task_accuracy?": "share of right answers in the task; null for models without a task",
    }
    needs_data = True
    full_minutes = 240

    def cells(self) -> Iterator[Cell]:
        for model in self.options.models:
            yield {"model": model, "method": NONE, "lora": False, "asked": 1.0}
            for label, density in itertools.product(self._labels(model), self.options.densities):
                yield {"model": model, "method": label, "lora": False, "asked": density}
                if label in ADAPTED and self.options.lora_steps and model in MODELS:  # a mixture is not trained
                    yield {"model": model, "method": label, "lora": True, "asked": density}

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row, or none if a method does not reach the density."""
        at = self.once(cell["model"], lambda: self._prepared(cell["model"]))
        if found := contender(at, cell["method"], cell["lora"], cell["asked"], self.options.lora_steps):
            yield row_of(at, found)

    def _labels(self, model: str) -> Iterator[str]:
        """Returns a model's rows, without pruned weights for a mixture, since gram measures no inputs of experts."""
        return (label for label in self.options.methods if label not in STATIC or model in MODELS)

    def _prepared(self, name: str) -> Prepared:
        options, folder = self.options, self.folder / name
        parts: Parts = {
            "calibration": ("fit", slice(0, options.calibration_blocks)),
            "validation": ("fit", slice(64, 80)),
            "training": ("fit", slice(80, 592)),  # adapters train on other text than thresholds and norms
            "test": ("test", slice(0, options.test_blocks)),
        }
        case = case_of(name, folder, parts)
        return Prepared(case, calibrated(case, folder), Questions.of(case, options.items))


if __name__ == "__main__":
    main("sparsity")
