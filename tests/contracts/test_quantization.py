"""Every storage format, found by its file name, goes through one list of checks; then the exact layouts."""

import gguf
import numpy as np
import pytest

from coldpress.compiler.rounding import rtn
from coldpress.compiler.rounding._weights import Weights
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._ranges import RangeFormat
from coldpress.schemas.errors import ColdpressError

FORMATS = names("coldpress.runtime.quantization")
IN_GROUPS = [
    name for name in FORMATS if not isinstance(load("coldpress.runtime.quantization", Format, name), RangeFormat)
]
"""Formats whose groups have a scale, or nothing; those with steps and starts are in test_block_formats.py."""
LENGTHS = [0, 1, 31, 32, 33, 64, 172, 4096]
# the largest error of a value, as a share of the largest magnitude in its group; a searched range cuts that one off
STEP = {
    "fp16": 2**-11,
    "int8_group32": 0.51 / 127,
    "int4_group32": 1.01 / 8,
    "iq4_nl": 17 / 127,
    "q5_0": 1.01 / 16,
    "q2_k": 1.2,
    "q3_k": 0.8,
    "q4_1": 0.5,
    "q4_k": 0.5,
    "q5_1": 0.25,
    "q5_k": 0.25,
    "q6_k": 0.1,
}


@pytest.fixture(params=FORMATS)
def fmt(request):
    return load("coldpress.runtime.quantization", Format, request.param)


def matrix(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, length)).astype(np.float32)


def name_of(fmt) -> str:
    return fmt.name()


def test_formats_found():
    assert set(FORMATS) >= {"fp16", "int8_group32", "int4_group32"}


@pytest.mark.parametrize("length", LENGTHS)
def test_round_trip(fmt, length):
    values = matrix(5, length)
    codes = fmt.encode(values)
    decoded = fmt.decode(codes, length)
    assert codes.dtype == np.uint8
    assert codes.shape == (5, fmt.nbytes(length))
    assert decoded.dtype == np.float32
    assert decoded.shape == values.shape
    limit = STEP[name_of(fmt)] * np.abs(values).max(initial=0)
    assert np.abs(decoded - values).max(initial=0) <= limit


@pytest.mark.parametrize("length", [1, 33, 172])
def test_the_last_group_is_padded_with_zeros(fmt, length):
    values = matrix(3, length)
    whole = np.zeros((3, -(-length // 32) * 32), np.float32)
    whole[:, :length] = values
    codes = fmt.encode(values)
    assert np.array_equal(codes, fmt.encode(whole)[:, : codes.shape[1]])


def test_a_slice_does_not_depend_on_its_neighbours(fmt):
    values = matrix(7, 172)
    codes = fmt.encode(values)
    assert all(np.array_equal(fmt.encode(values[i : i + 1])[0], codes[i]) for i in range(7))


def test_more_slices_than_a_block(fmt):
    values = matrix(300, 4096)
    codes = fmt.encode(values)
    assert np.array_equal(codes[299], fmt.encode(values[299:])[0])
    assert np.array_equal(fmt.decode(codes, 4096)[299], fmt.decode(codes[299:], 4096)[0])


def test_codes_taken_out_of_a_unit(fmt):
    codes = fmt.encode(matrix(4, 100))
    unit = np.zeros((4, codes.shape[1] + 9), np.uint8)
    unit[:, 5:-4] = codes
    assert np.array_equal(fmt.decode(unit[:, 5:-4], 100), fmt.decode(codes, 100))


def test_encoding_what_was_decoded_changes_nothing(fmt):
    if fmt.name() not in IN_GROUPS:
        return  # a search may find another range, and headers of few digits hold it otherwise
    once = fmt.decode(fmt.encode(matrix(20, 172)), 172)
    assert np.abs(fmt.decode(fmt.encode(once), 172) - once).max() <= 1e-3 * np.abs(once).max()


def grouped(fmt, values: np.ndarray) -> np.ndarray:
    """Each group's scale, float32 [n, groups], from values [n, length]."""
    return np.stack([fmt.scales(values[:, start : start + 32]) for start in range(0, values.shape[1], 32)], axis=1)


@pytest.mark.parametrize("name", IN_GROUPS)
@pytest.mark.parametrize("length", [31, 64, 172])
def test_codes_of_given_scales_say_the_nearest_values(name, length):
    fmt = load("coldpress.runtime.quantization", Format, name)
    values = matrix(6, length)
    values[0] = 0
    scales = grouped(fmt, values)
    nearest = fmt.nearest(values, np.repeat(scales, 32, axis=1)[:, :length])
    codes = fmt.pack(nearest, scales)
    assert codes.shape == (6, fmt.nbytes(length))
    assert np.array_equal(fmt.decode(codes, length), nearest)
    limit = STEP[name_of(fmt)] * np.abs(values).max()
    assert np.abs(nearest - values).max() <= limit


@pytest.mark.parametrize("name", IN_GROUPS)
def test_no_neighbouring_value_is_nearer(name):
    fmt = load("coldpress.runtime.quantization", Format, name)
    values = matrix(3, 32, seed=5)
    scales = grouped(fmt, values)
    nearest = fmt.nearest(values, scales)
    for step in (-1, 1):
        other = fmt.nearest(nearest + step * np.where(scales == 1, 2**-11 * np.abs(nearest), scales), scales)
        assert (np.abs(other - values) >= np.abs(nearest - values) - 1e-7).all()


def test_zeros_and_no_slices(fmt):
    assert not fmt.decode(fmt.encode(np.zeros((2, 40), np.float32)), 40).any()
    assert fmt.encode(np.zeros((0, 40), np.float32)).shape == (0, fmt.nbytes(40))
    assert fmt.decode(np.zeros((0, fmt.nbytes(40)), np.uint8), 40).shape == (0, 40)


@pytest.mark.parametrize("magnitude", [1e-7, 1e-30, 1e-42])
def test_magnitudes_below_float16_decode_to_finite_values(fmt, magnitude):
    values = matrix(2, 64) * np.float32(magnitude)
    decoded = fmt.decode(fmt.encode(values), 64)
    assert np.isfinite(decoded).all()
    assert np.abs(decoded).max() <= np.abs(values).max() + 2**-20


def test_magnitudes_above_float16_are_refused(fmt):
    values = np.full((1, 32), -1e12, np.float32)
    with pytest.raises(ColdpressError, match=rf"cannot encode in {name_of(fmt)}: found a value or scale of magnitude"):
        fmt.encode(values)


def test_the_first_number_that_float16_rounds_to_infinity_is_refused():
    fp16 = load("coldpress.runtime.quantization", Format, "fp16")
    for value in (65520, -65520, 65530, np.nan, np.inf):
        with pytest.raises(ColdpressError, match="cannot encode in fp16"):
            fp16.encode(np.array([[value, 1]], np.float32))


def test_wrong_number_of_bytes_is_refused(fmt):
    with pytest.raises(ColdpressError, match=rf"found 3 bytes per slice where 40 values take {fmt.nbytes(40)}"):
        fmt.decode(np.zeros((2, 3), np.uint8), 40)


def test_largest_float16_is_kept():
    fp16 = load("coldpress.runtime.quantization", Format, "fp16")
    values = np.array([[65504, -65504, 65519, 2**-24]], np.float32)
    assert fp16.decode(fp16.encode(values), 4).tolist() == [[65504, -65504, 65504, 2**-24]]


def q4_0(group: np.ndarray) -> bytes:
    """llama.cpp's quantize_row_q4_0_ref for 32 values, one at a time and in float32."""
    amax, peak = np.float32(0), np.float32(0)
    for v in group:
        if abs(v) > amax:
            amax, peak = abs(v), v
    d = peak / np.float32(-8)
    inverse = np.float32(1) / d if d else np.float32(0)
    q = [min(15, int(v * inverse + np.float32(8.5))) for v in group]
    return d.astype("<f2").tobytes() + bytes(q[i] | q[i + 16] << 4 for i in range(16))


def q8_0(group: np.ndarray) -> bytes:
    """llama.cpp's quantize_row_q8_0_ref for 32 values."""
    d = np.abs(group).max() / np.float32(127)
    inverse = np.float32(1) / d if d else np.float32(0)
    q = [int(np.sign(v) * np.floor(abs(float(v * inverse)) + 0.5)) for v in group]
    return d.astype("<f2").tobytes() + np.array(q, np.int8).tobytes()


@pytest.mark.parametrize(("name", "reference"), [("int4_group32", q4_0), ("int8_group32", q8_0)])
def test_bytes_equal_llama_cpp(name, reference):
    values = matrix(40, 96, seed=3)
    values[0] = 0
    values[1, :32] = np.round(values[1, :32])  # equal peaks of both signs, and halves
    values[2] *= 1e-6
    codes = load("coldpress.runtime.quantization", Format, name).encode(values)
    for row, code in zip(values, codes, strict=True):
        assert code.tobytes() == b"".join(reference(row[i : i + 32]) for i in range(0, 96, 32))


@pytest.mark.parametrize(("name", "kind"), [("int4_group32", "Q4_0"), ("int8_group32", "Q8_0")])
def test_rounded_to_nearest_is_what_the_package_gguf_gives(name, kind):
    """Of `rtn`, as the build uses it; the package has its own arithmetic."""
    values = matrix(64, 4096, seed=7) * np.float32(0.02)
    weights = Weights(64, 4096, "row", lambda start, stop: values[start:stop])
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(rtn.Plugin().quantize(weights, name), expected)


def test_int4_layout_by_hand():
    values = np.zeros((1, 32), np.float32)
    values[0, 0], values[0, 1], values[0, 16] = -8, 7, 3
    code = load("coldpress.runtime.quantization", Format, "int4_group32").encode(values)[0]
    assert code[:2].view("<f2") == 1.0
    assert (code[2] & 15, code[3] & 15, code[2] >> 4, code[4]) == (0, 15, 11, 0x88)


def test_int8_rounds_halves_away_from_zero():
    values = np.zeros((1, 32), np.float32)
    values[0, :4] = 127, 2.5, -2.5, 0.49999997
    code = load("coldpress.runtime.quantization", Format, "int8_group32").encode(values)[0]
    assert code[2:6].view(np.int8).tolist() == [127, 3, -3, 0]


def test_whether_codes_are_finite_is_what_decoding_says(fmt):
    """Codes of random bytes, where a scale in 32 is no number, a slice at a time and as columns of a unit."""
    codes = np.random.default_rng(7).integers(0, 256, (300, fmt.nbytes(40)), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = np.isfinite(fmt.decode(codes, 40)).all(axis=1)
    assert 10 < expected.sum() < 299
    units = np.concatenate([codes, codes], axis=1)
    for number, one in enumerate(expected):
        assert fmt.finite(codes[number : number + 1]) == one
        assert fmt.finite(units[number : number + 1, codes.shape[1] :]) == one
    assert fmt.finite(codes[expected])
    assert not fmt.finite(codes)
