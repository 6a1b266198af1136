"""Products with a rounded vector, and the MLP in one call: equal to numpy on every instruction set of this machine."""

from dataclasses import replace

import numpy as np
import pytest

from coldpress.runtime.arithmetic import activation, up_activation
from coldpress.runtime.kernels import activations, mlp, products
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.model import Activation
from tests.support import reference_kernels
from tests.support.block_formats import BLOCK_FORMATS, block_codes, half_places
from tests.support.kernels import (
    FORMATS,
    OFFSET,
    SLOTS,
    assert_close,
    cases,
    decode,
    floats,
    nbytes,
    unit_store,
    whole,
)

pytestmark = pytest.mark.usefixtures("cpu")

ROUNDED = ("int16", "int8")
ROUNDED_FORMATS = [name for name in FORMATS if name != "fp16"]
"""Formats of rows whose products round the vector."""
FUNCTIONS: tuple[Activation, ...] = ("relu", "relu2", "drelu", "fatrelu", "silu", "gelu", "gelu_tanh", "swiglu_oai")


@pytest.mark.parametrize(("fmt", "length"), cases([1, 31, 33, 64, 96, 172, 600, 4096], ROUNDED_FORMATS))
@pytest.mark.parametrize("kind", ROUNDED)
def test_rows_times_a_rounded_vector(rng, fmt, length, kind):
    store, x = unit_store(rng, fmt, length), floats(rng, length) * np.float32(0.01)
    x[::7] *= 100  # groups of a wide range
    x[64:96] = 0
    taken = reference_kernels.rounded(x, fmt, kind)
    for k in (0, 1, 6, SLOTS):
        slots = rng.permutation(SLOTS)[:k].astype(np.int32)
        place = store, slots, OFFSET, length, fmt
        assert_close(products.dot_rows(*place, x, activations=kind), reference_kernels.dot_rows(*place, taken), length)
    matrix = store[:, OFFSET:], length, fmt
    assert_close(products.gemv(*matrix, x, activations=kind), reference_kernels.gemv(*matrix, taken), length)


@pytest.mark.parametrize(("kind", "share"), [("int16", 1 / 65024), ("int8", 1 / 254)])
def test_rounding_errs_by_half_a_step(rng, kind, share):
    x = floats(rng, 320)
    error = np.abs(reference_kernels.rounded(x, "int4_group32", kind) - x).reshape(-1, 32)
    peak = np.abs(x).reshape(-1, 32).max(axis=1)
    assert (error.max(axis=1) <= 1.001 * share * peak).all()
    assert (error.max(axis=1) >= 0.5 * share * peak).all()


@pytest.mark.parametrize("fmt", [name for name in ROUNDED_FORMATS if name not in BLOCK_FORMATS])
@pytest.mark.parametrize("kind", ROUNDED)
def test_the_largest_codes_and_numbers_do_not_overflow(fmt, kind):
    values = np.full((3, 64), 7, np.float32)
    values[:, ::2] = -8  # the codes' ends in either sign, in every lane
    codes = load("coldpress.runtime.quantization", Format, fmt).encode(values)
    x = np.where(np.arange(64) % 2, -1, 1).astype(np.float32)
    expected = reference_kernels.rows(codes, np.arange(3), 0, 64, fmt) @ reference_kernels.rounded(x, fmt, kind)
    assert_close(products.dot_rows(codes, np.arange(3, dtype=np.int32), 0, 64, fmt, x, activations=kind), expected, 64)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
@pytest.mark.parametrize("kind", ROUNDED)
def test_the_largest_numbers_of_blocks_do_not_overflow(rng, fmt, kind):
    """Codes, scales and minima at both ends, times vectors at both ends, and with lower bytes of -128."""
    ends = np.array([0x00, 0x7F, 0x80, 0xFF], np.uint8)
    codes = block_codes(rng, fmt, 4, 256)
    mask = half_places(fmt, 256)
    codes[:, ~mask] = ends[:, None]
    slots, weights = np.arange(4, dtype=np.int32), decode(codes, fmt, 256).astype(np.float64)
    lower = np.where(np.arange(256) % 32, 128 / 32512, 1).astype(np.float32)
    for x in (np.ones(256, np.float32), -np.ones(256, np.float32), lower, -lower):
        taken = reference_kernels.rounded(x, fmt, kind)
        found = products.dot_rows(codes, slots, 0, 256, fmt, x, activations=kind)
        np.testing.assert_allclose(found, weights @ taken, rtol=2e-6, atol=2e-5 * np.abs(weights).max())


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("fmt", ["int4_group32", *BLOCK_FORMATS])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_rounded_away(rng, fmt, kind, bad):
    length = whole(fmt, 172)
    store, x = unit_store(rng, fmt, length), floats(rng, length)
    slots = np.arange(SLOTS, dtype=np.int32)
    x[170] = bad
    assert np.isnan(reference_kernels.rounded(x, fmt, kind)).any()
    assert np.isnan(products.dot_rows(store, slots, OFFSET, length, fmt, x, activations=kind)).all()


@pytest.mark.parametrize("kind", ROUNDED)
def test_tiny_groups_are_zeros(rng, kind):
    store, x = unit_store(rng, "int8_group32", 64), np.full(64, 1e-38, np.float32)
    found = products.dot_rows(store, np.arange(SLOTS, dtype=np.int32), OFFSET, 64, "int8_group32", x, activations=kind)
    assert not found.any()


def test_fp16_rows_take_float32(rng):
    store, x, slots = unit_store(rng, "fp16", 172), floats(rng, 172), np.arange(SLOTS, dtype=np.int32)
    place = store, slots, OFFSET, 172, "fp16", x
    assert np.array_equal(products.dot_rows(*place, activations="int8"), products.dot_rows(*place))


def layout_of(fmt: str, length: int, gate: bool, up: bool, function: Activation = "silu"):
    size = nbytes(fmt, length)
    places = iter((offset, fmt) for offset in range(OFFSET, OFFSET + 3 * size, size))
    first, second = next(places) if gate else None, next(places) if up else None
    return mlp.UnitLayout(first, second, next(places), length, function, 0.5)


def alone(store, slots, layout, x, terms: mlp.Terms, *rest, **how) -> np.ndarray:
    """Computes `mlp` for one vector, float32 [length], with factors float32 [k]."""
    factors = None if terms.factors is None else terms.factors[None]
    return mlp.mlp(store, slots, layout, x[None], replace(terms, factors=factors), *rest, **how)[0]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", activations.ACTIVATIONS)
@pytest.mark.parametrize(("gate", "up"), [(True, True), (True, False), (False, True), (False, False)])
def test_mlp_of_selected_units(rng, fmt, kind, gate, up):
    for length in (whole(fmt, 33), 512):
        store, x = unit_store(rng, fmt, length, slices=3), floats(rng, length) / np.float32(length**0.5)
        for slots in ([], [4], [3, 3, 0, 3, 22], rng.permutation(SLOTS)):
            k = len(slots)
            terms = mlp.Terms(*(floats(rng, k) for _ in range(3))) if k % 2 else mlp.Terms()
            place = store, np.array(slots, np.int32), layout_of(fmt, length, gate, up), x, terms
            expected = reference_kernels.mlp_rows(*place, activation("silu"), kind)
            np.testing.assert_allclose(alone(*place, activations=kind), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", activations.ACTIVATIONS)
def test_each_of_several_vectors_has_the_bits_that_it_has_alone(rng, fmt, kind):
    """Units that take more than one step of memory, with biases, and with factors of each vector."""
    store, x = unit_store(rng, fmt, 512, slots=301, slices=3), floats(rng, 3, 512)
    slots, layout = rng.permutation(301).astype(np.int32), layout_of(fmt, 512, True, True)
    biases, factors = [floats(rng, 301) for _ in range(2)], floats(rng, 3, 301)
    found = mlp.mlp(store, slots, layout, x, mlp.Terms(*biases, factors), activations=kind)
    for one, own, expected in zip(x, factors, found, strict=True):
        result = alone(store, slots, layout, one, mlp.Terms(*biases, own), activations=kind)
        assert result.tobytes() == expected.tobytes()
    with pytest.raises(ValueError, match="a row of factors has 301 values, expected 300"):
        mlp.mlp(store, slots[1:], layout, x, mlp.Terms(factors=factors))


@pytest.mark.parametrize("kind", activations.ACTIVATIONS)
@pytest.mark.parametrize(
    "formats", [("int4_group32", "int4_group32", "int8_group32"), ("int8_group32", "q4_1", "fp16")]
)
def test_slices_of_several_formats_are_multiplied_each_in_its_own(rng, kind, formats):
    """For one vector and for several; without any slice, or with both of them."""
    length, slots = 512, rng.permutation(301).astype(np.int32)
    parts = [load("coldpress.runtime.quantization", Format, one).encode(floats(rng, 301, length)) for one in formats]
    starts = np.cumsum([0, *(part.shape[1] for part in parts)]).tolist()
    store, x = np.concatenate(parts, axis=1), floats(rng, 3, length) / np.float32(50)
    biases, factors = [floats(rng, 301) for _ in range(2)], floats(rng, 3, 301)
    for first, second in ((0, 1), (None, 1), (0, None), (None, None)):
        places = [None if at is None else (starts[at], formats[at]) for at in (first, second, 2)]
        layout = mlp.UnitLayout(*places, length, "silu", 0.0)
        found = mlp.mlp(store, slots, layout, x, mlp.Terms(*biases, factors), activations=kind)
        for one, own, result in zip(x, factors, found, strict=True):
            place = store, slots, layout, one, mlp.Terms(*biases, own)
            expected = reference_kernels.mlp_rows(*place, activation("silu"), kind)
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=2e-5 * np.abs(expected).max())
            assert alone(*place, activations=kind).tobytes() == result.tobytes()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_activation_functions(function):
    # Gate rows pick one value each, up rows are ones, and each unit's down column is a place of its own.
    length = 512
    values = np.concatenate([np.linspace(-12, 12, length - 5), [-50, 50, 0.5, 0, -1e-4]]).astype(np.float16)
    gate, up = np.zeros((2, length, length), np.float16)
    gate[:, 0], up[:, 0] = values, 1
    store = np.concatenate([part.view(np.uint8) for part in (gate, up, np.eye(length, dtype=np.float16))], axis=1)
    x, slots = np.eye(1, length, dtype=np.float32)[0], np.arange(length, dtype=np.int32)
    layout = mlp.UnitLayout((0, "fp16"), (2 * length, "fp16"), (4 * length, "fp16"), length, function, 0.5)
    expected = activation(function, 0.5)(values.astype(np.float64)) * up_activation(function, 0.5)(np.float32(1))
    found = alone(store, slots, layout, x, mlp.Terms())
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-6)
    assert np.isnan(alone(store, slots, layout, x * np.float32(np.nan), mlp.Terms())).any()


@pytest.mark.parametrize("function", ["drelu", "swiglu_oai"])
def test_both_projections_are_activated(rng, function):
    store, x, slots = unit_store(rng, "fp16", 64, slices=3), floats(rng, 64), np.arange(SLOTS, dtype=np.int32)
    place = store, slots, layout_of("fp16", 64, True, True, function), x, mlp.Terms()
    expected = reference_kernels.mlp_rows(*place, activation(function, 0.5), act_up=up_activation(function, 0.5))
    np.testing.assert_allclose(alone(*place), expected, rtol=1e-5, atol=1e-4)


def test_a_unit_that_is_zero_is_not_read_further():
    store = np.full((2, 3, 32), np.nan, np.float16)
    store[:, 0], store[1, 1:] = np.array([[-1], [1]]), 2  # the first unit is left by ReLU with nothing
    layout = mlp.UnitLayout((0, "fp16"), (64, "fp16"), (128, "fp16"), 32, "relu", 0.0)
    x, slots = np.full(32, 1 / 32, np.float32), np.array([0, 1], np.int32)
    assert np.array_equal(alone(store.view(np.uint8).reshape(2, -1), slots, layout, x, mlp.Terms()), [4] * 32)


@pytest.mark.parametrize("kind", activations.ACTIVATIONS)
def test_threads_change_no_bit(rng, kind):
    store = unit_store(rng, "int4_group32", 1024, slots=701, slices=3)
    x, slots = floats(rng, 1024), rng.permutation(701).astype(np.int32)
    layout = layout_of("int4_group32", 1024, True, True)
    found = [
        (
            alone(store, slots, layout, x, mlp.Terms(), threads, kind).tobytes(),
            products.dot_rows(store, slots, OFFSET, 1024, "int4_group32", x, threads, kind).tobytes(),
        )
        for threads in (1, 2, 3, 7)
    ]
    assert all(result == found[0] for result in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": np.array([0, 3], np.int32)}, r"slot 3 at index 1 is outside the store of 3 slots"),
        ({"gate_offset": 30}, r"a row of 32 values in fp16 at byte 30 takes 64 bytes, but the stored rows have 64"),
        ({"down_offset": 65}, r"at byte 65 takes 64 bytes"),
        ({"up_bias": np.zeros(3, np.float32)}, r"up_bias has 3 values, expected 2"),
        ({"factors": np.zeros(1, np.float32)}, r"factors has 1 values, expected 2"),
        ({"x": np.zeros(31, np.float32)}, r"x has 31 values, expected 32"),
        ({"activation": "tanh"}, r"no native kernel computes the activation 'tanh'; there are kernels for relu"),
    ],
)
def test_bad_arguments(change, message):
    def pick(*names):
        return {name: change[name] for name in names if name in change}

    gate, up, down = ((change.get(f"{name}_offset", 0), "fp16") for name in ("gate", "up", "down"))
    layout = mlp.UnitLayout(gate, up, down, 32, change.get("activation", "relu"), 0.0)
    slots, x = change.get("slots", np.array([0, 1], np.int32)), change.get("x", np.zeros(32, np.float32))
    with pytest.raises(ValueError, match=message):
        alone(np.zeros((3, 64), np.uint8), slots, layout, x, mlp.Terms(**pick("up_bias", "factors")))
