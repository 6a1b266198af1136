"""How fast co-activations are counted, against the fp32 matrix product and against the processor's own limit.

Random bits, on two threads: the time of the dense way does not depend on them. The product is computed whole, in slices
of rows that fit memory, and every count is compared with it. The same is timed in a process whose compiler knows a
processor without a vector population count (the product keeps the real one). The limit is the rate of a loop of the
same operations in registers, or that of memory where that is less. At low densities the dense way is compared with the
sparse one.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, Spread, gain, interleaved, main, option, spread
from benchmarks.harness.apart import apart, run_here
from coldpress.compiler.compiled import compiled
from coldpress.compiler.stages.order._coactivation import TILE_UNITS, dense_pair_counts, pair_counts, sparse_pair_counts

THREADS = 2
PRODUCT_ROWS = 2048
LOW_DENSITIES = (0.0025, 0.005, 0.01, 0.02)
WITHOUT_VECTOR_COUNT = "haswell"
"""AVX2, hence population counts of single words only."""
BLOCK = 4
LANES, REGISTER = (8, "v") if get_host_cpu_features().get("avx512vpopcntdq") else (4, "x")
"""Words of a vector register, and what assembly calls one."""


@intrinsic
def _count_in_registers(typing_context: Any, rounds: Any) -> Any:
    """`rounds` times 4 x 4 ANDs, population counts and sums of vectors of words that never leave the registers.

    Four of the operands pass through an empty piece of assembly in each round: no instruction, but the compiler has to
    believe that they may have changed, so that it does the work of every round.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, vector = ir.IntType(64), ir.VectorType(ir.IntType(64), LANES)
        one_to_one = ir.FunctionType(vector, [vector])
        population_count = cgutils.get_or_insert_function(builder.module, one_to_one, f"llvm.ctpop.v{LANES}i64")
        operands = [cgutils.alloca_once(builder, vector) for _ in range(2 * BLOCK)]
        sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, [0] * LANES)) for _ in range(BLOCK * BLOCK)]
        for number, operand in enumerate(operands):
            value = ir.Constant(vector, None)
            for lane in range(LANES):
                mixed = builder.mul(arguments[0], ir.Constant(word, 0x9E3779B97F4A7C15 + LANES * number + lane))
                value = builder.insert_element(value, mixed, ir.Constant(ir.IntType(32), lane))
            builder.store(value, operand)
        with cgutils.for_range(builder, arguments[0]):
            for operand in operands[BLOCK:]:
                held = builder.asm(one_to_one, "", f"={REGISTER},0", (builder.load(operand),), True)
                builder.store(held, operand)
            for number, total in enumerate(sums):
                left, right = builder.load(operands[number // BLOCK]), builder.load(operands[BLOCK + number % BLOCK])
                counted = builder.call(population_count, [builder.and_(left, right)])
                builder.store(builder.add(builder.load(total), counted), total)
        total = builder.load(sums[0])
        for other in sums[1:]:
            total = builder.xor(total, builder.load(other))
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.int64(types.int64), generate


@compiled
def _run_rounds(rounds):
    return _count_in_registers(rounds)  # pyright: ignore[reportCallIssue] (an intrinsic of numba)


def best_seconds(work: Callable[[], Any]) -> float:
    """The least of several timings: what the machine does when nobody else asks for it."""
    return min(interleaved({"work": work}, 3)["work"])


def on_all_cores(work: Callable[[int], Any]) -> Callable[[], Any]:
    """`work(number)` on THREADS threads at once."""

    def run() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(THREADS)))

    return run


def register_words_per_s() -> float:
    """Words per second of AND, population count and sum on all cores, in registers."""
    rounds = 20_000_000
    seconds = best_seconds(on_all_cores(lambda _: _run_rounds(rounds)))
    return THREADS * rounds * BLOCK * BLOCK * LANES / seconds


def memory_bytes_per_s() -> float:
    """Bytes per second that all cores read together from far more memory than caches hold."""
    parts = [np.ones(1 << 26, np.uint64) for _ in range(THREADS)]
    return THREADS * parts[0].nbytes / best_seconds(on_all_cores(lambda number: int(parts[number].max())))


def random_bits(num_units: int, num_tokens: int, density: float) -> np.ndarray:
    """Packed activations, a few rows at a time."""
    rng = np.random.default_rng(0)
    bits = np.empty((num_units, -(-num_tokens // 8)), np.uint8)
    for row in range(0, num_units, 1024):
        size = (min(1024, num_units - row), num_tokens)
        bits[row : row + 1024] = np.packbits(rng.random(size, np.float32) < density, axis=1, bitorder="little")
    return bits


def product(bits: np.ndarray, num_tokens: int, counts: np.ndarray) -> tuple[float, bool]:
    """(seconds of the whole fp32 product in torch, whether all `counts` above the diagonal are its values)."""
    import torch

    torch.set_num_threads(THREADS)
    active = torch.from_numpy(np.unpackbits(bits, axis=1, count=num_tokens, bitorder="little")).float()
    _ = active[:64] @ active[:64].T
    seconds, exact = 0.0, True
    for row in range(0, len(bits), PRODUCT_ROWS):
        start = time.perf_counter()
        found = active[row : row + PRODUCT_ROWS] @ active.T
        seconds += time.perf_counter() - start
        above = np.triu(np.ones(found.shape, bool), row + 1)
        exact &= bool(((found.numpy() == counts[row : row + PRODUCT_ROWS]) | ~above).all())
    return seconds, exact


def dense_words(num_units: int, num_tokens: int) -> int:
    """Words that the dense way ANDs and counts: tiles on the diagonal are done whole."""
    words = -(-num_tokens // 64)
    return sum(
        (min(num_units, row + TILE_UNITS) - row) * (num_units - row) * words for row in range(0, num_units, TILE_UNITS)
    )


@dataclass(frozen=True)
class Options:
    units: int = option(8192, smoke=1024, full=14336, help="units of a layer")
    tokens: int = option(16384, smoke=1024, full=32768, help="tokens")
    density: float = option(0.1, help="share of active units")
    low_densities: tuple[float, ...] = option(
        (0.0025, 0.02), smoke=(0.01,), full=LOW_DENSITIES, help="the same, sparse"
    )
    rounds: int = option(5, smoke=2, help="rounds")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].part": "dense, lesser (a processor without a vector population count), or sparse",
        "rows[].count_s?": "dense and lesser: seconds of pair_counts",
        "rows[].product_s?": "dense: seconds of the product",
        "rows[].exact?": "dense: whether all counts are the product's",
        "rows[].words_per_s?": "dense: words that are ANDed and counted",
        "rows[].register_words_per_s?": "dense: the limit of registers",
        "rows[].memory_bytes_per_s?": "dense: the limit of memory",
        "rows[].limit?": "dense: registers or memory",
        "rows[].share_of_limit?": "dense: share of the limit",
        "rows[].dense_s?": "sparse: seconds of the dense way",
        "rows[].sparse_s?": "sparse: seconds of the sparse way",
        "rows[].speedup?": "sparse: dense over sparse seconds, formed in each round",
        "speedup": "the product's seconds over those of pair_counts",
        "speedup_avx2": "the same on the lesser processor",
    }
    is_timing = True
    over = ({"part": ("dense", "lesser"), "density": "density"}, {"part": ("sparse",), "density": "low_densities"})
    full_minutes = 4

    def measure(self, cell: Cell) -> Iterator[Row]:
        if cell["part"] == "dense":
            yield self._dense()
        elif cell["part"] == "lesser":
            command = ["env", f"NUMBA_CPU_NAME={WITHOUT_VECTOR_COUNT}"]
            yield {"count_s": apart(self, "dense_s", run=lambda argv: run_here([*command, *argv]))}
        else:
            bits = random_bits(self.options.units, self.options.tokens, cell["density"])
            found = interleaved(
                {
                    "dense": lambda: dense_pair_counts(bits, self.options.tokens, THREADS),
                    "sparse": lambda: sparse_pair_counts(bits, self.options.tokens, THREADS),
                },
                self.options.rounds,
            )
            seconds = {f"{name}_s": spread(samples) for name, samples in found.items()}
            yield {**seconds, "speedup": gain(found["dense"], found["sparse"])}

    def dense_s(self) -> Spread:
        """Seconds of the dense way on all cores."""
        bits = random_bits(self.options.units, self.options.tokens, self.options.density)
        works = {"dense": lambda: dense_pair_counts(bits, self.options.tokens, THREADS)}
        return spread(interleaved(works, self.options.rounds)["dense"])

    def _dense(self) -> Row:
        units, tokens = self.options.units, self.options.tokens
        memory_rate, registers = memory_bytes_per_s(), register_words_per_s()
        memory_limit = memory_rate / 8 * TILE_UNITS  # a tile's own rows stay, the others come once
        bits = random_bits(units, tokens, self.options.density)
        counts = pair_counts(bits, tokens, THREADS)
        count_s = spread(
            interleaved({"count": lambda: pair_counts(bits, tokens, THREADS)}, self.options.rounds)["count"]
        )
        product_s, exact = product(bits, tokens, counts)
        registers = max(registers, register_words_per_s())
        words_per_s = dense_words(units, tokens) / count_s["median"]
        return {
            "count_s": count_s,
            "product_s": product_s,
            "exact": exact,
            "words_per_s": words_per_s,
            "register_words_per_s": registers,
            "memory_bytes_per_s": memory_rate,
            "limit": "registers" if registers <= memory_limit else "memory",
            "share_of_limit": words_per_s / min(registers, memory_limit),
        }

    def figures(self, rows: Rows) -> Figures:
        dense, lesser = rows[0], rows[1]
        return {
            "speedup": dense["product_s"] / dense["count_s"]["median"],
            "speedup_avx2": dense["product_s"] / lesser["count_s"]["median"],
        }


if __name__ == "__main__":
    main("coactivation")
