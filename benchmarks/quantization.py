"""What rounding costs: formats × algorithms, dense and pruned to half, as perplexity of the rounded model.

The build's own stages ingest, tokenize, allocate, gram and quantize; then the codes are decoded into a checkpoint and
run over test text by transformers' modules with the build's selector, so that nothing but rounding differs between the
rows of one density. Embeddings and head stay as they are. Gram matrices are of calibration text; so is the importance
matrix of the row `rtn, imatrix`. Errors are standard errors over blocks.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gates import MODELS
from benchmarks.harness import Benchmark, Cell, Row, main, option
from benchmarks.harness.places import data
from benchmarks.shared.builds import build
from benchmarks.shared.cases import Replaced
from coldpress.compiler.activity.choice import Choice, choice_of
from coldpress.compiler.activity.forward import BlockHooks, Hooks, LayerStream
from coldpress.compiler.block_statistics import standard_error
from coldpress.compiler.io import Workspace, load_arrays, load_record
from coldpress.compiler.stages import gram, importance, quantize
from coldpress.compiler.stages.gram import GramConfig
from coldpress.compiler.stages.importance import ImportanceConfig
from coldpress.compiler.stages.quantize import QuantizeConfig
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.families import FAMILIES, num_units, slice_length, slices
from coldpress.schemas.gram import INPUT_OF, GramMatrices
from coldpress.schemas.importance import Importance
from coldpress.schemas.model import Model
from coldpress.schemas.quantized import LayerCodes
from coldpress.schemas.sparsity import Sparsity
from tests.support.imatrices import NAMES, write_legacy

WEIGHTED = "rtn, imatrix"
ALGORITHMS = {"rtn": "rtn", WEIGHTED: "rtn", "gptq": "gptq"}
"""Row -> the algorithm."""
DENSITIES: dict[float, dict[str, Any]] = {1.0: {"method": "dense"}, 0.5: {"method": "topk", "density": 0.5}}
CODES = names("coldpress.runtime.quantization")


def prepare(model: str, density: float, folder: Path, test_tokens: int) -> tuple[Model, Corpus, Sparsity]:
    """The records of a build as far as `allocate`; models with exact zeros are not pruned to a density."""
    corpus, budget = MODELS[model]
    label, settings = f"d{round(100 * density)}", DENSITIES[density]
    settings = settings | {"model": model, "dram_budget": budget, "evaluation_tokens": test_tokens}
    if corpus:
        settings |= {"model": data() / "models" / model, "corpus": data() / corpus, "context_length": 256}
    device = build(folder, "--until", "allocate", label=label, **settings)
    built = device.parent
    return (
        load_record(built / "ingest.json", Model),
        load_record(built / "tokenize.json", Corpus),
        load_record(device / "allocate.json", Sparsity),
    )


def matrices_of(layer: LayerCodes, sparsity: Sparsity, model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """(role, what its codes say) of every matrix of a layer, float32 in Hugging Face's order."""
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
            length = slice_length(piece, model.spec)
            stop = start + kept.nbytes(length)
            values = kept.decode(arrays[f"units.{family}"][: num_units(family, model.spec), start:stop], length)
            yield f"{prefix}{piece.role}.weight", np.ascontiguousarray(values if piece.axis == "row" else values.T)
            start = stop


class Scorer:
    """Runs models over test blocks, each unit chosen as in the build, and compares them with the unrounded one."""

    def __init__(self, source: Model, tokens: np.ndarray, sparsity: Sparsity) -> None:
        self.tokens, self._sparsity = tokens, sparsity
        self._choice = None if sparsity.is_whole else choice_of(sparsity, source.spec)
        stream = LayerStream(source, threads=1)
        self._source, self._hidden = stream, self._last(stream)

    def __call__(self, stream: LayerStream) -> tuple[np.ndarray, np.ndarray]:
        """(negative log likelihood, KL from the unrounded model) per token in nats, float64 [num_blocks] each."""
        import torch

        hidden = self._last(stream)
        nll, divergence = [], []
        for block, ids in enumerate(self.tokens):
            found, wanted = (
                torch.log_softmax(runs.head(states[block : block + 1])[0, :-1].double(), dim=-1)
                for runs, states in ((stream, hidden), (self._source, self._hidden))
            )
            divergence.append(float((wanted.exp() * (wanted - found)).sum(dim=-1).mean()))
            nll.append(-float(found[torch.arange(len(ids) - 1), torch.tensor(ids[1:].tolist())].mean()))
        return np.array(nll), np.array(divergence)

    def source_ppl(self) -> float:
        """Perplexity of the unrounded model."""
        return math.exp(self(self._source)[0].mean())

    def _last(self, stream: LayerStream):
        return stream.last_hidden(self.tokens, lambda layer: masks(self._choice, self._sparsity, layer))


def masks(choice: Choice | None, sparsity: Sparsity, layer: int) -> BlockHooks | None:
    """Block hooks that leave out what the selector does."""
    if choice is None:
        return None

    def change(family: str):
        def masked(part):
            import torch

            mask = torch.from_numpy(choice.mask(layer, family, part.float().numpy()))
            return torch.where(mask, part, 0.0)

        return masked

    hooks: Hooks = {FAMILIES[family].activity: change(family) for family in sparsity.families}
    return lambda _block: hooks


def imatrix_of(source: Model, grams: GramMatrices, folder: Path) -> Importance:
    """What the stage `importance` makes of a file with the mean squares of the model's inputs on calibration text."""
    means = {}
    for layer in grams.layers:
        arrays = load_arrays(layer.arrays)
        for role, signal in INPUT_OF.items():
            if f"layers.{layer.layer}.{role}.weight" in source.tensors:
                means[f"blk.{layer.layer}.{NAMES[role]}.weight"] = np.diag(arrays[signal]) / grams.num_tokens
    folder.mkdir(parents=True)
    path = write_legacy(folder / "imatrix.dat", means)
    return importance.run(ImportanceConfig(imatrix=str(path)), source, Workspace(folder / "read", "bench"))


@dataclass(frozen=True)
class Prepared:
    """A model at a density."""

    source: Model
    sparsity: Sparsity
    grams: GramMatrices
    score: Scorer
    source_ppl: float


class Prepare:
    """Builds a model at each density when it is asked for."""

    def __init__(self, model: str, folder: Path, test_tokens: int) -> None:
        self._model, self._folder, self._test_tokens = model, folder, test_tokens
        self._found: dict[float, Prepared] = {}

    def at(self, density: float) -> Prepared:
        """As far as the Gram matrices."""
        if density not in self._found:
            source, corpus, sparsity = prepare(self._model, density, self._folder, self._test_tokens)
            score = Scorer(source, load_arrays(corpus.split("test").arrays)["tokens"], sparsity)
            work = Workspace(self._folder / f"gram-{density}", "bench")
            grams = gram.run(GramConfig(), source, corpus, sparsity, work, 1)
            self._found[density] = Prepared(source, sparsity, grams, score, score.source_ppl())
        return self._found[density]

    @functools.cached_property
    def weights(self) -> Importance:
        """The importance matrix, of the dense model at every density."""
        dense = self.at(1.0)
        return imatrix_of(dense.source, dense.grams, self._folder / "imatrix")


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m",), smoke=("stories260k",), full=tuple(MODELS), choices=MODELS, help="models"
    )
    formats: tuple[str, ...] = option(CODES, smoke=CODES[-1:], choices=CODES, help="formats of the codes")
    densities: tuple[float, ...] = option(
        tuple(DENSITIES), smoke=(1.0,), choices=DENSITIES, help="shares of each matrix's inputs that are used"
    )
    tokens: int = option(4096, smoke=512, full=16384, help="tokens of test text, at most")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].algorithm": "how weights are rounded",
        "rows[].ppl": "perplexity of the rounded model",
        "rows[].ppl_source": "perplexity of the unrounded model at the same density",
        "rows[].kl": "mean KL divergence from the unrounded model, nats",
        "rows[].kl_error": "its standard error over blocks",
        "rows[].over_rtn": "perplexity over that of `rtn`",
        "rows[].over_rtn_error": "standard error of its logarithm over blocks",
    }
    needs_data = True
    over = {"model": "models", "density": "densities", "format": "formats"}
    full_minutes = 90

    def measure(self, cell: Cell) -> Iterator[Row]:
        """A row per algorithm."""
        model, density, code = cell["model"], cell["density"], cell["format"]
        prepare = self.once(model, lambda: Prepare(model, self.folder / model, self.options.tokens))
        at = prepare.at(density)
        in_format, layers = at.sparsity.model_copy(update={"format": code}), range(at.source.spec.num_hidden_layers)
        nearest: np.ndarray | None = None
        for label, algorithm in ALGORITHMS.items():
            space = Workspace(self.folder / model / f"{density}-{code}-{label}", "bench")
            known = (at.grams, prepare.weights if label == WEIGHTED else None)
            made = quantize.run(QuantizeConfig(algorithm=algorithm), at.source, in_format, tuple(layers), space, *known)
            matrices = dict(pair for layer in made.layers for pair in matrices_of(layer, in_format, at.source))
            nll, divergence = at.score(Replaced(at.source, matrices, 1))
            nearest = nll if nearest is None else nearest
            yield {
                "algorithm": label,
                "ppl": math.exp(nll.mean()),
                "ppl_source": at.source_ppl,
                "kl": float(divergence.mean()),
                "kl_error": standard_error(divergence),
                "over_rtn": math.exp((nll - nearest).mean()),
                "over_rtn_error": standard_error(nll - nearest),
            }


if __name__ == "__main__":
    main("quantization")
