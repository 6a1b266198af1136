"""What rounding costs: formats × algorithms, dense and pruned to half, as perplexity of the rounded model.

`python -m benchmarks.quantization [--models prose7m …] [--tokens N]`. The build's own stages ingest, tokenize,
allocate, gram and quantize; then the codes are decoded into a checkpoint and run over test text by transformers'
modules with the build's selector, so that nothing but rounding differs between the rows of one density. Embeddings and
head stay as they are. Gram matrices are of calibration text; so is the importance matrix of the row `rtn, imatrix`. The
last line is {rows: [{model, format, algorithm, density, ppl, ppl_source, kl, kl_error, over_rtn, over_rtn_error}]}:
`ppl_source` is that of the unrounded model at the same density, `kl` the mean divergence from it in nats, `over_rtn`
the perplexity over that of `rtn`; errors are standard errors over blocks, those of `over_rtn` of its logarithm.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gates import MODELS
from benchmarks.shared.cases import Replaced
from benchmarks.shared.report import finish, show
from coldpress.compiler.activity.choice import Choice, choice_of
from coldpress.compiler.activity.forward import LayerStream
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
from tests.support.data import find_data_folder
from tests.support.imatrices import NAMES, write_legacy
from tests.support.pipeline import snakemake

WEIGHTED = "rtn, imatrix"
ALGORITHMS = {"rtn": "rtn", WEIGHTED: "rtn", "gptq": "gptq"}
"""Row -> the algorithm."""
DENSITIES = {1.0: {"method": "dense"}, 0.5: {"method": "topk", "density": 0.5}}
TEST_TOKENS = 16384
Row = dict[str, Any]


def prepare(model: str, folder: Path, test_tokens: int) -> dict[float, tuple[Model, Corpus, Sparsity]]:
    """Density -> the records of a build as far as `allocate`; models with exact zeros are not pruned to a density."""
    corpus, budget = MODELS[model]
    shared: dict[str, object] = {"model": model, "dram_budget": budget, "evaluation_tokens": test_tokens}
    if corpus:
        data = find_data_folder()
        if data is None:
            raise SystemExit("no real test data: set COLDPRESS_TEST_DATA to its folder, or pass --models demo")
        shared |= {"model": data / "models" / model, "corpus": data / corpus, "context_length": 256}
    found = {}
    for density, settings in DENSITIES.items():
        label = f"d{round(100 * density)}"
        done = snakemake(folder, "--until", "allocate", label=label, **shared, **settings)
        if done.returncode:
            raise SystemExit(f"{model} {label}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        built = folder / "build" / model
        found[density] = (
            load_record(built / "ingest.json", Model),
            load_record(built / "tokenize.json", Corpus),
            load_record(built / f"pixel6+{label}" / "allocate.json", Sparsity),
        )
    return found


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


def masks(choice: Choice | None, sparsity: Sparsity, layer: int):
    """Block hooks that leave out what the selector does."""
    if choice is None:
        return None

    def change(family: str):
        def masked(part):
            import torch

            mask = torch.from_numpy(choice.mask(layer, family, part.float().numpy()))
            return torch.where(mask, part, 0.0)

        return masked

    hooks = {FAMILIES[family].activity: change(family) for family in sparsity.families}
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


def measure(model: str, folder: Path, test_tokens: int) -> Iterator[Row]:
    """The rows of one model."""
    weights: Importance | None = None
    for density, (source, corpus, sparsity) in prepare(model, folder, test_tokens).items():
        score = Scorer(source, load_arrays(corpus.split("test").arrays)["tokens"], sparsity)
        unrounded, work = score.source_ppl(), folder / f"{density}"
        grams = gram.run(GramConfig(), source, corpus, sparsity, Workspace(work / "gram", "bench"), 1)
        weights = weights or imatrix_of(source, grams, work / "imatrix")  # of the dense model, which comes first
        for code in names("coldpress.runtime.quantization"):
            nearest: np.ndarray | None = None
            for label, algorithm in ALGORITHMS.items():
                in_format = sparsity.model_copy(update={"format": code})
                space = Workspace(work / f"{code}-{label}", "bench")
                layers = tuple(range(source.spec.num_hidden_layers))
                known = (grams, weights if label == WEIGHTED else None)
                made = quantize.run(QuantizeConfig(algorithm=algorithm), source, in_format, layers, space, *known)
                matrices = dict(pair for layer in made.layers for pair in matrices_of(layer, in_format, source))
                nll, divergence = score(Replaced(source, matrices, 1))
                nearest = nll if nearest is None else nearest
                row = {"model": model, "format": code, "algorithm": label, "density": density}
                row |= {"ppl": math.exp(nll.mean()), "ppl_source": unrounded}
                row |= {"kl": divergence.mean(), "kl_error": standard_error(divergence)}
                row |= {"over_rtn": math.exp((nll - nearest).mean()), "over_rtn_error": standard_error(nll - nearest)}
                print(json.dumps(row), flush=True)
                yield row


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=TEST_TOKENS, metavar="N", help="of test text, at most")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = [row for model in arguments.models for row in measure(model, Path(folder) / model, arguments.tokens)]
    columns = list(rows[0])
    show("what rounding costs", columns, [[row[name] for name in columns] for row in rows])
    finish({"rows": rows})


if __name__ == "__main__":
    main()
