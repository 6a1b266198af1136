"""Times the counting of co-activations: against the fp32 matrix product, and the dense way against the sparse one.

Random bits serve, since the time of the dense way does not depend on them; two threads run. The product is computed
whole, in slices of rows that fit memory, and every count is compared with it. The dense way is timed again in a process
whose compiler knows a processor without a vector population count (the product keeps the real one).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, Spread, gain, interleaved, main, option, spread
from benchmarks.harness.apart import apart, run_here
from coldpress.compiler.stages.order._coactivation import dense_pair_counts, pair_counts, sparse_pair_counts

THREADS = 2
PRODUCT_ROWS = 2048
LOW_DENSITIES = (0.0025, 0.005, 0.01, 0.02)
WITHOUT_VECTOR_COUNT = "haswell"
"""AVX2, whose population counts take one word at a time."""


def random_bits(num_units: int, num_tokens: int, density: float) -> np.ndarray:
    """Returns packed random activations; drawing a few rows at a time keeps memory small."""
    rng = np.random.default_rng(0)
    bits = np.empty((num_units, -(-num_tokens // 8)), np.uint8)
    for row in range(0, num_units, 1024):
        size = (min(1024, num_units - row), num_tokens)
        bits[row : row + 1024] = np.packbits(rng.random(size, np.float32) < density, axis=1, bitorder="little")
    return bits


def product(bits: np.ndarray, num_tokens: int, counts: np.ndarray) -> tuple[float, bool]:
    """Returns (seconds of the whole fp32 product in torch, whether all `counts` above the diagonal are its values)."""
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


@dataclass(frozen=True)
class Options:
    units: int = option(8192, smoke=1024, full=14336, help="units per layer")
    tokens: int = option(16384, smoke=1024, full=32768, help="tokens over which pairs are counted")
    density: float = option(0.1, help="share of active units in the parts dense and lesser")
    low_densities: tuple[float, ...] = option(
        (0.0025, 0.02), smoke=(0.01,), full=LOW_DENSITIES, help="shares of active units in the part sparse"
    )
    rounds: int = option(5, smoke=2, help="timed rounds")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].part": "dense; lesser (dense, on a processor without a vector population count); sparse",
        "rows[].count_s?": "dense: seconds of pair_counts; lesser: seconds of dense_pair_counts on that processor",
        "rows[].product_s?": "dense: seconds of the fp32 matrix product in torch",
        "rows[].exact?": "dense: whether every count equals the product's value",
        "rows[].dense_s?": "sparse: seconds of dense_pair_counts",
        "rows[].sparse_s?": "sparse: seconds of sparse_pair_counts",
        "rows[].speedup?": "sparse: dense_s over sparse_s, taken in each round",
        "speedup": "seconds of the fp32 product over the median seconds of pair_counts",
        "speedup_avx2": "seconds of the fp32 product over the median seconds of lesser",
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
        """Returns the seconds of the dense way on THREADS threads."""
        bits = random_bits(self.options.units, self.options.tokens, self.options.density)
        works = {"dense": lambda: dense_pair_counts(bits, self.options.tokens, THREADS)}
        return spread(interleaved(works, self.options.rounds)["dense"])

    def _dense(self) -> Row:
        bits = random_bits(self.options.units, self.options.tokens, self.options.density)
        counts = pair_counts(bits, self.options.tokens, THREADS)
        product_s, exact = product(bits, self.options.tokens, counts)
        works = {"count": lambda: pair_counts(bits, self.options.tokens, THREADS)}
        count_s = spread(interleaved(works, self.options.rounds)["count"])
        return {"count_s": count_s, "product_s": product_s, "exact": exact}

    def figures(self, rows: Rows) -> Figures:
        dense, lesser = rows[0], rows[1]
        return {
            "speedup": dense["product_s"] / dense["count_s"]["median"],
            "speedup_avx2": dense["product_s"] / lesser["count_s"]["median"],
        }


if __name__ == "__main__":
    main("coactivation")
