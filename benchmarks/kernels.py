"""Measures the kernels' share of the machine's read bandwidth, and compares them with torch and llama.cpp.

A matrix of a 7B's MLP, 14336 slices of 4096 values in int4, has random weights; a random share of its units is used.
The kernels are `dot` (rows times x, as gate and up), `axpy` (columns times coefficients, as down), both on packed
slices, `mlp` (gate, up, SiLU and down in one call, over units that bundle the three), and `gemv`, the whole matrix
without a choice; x is rounded to `activations`. `gemv`, and `axpy` of all slices, run in the other formats, too. Before
every call as many threads stream 256 MB: that gives the bandwidth (`read`), and leaves none of the operands in a cache.
Every round measures everything in turn. torch multiplies in bfloat16: the whole matrix, or the selected rows gathered
first, whichever is faster. llama.cpp's products take the whole matrix, in each format that both have.

`several` is `mlp` for TOKENS vectors at once, as a pass checks drafts: it says what each further vector takes of the
first one's time.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.harness import Benchmark, Cell, Row, Spread, gain, interleaved, main, option, spread
from benchmarks.shared.ggml import GgmlProduct
from coldpress.compiler.llama_cpp.types import NAMES
from coldpress.runtime import _native
from coldpress.runtime.kernels import mlp, products
from coldpress.runtime.kernels.activations import ACTIVATIONS, DEFAULT_ACTIVATIONS
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format

FORMAT = "int4_group32"
FORMATS = names("coldpress.runtime.quantization")
LENGTH, UNITS = 4096, 14336
DENSITIES = (0.01, 0.03, 0.1, 0.25, 0.5, 1.0)
STREAM_BYTES = 256 << 20
SLICE_BYTES = load("coldpress.runtime.quantization", Format, FORMAT).nbytes(LENGTH)
FUSED_ROLES = 3
TOKENS = 5
"""A pass with four drafts."""
GGUF_TYPES = {name: load("coldpress.runtime.quantization", Format, name).GGUF_TYPE for name in FORMATS}
GGML_TYPES = {
    name: number for name, own in GGUF_TYPES.items() for number, kind in NAMES.items() if own == kind and name != "fp16"
}
"""Our formats that llama.cpp has, too, with its numbers."""
READ, LLAMA, TORCH, GATHERED = "read", "llama", "torch whole", "torch gathered"
Call = Callable[[], object]


def name_of(kernel: str, activations: str = "", density: float = 1.0) -> str:
    """Returns the name of a call."""
    return f"{kernel} {activations} {density}"


@dataclass
class Operands:
    """The matrix, as packed slices and as bundles of three, and its operand x."""

    packed: np.ndarray
    """Packed slices, uint8 [UNITS, SLICE_BYTES]."""
    bundled: np.ndarray
    """Bundles of gate, up and down, uint8 [UNITS, 3 * SLICE_BYTES]."""
    x: np.ndarray
    """The operand, float32 [LENGTH]."""
    rng: np.random.Generator


def operands() -> Operands:
    """Returns random operands, small enough that nothing overflows."""
    rng = np.random.default_rng(0)
    plugin = load("coldpress.runtime.quantization", Format, FORMAT)
    block = plugin.encode(rng.standard_normal((256, LENGTH)).astype(np.float32) / 64)
    bundled = np.tile(block, (UNITS * FUSED_ROLES // len(block), 1)).reshape(UNITS, -1)
    packed = np.ascontiguousarray(bundled[:, :SLICE_BYTES])
    return Operands(packed, bundled, rng.standard_normal(LENGTH).astype(np.float32), rng)


def native_calls(given: Operands, threads: int) -> Iterator[tuple[str, Call]]:
    """Yields each kernel at each density, for a random selection."""
    layout = layout_of(FORMAT)
    for density in DENSITIES:
        slots = some_units(given.rng, density)
        weights = given.rng.standard_normal(slots.size).astype(np.float32)
        packed = given.packed, slots, 0, LENGTH, FORMAT
        bundled = given.bundled, slots, layout, given.x[None], mlp.Terms(), threads
        yield name_of("axpy", "fp32", density), lambda p=packed, w=weights: products.axpy_rows(*p, w, threads)
        for kind in ACTIVATIONS:
            yield name_of("dot", kind, density), lambda p=packed, k=kind: products.dot_rows(*p, given.x, threads, k)
            yield name_of("mlp", kind, density), lambda b=bundled, k=kind: mlp.mlp(*b, k)
    every, weights = np.arange(UNITS, dtype=np.int32), given.rng.standard_normal(UNITS).astype(np.float32)
    for name in FORMATS:
        matrix = given.packed if name == FORMAT else whole_matrix(name, given.rng)
        for kind in ACTIVATIONS:
            whole = matrix, LENGTH, name, given.x, threads, kind
            yield name_of(f"gemv {name}", kind), lambda w=whole: products.gemv(*w)
        columns = matrix, every, 0, LENGTH, name, weights, threads
        yield name_of(f"axpy {name}", "fp32"), lambda c=columns: products.axpy_rows(*c)
        if name in GGML_TYPES:
            product = GgmlProduct(matrix, LENGTH, GGML_TYPES[name])
            yield name_of(f"{LLAMA} {name}"), lambda p=product: p(given.x, threads)


def layout_of(name: str) -> mlp.UnitLayout:
    """Returns the layout of bundles of three in a format."""
    size = load("coldpress.runtime.quantization", Format, name).nbytes(LENGTH)
    return mlp.UnitLayout((0, name), (size, name), (2 * size, name), LENGTH, "silu", 0.0)


def some_units(rng: np.random.Generator, density: float) -> np.ndarray:
    """Returns a random selection of units, int32, ascending."""
    return np.sort(rng.permutation(UNITS)[: round(density * UNITS)]).astype(np.int32)


def several_calls(given: Operands, threads: int) -> Iterator[tuple[str, Call]]:
    """Yields the products of units with TOKENS vectors, at each density."""
    several, terms = given.rng.standard_normal((TOKENS, LENGTH)).astype(np.float32), mlp.Terms()
    for density in DENSITIES:
        place = given.bundled, some_units(given.rng, density), layout_of(FORMAT), several, terms, threads
        yield name_of("several", FORMAT, density), lambda p=place: mlp.mlp(*p)


def whole_matrix(name: str, rng: np.random.Generator) -> np.ndarray:
    """Returns a random matrix in another format, uint8 [UNITS, row bytes]."""
    values = rng.standard_normal((256, LENGTH)).astype(np.float32) / 64
    block = load("coldpress.runtime.quantization", Format, name).encode(values)
    return np.tile(block, (UNITS // len(block), 1))


def other_calls(given: Operands, threads: int) -> Iterator[tuple[str, Call]]:
    """Yields torch's product of the whole matrix, and of gathered rows at each density."""
    matrix, x = torch.randn(UNITS, LENGTH).to(torch.bfloat16), torch.from_numpy(given.x).to(torch.bfloat16)
    torch.set_num_threads(threads)
    yield name_of(TORCH), lambda: torch.mv(matrix, x)
    for density in DENSITIES[:-1]:
        ids = torch.randperm(UNITS)[: round(density * UNITS)].sort().values
        yield name_of(GATHERED, "", density), lambda i=ids: torch.mv(matrix[i], x)


def timed(threads: int, rounds: int) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the seconds of (every streaming read, each call in every round); a read precedes each call."""
    given, words = operands(), np.ones(STREAM_BYTES // 8, np.uint64)
    works: dict[str, Call] = {}
    calls = native_calls(given, threads), several_calls(given, threads), other_calls(given, threads)
    for name, call in itertools.chain(*calls):
        works[f"{READ} before {name}"] = lambda: _native.read_through(words, threads)
        works[name] = call
    found = interleaved(works, rounds)
    read_s = list(itertools.chain.from_iterable(found.pop(name) for name in list(found) if name.startswith(READ)))
    return read_s, found


@dataclass(frozen=True)
class Options:
    threads: tuple[int, ...] = option((1, 2), smoke=(1,), help="numbers of threads")
    rounds: int = option(9, smoke=2, full=15, help="rounds; each runs all calls in turn")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].kernel": "dot, axpy, mlp, gemv, several; read: the streaming read; llama: llama.cpp's product",
        "rows[].format?": "format of the weights if it is not int4_group32",
        "rows[].activations": "format to which x is rounded; empty for read",
        "rows[].density": "share of the units that the call uses",
        "rows[].call_s": "seconds per call",
        "rows[].gb_per_s": "GB/s of packed weights that the call uses (read: of streamed bytes), from the median",
        "rows[].share_of_read": "gb_per_s over that of the streaming read",
        "rows[].over_dense?": "seconds of the kernel with all units over seconds with these, taken in each round",
        "rows[].over_torch?": "dot: seconds of torch over seconds of the kernel, taken in each round",
        "rows[].over_llama?": "gemv: seconds of llama.cpp's product in the format over those of the kernel, per round",
        "rows[].over_int4?": "gemv, axpy in another format: seconds with int4_group32 over those with it, per round",
        "rows[].further?": f"several: what each vector after the first takes, as a share of the time of one, in a call "
        f"of {TOKENS}, per round",
    }
    is_timing = True
    extra = "llama: xllamacpp"
    over = {"threads": "threads"}
    full_minutes = 5

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per kernel, activations and density."""
        read_s, seconds = timed(cell["threads"], self.options.rounds)
        read_bytes_per_s = STREAM_BYTES / spread(read_s)["median"]
        yield row_of(READ, "", 1.0, read_s, STREAM_BYTES, read_bytes_per_s)
        cases = [("axpy", "fp32"), *itertools.product(("dot", "mlp"), ACTIVATIONS)]
        for (kernel, kind), density in itertools.product(cases, DENSITIES):
            call_s = seconds[name_of(kernel, kind, density)]
            num_bytes = round(density * UNITS) * SLICE_BYTES * (FUSED_ROLES if kernel == "mlp" else 1)
            row = row_of(kernel, kind, density, call_s, num_bytes, read_bytes_per_s)
            row["over_dense"] = gain(seconds[name_of(kernel, kind)], call_s)
            if kernel == "dot":
                row["over_torch"] = gain(torch_s(seconds, density), call_s)
            yield row
        for name in FORMATS:
            yield from rows_of_format(name, seconds, read_bytes_per_s)
        yield from rows_of_several(seconds, read_bytes_per_s)


def rows_of_format(name: str, seconds: Mapping[str, list[float]], read_bytes_per_s: float) -> Iterator[Row]:
    """Yields the rows of products with the whole matrix in a format, ours and llama.cpp's."""
    num_bytes = UNITS * load("coldpress.runtime.quantization", Format, name).nbytes(LENGTH)
    theirs_s = seconds.get(name_of(f"{LLAMA} {name}"))
    own = {} if name == FORMAT else {"format": name}
    if theirs_s is not None:
        yield row_of(LLAMA, "int8", 1.0, theirs_s, num_bytes, read_bytes_per_s) | own
    for kernel, kind in [*(("gemv", kind) for kind in ACTIVATIONS), ("axpy", "fp32")]:
        if kernel == "axpy" and name == FORMAT:
            continue  # among the densities
        call_s = seconds[name_of(f"{kernel} {name}", kind)]
        row = row_of(kernel, kind, 1.0, call_s, num_bytes, read_bytes_per_s) | own
        if name != FORMAT:
            row["over_int4"] = gain(seconds[name_of(f"{kernel} {FORMAT}", kind)], call_s)
        if kernel == "gemv" and theirs_s is not None:
            row["over_llama"] = gain(theirs_s, call_s)
        yield row


def rows_of_several(seconds: Mapping[str, list[float]], read_bytes_per_s: float) -> Iterator[Row]:
    """Yields the rows of products with TOKENS vectors."""
    for density in DENSITIES:
        one_s, many_s = (
            seconds[name_of(*call, density)] for call in (("mlp", DEFAULT_ACTIVATIONS), ("several", FORMAT))
        )
        num_bytes = round(density * UNITS) * SLICE_BYTES * FUSED_ROLES
        row = row_of("several", DEFAULT_ACTIVATIONS, density, many_s, num_bytes, read_bytes_per_s)
        yield row | {"further": further(many_s, one_s)}


def further(many_s: Sequence[float], one_s: Sequence[float]) -> Spread:
    """Returns what each vector after the first takes, as a share of the time of one, from calls of TOKENS and of one in
    the same rounds."""
    return spread([(many / one - 1) / (TOKENS - 1) for many, one in zip(many_s, one_s, strict=True)])


def row_of(
    kernel: str, activations: str, density: float, call_s: Sequence[float], num_bytes: int, read_bytes_per_s: float
) -> Row:
    """Returns the figures that all rows have."""
    found = spread(call_s)
    rate = num_bytes / found["median"]
    return {
        "kernel": kernel,
        "activations": activations,
        "density": density,
        "call_s": found,
        "gb_per_s": rate / 1e9,
        "share_of_read": rate / read_bytes_per_s,
    }


def torch_s(seconds: Mapping[str, list[float]], density: float) -> list[float]:
    """Returns torch's seconds in each round, by its faster way."""
    ways = [seconds[name] for name in (name_of(TORCH), name_of(GATHERED, "", density)) if name in seconds]
    return min(ways, key=lambda way: spread(way)["median"])


if __name__ == "__main__":
    main("kernels")
