"""Measures predictors of ReLU models: perplexity, recall, and the savings of sizes layer by layer over one size.

In a model without exact zeros, as the mixture of experts, the active units are the largest half of those that a token
may use. `predict` itself trains the trained on calibration text, with as much DRAM as they ask for. Validation text
chooses sizes, by `size` itself and, for comparison, one rank for all layers: the smallest whose perplexity is within
the same tolerance. Figures are of test text. For less DRAM the table has the curve from bytes to perplexity.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.cases import CORPORA, Parts, case_of
from benchmarks.shared.predicting import aiming, largest_rank
from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.layer_counts import ActivityRule, exact_families
from coldpress.compiler.block_statistics import standard_error
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages.predict import PredictConfig, Trainer, ranks_tried
from coldpress.compiler.stages.predict import run as predict
from coldpress.compiler.stages.size import SizeConfig, choose
from coldpress.compiler.stages.size.passes import network_of, nll_with
from coldpress.runtime.sparsity import predictor
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.families import WHOLE_MLP as FAMILY
from coldpress.schemas.families import FormatName, used_share
from coldpress.schemas.predictors import Predictors, TrainedLayer
from tests.support.statistics import sparsity_of

PREDICTOR = predictor.Plugin()
TOLERANCE, UNLIMITED = SizeConfig().predictor_tolerance, 1 << 62
RELU = ("prose7m-relu", "tinystories656k-relu", "tinystories-opt-0.9m")
DENSITY = 0.5
"""Active share of the units that a token may use, in models without exact zeros."""
PER_LAYER, SINGLE = "per layer", "one for all"
LIMITS = {"75 % of the bytes": 0.75, "50 % of the bytes": 0.5}
"""Limits on DRAM for the curve, as shares of the chosen sizes' bytes."""
SIZES = (PER_LAYER, SINGLE, *LIMITS)


class Case:
    """A model with its text, its activations and the format of its predictors."""

    def __init__(self, name: str, format_name: FormatName, folder: Path, options: "Options") -> None:
        """Splits the text and calibrates."""
        parts: Parts = {"fit": ("fit", slice(None)), "test": ("test", slice(0, options.test_blocks))}
        known = case_of(name, folder, parts)
        fit, count = known.splits["fit"], options.calibration_blocks
        fit = fit[np.random.default_rng(0).permutation(len(fit))]  # stories are sorted, by tense among other things
        validation = fit[count : count + options.validation_blocks]
        self.splits = {"calibration": fit[:count], "validation": validation, "test": known.splits["test"]}
        self.model, self.stream = known.model, known.stream
        self.format_name, self.folder = format_name, folder
        self.activations = self._calibrated(replace(known, splits=self.splits).corpus())
        spec = self.model.spec
        self.layers = tuple(range(spec.num_hidden_layers))
        self.largest = largest_rank(spec)
        self.sparsity = sparsity_of(
            "predictor",
            {FAMILY: (DENSITY * used_share(FAMILY, spec),) * len(self.layers)},
            predictor_rank=(self.largest,) * len(self.layers),
            predictor_format=format_name,
        )

    @functools.cached_property
    def trained(self) -> dict[int, TrainedLayer]:
        """The trained that `predict` trains, by layer."""
        work = Workspace(self.folder / "predict", "benchmark")
        found = predict(PredictConfig(), self.model, self.activations, self.sparsity, self.layers, work, 1)
        return {trained_layer.layer: trained_layer for trained_layer in found.layers}

    @functools.cached_property
    def unlimited(self) -> Predictors:
        """The sizes per layer that `size` chooses without a limit on bytes."""
        return self.chosen(UNLIMITED, self.trained)

    def chosen(self, limit: int, trained: dict[int, TrainedLayer]) -> Predictors:
        """Chooses sizes per layer of at most `limit` bytes."""
        no_topk = dict.fromkeys(self.layers, 0)
        return choose(PREDICTOR, self.stream, self.splits["validation"], trained, limit, TOLERANCE, no_topk)

    def ratio(self, predictors: Predictors) -> tuple[float, float]:
        """Returns (`ppl_ratio` of test text, its standard error from differences by block)."""
        tokens = self.splits["test"]
        networks = {
            entry.layer: network_of(PREDICTOR, entry.format, entry, entry, self.model.spec.hidden_size)
            for entry in predictors.layers
        }
        nll, _ = nll_with(self.stream, tokens, networks, networks.__getitem__)
        more = nll.sum(axis=1) - self.stream.block_nll(tokens)
        per_block = more / (tokens.shape[1] - 1)
        ratio = math.exp(float(per_block.mean()))
        return ratio, ratio * standard_error(per_block)

    def _calibrated(self, corpus: Corpus) -> Activations:
        spec = self.model.spec
        exact = ActivityRule(exact_families((FAMILY,), spec))
        activity = exact if spec.exact_zeros else ActivityRule(frozenset(), aiming(spec, DENSITY))
        work = Workspace(self.folder / "calibrate", "benchmark")
        return count_activity(PassConfig(), self.model, corpus, (FAMILY,), activity, work, self.stream.threads)


def best_single(case: Case, level: int) -> Predictors:
    """Returns predictors of the smallest common rank whose perplexity on validation text is within `tolerance`.

    They use the same level of thresholds as the sizes per layer, so that both predict nearly the same units.
    """
    work, config = Workspace(case.folder / "single", "benchmark"), PredictConfig()
    trainers = [
        Trainer(config, case.model, case.activations, entry, FAMILY, case.format_name, work)
        for entry in case.activations.layers
    ]
    trained = dict(case.trained)
    found = None
    for rank in ranks_tried(0, case.largest, case.format_name):
        for layer, trainer in enumerate(trainers):
            size, _ = trainer.size(rank)
            size = size.model_copy(update={"points": (size.points[min(level, len(size.points) - 1)],)})
            trained[layer] = trained[layer].model_copy(update={"suggested_rank": rank, "sizes": (size,)})
        found = case.chosen(UNLIMITED, trained)
        if validation_ratio(found) <= 1 + TOLERANCE:
            break
    assert found is not None
    return found


def level_of(found: Predictors, trained: dict[int, TrainedLayer]) -> int:
    """Returns the level of thresholds at which predictors work; a layer with fewer levels is at its last."""
    thresholds = {
        (layer, size.rank): [point.threshold for point in size.points]
        for layer, trained_layer in trained.items()
        for size in trained_layer.sizes
    }
    return max(thresholds[entry.layer, entry.rank].index(entry.threshold) for entry in found.layers)


def validation_ratio(found: Predictors) -> float:
    """Returns the perplexity on validation text with the chosen predictors over perplexity without predictors."""
    (ppl,) = (tried.ppl for tried in found.tried if tried.predictor_bytes == nbytes_of(found))
    return ppl / (found.ppl_without or math.nan)


def nbytes_of(found: Predictors) -> int:
    """Returns the bytes of all predictors."""
    return sum(entry.nbytes for entry in found.layers)


def row_of(case: Case, found: Predictors) -> Row:
    """Returns sizes and thresholds, from calibration and validation text, and `ppl_ratio` of test text."""
    ratio, error = case.ratio(found)
    entries = found.layers
    parameters = sum(entry.num_parameters for entry in entries)
    return {
        "ranks": [entry.rank for entry in entries],
        "parameters": parameters,
        "parameter_share": parameters / case.model.num_parameters,
        "nbytes": nbytes_of(found),
        "recall": float(np.mean([entry.recall for entry in entries])),
        "predicted_over_active": float(np.mean([entry.predicted_density / entry.density for entry in entries])),
        "output_cosine": float(np.mean([entry.output_cosine for entry in entries])),
        "ppl_ratio_validation": validation_ratio(found),
        "ppl_ratio": ratio,
        "ppl_ratio_error": error,
    }


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m-relu",), smoke=("tinystories656k-relu",), full=RELU, choices=CORPORA, help="models with predictors"
    )
    formats: tuple[str, ...] = option(
        ("int8_group32",), full=("fp16", "int8_group32"), help="formats of the predictors"
    )
    sizes: tuple[str, ...] = option(
        (PER_LAYER, SINGLE),
        full=SIZES,
        choices=SIZES,
        help="whether each layer has its own rank; limits on their bytes",
    )
    calibration_blocks: int = option(16, smoke=4, full=128, help="blocks of 256 tokens of calibration text")
    validation_blocks: int = option(8, smoke=2, full=48, help="blocks of 256 tokens of validation text")
    test_blocks: int = option(16, smoke=2, full=64, help="blocks of 256 tokens of test text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].ranks": "rank of each layer's predictor",
        "rows[].level?": "number of the threshold that predictors use, largest of the layers; null: one for all",
        "rows[].parameters": "parameters of all predictors",
        "rows[].parameter_share": "parameters of all predictors over those of the model",
        "rows[].nbytes": "bytes of all predictors",
        "rows[].recall": "share of the active neurons that are predicted, mean over layers",
        "rows[].predicted_over_active": "number of predicted neurons over number of active neurons, mean over layers",
        "rows[].output_cosine": "cosine between the MLP's output by predicted neurons and by all, mean over layers",
        "rows[].ppl_ratio_validation": "perplexity with predictors over perplexity without, on validation text",
        "rows[].ppl_ratio": "perplexity with predictors over perplexity without, on test text",
        "rows[].ppl_ratio_error": "standard error of ppl_ratio over blocks",
        "adaptive_saving.*?": "share of the parameters that sizes per layer save over one size for all, by model",
    }
    needs_data = True
    over = {"model": "models", "format": "formats", "sizes": "sizes"}
    full_minutes = 240

    def measure(self, cell: Cell) -> Iterator[Row]:
        name, format_name, sizes = cell["model"], cell["format"], cell["sizes"]
        options, folder = self.options, self.folder / f"{name}-{format_name}"
        case = self.once((name, format_name), lambda: Case(name, format_name, folder, options))
        if sizes == SINGLE:
            found = best_single(case, level_of(case.unlimited, case.trained))
        elif sizes == PER_LAYER:
            found = case.unlimited
        else:
            found = case.chosen(int(LIMITS[sizes] * nbytes_of(case.unlimited)), case.trained)
        yield {"level": None if sizes == SINGLE else level_of(found, case.trained), **row_of(case, found)}

    def figures(self, rows: Rows) -> Figures:
        found = {(row["model"], row["sizes"]): row for row in rows if row["format"] == self.options.formats[0]}
        return {
            "adaptive_saving": {
                model: 1 - found[model, PER_LAYER]["parameters"] / row["parameters"]
                for (model, sizes), row in found.items()
                if sizes == SINGLE and (model, PER_LAYER) in found
            }
        }


if __name__ == "__main__":
    main("predictors")
