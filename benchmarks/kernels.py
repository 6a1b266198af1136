"""How much of the machine's read bandwidth the kernels reach, and how they compare with torch and llama.cpp.

`python -m benchmarks.kernels [--threads 1 2] [--rounds 15]`, with the extra `llama` for the last comparison. A
matrix of a 7B's MLP, 14336 slices of 4096 values in int4, random weights; of its units a random share is used:
`dot` (rows times x, as gate and up), `axpy` (columns times coefficients, as down), both on packed slices, `mlp`
(gate, up, SiLU and down in one call, over units that bundle the three), each with x in what `activations` says, and
`gemv`, the whole matrix without a choice. Before every call 256 MB are streamed by as many threads, which gives the
bandwidth that the call's share is of, and leaves nothing of the operands in a cache. Figures are medians over rounds;
every round measures everything, so that a busy moment spoils no ratio.

torch multiplies in bfloat16: the whole matrix, or the selected rows gathered first, whichever is faster. llama.cpp's
Q4_0 product is of the whole matrix. The last line is {read_gb_per_s, rows: [{kernel, activations, threads, density,
gb_per_s, share_of_read, over_dense, over_torch}], q4_0: [{threads, gb_per_s, ours_over_q4_0}]}, the last ratio for each
of `activations`.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.shared.ggml import Q4Product
from benchmarks.shared.llama import llama_extra
from benchmarks.shared.report import finish, show
from coldpress.runtime import _native
from coldpress.runtime.kernels import gemv, mlp, rows
from coldpress.runtime.kernels.activations import ACTIVATIONS
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format

FORMAT = "int4_group32"
LENGTH, UNITS = 4096, 14336
DENSITIES = (0.01, 0.03, 0.1, 0.25, 0.5, 1.0)
STREAM_BYTES = 256 << 20
SLICE_BYTES = load("coldpress.runtime.quantization", Format, FORMAT).nbytes(LENGTH)
FUSED_ROLES = 3
KERNELS = ("dot", "axpy", "mlp", "gemv")

Key = tuple[str, str, int, float]
"""(kernel, activations, threads, density)."""


@dataclass
class Operands:
    """The matrix, as packed slices and as bundles of three, and what it is multiplied with."""

    packed: np.ndarray
    """uint8 [UNITS, SLICE_BYTES]."""
    bundled: np.ndarray
    """uint8 [UNITS, 3 * SLICE_BYTES]."""
    x: np.ndarray
    """float32 [LENGTH]."""
    rng: np.random.Generator


def operands() -> Operands:
    """Random ones, in a range in which nothing overflows."""
    rng = np.random.default_rng(0)
    plugin = load("coldpress.runtime.quantization", Format, FORMAT)
    block = plugin.encode(rng.standard_normal((256, LENGTH)).astype(np.float32) / 64)
    bundled = np.tile(block, (UNITS * FUSED_ROLES // len(block), 1)).reshape(UNITS, -1)
    packed = np.ascontiguousarray(bundled[:, :SLICE_BYTES])
    return Operands(packed, bundled, rng.standard_normal(LENGTH).astype(np.float32), rng)


class Clock:
    """Seconds of single calls with nothing in the caches, and of the streaming reads between them."""

    def __init__(self, threads: int) -> None:
        """Makes the memory to stream."""
        self._words, self._threads = np.ones(STREAM_BYTES // 8, np.uint64), threads
        self.stream_s: list[float] = []
        self.seconds: dict[Key, list[float]] = {}

    def time(self, key: Key, call: Callable[[], object]) -> None:
        """Streams, and times one call."""
        start = time.perf_counter()
        _native.read_through(self._words, self._threads)
        begin = time.perf_counter()
        call()
        self.seconds.setdefault(key, []).append(time.perf_counter() - begin)
        self.stream_s.append(begin - start)

    def median(self, key: Key) -> float:
        """Seconds of a call."""
        return float(np.median(self.seconds[key]))

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes per second of the streaming read."""
        return STREAM_BYTES / float(np.median(self.stream_s))


def native_calls(given: Operands, threads: int) -> Iterator[tuple[Key, Callable[[], object]]]:
    """Each kernel at each density, for a selection of its own."""
    layout = mlp.Layout(0, SLICE_BYTES, 2 * SLICE_BYTES, LENGTH, FORMAT, "silu", 0.0, False)
    for density in DENSITIES:
        count = round(density * UNITS)
        slots = np.sort(given.rng.permutation(UNITS)[:count]).astype(np.int32)
        weights = given.rng.standard_normal(count).astype(np.float32)
        packed = given.packed, slots, 0, LENGTH, FORMAT
        bundled = given.bundled, slots, layout, given.x, mlp.Terms(), threads
        yield ("axpy", "fp32", threads, density), lambda p=packed, w=weights: rows.axpy_rows(*p, w, threads)
        for kind in ACTIVATIONS:
            yield ("dot", kind, threads, density), lambda p=packed, k=kind: rows.dot_rows(*p, given.x, threads, k)
            yield ("mlp", kind, threads, density), lambda b=bundled, k=kind: mlp.mlp_rows(*b, k)
    for kind in ACTIVATIONS:
        whole = given.packed, LENGTH, FORMAT, given.x, threads, kind
        yield ("gemv", kind, threads, 1.0), lambda w=whole: gemv.gemv(*w)


def torch_calls(matrix: torch.Tensor, given: Operands, threads: int) -> Iterator[tuple[Key, Callable[[], object]]]:
    """torch's product of the whole matrix, and of gathered rows at each density."""
    x = torch.from_numpy(given.x).to(torch.bfloat16)
    yield ("torch whole", "bf16", threads, 1.0), lambda: torch.mv(matrix, x)
    for density in DENSITIES[:-1]:
        ids = torch.randperm(UNITS)[: round(density * UNITS)].sort().values
        yield ("torch gathered", "bf16", threads, density), lambda i=ids: torch.mv(matrix[i], x)


def measure(threads: int, rounds: int) -> Clock:
    """All figures of one number of threads."""
    given, clock = operands(), Clock(threads)
    matrix = torch.randn(UNITS, LENGTH).to(torch.bfloat16)
    torch.set_num_threads(threads)
    q4_0 = Q4Product(given.packed, LENGTH)
    for _ in range(rounds):
        for key, call in native_calls(given, threads):
            clock.time(key, call)
        for key, call in torch_calls(matrix, given, threads):
            clock.time(key, call)
        clock.time(("q4_0", "int8", threads, 1.0), lambda: q4_0(given.x, threads))
    return clock


def row(clock: Clock, key: Key) -> dict[str, object]:
    """A row of the last line."""
    kernel, kind, threads, density = key
    num_bytes = round(density * UNITS) * SLICE_BYTES * (FUSED_ROLES if kernel == "mlp" else 1)
    rate = num_bytes / clock.median(key)
    found: dict[str, object] = {
        "kernel": kernel,
        "activations": kind,
        "threads": threads,
        "density": density,
        "gb_per_s": rate / 1e9,
        "share_of_read": rate / clock.read_bytes_per_s,
        "over_dense": clock.median((kernel, kind, threads, 1.0)) / clock.median(key),
    }
    if kernel == "dot":
        gathered = ("torch gathered", "bf16", threads, density)
        torch_s = [clock.median(("torch whole", "bf16", threads, 1.0))]
        torch_s += [clock.median(gathered)] if gathered in clock.seconds else []
        found["over_torch"] = min(torch_s) / clock.median(key)
    return found


def against_q4_0(clock: Clock, threads: int) -> dict[str, object]:
    """A row of the second list."""
    theirs_s = clock.median(("q4_0", "int8", threads, 1.0))
    ours = {kind: theirs_s / clock.median(("gemv", kind, threads, 1.0)) for kind in ACTIVATIONS}
    return {"threads": threads, "gb_per_s": UNITS * SLICE_BYTES / theirs_s / 1e9, "ours_over_q4_0": ours}


def main() -> None:
    """Prints the tables and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    llama_extra()  # before minutes of work
    clocks = {threads: measure(threads, arguments.rounds) for threads in arguments.threads}
    figures = [row(clock, key) for clock in clocks.values() for key in sorted(clock.seconds) if key[0] in KERNELS]
    q4_0 = [against_q4_0(clock, threads) for threads, clock in clocks.items()]
    columns = list(figures[0] | {"over_torch": None})
    show("kernels, int4 4096 x 14336", columns, ([line.get(name, "") for name in columns] for line in figures))
    show("llama.cpp's Q4_0, density 1", list(q4_0[0]), (list(line.values()) for line in q4_0))
    read = {str(threads): clock.read_bytes_per_s / 1e9 for threads, clock in clocks.items()}
    finish({"read_gb_per_s": read, "rows": figures, "q4_0": q4_0})


if __name__ == "__main__":
    main()
