"""How near prefill products come to a bare product of float32 matrices: `matmul` and `matmul_t` over BLAS's sgemm.

`python -m benchmarks.prefill [--rounds N]`. A 7B's MLP matrix, 14336 x 4096 in int4, times 128 and 512 tokens;
sgemm has the matrix decoded before. In turns within a round, medians over rounds. The last line is {rows: [{product,
tokens, ours_ms, sgemm_ms, decode_ms, share_of_sgemm}]}.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from benchmarks.shared.report import finish, show
from coldpress.runtime.kernels import matmul
from coldpress.runtime.quantization import int4_group32

FORMAT = "int4_group32"
LENGTH, ROWS = 4096, 14336
TOKENS = (128, 512)


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    block = int4_group32.Plugin().encode(random.standard_normal((256, LENGTH)).astype(np.float32))
    codes = np.tile(block, (ROWS // len(block), 1))
    floats = matmul.decode_rows(codes, LENGTH, FORMAT)
    rows = []
    for tokens in TOKENS:
        x = random.standard_normal((tokens, LENGTH)).astype(np.float32)
        c = random.standard_normal((tokens, ROWS)).astype(np.float32)
        decode_s = _median(arguments.rounds, lambda: _decode_in_blocks(codes))[0]
        rows += [
            _row("matmul", tokens, decode_s, arguments.rounds, lambda x=x: _ours(codes, x), lambda x=x: x @ floats.T),
            _row("matmul_t", tokens, decode_s, arguments.rounds, lambda c=c: _ours_t(codes, c), lambda c=c: c @ floats),
        ]
    show("prefill products, 14336 x 4096 in int4", list(rows[0]), [list(row.values()) for row in rows])
    finish({"rows": rows})


def _ours(codes: np.ndarray, x: np.ndarray) -> np.ndarray:
    return matmul.matmul(codes, LENGTH, FORMAT, x)


def _ours_t(codes: np.ndarray, c: np.ndarray) -> np.ndarray:
    return matmul.matmul_t(codes, LENGTH, FORMAT, c)


def _decode_in_blocks(codes: np.ndarray) -> None:
    step = matmul.BLOCK_BYTES // (4 * LENGTH)
    for start in range(0, ROWS, step):
        matmul.decode_rows(codes[start : start + step], LENGTH, FORMAT)


def _row(
    product: str, tokens: int, decode_s: float, rounds: int, ours: Callable[[], object], bare: Callable[[], object]
) -> dict[str, object]:
    ours_s, sgemm_s = _median(rounds, ours, bare)
    times = {"ours_ms": 1000 * ours_s, "sgemm_ms": 1000 * sgemm_s, "decode_ms": 1000 * decode_s}
    return {"product": product, "tokens": tokens, **times, "share_of_sgemm": sgemm_s / ours_s}


def _median(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Seconds of each call, in turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, its in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            call()
            its.append(time.perf_counter() - start)
    return [float(np.median(its)) for its in seconds]


if __name__ == "__main__":
    main()
