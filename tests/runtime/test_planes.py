"""Formats in planes: both planes together are the plain format, and the coarse plane alone is what it stands for."""

import numpy as np
import pytest

from coldpress.runtime.kernels import planes as kernels
from coldpress.runtime.plugins import names
from coldpress.runtime.quantization._planes import PlanesFormat, planes_of, unit_planes, whole_format
from tests.support import reference_kernels

LENGTHS = [1, 31, 32, 33, 172]
FORMATS = [name for name in names("coldpress.runtime.quantization") if planes_of(name)]


def in_planes(name: str) -> PlanesFormat:
    found = planes_of(name)
    assert found is not None
    return found


@pytest.fixture(params=FORMATS)
def planes(request):
    return in_planes(request.param)


def some_codes(planes, length: int) -> np.ndarray:
    """Codes of drawn weights, of zeros, and of every number under a scale of either sign."""
    values = np.random.default_rng(length).standard_normal((40, length)).astype(np.float32)
    values[0] = 0
    codes = planes.whole.encode(values)
    if planes.HIGH_BITS + planes.LOW_BITS == 8:
        codes[1, 2:34] = np.arange(97, 129, dtype=np.uint8)  # 127 and -128 among them, which encoding never gives
        codes[2, 2:34] = np.arange(128, 160, dtype=np.uint8)
    else:
        codes[1, 2:18] = codes[2, 2:18] = np.arange(16) * 17
        codes[2, 1] ^= 0x80
    return codes


@pytest.mark.parametrize("length", LENGTHS)
def test_both_planes_together_are_the_plain_format_bit_for_bit(planes, length):
    codes = some_codes(planes, length)
    coarse, refinement = planes.split(codes)
    assert coarse.shape == (40, planes.nbytes(length))
    assert refinement.shape == (40, planes.unit_nbytes(length))
    assert np.array_equal(planes.join(coarse, refinement), codes)
    ids, slots = np.array([39, 0, 1, 2, 2], np.int32), np.array([3, 2, 4, 0, 1], np.int32)
    stored = np.zeros((6, refinement.shape[1] + 5), np.uint8)[:, : refinement.shape[1]]
    stored[slots] = refinement[ids]
    assert np.array_equal(kernels.join_units(kernels.Coarse(coarse, ids, planes.name()), stored, slots), codes[ids])


MIXED = ("int4_2_2+int4_3_1+int4_2_2", "int4_3_1+int4_2_2+int4_2_2", "int4_3_1+int4_2_2")


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("length", LENGTHS)
def test_slices_in_several_formats_are_split_and_joined_each_in_its_own(name, length):
    """The native core and numpy, against the formats of the slices."""
    slices = [in_planes(one) for one in name.split("+")]
    codes = [some_codes(one, length) for one in slices]
    codes[0] = codes[0][::-1]
    parts = [one.split(part) for one, part in zip(slices, codes, strict=True)]
    coarse, refinement = (np.concatenate(planes, axis=1) for planes in zip(*parts, strict=True))
    plain, units = np.concatenate(codes, axis=1), unit_planes(name)
    assert units is not None
    assert all(np.array_equal(*pair) for pair in zip(units.split(plain), (coarse, refinement), strict=True))
    ids, slots = np.array([39, 0, 1, 2, 2], np.int32), np.array([3, 2, 4, 0, 1], np.int32)
    stored = np.zeros((6, refinement.shape[1] + 5), np.uint8)[:, : refinement.shape[1]]
    stored[slots] = refinement[ids]
    given = kernels.Coarse(coarse, ids, name)
    for join in (kernels.join_units, reference_kernels.join_units):
        assert np.array_equal(join(given, stored, slots), plain[ids])
    size = sum(one.nbytes(32) for one in slices), sum(one.unit_nbytes(32) for one in slices)
    assert units.joined_share == pytest.approx(sum(size) / size[1])


def test_planes_take_the_bytes_of_the_plain_format(planes):
    """Scales are stored once."""
    assert planes.nbytes(4096) + planes.unit_nbytes(4096) == planes.whole.nbytes(4096)
    assert planes.whole.unit_nbytes(4096) == planes.whole.nbytes(4096)


def test_the_coarse_plane_stands_for_the_middle_of_what_it_leaves_open(planes):
    codes = some_codes(planes, 64)
    coarse, refinement = planes.split(codes)
    least, greatest = (
        planes.whole.decode(planes.join(coarse, np.full_like(refinement, filled)), 64) for filled in (0x00, 0xFF)
    )
    middle = planes.MIDDLE / ((1 << planes.LOW_BITS) - 1)
    assert middle == pytest.approx(0.5, abs=0.04)
    expected = least + middle * (greatest - least).astype(np.float64)
    assert np.allclose(planes.decode(coarse, 64), expected, rtol=1e-6)


def test_the_coarse_plane_of_encoded_values_is_that_of_the_plain_codes(planes):
    values = np.random.default_rng(5).standard_normal((7, 100)).astype(np.float32)
    assert np.array_equal(planes.encode(values), planes.split(planes.whole.encode(values))[0])


def test_a_plain_format_is_its_own_whole():
    assert whole_format("int4_3_1") == whole_format("int4_group32") == "int4_group32"
    assert planes_of("fp16") is None


def test_the_kernel_refuses_what_does_not_fit():
    planes = in_planes("int4_2_2")
    coarse, refinement = planes.split(some_codes(planes, 64))
    none, far = np.array([], np.int32), np.array([40], np.int32)
    zero = np.array([0], np.int32)
    assert kernels.join_units(kernels.Coarse(coarse, none, "int4_2_2"), refinement, none).shape == (0, 36)
    for ids, slots, units in ((far, zero, refinement), (zero, far, refinement), (zero, zero, refinement[:, :8])):
        with pytest.raises(ValueError, match=r"expected|outside"):
            kernels.join_units(kernels.Coarse(coarse, ids, "int4_2_2"), units, slots)
    with pytest.raises(ValueError, match="several plain formats"):
        kernels.join_units(kernels.Coarse(coarse, zero, "int4_2_2+int8_4_4"), refinement, zero)
    with pytest.raises(ValueError, match="the format has no planes"):
        kernels.join_units(kernels.Coarse(coarse, zero, "int4_group32"), refinement, zero)


def test_int4_layouts_by_hand():
    codes = np.zeros((1, 18), np.uint8)
    codes[0, :2] = np.array([1.0], "<f2").view(np.uint8)
    codes[0, 2:] = 0x88  # a level of 0
    codes[0, 2], codes[0, 5] = 0x8D, 0x18  # value 0 is 13 - 8 = 5, value 19 is 1 - 8 = -7
    coarse, refinement = in_planes("int4_2_2").split(codes)
    high, low = [2] * 32, [0] * 32
    high[0], low[0], high[19], low[19] = 3, 1, 0, 1
    assert coarse[0, 2:].tolist() == [sum(high[byte + 8 * part] << 2 * part for part in range(4)) for byte in range(8)]
    assert refinement[0].tolist() == [sum(low[byte + 8 * part] << 2 * part for part in range(4)) for byte in range(8)]
    coarse, refinement = in_planes("int4_3_1").split(codes)
    three, one = [4] * 32, [0] * 32
    three[0], one[0], three[19], one[19] = 6, 1, 0, 1
    assert coarse[0, 2:10].tolist() == [
        sum((three[byte + 8 * part] & 3) << 2 * part for part in range(4)) for byte in range(8)
    ]
    assert coarse[0, 10:].tolist() == [
        sum((three[byte + 4 * part] >> 2) << part for part in range(8)) for byte in range(4)
    ]
    assert refinement[0].tolist() == [sum(one[byte + 4 * part] << part for part in range(8)) for byte in range(4)]
