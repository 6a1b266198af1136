"""Compares the prefill's products with BLAS's sgemm: `matmul` and `matmul_t` on rows in int4.

One matrix of a 7B's MLP, 14336 x 4096, is multiplied with 128 and 512 tokens. sgemm gets the matrix decoded in advance.
Ours, sgemm and decoding alone run in turn in every round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Benchmark, Cell, Row, gain, interleaved, main, option, spread
from coldpress.runtime.kernels import products
from coldpress.runtime.quantization import int4_group32

FORMAT = "int4_group32"
LENGTH = 4096
BLOCK_BYTES = 4 << 20
"""Decoded bytes that fit the processor's cache."""


@dataclass(frozen=True)
class Options:
    tokens: tuple[int, ...] = option((128, 512), smoke=(8,), help="tokens per chunk")
    rows: int = option(14336, smoke=512, help="rows of the matrix, a multiple of 256")
    rounds: int = option(7, smoke=2, help="rounds; each runs all ways in turn")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].product": "kernel: matmul or matmul_t",
        "rows[].ours_s": "seconds of our kernel on the int4 rows",
        "rows[].sgemm_s": "seconds of sgemm on rows decoded in advance",
        "rows[].decode_s": "seconds of decoding all rows, block by block",
        "rows[].share_of_sgemm": "sgemm_s over ours_s, taken in each round",
    }
    is_timing = True
    over = {"tokens": "tokens", "product": ("matmul", "matmul_t")}
    full_minutes = 1

    def measure(self, cell: Cell) -> Iterator[Row]:
        codes, floats = self.once("matrix", self._matrix)
        width = LENGTH if cell["product"] == "matmul" else self.options.rows
        x = np.random.default_rng(1).standard_normal((cell["tokens"], width)).astype(np.float32)
        works = {
            "matmul": (lambda: products.matmul(codes, LENGTH, FORMAT, x), lambda: x @ floats.T),
            "matmul_t": (lambda: products.matmul_t(codes, LENGTH, FORMAT, x), lambda: x @ floats),
        }
        ours, bare = works[cell["product"]]
        found = interleaved(
            {"ours": ours, "sgemm": bare, "decode": lambda: _decode_in_blocks(codes)}, self.options.rounds
        )
        seconds = {f"{name}_s": spread(samples) for name, samples in found.items()}
        yield {**seconds, "share_of_sgemm": gain(found["sgemm"], found["ours"])}

    def _matrix(self) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(0)
        block = int4_group32.Plugin().encode(random.standard_normal((256, LENGTH)).astype(np.float32))
        codes = np.tile(block, (self.options.rows // len(block), 1))
        return codes, products.decode_rows(codes, LENGTH, FORMAT)


def _decode_in_blocks(codes: np.ndarray) -> None:
    step = BLOCK_BYTES // (4 * LENGTH)
    for start in range(0, len(codes), step):
        products.decode_rows(codes[start : start + step], LENGTH, FORMAT)


if __name__ == "__main__":
    main("prefill")
