"""llama.cpp's block formats against the package gguf's decoders and against an exhaustive search of ranges."""

import gguf
import numpy as np
import pytest

from coldpress.compiler.candidates import check_format, compared_formats
from coldpress.compiler.llama_cpp.formats import formats
from coldpress.compiler.llama_cpp.types import BLOCKS
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._ranges import RangeFormat
from coldpress.schemas.errors import ColdpressError
from tests.support.shapes import small_spec

TYPES = {own: name for name, own in formats().items() if name in BLOCKS and own != "fp16"}
IN_RANGES = tuple(
    name
    for name in names("coldpress.runtime.quantization")
    if isinstance(load("coldpress.runtime.quantization", Format, name), RangeFormat)
)


def weights(count: int, length: int, seed: int = 0) -> np.ndarray:
    """Values with heavy tails, as trained weights have."""
    return np.random.default_rng(seed).standard_t(4, (count, length)).astype(np.float32) * np.float32(0.02)


def test_every_type_of_gguf_that_a_build_reads_in_blocks_of_its_own_has_a_format():
    assert set(TYPES) >= {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_1", "q5_0", "q5_1", "iq4_nl", "int8_group32"}
    assert set(IN_RANGES) == {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_1", "q5_1"}


def test_k_formats_are_compared_where_they_fit_and_refused_where_they_do_not():
    fits = small_spec(hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=4, num_key_value_heads=4)
    assert compared_formats("auto", fits) == ("fp16", "int8_group32", "q3_k", "q4_k", "q5_k", "q6_k")
    check_format("q4_k", fits)
    narrow = small_spec(hidden_size=96)
    assert compared_formats("auto", narrow) == ("fp16", "int4_group32", "int8_group32", "q4_1", "q5_1")
    assert compared_formats("q5_0", narrow) == ("q5_0",)
    with pytest.raises(ColdpressError, match=r"format=q4_k stores 256 values in a block, and [a-z]+_proj has"):
        check_format("q4_1+q4_1+q4_k", narrow)


@pytest.mark.parametrize("name", list(TYPES))
def test_any_bytes_mean_what_they_mean_to_llama_cpp(name):
    fmt, (size, nbytes) = load("coldpress.runtime.quantization", Format, name), BLOCKS[TYPES[name]]
    codes = np.random.default_rng(3).integers(0, 256, (40, 3 * nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(codes, gguf.GGMLQuantizationType[TYPES[name]])
        found = fmt.decode(codes, 3 * size)
    assert fmt.nbytes(3 * size) == 3 * nbytes
    assert np.isfinite(expected).any()
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("name", ["q4_1", "q5_1"])
def test_ranges_lose_less_than_those_from_the_least_to_the_largest_value(name):
    values, kind = weights(64, 1024), gguf.GGMLQuantizationType[TYPES[name]]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    fmt = load("coldpress.runtime.quantization", Format, name)
    ours = fmt.decode(fmt.encode(values), 1024)
    assert np.linalg.norm(ours - values) < 0.93 * np.linalg.norm(theirs - values)


def exhaustive(values: np.ndarray, prices: np.ndarray, highest: int) -> float:
    """The least weighted squared error of one group over many ranges, in float64."""
    least, most = min(0.0, float(values.min())), float(values.max())
    best = np.inf
    for low in np.linspace(least, min(0.0, least * 0.4), 40):
        for high in np.linspace(max(most * 0.4, low + 1e-9), most * 1.05, 40):
            step = (high - low) / highest
            numbers = np.clip(np.rint((values - low) / step), 0, highest)
            best = min(best, float((prices * (values - low - step * numbers) ** 2).sum()))
    return best


def test_prices_decide_and_the_search_is_nearly_exhaustive():
    fmt = load("coldpress.runtime.quantization", Format, "q4_1")
    values = weights(12, 32, seed=5)
    prices = (10 ** np.random.default_rng(6).uniform(-3, 0, 32)).astype(np.float32)
    priced, plain = (fmt.decode(fmt.encode(values, by), 32) for by in (prices, None))
    lost = (prices * np.square(priced - values)).sum(axis=1)
    assert lost.sum() < 0.8 * (prices * np.square(plain - values)).sum()
    assert np.square(plain - values).sum() < np.square(priced - values).sum()
    least = np.array([exhaustive(row.astype(np.float64), prices, 15) for row in values])
    assert lost.sum() < 1.15 * least.sum()


@pytest.mark.parametrize("name", IN_RANGES)
def test_no_neighbouring_number_is_nearer(name):
    fmt = load("coldpress.runtime.quantization", Format, name)
    values = weights(4, 256, seed=8)
    blocks = fmt.encode(values).reshape(-1, fmt.BLOCK_BYTES)
    numbers, steps, starts = fmt.split(blocks)
    grouped = numbers.reshape(*steps.shape, fmt.GROUP).astype(np.float32)
    wanted = values.reshape(grouped.shape)
    for other in (grouped - 1, grouped + 1):
        inside = (other >= 0) & (other <= fmt.HIGHEST)
        here, there = (np.abs(steps[..., None] * n + starts[..., None] - wanted) for n in (grouped, other))
        assert (here <= there + 1e-7)[inside].all()


@pytest.mark.parametrize("name", IN_RANGES)
def test_joining_is_the_inverse_of_splitting(name):
    fmt = load("coldpress.runtime.quantization", Format, name)
    random = np.random.default_rng(9)
    numbers = random.integers(0, fmt.HIGHEST + 1, (6, fmt.BLOCK)).astype(np.uint8)
    per_block = fmt.BLOCK // fmt.GROUP
    starts = -random.uniform(0, 1, (6, per_block)).astype(np.float32)
    ranges = fmt.held(random.uniform(0.01, 0.1, (6, per_block)).astype(np.float32), starts)
    found, steps, own = fmt.split(fmt.join(numbers, ranges.header))
    assert np.array_equal(found, numbers)
    assert np.array_equal(steps, ranges.steps)
    assert np.array_equal(own, ranges.starts)
