"""Every native kernel equals its numpy reference: each format and instruction set of this machine, awkward lengths."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from coldpress.runtime import _native
from coldpress.runtime.kernels import attention, products
from coldpress.runtime.kernels.activations import ACTIVATIONS
from tests.support import reference_kernels
from tests.support.block_formats import BLOCK_FORMATS, block_codes
from tests.support.kernels import (
    FORMATS,
    OFFSET,
    SLOTS,
    assert_close,
    cases,
    decode,
    floats,
    some_codes,
    unit_store,
    whole,
)

LENGTHS = [1, 31, 32, 33, 64, 172, 600, 4096]


pytestmark = pytest.mark.usefixtures("cpu")


@pytest.mark.parametrize(("fmt", "length"), cases(LENGTHS))
@pytest.mark.parametrize("k", [0, 1, 6, SLOTS])
def test_rows(rng, fmt, length, k):
    store = unit_store(rng, fmt, length)
    slots = rng.permutation(SLOTS)[:k].astype(np.int32)
    x, c = floats(rng, length), floats(rng, k)
    place = store, slots, OFFSET, length, fmt
    assert_close(products.dot_rows(*place, x), reference_kernels.dot_rows(*place, np.float64(x)), length)
    assert_close(products.axpy_rows(*place, c), reference_kernels.axpy_rows(*place, np.float64(c)), k)


@pytest.mark.parametrize(("fmt", "length"), cases(LENGTHS))
def test_gemv(rng, fmt, length):
    matrix = unit_store(rng, fmt, length)[:, OFFSET:]
    x = floats(rng, length)
    assert_close(
        products.gemv(matrix, length, fmt, x), reference_kernels.gemv(matrix, length, fmt, np.float64(x)), length
    )


@pytest.mark.parametrize(("fmt", "length"), cases([45, 96]))
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_each_of_several_vectors_has_the_bits_that_it_has_alone(rng, cpu, fmt, length, kind):
    """On every instruction set, of more vectors and rows than are taken at a time, and of some that remain."""
    matrix = unit_store(rng, fmt, length)[:, OFFSET:]
    x = np.stack([floats(rng, length) for _ in range(7)])
    expected = np.stack([products.gemv(matrix, length, fmt, one, activations=kind) for one in x])
    for count in (1, 4, 7):
        assert products.gemv_each(matrix, length, fmt, x[:count], kind).tobytes() == expected[:count].tobytes()


@pytest.mark.parametrize(("fmt", "length"), cases(LENGTHS))
def test_decoding_is_exact(rng, fmt, length):
    matrix = unit_store(rng, fmt, length)[:, OFFSET:]
    assert np.array_equal(products.decode_rows(matrix, length, fmt), decode(matrix, fmt, length))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_decoding_of_large_values_rounds_once(rng, fmt):
    """Where a scale times a code and the minimum have more bits together than float32."""
    codes = block_codes(rng, fmt, SLOTS, 4096, peak=1024)
    assert np.array_equal(products.decode_rows(codes, 4096, fmt), decode(codes, fmt, 4096))


def test_every_float16_is_decoded_exactly():
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    found = products.decode_rows(halves.view(np.uint8), 256, "fp16")
    expected = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert np.array_equal(found[~np.isnan(found)].view(np.uint32), expected[~np.isnan(expected)].view(np.uint32))


@pytest.mark.parametrize(("fmt", "length"), cases([33, 4096]))
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_matmul(rng, fmt, length, tokens):
    matrix = unit_store(rng, fmt, length)[:, OFFSET:]
    x, c = floats(rng, tokens, length), floats(rng, tokens, SLOTS)
    weights = decode(matrix, fmt, length).astype(np.float64)
    assert_close(products.matmul(matrix, length, fmt, x), x @ weights.T, length)
    assert_close(products.matmul_t(matrix, length, fmt, c), c @ weights, SLOTS)


@pytest.mark.parametrize(("length", "rows", "tokens"), [(300, 301, 70), (8400, 3, 300)])
def test_a_token_has_the_bits_of_a_product_that_it_has_alone(rng, cpu, length, rows, tokens):
    """Of more rows, values, columns and tokens than are taken at a time, on any number of threads."""
    matrix = unit_store(rng, "int4_group32", length, slots=rows)[:, OFFSET:]
    x, c = floats(rng, tokens, length), floats(rng, tokens, rows)
    place = matrix, length, "int4_group32"
    weights = decode(matrix, "int4_group32", length)
    for product, given, expected in ((products.matmul, x, weights.T), (products.matmul_t, c, weights)):
        found = product(*place, given, num_threads=1)
        assert_close(found, np.float64(given) @ np.float64(expected), len(expected))
        assert found.tobytes() == product(*place, np.asfortranarray(given), num_threads=3).tobytes()
        for token in (0, 37, tokens - 1):
            assert found[token].tobytes() == product(*place, given[token : token + 1]).tobytes()
        if cpu not in ("portable", "avx2"):
            _native.use_cpu("avx2")
            assert found.tobytes() == product(*place, given).tobytes(), "fused additions in the same order"
            _native.use_cpu(cpu)


@pytest.mark.parametrize("fmt", FORMATS)
def test_threads_change_no_bit(rng, fmt):
    store = unit_store(rng, fmt, 4096, slots=301)
    slots = rng.permutation(301).astype(np.int32)
    x, c = floats(rng, 4096), floats(rng, 301)
    place = store, slots, OFFSET, 4096, fmt
    whole = np.tile(slots, 4), np.tile(c, 4)  # of more than are added up in one part
    expected = reference_kernels.axpy_rows(store, whole[0], OFFSET, 4096, fmt, np.float64(whole[1]))
    found = products.axpy_rows(store, whole[0], OFFSET, 4096, fmt, whole[1], num_threads=1)
    assert_close(found, expected, 4 * whole[1].size)
    assert found.tobytes() == products.axpy_rows(store, whole[0], OFFSET, 4096, fmt, whole[1], num_threads=3).tobytes()
    q, kv = floats(rng, 8, 64), floats(rng, 700, 4, 64).astype(np.float16)
    results = [
        (
            products.dot_rows(*place, x, threads).tobytes(),
            products.axpy_rows(*place, c, threads).tobytes(),
            products.gemv(store[:, OFFSET:], 4096, fmt, x, threads).tobytes(),
            attention.attend(q, kv, kv, 700, num_threads=threads).tobytes(),
        )
        for threads in (1, 2, 3, 7, 1)
    ]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_does_not_depend_on_the_others(rng, fmt):
    length = whole(fmt, 172)
    store = unit_store(rng, fmt, length)
    x = floats(rng, length)
    alone = [products.dot_rows(store, np.array([i], np.int32), OFFSET, length, fmt, x)[0] for i in range(SLOTS)]
    together = products.dot_rows(store, np.arange(SLOTS, dtype=np.int32), OFFSET, length, fmt, x)
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_beside_the_store_are_not_read(rng, fmt):
    # The last row ends where the array ends, and what follows would make the sums not-a-number.
    length = whole(fmt, 45)
    codes = some_codes(rng, fmt, 4, length)
    memory = np.full(codes.size + 64, 0xFF, np.uint8)
    memory[: codes.size] = codes.ravel()
    store = memory[: codes.size].reshape(codes.shape)
    for kind in ACTIVATIONS:
        assert np.isfinite(products.gemv(store, length, fmt, floats(rng, length), activations=kind)).all()
    slots = np.arange(4, dtype=np.int32)
    assert np.isfinite(products.axpy_rows(store, slots, 0, length, fmt, floats(rng, 4))).all()


BAD_ROWS = [
    ({"slots": np.array([0, 3], np.int32)}, r"slot 3 at index 1 is outside the store of 3 slots"),
    ({"slots": np.array([-1], np.int32)}, r"slot -1 at index 0 is outside the store of 3 slots"),
    ({"offset": 1}, r"a row of 64 values in int4_group32 at byte 1 takes 36 bytes, but the stored rows have 36"),
    ({"offset": -1}, r"at byte -1 takes 36 bytes"),
    ({"offset": 1 << 62}, r"at byte 4611686018427387904 takes 36 bytes"),
    ({"length": 65}, r"a row of 65 values in int4_group32 at byte 0 takes 54 bytes"),
    ({"length": -1}, r"a row of -1 values is not possible"),
    ({"length": 1 << 62}, r"a row of 4611686018427387904 values is not possible"),
    ({"vector": np.zeros(63, np.float32)}, r"has 63 values, expected"),
    ({"num_threads": -1}, r"num_threads is -1, expected"),
    ({"store": np.zeros((3, 72), np.uint8)[:, ::2]}, r"the bytes of a row are not contiguous"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ROWS)
@pytest.mark.parametrize("kernel", [products.dot_rows, products.axpy_rows])
def test_bad_arguments(kernel, change, message):
    slots = change.get("slots", np.array([0, 1], np.int32))
    good = {
        "store": np.zeros((3, 36), np.uint8),
        "slots": slots,
        "offset": 0,
        "length": 64,
        "fmt": "int4_group32",
        "num_threads": 1,
    }
    good["vector"] = np.zeros(64 if kernel is products.dot_rows else len(slots), np.float32)
    arguments = good | change
    arguments["x" if kernel is products.dot_rows else "coefficients"] = arguments.pop("vector")
    # the result's own length is bad before numpy can make it
    with pytest.raises(ValueError, match=message if change.get("length") not in (-1, 1 << 62) else "."):
        kernel(**arguments)


@pytest.mark.parametrize(("fmt", "length"), [("q4_k", 288), ("q2_k", 32)])
def test_a_row_of_large_blocks_has_no_partial_one(fmt, length):
    with pytest.raises(ValueError, match=f"a row of {length} values has no whole number of blocks of 256 in {fmt}"):
        products.gemv(np.zeros((3, 512), np.uint8), length, fmt, np.zeros(length, np.float32))


def test_a_format_without_a_kernel_is_refused():
    with pytest.raises(ValueError, match="no native kernel reads the format 'int5'; there are kernels for fp16, int8_"):
        products.gemv(np.zeros((3, 36), np.uint8), 64, "int5", np.zeros(64, np.float32))


@pytest.mark.parametrize("bad", [np.zeros(64), np.zeros(128, np.float32)[::2], np.zeros((1, 64), np.float32)])
def test_vectors_of_another_kind_are_not_converted(bad):
    with pytest.raises(TypeError):
        products.gemv(np.zeros((3, 36), np.uint8), 64, "int4_group32", bad)


SHAPES = [(8, 2, 64, 300, None), (8, 8, 20, 300, 17), (4, 1, 128, 1, None), (6, 3, 33, 40, 40), (2, 2, 8, 90, 1)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "length", "window"), SHAPES)
@pytest.mark.parametrize("scores", [{}, {"scale": 0.7, "softcap": 3.0}, {"softcap": 0.01}, {"sinks": True}])
def test_attention_of_one_step(rng, heads, kv_heads, head_dim, length, window, scores):
    q = 3 * floats(rng, heads, head_dim)
    if "sinks" in scores:
        scores = {"sinks": 9 * floats(rng, heads)}
    keys, values = (floats(rng, length + 5, kv_heads, head_dim).astype(np.float16) for _ in range(2))
    keys[length:], values[length:] = np.nan, np.nan  # not filled yet
    found = attention.attend(q, keys, values, length, window, **scores)
    expected = reference_kernels.attend(np.float64(q), keys, values, length, window, **scores)
    np.testing.assert_allclose(found, expected, atol=3e-6)


def test_soft_caps_of_scores_by_their_formula(rng):
    """Scores far below the cap, at it, and far beyond it, of both signs (Gemma 2, section 2)."""
    cap, products = 5.0, np.array([-400, -6, -1, -1e-3, 0, 1e-3, 2, 5, 9, 3000], np.float32)
    keys = np.zeros((10, 1, 16), np.float16)
    keys[:, 0, 0] = products / 100
    values = floats(rng, 10, 1, 16).astype(np.float16)
    q = np.zeros((1, 16), np.float32)
    q[0, 0] = 200
    scores = 0.5 * 200 * keys[:, 0, 0].astype(np.float64)
    weights = np.exp([cap * math.tanh(score / cap) for score in scores])
    expected = weights / weights.sum() @ values[:, 0].astype(np.float64)
    one = attention.attend(q, keys, values, 10, scale=0.5, softcap=cap)
    many = attention.attend_prefill(q[None], keys, values, 10, scale=0.5, softcap=cap)[0]
    for found in (one, many):
        np.testing.assert_allclose(found[0], expected, atol=2e-6)


def test_sinks_by_their_formula(rng):
    """Of every size beside the scores: nothing, a part of the weights, or nearly all of them; each head has its own."""
    keys, values = (floats(rng, 6, 2, 16).astype(np.float16) for _ in "kv")
    q, sinks = floats(rng, 4, 16), np.array([-300, 0.5, 4, 300], np.float32)
    expected = np.empty((4, 16))
    for head, (query, sink) in enumerate(zip(q.astype(np.float64), sinks.astype(np.float64), strict=True)):
        scores = keys[:, head // 2].astype(np.float64) @ query / 4
        peak = max(*scores, sink)
        total = np.exp(scores - peak).sum() + math.exp(sink - peak)
        expected[head] = np.exp(scores - peak) / total @ values[:, head // 2].astype(np.float64)
    one = attention.attend(q, keys, values, 6, sinks=sinks)
    many = attention.attend_prefill(q[None], keys, values, 6, sinks=sinks)[0]
    for found in (one, many):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert not np.abs(expected[3]).any() or np.abs(expected[3]).max() < 1e-30
    without = attention.attend(q, keys, values, 6)
    assert np.abs(without[0] - one[0]).max() < 1e-6 < np.abs(without[1] - one[1]).max()
    with pytest.raises(ValueError, match="sinks has 3 values, expected 4"):
        attention.attend(q, keys, values, 6, sinks=sinks[:3])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "length", "window"), SHAPES)
@pytest.mark.parametrize("softcap", [None, 0.4])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_prefill_equals_single_steps(rng, monkeypatch, heads, kv_heads, head_dim, length, window, softcap, with_sinks):
    monkeypatch.setattr(attention, "SCORES_BYTES", 4 * heads * 7 * length)  # blocks of a few queries
    tokens = (length + 1) // 2
    q = floats(rng, tokens, heads, head_dim)
    keys, values = (floats(rng, length + 5, kv_heads, head_dim).astype(np.float16) for _ in range(2))
    keys[length:], values[length:] = np.nan, np.nan
    scores = {"scale": 0.3, "softcap": softcap, "sinks": 3 * floats(rng, heads) if with_sinks else None}
    found = attention.attend_prefill(q, keys, values, length, window, **scores)
    assert found.dtype == np.float32
    for t in range(tokens):
        seen = length - tokens + t + 1
        expected = reference_kernels.attend(np.float64(q[t]), keys, values, seen, window, **scores)
        np.testing.assert_allclose(found[t], expected, atol=5e-6)


def test_large_scores_do_not_overflow(rng):
    q = np.full((1, 16), 200, np.float32)
    keys = np.stack([np.full((1, 16), k, np.float16) for k in (-100, 99, 100)])
    values = floats(rng, 3, 1, 16).astype(np.float16)
    assert np.array_equal(attention.attend(q, keys, values, 3)[0], values[2, 0].astype(np.float32))


@pytest.mark.parametrize("length", [0, 9])
def test_positions_outside_the_context_are_refused(length):
    kv = np.zeros((8, 2, 16), np.float16)
    with pytest.raises(ValueError, match=r"not a range inside the context of 8"):
        attention.attend(np.zeros((4, 16), np.float32), kv, kv, length)
    with pytest.raises(ValueError, match=r"not a range inside the context of 8"):
        attention.attend_prefill(np.zeros((max(1, length), 4, 16), np.float32), kv, kv, length)


def test_heads_that_do_not_fit_are_refused():
    kv = np.zeros((8, 3, 16), np.float16)
    with pytest.raises(ValueError, match=r"4 query heads cannot share 3 key heads"):
        attention.attend(np.zeros((4, 16), np.float32), kv, kv, 1)
    with pytest.raises(ValueError, match=r"queries of 4 heads of 16 do not fit keys"):
        attention.attend_prefill(np.zeros((1, 4, 16), np.float32), kv, kv, 1)


def cpu_in_new_process(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from coldpress.runtime import _native; print(_native.cpu())"],
        env=os.environ | {"COLDPRESS_CPU": name},
        capture_output=True,
        text=True,
        check=False,
    )


def test_environment_forces_the_instruction_set(cpu):
    assert cpu_in_new_process(cpu).stdout.strip() == cpu


def test_unknown_instruction_set_is_refused(cpu):
    with pytest.raises(ValueError, match=r"COLDPRESS_CPU 'sse9' is not available on this machine; it has: portable"):
        _native.use_cpu("sse9")
    if cpu == "portable":  # once is enough
        found = cpu_in_new_process("sse9")
        assert found.returncode == 1
        assert "ImportError: COLDPRESS_CPU 'sse9' is not available on this machine; it has: portable" in found.stderr


def test_default_number_of_threads():
    before = _native.num_threads()
    assert before >= 1
    _native.set_num_threads(3)
    assert _native.num_threads() == 3
    _native.set_num_threads(before)
    with pytest.raises(ValueError, match=r"num_threads is 0, expected 1 to 1024"):
        _native.set_num_threads(0)


def test_a_forked_child_has_threads_of_its_own(rng, cpu):
    if cpu != _native.cpus()[-1]:
        pytest.skip("forking is tried once, with the fastest instruction set")
    store = unit_store(rng, "int4_group32", 4096, slots=301)[:, OFFSET:]
    x = floats(rng, 4096)
    expected = products.gemv(store, 4096, "int4_group32", x, 2)  # starts the pool
    child = os.fork()
    if child == 0:
        same = np.array_equal(products.gemv(store, 4096, "int4_group32", x, 2), expected)
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
