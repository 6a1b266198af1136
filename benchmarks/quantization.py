"""Measures what rounding costs real models, with llama.cpp's quantization beside ours in equal bytes.

Of a model's file, reference `noised` has all values with noise in the matrices of attention and MLP, so that no format
has them (shared/noised.py); the product takes it as its source, and calibrates on its own text. At each size of
llama.cpp's these matrices are rounded in several ways: `llama`, by llama.cpp's code with our importances as its
importance matrix; ours to nearest (`nearest`), by importances (`searched`) and by GPTQ (`gptq`), all in the types that
llama.cpp gives them at that size (shared/llama_sizes.py); and `mixed` and `mixed_gptq`, in formats that measured
sensitivities choose for each matrix, in at most these bytes. Embeddings, head and norms stay as they are in all ways.
The reference and what was rounded then compute test text in float32, a layer at a time; errors are standard errors over
blocks.

Reference `file` is the file itself, whose codes `quantize` keeps: its row says how many matrices, with embeddings and
head, have the values that the package gguf decodes.
"""

import functools
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.harness.places import data
from benchmarks.shared import ggml, noised
from benchmarks.shared.cases import Replaced
from benchmarks.shared.imported import imported
from benchmarks.shared.llama_sizes import SIZES, type_of
from benchmarks.shared.real_models import MODELS, SMALL, file_of, named
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.sensitivity import sensitivities
from coldpress.compiler.activity.variants import compare
from coldpress.compiler.block_statistics import standard_error
from coldpress.compiler.cost_model import slice_bytes, weight_bytes
from coldpress.compiler.io import load_arrays, load_record
from coldpress.compiler.llama_cpp.formats import formats
from coldpress.compiler.llama_cpp.formats import type_of as type_of_format
from coldpress.compiler.llama_cpp.types import decode
from coldpress.compiler.rounding import gptq, rtn
from coldpress.compiler.rounding._matrix import InputStatistics, Rounding
from coldpress.compiler.stages.allocate._mixed import Mixes, expected_effects
from coldpress.runtime.kernels.products import decode_rows
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.families import FormatName, unit_role
from coldpress.schemas.gram import GramMatrices
from coldpress.schemas.model import Model, TensorSource
from coldpress.schemas.sparsity import Sparsity
from tests.support.warm import build

if TYPE_CHECKING:
    from torch import Tensor

LLAMA, MIXED = "llama", "mixed"
WAYS = (LLAMA, "nearest", "searched", "gptq", MIXED, "mixed_gptq")
CALIBRATION_TOKENS = 8192
SMALL_SHARE = 0.6
"""DRAM budget of `--floor`, as a share of the file's bytes: less than any format at the floor takes."""
Values = Callable[[str], np.ndarray]
"""Role -> the values of a rounded matrix, float32."""
FormatOf = Mapping[str, FormatName]
"""Role of each rounded matrix -> its format."""


@dataclass(frozen=True)
class Reference:
    """A model that is rounded, with what a build has measured of it, and test text."""

    model: Model
    activations: Activations
    gram: GramMatrices | None
    """None if no way is GPTQ."""
    calibration: np.ndarray
    """Token ids int32 [num_blocks, T]."""
    tokens: np.ndarray
    """Token ids of test text, int32 [num_blocks, T]."""

    @staticmethod
    def of(file: Path, folder: Path, calibration_tokens: int, tokens: int, with_gram: bool) -> "Reference":
        """Writes the noised model of a file, and builds it up to its statistics, or to its Gram matrices."""
        source = folder / "noised.gguf"
        folder.mkdir(parents=True, exist_ok=True)
        noised.write(file, source)
        config: dict[str, Any] = {"model": source, "method": "dense", "format": "fp16", "algorithm": "gptq"}
        config |= {"calibration_tokens": calibration_tokens, "evaluation_tokens": tokens, "dram_budget": "100%"}
        device = build(folder, "--until", "gram" if with_gram else "allocate", **config, **_text())
        built = device.parent
        corpus = load_record(built / "tokenize.json", Corpus)
        blocks = (load_arrays(corpus.split(name).arrays)["tokens"] for name in ("calibration", "test"))
        return Reference(
            load_record(built / "ingest.json", Model),
            load_record(_only(built, "calibrate.json"), Activations),
            load_record(_only(built, "gram.json"), GramMatrices) if with_gram else None,
            *blocks,
        )

    @functools.cached_property
    def matrices(self) -> Mapping[str, TensorSource]:
        """The matrices that are rounded, by role."""
        return {
            role: source
            for role, source in self.model.tensors.items()
            if role.endswith(".weight") and unit_role(role, self.model.spec) is not None
        }

    @functools.cached_property
    def stream(self) -> LayerStream:
        return LayerStream(self.model, _threads())

    @functools.cached_property
    def hidden(self) -> "Tensor":
        return self.stream.last_hidden(self.tokens)

    @functools.cached_property
    def greedy(self) -> np.ndarray:
        return greedy_tokens(self.stream, self.hidden)

    @functools.cached_property
    def mixes(self) -> Mixes:
        """The product's formats by matrix, from the fewest bytes to those of the source."""
        found = sensitivities(self.stream, self.calibration)
        return Mixes(self.model, expected_effects(self.model, self.rounding(MIXED), found, _threads()), ())

    def mixed(self, limit_bytes: int) -> FormatOf:
        """Returns the product's formats by matrix in at most so many bytes."""
        each = (self.mixes.chosen(sizes) for sizes in reversed(self.mixes.path))
        return next(chosen for chosen in each if self.nbytes(chosen) <= limit_bytes)

    def at(self, size: str) -> FormatOf:
        """Returns the formats of llama.cpp's types at a size."""
        count, found = self.model.spec.num_hidden_layers, dict[str, FormatName]()
        for role, source in self.matrices.items():
            matrix = unit_role(role, self.model.spec)
            assert matrix is not None
            found[role] = formats()[type_of(size, matrix, int(role.split(".")[1]), count, source.shape[1])]
        return found

    def nbytes(self, chosen: FormatOf) -> int:
        return sum(
            source.shape[0] * slice_bytes(source.shape[1], chosen[role]) for role, source in self.matrices.items()
        )

    def rounding(self, way: str) -> Rounding:
        """Returns how one of our ways rounds."""
        if way == "nearest":
            return Rounding(rtn.Plugin())
        if way.endswith("gptq"):
            return Rounding(gptq.Plugin(), self.gram, self.activations)
        return Rounding(rtn.Plugin(), activations=self.activations)

    def values(self, way: str, chosen: FormatOf) -> Values:
        """Returns what gives the values of a matrix, rounded in a way to its format."""
        if way == LLAMA:
            return functools.partial(self._by_llama, chosen)
        return functools.partial(self._by_us, self.rounding(way), chosen)

    def _by_us(self, rounding: Rounding, chosen: FormatOf, role: str) -> np.ndarray:
        codes = rounding.codes(self.model, role, "row", chosen[role])
        return decode_rows(codes, self.matrices[role].shape[1], chosen[role], num_threads=1)

    def _by_llama(self, chosen: FormatOf, role: str) -> np.ndarray:
        weights = InputStatistics(activations=self.activations).weights(self.model, role, "row")
        kind = type_of_format(chosen[role])
        return decode(ggml.quantize(weights.read(0, weights.count), kind, weights.importance), kind)

    def row(self, way: str, chosen: FormatOf) -> Row:
        """Returns the figures of the model with its matrices rounded."""
        values, matrices = self.values(way, chosen), self.matrices
        changed = Replaced(self.model, lambda role: values(role) if role in matrices else None, _threads())
        hidden = changed.last_hidden(self.tokens)
        found = compare(self.stream, self.tokens, self.hidden, hidden)
        nbytes, count = self.nbytes(chosen), sum(math.prod(source.shape) for source in matrices.values())
        return {
            "bytes": nbytes,
            "bits": 8 * nbytes / count,
            "kl": float(found.kld.mean()),
            "kl_error": standard_error(found.kld[0].mean(axis=1)),
            "ppl_ratio": math.exp(found.nll.mean() - found.whole_nll.mean()),
            "same": float((greedy_tokens(self.stream, hidden) == self.greedy).mean()),
        }


def greedy_tokens(stream: LayerStream, hidden: "Tensor") -> np.ndarray:
    """Returns the likeliest next token at each position, int64 [num_blocks, T], from the hidden states after the last
    layer, [num_blocks, T, hidden_size]."""
    import torch

    highest = torch.full(hidden.shape[:2], -torch.inf)
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64)
    for part in stream.head_parts(hidden):

        def run(block: int, part: Any = part) -> None:
            of_part, places = part.logits(block).float().max(dim=-1)
            larger = of_part > highest[block]
            highest[block] = torch.where(larger, of_part, highest[block])
            tokens[block] = torch.where(larger, places + part.start, tokens[block])

        stream.each(run, len(hidden))
    return tokens.numpy()


def bits_at_floor(file: Path, folder: Path) -> float:
    """Returns the bits of a weight, head and embeddings included, in the formats that `auto` takes where the model does
    not fit in DRAM."""
    budget_bytes = int(SMALL_SHARE * file.stat().st_size)
    device = build(folder, "--until", "allocate", model=file, context_length=512, dram_budget=budget_bytes, **_text())
    model = load_record(device.parent / "ingest.json", Model)
    count = sum(math.prod(source.shape) for source in model.tensors.values())
    return 8 * weight_bytes(model, load_record(device / "allocate.json", Sparsity).formats) / count


def over_llama(rows: Rows, way: str) -> dict[str, dict[str, float]]:
    """Returns size -> the median and the most, over models, of a way's divergence over llama.cpp's."""
    kl = {(row["size"], row["model"], row["way"]): row["kl"] for row in rows if "kl" in row}
    ratios: dict[str, list[float]] = {}
    for (size, model, of_way), found in kl.items():
        if of_way == way and (size, model, LLAMA) in kl:
            ratios.setdefault(size, []).append(found / kl[size, model, LLAMA])
    return {size: {"median": statistics.median(found), "worst": max(found)} for size, found in ratios.items()}


def _text() -> dict[str, Any]:
    return {"corpus": data() / "corpora" / "wikitext-2", "preflight": "off"}


def _threads() -> int:
    return len(os.sched_getaffinity(0))


def _only(folder: Path, name: str) -> Path:
    (found,) = folder.rglob(name)
    return found


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        MODELS[:1], smoke=(SMALL,), full=MODELS, choices=(*MODELS, SMALL), help="models to round"
    )
    sizes: tuple[str, ...] = option(SIZES, smoke=("Q4_K_M",), choices=SIZES, help="sizes of llama.cpp")
    ways: tuple[str, ...] = option(WAYS, choices=WAYS, help="ways to round")
    tokens: int = option(2048, smoke=512, help="most tokens of test text")
    calibration_tokens: int = option(CALIBRATION_TOKENS, smoke=512, help="most tokens of calibration text")
    floor: bool = option(False, full=True, help="also build with method=auto where the model does not fit in DRAM")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].reference": "file: the file's own values; noised: these with noise in attention and MLP",
        "rows[].way": "import, or a way to round",
        "rows[].equal?": "matrices that have the file's values in the codes that quantize makes",
        "rows[].total?": "all matrices",
        "rows[].bits_at_floor?": "bits of a weight in the formats that auto chose, head and embeddings included",
        "rows[].bytes?": "bytes of the rounded matrices' codes",
        "rows[].bits?": "bits of a weight of theirs",
        "rows[].kl?": "KL divergence of the rounded model from the reference, mean over tokens, nats",
        "rows[].kl_error?": "standard error of kl over blocks",
        "rows[].ppl_ratio?": "perplexity of the rounded model over that of the reference",
        "rows[].same?": "share of positions where both have the same likeliest token",
        "kl_over_llama.*.median?": "kl of mixed over that of llama at a size, median over models",
        "kl_over_llama.*.worst?": "the most of them",
        "kl_over_llama_by_way.*.*.median?": "the same of each of our other ways",
        "kl_over_llama_by_way.*.*.worst?": "the most of them",
        "imported.*.equal": "equal of the file's row, by model",
        "imported.*.total": "total of the file's row, by model",
        "bits_at_floor.*?": "bits_at_floor of the file's row, by model",
    }
    needs_data = True
    extra = "llama: xllamacpp"
    over = (
        {"model": "models", "reference": ("file",)},
        {"model": "models", "reference": ("noised",), "size": "sizes", "way": "ways"},
    )
    full_minutes = 240

    def measure(self, cell: Cell) -> Iterator[Row]:
        model, folder = cell["model"], self.folder / cell["model"]
        if cell["reference"] == "file":
            file = file_of(model, folder, build)
            equal, total = imported(file, folder / "import")
            row: Row = {"way": "import", "equal": equal, "total": total}
            yield row | ({"bits_at_floor": bits_at_floor(file, folder / "auto")} if self.options.floor else {})
            return
        at = self.once(model, lambda: self._reference(model, folder))
        usual = at.at(cell["size"])
        chosen = at.mixed(at.nbytes(usual)) if cell["way"].startswith(MIXED) else usual
        yield at.row(cell["way"], chosen)

    def _reference(self, model: str, folder: Path) -> Reference:
        file = file_of(model, folder, build)
        with_gram = any(way.endswith("gptq") for way in self.options.ways)
        return Reference.of(file, folder / "noised", self.options.calibration_tokens, self.options.tokens, with_gram)

    def figures(self, rows: Rows) -> Figures:
        files = [row for row in rows if row["reference"] == "file"]
        others = [way for way in self.options.ways if way not in (LLAMA, MIXED)]
        return {
            "kl_over_llama": over_llama(rows, MIXED),
            "kl_over_llama_by_way": {way: over_llama(rows, way) for way in others},
            "imported": {named(row["model"]): {name: row[name] for name in ("equal", "total")} for row in files},
            "bits_at_floor": {named(row["model"]): row["bits_at_floor"] for row in files if "bits_at_floor" in row},
        }


if __name__ == "__main__":
    main("quantization")
