"""Formats in planes: both planes together are the plain format, and each alone is what it stands for."""

import numpy as np
import pytest

from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._planes import PLANES

LENGTHS = [1, 31, 32, 33, 172]


@pytest.fixture(params=sorted(PLANES))
def planes(request):
    return PLANES[request.param]


def some_codes(planes, length: int) -> np.ndarray:
    """Codes of drawn weights, of zeros, and of every number under a scale of either sign."""
    values = np.random.default_rng(length).standard_normal((40, length)).astype(np.float32)
    values[0] = 0
    codes = planes.whole.encode(values)
    if planes.bits == 8:
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
    assert coarse.shape == (40, planes.coarse_nbytes(length))
    assert refinement.shape == (40, planes.refinement_nbytes(length))
    assert np.array_equal(planes.join(coarse, refinement), codes)
    both = planes.coarse_values(coarse, length) + planes.refinement_values(coarse, refinement, length)
    plain = load("coldpress.runtime.quantization", Format, planes.format).decode(codes, length)
    assert np.array_equal(both, plain)
    assert both.dtype == np.float32


def test_planes_take_the_bytes_of_the_plain_format(planes):
    """Scales are stored once."""
    assert planes.coarse_nbytes(4096) + planes.refinement_nbytes(4096) == planes.whole.nbytes(4096)


def test_the_coarse_plane_stands_for_the_middle_of_what_it_leaves_open(planes):
    codes = some_codes(planes, 64)
    coarse, refinement = planes.split(codes)
    open_values = [
        planes.whole.decode(planes.join(coarse, np.full_like(refinement, filled)), 64) for filled in (0x00, 0xFF)
    ]
    assert np.array_equal(planes.coarse_values(coarse, 64), (open_values[0] + open_values[1]) / 2)


def test_int4_layouts_by_hand():
    codes = np.zeros((1, 18), np.uint8)
    codes[0, :2] = np.array([1.0], "<f2").view(np.uint8)
    codes[0, 2:] = 0x88  # a level of 0
    codes[0, 2], codes[0, 5] = 0x8D, 0x18  # value 0 is 13 - 8 = 5, value 19 is 1 - 8 = -7
    coarse, refinement = PLANES["int4_2_2"].split(codes)
    high, low = [2] * 32, [0] * 32
    high[0], low[0], high[19], low[19] = 3, 1, 0, 1
    assert coarse[0, 2:].tolist() == [sum(high[byte + 8 * part] << 2 * part for part in range(4)) for byte in range(8)]
    assert refinement[0].tolist() == [sum(low[byte + 8 * part] << 2 * part for part in range(4)) for byte in range(8)]
    coarse, refinement = PLANES["int4_3_1"].split(codes)
    three, one = [4] * 32, [0] * 32
    three[0], one[0], three[19], one[19] = 6, 1, 0, 1
    assert coarse[0, 2:10].tolist() == [
        sum((three[byte + 8 * part] & 3) << 2 * part for part in range(4)) for byte in range(8)
    ]
    assert coarse[0, 10:].tolist() == [
        sum((three[byte + 4 * part] >> 2) << part for part in range(8)) for byte in range(4)
    ]
    assert refinement[0].tolist() == [sum(one[byte + 4 * part] << part for part in range(8)) for byte in range(4)]
