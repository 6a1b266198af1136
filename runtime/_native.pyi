"""Types of the native core for type checkers.

The bindings are in runtime/native/src/module.cpp and bind_products.cpp; runtime/kernels documents the products.
"""

import numpy as np

def dot_rows(
    store: np.ndarray,
    slots: np.ndarray | None,
    offset: int,
    length: int,
    format: str,
    x: np.ndarray,
    out: np.ndarray,
    num_threads: int = 0,
    activation_bits: int = 0,
) -> None: ...
def axpy_rows(
    store: np.ndarray,
    slots: np.ndarray,
    offset: int,
    length: int,
    format: str,
    coefficients: np.ndarray,
    out: np.ndarray,
    num_threads: int = 0,
) -> None: ...
def mlp(
    store: np.ndarray,
    slots: np.ndarray,
    gate: tuple[int, str] | None,
    up: tuple[int, str] | None,
    down: tuple[int, str],
    block: int,
    length: int,
    activation: str,
    threshold: float,
    x: np.ndarray,
    gate_bias: np.ndarray | None,
    up_bias: np.ndarray | None,
    factors: np.ndarray | None,
    out: np.ndarray,
    num_threads: int = 0,
    activation_bits: int = 0,
) -> None: ...
def matmul(
    matrix: np.ndarray, length: int, format: str, x: np.ndarray, out: np.ndarray, num_threads: int = 0
) -> None: ...
def matmul_t(
    matrix: np.ndarray, length: int, format: str, c: np.ndarray, out: np.ndarray, num_threads: int = 0
) -> None: ...
def decode_rows(matrix: np.ndarray, length: int, format: str, out: np.ndarray, num_threads: int = 0) -> None: ...
def read_through(words: np.ndarray, num_threads: int = 0) -> int: ...
def attend(
    format: str,
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    start: int,
    stop: int,
    scale: float,
    softcap: float,
    sinks: np.ndarray | None,
    out: np.ndarray,
    num_threads: int = 0,
) -> None: ...
def encode_int8(values: np.ndarray, out: np.ndarray) -> float: ...
def count_pairs(words: np.ndarray, counts: np.ndarray, num_threads: int = 0) -> None: ...
def join_links(counts: np.ndarray, units: np.ndarray, run_pairs: int, order: np.ndarray) -> None: ...
def fit_ranges(
    values: np.ndarray,
    prices: np.ndarray,
    highest: int,
    zero: int,
    steps: np.ndarray,
    starts: np.ndarray,
    num_threads: int = 0,
) -> None: ...
def fit_scales(
    values: np.ndarray, prices: np.ndarray, levels: np.ndarray, scales: np.ndarray, num_threads: int = 0
) -> None: ...
def nearest_numbers(
    values: np.ndarray,
    steps: np.ndarray,
    starts: np.ndarray,
    highest: int,
    out: np.ndarray,
    num_threads: int = 0,
) -> None: ...
def best_intervals(
    gain: np.ndarray,
    price: float,
    read_units: float,
    edge_units: float,
    overlap: float,
    steps: int,
    chosen: np.ndarray,
) -> None: ...

class Reads:
    def wait(self, count: int) -> bool: ...
    def finish(self) -> int: ...

def start_reads(
    fd: int,
    offsets: np.ndarray,
    lengths: np.ndarray,
    buffer: np.ndarray,
    buffer_offsets: np.ndarray,
    page_bytes: int,
    page_crc32c: np.ndarray,
    num_threads: int,
    units: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> Reads: ...
def start_ring_reads(
    fd: int,
    offsets: np.ndarray,
    lengths: np.ndarray,
    buffer: np.ndarray,
    buffer_offsets: np.ndarray,
    page_bytes: int,
    page_crc32c: np.ndarray,
    depth: int,
    units: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
) -> Reads: ...
def plan_reads(
    positions: np.ndarray,
    offset_bytes: int,
    unit_bytes: int,
    stride_bytes: int,
    page_bytes: int,
    gap_bytes: int,
    max_bytes: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...
def count_reads(
    positions: np.ndarray,
    stops: np.ndarray,
    offset_bytes: int,
    unit_bytes: int,
    stride_bytes: int,
    page_bytes: int,
    gaps: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]: ...
def ring_error() -> int: ...
def crc32c_pages(data: np.ndarray | bytes | memoryview, page_bytes: int) -> np.ndarray: ...
def aligned_buffer(nbytes: int) -> np.ndarray: ...
def cpu() -> str: ...
def cpus() -> list[str]: ...
def use_cpu(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(num_threads: int) -> None: ...
