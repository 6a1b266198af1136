"""Predictors of ReLU models: perplexity, what they find, and what sizes layer by layer save over one size for all.

`python -m benchmarks.predictors [--models prose7m-relu …] [--formats fp16 int8_group32]`. A model without exact
zeros, as the mixture of experts, has half of what a token may use as its active units: those that are largest. Ladders
are trained on calibration text by `predict` itself, with as much DRAM as they ask for; sizes are chosen on validation
text, by `size` itself and, for comparison, one rank for all layers: the smallest whose perplexity is within the same
tolerance. Reported is test text. For DRAM that ends sooner the table has the curve from bytes to perplexity.

The last line is {model: {recall, predicted_over_active, parameter_share, ppl_ratio, adaptive_saving}} of the first
format: means over layers, the predictors' share of the model's parameters, perplexity with them over that without, and
the share of parameters that sizes per layer save over the best single size.
"""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.shared.cases import texts
from benchmarks.shared.predicting import aiming, largest_rank
from benchmarks.shared.report import finish, show
from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.layer_counts import Activity, exact_families
from coldpress.compiler.io import Workspace, save_arrays
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.predict import PredictConfig, Trainer, ladder_ranks
from coldpress.compiler.stages.predict import run as predict
from coldpress.compiler.stages.size import SizeConfig, choose
from coldpress.compiler.stages.size.passes import network_of, nll_with
from coldpress.runtime.sparsity import predictor
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import SPLITS, Corpus, TokenBlocks
from coldpress.schemas.families import WHOLE_MLP as FAMILY
from coldpress.schemas.families import FormatName, used_share
from coldpress.schemas.predictors import Ladder, Predictors
from tests.support.data import find_data_folder
from tests.support.statistics import sparsity_of

PREDICTOR = predictor.Plugin()
RELU = {"prose7m-relu": "wikitext-2", "tinystories656k-relu": "tinystories", "tinystories-opt-0.9m": "tinystories"}
MODELS = RELU | {"tinystories-mixtral-8x": "tinystories", "tinystories656k": "tinystories"}
"""Model -> the corpus that it is calibrated and scored on."""
DENSITY = 0.5
"""Of what a token may use, in models without exact zeros."""
BLOCK_TOKENS = 256
CALIBRATION_BLOCKS, VALIDATION_BLOCKS, TEST_BLOCKS = 128, 48, 64
LIMIT_SHARES = (0.75, 0.5)
"""Of the bytes that the chosen sizes take: where DRAM ends on the curve."""


class Case:
    """A model with its text, its activations and how its predictors are stored."""

    def __init__(self, name: str, format_name: FormatName, folder: Path) -> None:
        """Calibrates."""
        data = find_data_folder()
        if data is None:
            raise SystemExit("no real test data: set COLDPRESS_TEST_DATA to its folder")
        source = data / "models" / name
        self.model = ingest.run(IngestConfig(model=str(source)), Workspace(folder / "ingest", "benchmark"))
        self.stream = LayerStream(self.model, len(os.sched_getaffinity(0)))
        self.splits = splits_of(source, data / "corpora" / MODELS[name])
        self.format_name, self.folder = format_name, folder
        self.activations = self._calibrated()
        spec = self.model.spec
        self.layers = tuple(range(spec.num_hidden_layers))
        self.no_topk = dict.fromkeys(self.layers, 0)
        self.largest = largest_rank(spec)
        self.sparsity = sparsity_of(
            "predictor",
            {FAMILY: (DENSITY * used_share(FAMILY, spec),) * len(self.layers)},
            predictor_rank=(self.largest,) * len(self.layers),
            predictor_format=format_name,
        )

    def ladders(self, config: PredictConfig) -> dict[int, Ladder]:
        """What `predict` gives."""
        work = Workspace(self.folder / "predict", "benchmark")
        found = predict(config, self.model, self.activations, self.sparsity, self.layers, work, 1)
        return {ladder.layer: ladder for ladder in found.layers}

    def ratio(self, split: str, predictors: Predictors) -> tuple[float, float]:
        """(perplexity with predictors over that without, its standard error from the differences block by block)."""
        tokens = self.splits[split]
        networks = {
            entry.layer: network_of(PREDICTOR, entry.format, entry, entry, self.model.spec.hidden_size)
            for entry in predictors.layers
        }
        whole = self.stream.block_nll(tokens)
        found = nll_with(self.stream, tokens, networks)[0].sum(axis=1) - whole
        per_block = found / (tokens.shape[1] - 1)
        ratio = math.exp(float(per_block.mean()))
        return ratio, ratio * float(per_block.std(ddof=1)) / math.sqrt(len(per_block))

    def _calibrated(self) -> Activations:
        tokens = self.splits["calibration"]
        arrays = save_arrays(self.folder / "tokens.safetensors", {"tokens": tokens})
        blocks = TokenBlocks(split="calibration", arrays=arrays, num_blocks=len(tokens), block_tokens=BLOCK_TOKENS)
        parts = tuple(blocks.model_copy(update={"split": split}) for split in SPLITS)
        corpus = Corpus(name="benchmark", text_sha256="0" * 64, splits=parts)
        spec = self.model.spec
        chosen = None if spec.exact_zeros else aiming(spec, DENSITY)
        activity = Activity(exact_families((FAMILY,), spec) if chosen is None else frozenset(), chosen)
        work = Workspace(self.folder / "calibrate", "benchmark")
        return count_activity(PassConfig(), self.model, corpus, (FAMILY,), activity, work, self.stream.threads)


def splits_of(folder: Path, corpus: Path) -> dict[str, np.ndarray]:
    """Token blocks int32 [n, BLOCK_TOKENS] of calibration, validation and test text.

    Documents of the text to fit and to choose by are shuffled: the stories are sorted, by tense among other things.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = texts(corpus)
    documents = found["fit"].split("\n\n" if corpus.name == "tinystories" else "\n = ")
    shuffled = "\n\n".join(documents[place] for place in np.random.default_rng(0).permutation(len(documents)))
    fit = _blocks(tokenizer, shuffled, CALIBRATION_BLOCKS + VALIDATION_BLOCKS)
    return {
        "calibration": fit[:-VALIDATION_BLOCKS],
        "validation": fit[-VALIDATION_BLOCKS:],
        "test": _blocks(tokenizer, found["test"], TEST_BLOCKS),
    }


def _blocks(tokenizer: Tokenizer, text: str, count: int) -> np.ndarray:
    ids = np.array(tokenizer.encode(text[: 16 * count * BLOCK_TOKENS], add_special_tokens=False).ids, np.int32)
    whole = min(count, ids.size // BLOCK_TOKENS)
    return ids[: whole * BLOCK_TOKENS].reshape(whole, BLOCK_TOKENS)


def best_single(case: Case, config: PredictConfig, tolerance: float, level: int) -> Predictors:
    """The smallest rank of all layers alike whose perplexity on validation text is within `tolerance`.

    At the same level of thresholds as the sizes per layer: what is predicted then differs little.
    """
    work = Workspace(case.folder / "single", "benchmark")
    trainers = [
        Trainer(config, case.model, case.activations, entry, FAMILY, case.format_name, work)
        for entry in case.activations.layers
    ]
    found = None
    for rank in ladder_ranks(0, case.largest, case.format_name):
        ladders = {
            layer: _only(trainer, rank, layer, level, case.format_name) for layer, trainer in enumerate(trainers)
        }
        found = choose(PREDICTOR, case.stream, case.splits["validation"], ladders, 1 << 62, tolerance, case.no_topk)
        if validation_ratio(found) <= 1 + tolerance:
            break
    assert found is not None
    return found


def _only(trainer: Trainer, rank: int, layer: int, level: int, format_name: FormatName) -> Ladder:
    rung, _ = trainer.rung(rank)
    return Ladder(
        layer=layer,
        format=format_name,
        density=trainer.judged_on.density,
        skewness=0,
        suggested_rank=rank,
        rungs=(rung.model_copy(update={"points": (rung.points[min(level, len(rung.points) - 1)],)}),),
    )


def level_of(found: Predictors, ladders: dict[int, Ladder]) -> int:
    """Which of its thresholds each predictor works at; a layer with fewer is at its last."""
    thresholds = {
        (layer, rung.rank): [point.threshold for point in rung.points]
        for layer, ladder in ladders.items()
        for rung in ladder.rungs
    }
    return max(thresholds[entry.layer, entry.rank].index(entry.threshold) for entry in found.layers)


def validation_ratio(found: Predictors) -> float:
    """Perplexity on validation text with the chosen predictors over that without."""
    nbytes = sum(entry.nbytes for entry in found.layers)
    (ppl,) = (tried.ppl for tried in found.tried if tried.predictor_bytes == nbytes)
    return ppl / (found.ppl_without or math.nan)


def row_of(label: str, case: Case, found: Predictors) -> dict[str, Any]:
    """What predictors are and do: sizes and thresholds from calibration and validation text, `ppl_ratio` of test."""
    ratio, error = case.ratio("test", found)
    entries = found.layers
    parameters = sum(entry.num_parameters for entry in entries)
    row = {
        "sizes": label,
        "format": case.format_name,
        "ranks": [entry.rank for entry in entries],
        "parameters": parameters,
        "parameter_share": parameters / case.model.num_parameters,
        "nbytes": sum(entry.nbytes for entry in entries),
        "recall": float(np.mean([entry.recall for entry in entries])),
        "predicted_over_active": float(np.mean([entry.predicted_density / entry.density for entry in entries])),
        "output_cosine": float(np.mean([entry.output_cosine for entry in entries])),
        "ppl_ratio_validation": validation_ratio(found),
        "ppl_ratio": ratio,
        "ppl_ratio_error": error,
    }
    print(json.dumps(row), flush=True)
    return row


def rows_of(name: str, format_name: FormatName, folder: Path) -> Iterator[dict[str, Any]]:
    """Sizes per layer, the best single one, and sizes per layer where DRAM ends sooner."""
    case, config, tolerance = Case(name, format_name, folder), PredictConfig(), SizeConfig().predictor_tolerance
    ladders = case.ladders(config)
    found = choose(PREDICTOR, case.stream, case.splits["validation"], ladders, 1 << 62, tolerance, case.no_topk)
    best = row_of(f"per layer, thresholds {level_of(found, ladders)}", case, found)
    yield best
    yield row_of("one for all", case, best_single(case, config, tolerance, level_of(found, ladders)))
    for share in LIMIT_SHARES:
        limit = int(share * best["nbytes"])
        yield row_of(
            f"at most {limit} bytes",
            case,
            choose(PREDICTOR, case.stream, case.splits["validation"], ladders, limit, tolerance, case.no_topk),
        )


COLUMNS = ("sizes", "ranks", "parameter_share", "nbytes", "recall", "predicted_over_active", "output_cosine")
RATIOS = ("ppl_ratio_validation", "ppl_ratio", "ppl_ratio_error")


def main() -> None:
    """Prints a table per model and format, and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(RELU), choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=["fp16", "int8_group32"])
    arguments = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    for name in arguments.models:
        for format_name in arguments.formats:
            with tempfile.TemporaryDirectory() as folder:
                rows = list(rows_of(name, format_name, Path(folder)))
            cells = [[row[key] for key in COLUMNS] + [f"{row[key]:.5f}" for key in RATIOS] for row in rows]
            show(f"{name}, predictors in {format_name}", [*COLUMNS, *RATIOS], cells)
            layered, single = rows[:2]
            kept = ("recall", "predicted_over_active", "parameter_share", "ppl_ratio", "ppl_ratio_error")
            saving = 1 - layered["parameters"] / single["parameters"]
            figures.setdefault(name, {key: layered[key] for key in kept} | {"adaptive_saving": saving})
    finish(figures)


if __name__ == "__main__":
    main()
