"""How fast co-activations are counted, against the fp32 matrix product and against the processor's own limit.

`python -m benchmarks.coactivation [--units 14336] [--tokens 32768] [--density 0.1]`, both cores. Random bits: the
dense way's time does not depend on them. The product is computed whole, in slices of rows that fit memory, and every
count is compared with it. Keys of the last line: `speedup` is seconds of the product over seconds of `pair_counts`,
`speedup_avx2` the same for a compiler that is told of a processor without a vector population count (the product keeps
all it has), `share_of_limit` is words per second over what a loop of the same operations reaches in registers, or over
what memory delivers where that is less; `sparse_speedups` is dense over sparse seconds at low densities.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from benchmarks.shared.report import finish, show
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
    return _count_in_registers(rounds)


def best_seconds(work: Callable[[], Any], repeats: int) -> float:
    """The least of several timings: what the machine does when nobody else asks for it."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def on_all_cores(work: Callable[[int], Any]) -> Callable[[], Any]:
    """`work(number)` on THREADS threads at once."""

    def run() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(THREADS)))

    return run


def register_words_per_s() -> float:
    """Words per second of AND, population count and sum on all cores, in registers."""
    rounds = 20_000_000
    _run_rounds(1)
    seconds = best_seconds(on_all_cores(lambda _: _run_rounds(rounds)), 3)
    return THREADS * rounds * BLOCK * BLOCK * LANES / seconds


def memory_bytes_per_s() -> float:
    """Bytes per second that all cores read together from far more memory than caches hold."""
    parts = [np.ones(1 << 26, np.uint64) for _ in range(THREADS)]
    return THREADS * parts[0].nbytes / best_seconds(on_all_cores(lambda number: int(parts[number].max())), 3)


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
    active[:64] @ active[:64].T
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


def dense_seconds(num_units: int, num_tokens: int, density: float) -> float:
    """Seconds of the dense way on all cores."""
    bits = random_bits(num_units, num_tokens, density)
    dense_pair_counts(bits[:128], num_tokens, THREADS)
    return best_seconds(lambda: dense_pair_counts(bits, num_tokens, THREADS), 3)


def seconds_without_vector_count(arguments: argparse.Namespace) -> float:
    """The dense way in a process whose compiler knows a lesser processor."""
    command = [sys.executable, "-m", "benchmarks.coactivation", "--dense-only"]
    command += [f"--{name}={getattr(arguments, name)}" for name in ("units", "tokens", "density")]
    environment = {**os.environ, "NUMBA_CPU_NAME": WITHOUT_VECTOR_COUNT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def sparse_rows(num_units: int, num_tokens: int) -> list[list[float]]:
    """[density, dense seconds, sparse seconds] at low densities."""
    rows = []
    for density in LOW_DENSITIES:
        bits = random_bits(num_units, num_tokens, density)
        sparse_pair_counts(bits[:128], num_tokens, THREADS)
        seconds = [
            best_seconds(lambda bits=bits, way=way: way(bits, num_tokens, THREADS), 2)
            for way in (dense_pair_counts, sparse_pair_counts)
        ]
        rows.append([density, *seconds])
    return rows


def main() -> None:
    """Prints the tables and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=14336)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--dense-only", action="store_true", help="print the seconds of the dense way and nothing else")
    arguments = parser.parse_args()
    num_units, num_tokens = arguments.units, arguments.tokens
    if arguments.dense_only:
        print(dense_seconds(num_units, num_tokens, arguments.density))
        return
    words = dense_words(num_units, num_tokens)
    register_limit, memory_rate = register_words_per_s(), memory_bytes_per_s()
    memory_limit = memory_rate / 8 * TILE_UNITS  # a tile's own rows stay, those it is compared with come once
    bits = random_bits(num_units, num_tokens, arguments.density)
    pair_counts(bits[:128], num_tokens, THREADS)
    seconds = best_seconds(lambda: pair_counts(bits, num_tokens, THREADS), 3)
    product_s, exact = product(bits, num_tokens, pair_counts(bits, num_tokens, THREADS))
    lesser_s = seconds_without_vector_count(arguments)
    register_limit = max(register_limit, register_words_per_s())
    limit = min(register_limit, memory_limit)
    title = f"{num_units} units, {num_tokens} tokens at {arguments.density:.1%}, {THREADS} cores"
    ways = [["fp32 product", product_s], ["pair_counts", seconds], [f"pair_counts, {WITHOUT_VECTOR_COUNT}", lesser_s]]
    show(title, ["way", "s", "x"], [[*way, product_s / way[1]] for way in ways])
    low = sparse_rows(num_units, num_tokens)
    show("low densities", ["density", "dense s", "sparse s", "x"], [[*row, row[1] / row[2]] for row in low])
    finish(
        {
            "speedup": product_s / seconds,
            "speedup_avx2": product_s / lesser_s,
            "exact": exact,
            "share_of_limit": words / seconds / limit,
            "limit": "registers" if register_limit <= memory_limit else "memory",
            "words_per_s": words / seconds,
            "register_words_per_s": register_limit,
            "memory_bytes_per_s": memory_rate,
            "product_s": product_s,
            "count_s": seconds,
            "sparse_speedups": {row[0]: row[1] / row[2] for row in low},
        }
    )


if __name__ == "__main__":
    main()
