"""Computes in plain numpy what the kernels compute in the native core, to compare the two; arguments as theirs."""

from collections.abc import Callable

import numpy as np

from coldpress.runtime.kernels.activations import ActivationFormat
from coldpress.runtime.kernels.intervals import STEPS, Times, filled
from coldpress.runtime.kernels.mlp import Slices, Terms, UnitLayout
from coldpress.runtime.quantization import int8_group32
from coldpress.schemas.law import combined
from tests.support.kernels import decode, nbytes

LARGEST: dict[ActivationFormat, int] = {"int16": 32512, "int8": 127}
"""The whole number of a group's largest magnitude. 32512 = 256 * 127: the sum of two signed bytes, one times 256."""
SMALLEST_PEAK = np.float32(1e-30)
"""Groups whose largest magnitude is smaller become zeros: the inverse of their scale would overflow float32."""
GROUP = 32
"""Values that share a scale; the last group is padded with zeros."""


def rounded(x: np.ndarray, fmt: str, activations: ActivationFormat) -> np.ndarray:
    """Rounds `x` float32 [n] as products with rows of `fmt` do: float64 [n]; a group that is not finite is NaN."""
    if activations == "fp32" or fmt == "fp16":
        return x.astype(np.float64)
    most = np.float32(LARGEST[activations])
    groups = np.pad(x, (0, -x.size % GROUP)).reshape(-1, GROUP)
    peak = np.abs(groups).max(axis=1, keepdims=True)
    used = peak >= SMALLEST_PEAK
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        numbers = np.where(used, np.rint(groups * (most / peak)), np.float32(0))
        scales = np.where(used, peak / most, np.float32(0))
        products = numbers.astype(np.float64) * scales
    return np.where(np.isfinite(peak), products, np.nan).ravel()[: x.size]


def encode_heads(values: np.ndarray, out: np.ndarray) -> None:
    tokens, heads, head_dim = values.shape
    out[:] = int8_group32.Plugin().encode(values.reshape(-1, head_dim)).reshape(tokens, heads, -1)


def gemv(matrix: np.ndarray, length: int, fmt: str, x: np.ndarray) -> np.ndarray:
    return decode(matrix, fmt, length) @ x


def dot_rows(store: np.ndarray, slots: np.ndarray, offset: int, length: int, fmt: str, x: np.ndarray) -> np.ndarray:
    return np.einsum("kj,j->k", rows(store, slots, offset, length, fmt), x)


def axpy_rows(
    store: np.ndarray, slots: np.ndarray, offset: int, length: int, fmt: str, coefficients: np.ndarray
) -> np.ndarray:
    return np.einsum("k,kj->j", coefficients, rows(store, slots, offset, length, fmt))


def rows(store: np.ndarray, slots: np.ndarray, offset: int, length: int, fmt: str) -> np.ndarray:
    """Decodes the selected rows: float32[k, length]."""
    return decode(store[slots, offset : offset + nbytes(fmt, length)], fmt, length)


def mlp_rows(
    store: np.ndarray,
    slots: np.ndarray,
    layout: UnitLayout,
    x: np.ndarray,
    terms: Terms,
    act: Callable[[np.ndarray], np.ndarray],
    activations: ActivationFormat = "fp32",
    act_up: Callable[[np.ndarray], np.ndarray] = lambda values: values,
) -> np.ndarray:
    """Computes float64[length]; `layout.activation` applies `act` to the products of gate, and `act_up` to those of
    up."""

    def projected(place: Slices, bias: np.ndarray | None) -> np.ndarray:
        offset, fmt = place
        values = rows(store, slots, offset, layout.length, fmt) @ rounded(x, fmt, activations)
        return values if bias is None else values + bias

    inner = np.ones(slots.size) if terms.factors is None else terms.factors.astype(np.float64)
    if layout.gate is not None:
        inner = inner * act(projected(layout.gate, terms.gate_bias))
    if layout.up is not None:
        inner = inner * act_up(projected(layout.up, terms.up_bias))
    return axpy_rows(store, slots, layout.down[0], layout.length, layout.down[1], inner)


def mlp_blocks(
    store: np.ndarray,
    slots: np.ndarray,
    layout: UnitLayout,
    x: np.ndarray,
    terms: Terms,
    act: Callable[[np.ndarray], np.ndarray],
    activations: ActivationFormat = "fp32",
    act_up: Callable[[np.ndarray], np.ndarray] = lambda values: values,
) -> np.ndarray:
    """Computes float64[tokens, length] from the matrices of the selected units' neurons; `act` and `act_up` as in
    `mlp_rows`."""
    units, k, block, length = store[slots], slots.size, layout.block, layout.length

    def matrices(offset: int, fmt: str, num_rows: int, values: int) -> np.ndarray:
        size = nbytes(fmt, values)
        codes = units[:, offset : offset + num_rows * size].reshape(k * num_rows, size)
        return decode(codes, fmt, values).astype(np.float64).reshape(k, num_rows, values)

    def each_rounded(values: np.ndarray, fmt: str) -> np.ndarray:
        return np.stack([rounded(one.astype(np.float32), fmt, activations) for one in values])

    def projected(place: Slices, bias: np.ndarray | None) -> np.ndarray:
        values = each_rounded(x, place[1]) @ matrices(*place, block, length).reshape(k * block, length).T
        return values if bias is None else values + bias

    inner = np.ones((len(x), k * block))
    if terms.factors is not None:
        inner *= np.repeat(terms.factors, block, axis=1)
    if layout.gate is not None:
        inner *= act(projected(layout.gate, terms.gate_bias))
    if layout.up is not None:
        inner *= act_up(projected(layout.up, terms.up_bias))
    down = matrices(*layout.down, length, block).transpose(1, 0, 2).reshape(length, k * block)
    return each_rounded(inner, layout.down[1]) @ down.T


def attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    length: int,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    group = q.shape[0] // keys.shape[1]
    seen = slice(0 if window is None else max(0, length - window), length)
    k, v = (np.repeat(_floats(cache[seen], q.shape[1]), group, axis=1) for cache in (keys, values))
    scores = np.einsum("hd,thd->ht", q, k) * np.float32(q.shape[1] ** -0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = scores if sinks is None else np.concatenate([scores, sinks[:, None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", (weights / weights.sum(axis=1, keepdims=True))[:, : len(v)], v)


def _floats(cache: np.ndarray, head_dim: int) -> np.ndarray:
    """Decodes all heads: float32 [positions, kv_heads, head_dim]."""
    if cache.dtype == np.float16:
        return cache.astype(np.float32)
    codes = np.ascontiguousarray(cache).reshape(-1, cache.shape[2])
    return int8_group32.Plugin().decode(codes, head_dim).reshape(*cache.shape[:2], head_dim)


def best_intervals(gain: np.ndarray, price: float, times: Times) -> np.ndarray:
    return filled(gain, price, times, lambda gain, price: _at_any_time(gain, price, times))


def _at_any_time(gain: np.ndarray, price: float, times: Times) -> np.ndarray:
    """Computes the native core's choice, each step for all tokens at once; knows no least time."""
    low, high, best = np.zeros(len(gain)), np.ones(len(gain)), np.full(len(gain), -np.inf)
    chosen = np.zeros(gain.shape, bool)
    for _ in range(STEPS):
        mix = (low + high) / 2
        of_bytes, of_reads = (1 - mix) ** times.overlap, mix**times.overlap
        read_cost = price * (of_bytes * times.edge + of_reads * times.own)
        tried = intervals_at(gain, price * of_bytes, np.maximum(0.0, read_cost))
        starts = np.count_nonzero(tried[:, 1:] & ~tried[:, :-1], axis=1) + tried[:, 0]
        reads, size = starts * times.own, np.maximum(0.0, np.count_nonzero(tried, axis=1) + starts * times.edge)
        # a cumulative sum adds in order, as the native core does, so both have the same bits
        sums = np.cumsum(np.where(tried, gain, 0), axis=1, dtype=np.float64)[:, -1]
        worth = sums - price * combined((reads, size, 0.0), times.overlap)
        better = worth > best
        chosen[better], best = tried[better], np.maximum(worth, best)
        more_reads = reads > size * (mix / (1 - mix)) ** (1 - times.overlap)
        low, high = np.where(more_reads, mix, low), np.where(more_reads, high, mix)
    return chosen


def intervals_at(gain: np.ndarray, unit_cost: np.ndarray, read_cost: np.ndarray) -> np.ndarray:
    """Finds the intervals with the largest sum of gains less costs, exactly, by dynamic programming over the units.

    Args:
        gain: float32 [T, num_units] in flash order.
        unit_cost: Cost of each unit read, float64 [T].
        read_cost: Cost of each interval, float64 [T].

    Returns:
        bool [T, num_units]; of equal sums the one that reads fewer units.
    """
    num_tokens, num_units = gain.shape
    net = np.ascontiguousarray(gain.T, dtype=np.float64) - unit_cost
    reading, idle = np.full(num_tokens, -np.inf), np.zeros(num_tokens)
    started = np.empty((num_units, num_tokens), bool)  # the best way to be reading unit i begins with it
    stopped = np.empty((num_units + 1, num_tokens), bool)  # the best way to be idle before unit i read unit i - 1
    stopped[0] = False
    for unit in range(num_units):
        started[unit] = idle - read_cost >= reading
        reading = np.where(started[unit], idle - read_cost, reading) + net[unit]
        stopped[unit + 1] = reading > idle
        idle = np.where(stopped[unit + 1], reading, idle)
    chosen = np.zeros((num_units, num_tokens), bool)
    # walk back from the end: a unit is read from where its interval stopped to where it started
    on = stopped[num_units].copy()
    for unit in range(num_units - 1, -1, -1):
        chosen[unit] = on
        on = (on & ~started[unit]) | stopped[unit]
    return np.ascontiguousarray(chosen.T)
