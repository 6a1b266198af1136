"""Measures the cost of rounding: formats × algorithms, dense and pruned to half, as perplexity of the rounded model.

The build's own stages ingest, tokenize, allocate, gram and quantize. Then the codes are decoded into a checkpoint and
run over test text by transformers' modules with the build's selector, so that only rounding differs between the rows of
one density. Embeddings and head stay as they are. Gram matrices come from calibration text. Errors are standard errors
over blocks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Row, main, option
from benchmarks.shared import builds
from benchmarks.shared.builds import build, settings
from benchmarks.shared.cases import Replaced
from coldpress.compiler.activity.choice import choice_of
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.variants import Differences, compare
from coldpress.compiler.block_statistics import standard_error
from coldpress.compiler.io import Workspace, load_arrays, load_record
from coldpress.compiler.stages import gram, quantize
from coldpress.compiler.stages.gram import GramConfig
from coldpress.compiler.stages.quantize import QuantizeConfig
from coldpress.runtime.artifact.contents import out_of_units
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.families import num_units, slice_shape, slices
from coldpress.schemas.model import Model
from coldpress.schemas.quantized import LayerCodes
from coldpress.schemas.sparsity import Sparsity

ALGORITHMS = ("rtn", "gptq")
BUDGETS = {name: budget for name, (_, budget) in builds.MODELS.items() if name != "tinystories-mixtral-8x"} | {
    "stories260k": "98%",
    "tinystories-opt-0.9m": "95%",
    "prose7m": "80%",
    "prose7m-relu": "80%",
}
"""Model -> DRAM budget that holds what must be resident."""
DENSITIES: dict[float, dict[str, Any]] = {1.0: {"method": "dense"}, 0.5: {"method": "topk", "density": 0.5}}
CODES = names("coldpress.runtime.quantization")


def prepare(model: str, density: float, folder: Path, test_tokens: int) -> tuple[Model, Corpus, Sparsity]:
    """Returns the records of a build up to `allocate`; models with exact zeros are not pruned to a density."""
    asked = settings(model) | DENSITIES[density] | {"dram_budget": BUDGETS[model], "evaluation_tokens": test_tokens}
    if model != "relu-demo":
        asked["context_length"] = 256
    device = build(folder, "--until", "allocate", label=f"d{round(100 * density)}", **asked)
    built = device.parent
    return (
        load_record(built / "ingest.json", Model),
        load_record(built / "tokenize.json", Corpus),
        load_record(device / "allocate.json", Sparsity),
    )


def matrices_of(layer: LayerCodes, sparsity: Sparsity, model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (role, decoded values) of every matrix of a layer, float32 in Hugging Face's order."""
    arrays = load_arrays(layer.arrays)
    kept = load("coldpress.runtime.quantization", Format, sparsity.format)
    prefix = f"layers.{layer.layer}."
    for tensor in layer.resident:
        if tensor.format is not None:
            codes = arrays[tensor.role.removeprefix(prefix)]
            yield (
                tensor.role,
                load("coldpress.runtime.quantization", Format, tensor.format).decode(codes, tensor.shape[1]),
            )
    for family in sparsity.families:
        start = 0
        for piece in slices(family, model.spec):
            role, (count, length) = f"{prefix}{piece.role}.weight", slice_shape(piece, model.spec)
            stop = start + count * kept.nbytes(length)
            units = arrays[f"units.{family}"][: num_units(family, model.spec), start:stop]
            num_rows, num_columns = model.tensors[role].shape
            codes = out_of_units(units, piece, num_rows)
            values = kept.decode(np.ascontiguousarray(codes), num_rows if piece.axis == "column" else num_columns)
            yield role, np.ascontiguousarray(values.T if piece.axis == "column" else values)
            start = stop


class Prepared:
    """A model at a density, built up to the Gram matrices."""

    def __init__(self, model: str, density: float, folder: Path, test_tokens: int) -> None:
        """Builds the model; each density has its own build."""
        self.source, corpus, self.sparsity = prepare(model, density, folder, test_tokens)
        self.tokens = load_arrays(corpus.split("test").arrays)["tokens"]
        self._choice = None if self.sparsity.is_whole else choice_of(self.sparsity, self.source.spec)
        self._stream = LayerStream(self.source, threads=1)
        self._hidden = self._last(self._stream)
        work = Workspace(folder / f"gram-{density}", "bench")
        self.grams = gram.run(GramConfig(), self.source, corpus, self.sparsity, work, 1)

    def compared(self, matrices: dict[str, np.ndarray]) -> Differences:
        """Compares the model with these matrices to the unrounded one, choosing each unit as in the build."""
        return compare(self._stream, self.tokens, self._hidden, self._last(Replaced(self.source, matrices, 1)))

    def _last(self, stream: LayerStream):
        choice = self._choice
        if choice is None:
            return stream.last_hidden(self.tokens)
        return stream.last_hidden(self.tokens, lambda layer: lambda _: choice.changes(layer, self.sparsity.families))


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m",), smoke=("stories260k",), full=tuple(BUDGETS), choices=BUDGETS, help="models to round"
    )
    formats: tuple[str, ...] = option(CODES, smoke=CODES[-1:], choices=CODES, help="formats of the codes")
    densities: tuple[float, ...] = option(
        tuple(DENSITIES), smoke=(1.0,), choices=DENSITIES, help="shares of each matrix's inputs that are used"
    )
    tokens: int = option(4096, smoke=512, full=16384, help="most tokens of test text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].algorithm": "rtn: round to nearest; gptq: round by the Gram matrices of the inputs",
        "rows[].ppl": "perplexity of the rounded model on test text",
        "rows[].ppl_source": "perplexity of the unrounded model at the same density",
        "rows[].kl": "KL divergence of the rounded model from the unrounded one, mean over tokens, nats",
        "rows[].kl_error": "standard error of kl over blocks",
        "rows[].over_rtn": "perplexity over that with rtn",
        "rows[].over_rtn_error": "standard error over blocks of the logarithm of over_rtn",
    }
    needs_data = True
    over = {"model": "models", "density": "densities", "format": "formats"}
    full_minutes = 60

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per algorithm."""
        model, density, code = cell["model"], cell["density"], cell["format"]
        folder = self.folder / model
        at = self.once((model, density), lambda: Prepared(model, density, folder, self.options.tokens))
        layers = tuple(range(at.source.spec.num_hidden_layers))
        in_format = at.sparsity.model_copy(update={"format": code})
        nearest: np.ndarray | None = None
        for algorithm in ALGORITHMS:
            space = Workspace(folder / f"{density}-{code}-{algorithm}", "bench")
            config = QuantizeConfig(algorithm=algorithm)
            made = quantize.run(config, at.source, in_format, layers, space, at.grams)
            found = at.compared(dict(pair for one in made.layers for pair in matrices_of(one, in_format, at.source)))
            nll, divergence = found.nll[0].mean(axis=1), found.kld[0].mean(axis=1)
            nearest = nll if nearest is None else nearest
            yield {
                "algorithm": algorithm,
                "ppl": math.exp(nll.mean()),
                "ppl_source": math.exp(found.whole_nll.mean()),
                "kl": float(divergence.mean()),
                "kl_error": standard_error(divergence),
                "over_rtn": math.exp((nll - nearest).mean()),
                "over_rtn_error": standard_error(nll - nearest),
            }


if __name__ == "__main__":
    main("quantization")
