"""What rounding costs: formats × algorithms, dense and pruned to half, as perplexity of the rounded model.

`python -m tests.benchmarks.quantization [--models prose7m …] [--tokens N]`. The build's own stages ingest, tokenize,
allocate, gram and quantize; then the codes are decoded into a checkpoint and run over test text by transformers'
modules with the build's selector, so that nothing but rounding differs between the rows of one density. Embeddings and
head stay as they are. Gram matrices are of calibration text. The last line is
{rows: [{model, format, algorithm, density, ppl, ppl_source}]}; `ppl_source` is that of the unrounded model at the same
density.
"""

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from compiler import gram, quantize
from compiler._io import Workspace, load_arrays, load_record
from compiler.activity.choice import Choice, choice_of
from compiler.activity.forward import LayerStream
from compiler.gram import GramConfig
from compiler.quantize import QuantizeConfig
from runtime._plugins import load, names
from schemas.corpus import Corpus
from schemas.families import FAMILIES, num_units, slice_length, slices
from schemas.gram import GramMatrices
from schemas.model import Model
from schemas.quantized import LayerCodes
from schemas.sparsity import Sparsity
from tests.benchmarks._report import finish, show
from tests.benchmarks.gates import MODELS
from tests.support.data import find_data_folder
from tests.support.pipeline import snakemake

ALGORITHMS = ("rtn", "gptq")
DENSITIES = {1.0: {"method": "dense"}, 0.5: {"method": "topk", "density": 0.5}}
TEST_TOKENS = 8192


def prepare(model: str, folder: Path) -> dict[float, tuple[Model, Corpus, Sparsity]]:
    """Density -> the records of a build as far as `allocate`; models with exact zeros are not pruned to a density."""
    corpus, budget = MODELS[model]
    shared: dict[str, object] = {"model": model, "dram_budget": budget}
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


class Rounded(LayerStream):
    """A model whose matrices are replaced, by role, as they are read."""

    def __init__(self, model: Model, matrices: dict[str, np.ndarray]) -> None:
        super().__init__(model, threads=2)
        self._matrices = matrices

    def _of_role(self, role: str):
        import torch

        return torch.from_numpy(self._matrices[role]) if role in self._matrices else super()._of_role(role)


def matrices_of(layer: LayerCodes, sparsity: Sparsity, model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """(role, what its codes say) of every matrix of a layer, float32 in Hugging Face's order."""
    arrays = load_arrays(layer.arrays)
    kept = load("runtime.quantization", sparsity.format)
    prefix = f"layers.{layer.layer}."
    for tensor in layer.resident:
        if tensor.format is not None:
            codes = arrays[tensor.role.removeprefix(prefix)]
            yield tensor.role, load("runtime.quantization", tensor.format).decode(codes, tensor.shape[1])
    for family in sparsity.families:
        start = 0
        for piece in slices(family, model.spec):
            length = slice_length(piece, model.spec)
            stop = start + kept.nbytes(length)
            values = kept.decode(arrays[f"units.{family}"][: num_units(family, model.spec), start:stop], length)
            yield f"{prefix}{piece.role}.weight", np.ascontiguousarray(values if piece.axis == "row" else values.T)
            start = stop


def perplexity(stream: LayerStream, tokens: np.ndarray, sparsity: Sparsity) -> float:
    """exp of the mean negative log likelihood of test blocks, each unit chosen as in the build."""
    choice = None if sparsity.is_whole else choice_of(sparsity)
    nll, count = stream.nll(tokens, lambda layer: masks(choice, sparsity, layer))
    return math.exp(nll / count)


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


def measure(model: str, folder: Path, test_tokens: int) -> Iterator[dict[str, object]]:
    """The rows of one model."""
    for density, (source, corpus, sparsity) in prepare(model, folder).items():
        blocks = load_arrays(corpus.split("test").arrays)["tokens"]
        tokens = blocks[: max(1, test_tokens // blocks.shape[1])]
        unrounded = perplexity(LayerStream(source, threads=2), tokens, sparsity)
        work = folder / f"{density}"
        grams: GramMatrices = gram.run(GramConfig(), source, corpus, sparsity, Workspace(work / "gram", "bench"), 2)
        for code in names("runtime.quantization"):
            in_format = sparsity.model_copy(update={"format": code})
            for algorithm in ALGORITHMS:
                space = Workspace(work / f"{code}-{algorithm}", "bench")
                layers = tuple(range(source.spec.num_hidden_layers))
                made = quantize.run(QuantizeConfig(algorithm=algorithm), source, in_format, layers, space, grams)
                matrices = dict(pair for layer in made.layers for pair in matrices_of(layer, in_format, source))
                yield {
                    "model": model,
                    "format": code,
                    "algorithm": algorithm,
                    "density": density,
                    "ppl": perplexity(Rounded(source, matrices), tokens, in_format),
                    "ppl_source": unrounded,
                }


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["prose7m", "tinystories656k", "demo"], choices=list(MODELS))
    parser.add_argument("--tokens", type=int, default=TEST_TOKENS, metavar="N", help="of test text, at most")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = [row for model in arguments.models for row in measure(model, Path(folder) / model, arguments.tokens)]
    columns = ["model", "format", "algorithm", "density", "ppl", "ppl_source"]
    show("what rounding costs", columns, [[row[name] for name in columns] for row in rows])
    finish({"rows": rows})


if __name__ == "__main__":
    main()
