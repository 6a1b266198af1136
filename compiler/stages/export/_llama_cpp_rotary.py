"""Finds the settings from which llama.cpp makes rotary frequencies: an artifact has only the frequencies.

A base gives a geometric sequence, a factor divides all of it, and YaRN (Peng et al. 2023, section 3.2) divides the last
frequencies by its factor, the first not at all, and those between in part.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from coldpress.compiler.stages.export._stored import StoredModel
from coldpress.schemas.model import FREQUENCIES, RotaryKind

PRECISION = 4e-7
"""Relative precision with which a float32 frequency determines the base that it was computed from."""
MIXED_PRECISION = 1e-6
"""The same for YaRN's sum of two products."""
FAST, SLOW = 32, 1
"""Turns of the frequencies over the original context between which YaRN mixes; some architectures read no others."""


@dataclass(frozen=True)
class Yarn:
    base: float
    factor: float
    context_length: int
    """The original one."""


def frequencies(model: StoredModel, kind: RotaryKind = "main") -> np.ndarray:
    """Returns a kind's frequencies, float64 [rotary_dim / 2]."""
    return model.values(FREQUENCIES[kind]).astype(np.float64)


def geometric(base: float, scale: float, count: int) -> np.ndarray:
    return scale * base ** (-np.arange(count) / count)


def base_and_scale(found: np.ndarray) -> tuple[float, float]:
    """Returns (base, factor on all frequencies) of a geometric sequence; of others, the base that its beginning has."""
    count, scale = found.size, float(found[0])
    if count == 1:
        return 10000.0, scale
    base = float((found[-1] / scale) ** (-count / (count - 1)))
    for rounded in _rounded(base):
        if np.allclose(geometric(rounded, scale, count), found, rtol=PRECISION, atol=0):
            return rounded, scale
    return _base_of(float(found[1]), count), 1.0


def is_geometric(found: np.ndarray) -> bool:
    """Tells whether a base and a factor on all frequencies give them."""
    return np.allclose(geometric(*base_and_scale(found), found.size), found, rtol=PRECISION, atol=0)


def yarn_of(found: np.ndarray) -> Yarn | None:
    """Returns settings of YaRN that give the frequencies; None if there are none. The base is that of the first two or
    that of the last two frequencies: YaRN divides both by the same in one pair."""
    count = found.size
    steps = np.arange(count)
    for base in sorted({_base_of(float(found[1]), count), _base_of(float(found[-1] / found[-2]), count)}):
        shares = found / geometric(base, 1.0, count)
        for first, last in product(range(count - 1), range(2 * count)):
            ramp = np.clip((steps - first) / max(0.001, last - first), 0, 1)
            lost, context_length = (1 - shares[-1]) / ramp[-1], _context_length(base, count, first, last)
            fits = 0 < lost < 1 and np.allclose(shares, 1 - lost * ramp, rtol=MIXED_PRECISION, atol=0)
            if fits and context_length is not None:
                return Yarn(base, 1 / (1 - lost), context_length)
    return None


def _context_length(base: float, count: int, first: int, last: int) -> int | None:
    """Returns an original context with which YaRN keeps frequencies up to `first` and divides those from `last` on."""
    turn = 2 * math.pi
    lowest = max(SLOW * turn * base ** ((last - 1) / count), FAST * turn * base ** (first / count) if first else 1.0)
    highest = FAST * turn * base ** ((first + 1) / count)
    if last < 2 * count - 1:  # there the rule ends
        highest = min(highest, SLOW * turn * base ** (last / count))
    found = round(math.sqrt(lowest * highest)) if lowest < highest else 0
    return found if lowest < found < highest else None


def _base_of(ratio: float, count: int) -> float:
    """Returns the roundest base of a sequence with this ratio of neighbours."""
    base = ratio**-count
    return next(rounded for rounded in _rounded(base) if np.isclose(rounded, base, rtol=count * PRECISION))


def _rounded(base: float) -> Iterator[float]:
    """Yields the number, roundest form first: float32 frequencies do not determine it more precisely."""
    yield from (float(f"{base:.{digits}g}") for digits in range(1, 10))
