"""The MLP of blocks of neurons: equal to numpy on every instruction set of this machine."""

from itertools import accumulate, product

import numpy as np
import pytest

from coldpress.runtime.arithmetic import activation, up_activation
from coldpress.runtime.kernels import activations, mlp
from coldpress.schemas.model import Activation
from tests.support import reference_kernels
from tests.support.block_formats import BLOCK_FORMATS, block_of
from tests.support.kernels import FORMATS, OFFSET, floats, nbytes, some_codes, whole

pytestmark = pytest.mark.usefixtures("cpu")

TOLERANCE: dict[activations.ActivationFormat, float] = {"fp32": 2e-5, "int16": 2e-4, "int8": 3e-3}
"""Of the largest result. An inner activation half-way between two whole numbers may become either of them, since
float32 sums depend on the order."""
FORMATS_OF_32 = [fmt for fmt in FORMATS if fmt not in BLOCK_FORMATS or block_of(fmt)[0] == 32]
BLOCKS = [*product(FORMATS_OF_32, (32, 256)), *((fmt, 256) for fmt in FORMATS if fmt not in FORMATS_OF_32)]
ALL = slice(None)
FEW = [(1, [5, 5, 0, 5, 2]), (3, [4]), (40, [3, 0, 3, 1, 2]), (2, [])]
"""Tokens and slots."""


def blocks_of(rng, formats, length: int, block: int, gate=True, up=True, function: Activation = "silu"):
    """Returns six units with random bytes around them, which begin at an odd byte, and their layout."""
    shapes = [(block, length), (block, length), (length, block)]
    parts = [some_codes(rng, fmt, 6 * rows, values) for fmt, (rows, values) in zip(formats, shapes, strict=True)]
    codes = np.concatenate([part.reshape(6, -1) for part in parts], axis=1)
    store = rng.integers(0, 256, (6, OFFSET + codes.shape[1] + 2), np.uint8)
    store[:, OFFSET:-2] = codes
    sizes = [rows * nbytes(fmt, values) for fmt, (rows, values) in zip(formats, shapes, strict=True)]
    first, second, down = list(accumulate(sizes[:2], initial=OFFSET))
    places = zip((first, second, down), formats, strict=True)
    gate_at, up_at, down_at = (place if has else None for place, has in zip(places, (gate, up, True), strict=True))
    return store, mlp.UnitLayout(gate_at, up_at, down_at, length, function, 0.5, block)


def terms_of(rng, tokens: int, k: int, block: int) -> mlp.Terms:
    return mlp.Terms(floats(rng, k * block), floats(rng, k * block), floats(rng, tokens, k))


def assert_equal(place, kind: activations.ActivationFormat, function: Activation = "silu") -> None:
    act, act_up = activation(function, 0.5), up_activation(function, 0.5)
    expected = reference_kernels.mlp_blocks(*place, act=act, activations=kind, act_up=act_up)
    found = mlp.mlp(*place, activations=kind)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[kind] * np.abs(expected).max(initial=0))


@pytest.mark.parametrize(("fmt", "block"), BLOCKS)
@pytest.mark.parametrize("kind", activations.ACTIVATIONS)
@pytest.mark.parametrize(("gate", "up"), [(True, True), (True, False)])
def test_mlp_of_selected_blocks(rng, fmt, block, kind, gate, up):
    length = whole(fmt, 96)
    store, layout = blocks_of(rng, [fmt] * 3, length, block, gate, up)
    for (tokens, slots), with_terms in zip(FEW, (False, True, True, True), strict=True):
        x, k = floats(rng, tokens, length) / np.float32(length**0.5), len(slots)
        terms = terms_of(rng, tokens, k, block) if with_terms else mlp.Terms()
        assert_equal((store, np.array(slots, np.int32), layout, x, terms), kind)


@pytest.mark.parametrize("kind", activations.ACTIVATIONS)
@pytest.mark.parametrize(
    "formats", [("q4_k", "q4_k", "q6_k"), ("int8_group32", "q4_1", "fp16"), ("q5_0", "int4_group32", "int8_group32")]
)
@pytest.mark.parametrize(("gate", "up"), [(True, True), (True, False), (False, True), (False, False)])
def test_slices_of_several_formats_are_multiplied_each_in_its_own(rng, formats, kind, gate, up):
    store, layout = blocks_of(rng, formats, 512, 256, gate, up)
    x = floats(rng, 3, 512) / np.float32(512**0.5)
    assert_equal((store, np.array([1, 4, 0], np.int32), layout, x, terms_of(rng, 3, 3, 256)), kind)


@pytest.mark.parametrize("function", ["relu", "relu2", "drelu", "fatrelu", "gelu", "gelu_tanh", "swiglu_oai"])
def test_activation_functions(rng, function):
    store, layout = blocks_of(rng, ["fp16"] * 3, 64, 32, function=function)
    assert_equal((store, np.arange(6, dtype=np.int32), layout, floats(rng, 2, 64), mlp.Terms()), "fp32", function)


@pytest.mark.parametrize(("fmt", "block"), BLOCKS)
@pytest.mark.parametrize("kind", activations.ACTIVATIONS)
def test_bits_depend_on_neither_threads_nor_other_tokens_nor_other_units(rng, fmt, block, kind):
    """Of more rows than a task has, with biases and factors; units, or those joined to 256 neurons, in their order."""
    joined = 256 // block
    k = 2 * joined + 2
    store, layout = blocks_of(rng, [fmt] * 3, 512, block)
    slots, x = rng.integers(0, 6, k).astype(np.int32), floats(rng, 7, 512)
    gate_KB, up_KB, factors_TK = floats(rng, k, block), floats(rng, k, block), floats(rng, 7, k)

    def found(tokens: slice, units: slice, threads: int = 1) -> np.ndarray:
        factors = np.ascontiguousarray(factors_TK[tokens, units])
        terms = mlp.Terms(gate_KB[units].ravel(), up_KB[units].ravel(), factors)
        return mlp.mlp(store, slots[units], layout, x[tokens], terms, threads, kind)

    together = found(ALL, ALL)
    for threads in (2, 4):
        assert found(ALL, ALL, threads).tobytes() == together.tobytes()
    for t in range(7):
        assert found(slice(t, t + 1), ALL).tobytes() == together[t].tobytes()
    added = np.zeros_like(together)
    for u in range(0, k, joined):
        added += found(ALL, slice(u, u + joined))
    assert added.tobytes() == together.tobytes()


def test_inner_activations_are_rounded(rng):
    """Down's first row selects an inner activation beside a far larger one of its group, which int8 rounds to zero."""
    store = np.zeros((1, 96, 32), np.float16)
    store[0, :32, 0] = np.where(np.arange(32) == 1, 1000, 1)  # the inner activations
    down = np.zeros((32, 32), np.float32)
    down[0, 0] = 1
    codes = np.concatenate([store[0, :32].view(np.uint8).ravel(), q8_0(down).ravel()])[None]
    layout = mlp.UnitLayout((0, "fp16"), None, (2048, "q8_0"), 32, "relu", 0.0, 32)
    x, slots = np.eye(1, 32, dtype=np.float32), np.zeros(1, np.int32)
    found = {kind: mlp.mlp(codes, slots, layout, x, mlp.Terms(), activations=kind)[0, 0] for kind in TOLERANCE}
    assert found["fp32"] == pytest.approx(1, rel=1e-3)
    assert found["int16"] == pytest.approx(33 * 1000 / 32512, rel=1e-3)
    assert found["int8"] == 0


def q8_0(values: np.ndarray) -> np.ndarray:
    """Encodes rows of 32 values whose largest magnitude is 1 or 0."""
    codes = np.zeros((len(values), 34), np.uint8)
    codes[:, :2] = np.full((len(values), 1), 1 / 127, np.float16).view(np.uint8)
    codes[:, 2:] = np.rint(values * 127).astype(np.int8).view(np.uint8)
    return codes


BAD = [
    ({"slots": np.array([0, 3], np.int32)}, r"slot 3 at index 1 is outside the store of 3 slots"),
    ({"block": 33}, r"a block of 33 neurons, expected a multiple of 32 up to 1048576"),
    ({"block": 0}, r"a block of 0 neurons"),
    ({"block": 1 << 40}, r"a block of 1099511627776 neurons"),
    ({"block": 64}, r"32 rows of 64 values in fp16 at byte 4096 take, each, 128 bytes, but the stored rows have 6144"),
    ({"gate_offset": 4097}, r"32 rows of 32 values in fp16 at byte 4097 take, each, 64 bytes"),
    ({"up_offset": -1}, r"at byte -1 take, each, 64 bytes"),
    ({"down_offset": 4098}, r"32 rows of 32 values in fp16 at byte 4098 take, each, 64 bytes"),
    ({"down_fmt": "q4_k"}, r"a row of 32 values has no whole number of blocks of 256 in q4_k"),
    ({"up_fmt": "int5"}, r"no native kernel reads the format 'int5'"),
    ({"activation": "tanh"}, r"no native kernel computes the activation 'tanh'"),
    ({"gate_bias": np.zeros(2, np.float32)}, r"gate_bias has 2 values, expected 64"),
    ({"up_bias": np.zeros(65, np.float32)}, r"up_bias has 65 values, expected 64"),
    ({"factors": np.zeros((1, 64), np.float32)}, r"a row of factors has 64 values, expected 2"),
    ({"factors": np.zeros((2, 2), np.float32)}, r"factors has 2 values, expected 1"),
    ({"x": np.zeros((1, 31), np.float32)}, r"a row of x has 31 values, expected 32"),
    ({"x": np.zeros((0, 32), np.float32)}, r"0 vectors are to be multiplied with, expected 1 to 1024"),
    ({"num_threads": -1}, r"num_threads is -1"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_arguments(change, message):
    gate, up, down = (
        (change.get(f"{name}_offset", offset), change.get(f"{name}_fmt", "fp16"))
        for name, offset in (("gate", 0), ("up", 2048), ("down", 4096))
    )
    layout = mlp.UnitLayout(gate, up, down, 32, change.get("activation", "relu"), 0.0, change.get("block", 32))
    terms = mlp.Terms(*(change.get(name) for name in ("gate_bias", "up_bias", "factors")))
    slots, x = change.get("slots", np.array([0, 1], np.int32)), change.get("x", np.zeros((1, 32), np.float32))
    with pytest.raises(ValueError, match=message):
        mlp.mlp(np.zeros((3, 6144), np.uint8), slots, layout, x, terms, change.get("num_threads", 1))


@pytest.mark.parametrize("bad", [np.zeros((1, 32)), np.zeros(32, np.float32), np.zeros((1, 64), np.float32)[:, ::2]])
def test_vectors_of_another_kind_are_not_converted(bad):
    layout = mlp.UnitLayout((0, "fp16"), (2048, "fp16"), (4096, "fp16"), 32, "relu", 0.0, 32)
    with pytest.raises(TypeError):
        mlp.mlp(np.zeros((3, 6144), np.uint8), np.zeros(1, np.int32), layout, bad, mlp.Terms())
