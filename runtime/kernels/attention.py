"""Causal attention over a key and value cache, with grouped queries and an optional sliding window.

The cache is in fp16, or in int8_group32. `attend` is one decoding step; `attend_prefill` takes many consecutive
positions, in blocks of queries. The query at position p sees the positions up to p, with a window only the last
`window` of them, its own included: Hugging Face's convention. Softmax subtracts the maximum and is in float32. Query
heads share key heads in consecutive groups.
"""

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.kernels.products import decode_rows
from coldpress.runtime.quantization import int8_group32
from coldpress.runtime.quantization._groups import FLOAT16_MAX

INT8 = int8_group32.Plugin()
SCORES_BYTES = 4 << 20
"""Bound on the scores of a block of queries, so that memory does not grow with the square of a prompt's length."""


def encode_heads(values: np.ndarray, out: np.ndarray) -> None:
    """Writes keys or values of tokens into an int8 cache, with the same bits as the format's `encode`.

    Args:
        values: float32[tokens, kv_heads, head_dim], contiguous.
        out: uint8[tokens, kv_heads, bytes], contiguous; its contents are undefined after an error.

    Raises:
        ColdpressError: if a group's scale is beyond float16.
        ValueError: if shapes disagree.
        TypeError: if an array has another dtype or is not contiguous.
    """
    if not _native.encode_int8(values, out) < FLOAT16_MAX + 16:
        INT8.encode(values.reshape(-1, values.shape[2]))  # raises the error, with the offending value


def attend(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    length: int,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    num_threads: int = 0,
) -> np.ndarray:
    """Computes attention of the query at position length - 1: float32[heads, head_dim].

    Args:
        q: float32[heads, head_dim], after rotation.
        keys, values: contiguous, with the first `length` positions filled: float16[context, kv_heads, head_dim], or
            uint8[context, kv_heads, bytes], each head's values in int8_group32.
        window: most positions that a query sees, including its own; None for all.
        scale: factor of the scores; None for 1 / sqrt(head_dim).
        softcap: scaled scores s become softcap * tanh(s / softcap) (Gemma 2, section 2); None: they stay as they are.
        sinks: float32[heads], a score of each head that counts in its softmax and adds nothing; None for none.
        num_threads: 0 for the process's default; no bit of the result depends on it.

    Raises:
        ValueError: if shapes disagree or `length` is not inside the context.
        TypeError: if an array has another dtype or is not contiguous.
    """
    out = np.empty(q.shape, np.float32)
    scores = _first_seen(length - 1, window), length, _scale(q, scale), softcap or 0.0, sinks
    fmt = "int8_group32" if keys.dtype == np.uint8 else "fp16"
    _native.attend(fmt, q, keys.view(np.uint8), values.view(np.uint8), *scores, out, num_threads)
    return out


def attend_prefill(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    length: int,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Computes attention of the last `tokens` of `length` positions: float32[tokens, heads, head_dim].

    `q` is float32[tokens, heads, head_dim]; query t is at position length - tokens + t. All else is as in `attend`.

    Memory besides arguments and result: the scores of a block of queries (SCORES_BYTES, or one query's scores) and the
    float32 keys and values of one key head over the positions that the block sees. Raises `ValueError` if shapes
    disagree or `length` is not inside the context.
    """
    tokens, heads, head_dim = q.shape
    _check(q, keys, values, length)
    group = heads // keys.shape[1]
    out = np.empty_like(q)
    step = max(1, SCORES_BYTES // (4 * group * min(length, window + tokens if window else length)))
    for start in range(0, tokens, step):
        stop = min(tokens, start + step)
        block, first, behind = slice(start, stop), length - tokens + start, length - tokens + stop
        seen = slice(_first_seen(first, window), behind)
        positions = np.arange(behind, dtype=np.int64)
        hidden = _hidden(positions[first:], positions[seen], window)
        for head in range(keys.shape[1]):
            share = slice(head * group, (head + 1) * group)
            # [queries of the block, group, head_dim] -> rows, so that each of the two products is one BLAS call
            rows = np.ascontiguousarray(q[block, share]).reshape(-1, head_dim) * np.float32(_scale(q, scale))
            k, v = (_floats(cache[seen, head], head_dim) for cache in (keys, values))
            of_rows = None if sinks is None else np.tile(sinks[share], stop - start)
            mixed = _softmax_times(soft_cap(rows @ k.T, softcap), v, np.repeat(hidden, group, axis=0), of_rows)
            out[block, share] = mixed.reshape(-1, group, head_dim)
    return out


def _floats(cache: np.ndarray, head_dim: int) -> np.ndarray:
    return decode_rows(cache, head_dim, "int8_group32") if cache.dtype == np.uint8 else cache.astype(np.float32)


def _softmax_times(scores: np.ndarray, values: np.ndarray, hidden: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    scores[hidden] = -np.inf
    peaks = scores.max(axis=1, keepdims=True)
    if sinks is not None:
        peaks = np.maximum(peaks, sinks[:, None])
    scores -= peaks
    np.exp(scores, out=scores)
    totals = scores.sum(axis=1, keepdims=True)
    if sinks is not None:
        totals += np.exp(sinks[:, None] - peaks)
    return (scores @ values) / totals


def soft_cap(values: np.ndarray, cap: float | None) -> np.ndarray:
    """Replaces `values`, float32, by cap * tanh(values / cap), in place; leaves them as they are without a cap."""
    if cap is not None:
        values /= np.float32(cap)
        np.tanh(values, out=values)
        values *= np.float32(cap)
    return values


def _hidden(queries: np.ndarray, positions: np.ndarray, window: int | None) -> np.ndarray:
    ahead = positions[None, :] > queries[:, None]
    return ahead if window is None else ahead | (positions[None, :] <= queries[:, None] - window)


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position + 1 - window)


def _scale(q: np.ndarray, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _check(q: np.ndarray, keys: np.ndarray, values: np.ndarray, length: int) -> None:
    tokens, heads, head_dim = q.shape
    width = INT8.nbytes(head_dim) if keys.dtype == np.uint8 else head_dim
    if keys.shape != values.shape or keys.shape[2] != width or heads % keys.shape[1]:
        raise ValueError(
            f"queries of {heads} heads of {head_dim} do not fit keys {keys.shape} and values {values.shape}, "
            f"expected [context, kv_heads, {width}] with kv_heads dividing the heads"
        )
    if not tokens <= length <= keys.shape[0]:
        raise ValueError(
            f"{tokens} queries at the end of {length} positions are not a range inside the context of {keys.shape[0]}"
        )
