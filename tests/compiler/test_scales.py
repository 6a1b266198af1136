"""Scales of groups against an exhaustive search, and rounding to nearest by the importance of inputs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from coldpress.compiler.rounding import rtn
from coldpress.compiler.rounding._weights import Weights
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format, iq4_nl
from coldpress.schemas.errors import ColdpressError

FORMATS = names("coldpress.runtime.quantization")
LEVELS = {"int4_group32": range(-8, 8), "q5_0": range(-16, 16), "iq4_nl": iq4_nl.LEVELS.tolist()}
SCALED = (*LEVELS, "int8_group32")


def groups(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Values float32 [count, 32] with heavy tails, and prices alike that differ a thousandfold."""
    random = np.random.default_rng(seed)
    values = random.standard_t(3, (count, 32)).astype(np.float32) * np.float32(0.05)
    return values, (10 ** random.uniform(-3, 0, (count, 32))).astype(np.float32)


def lost(values: np.ndarray, scale: float, prices: np.ndarray, levels: Sequence[float]) -> float:
    """What one group loses, each value to its nearest level, in float64 and one by one."""
    return sum(
        price * min((value - scale * level) ** 2 for level in levels)
        for value, price in zip(values.tolist(), prices.tolist(), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("format_name", list(LEVELS))
def test_scales_are_nearly_the_best_of_all(format_name):
    values, prices = groups(6)
    kept = load("coldpress.runtime.quantization", Format, format_name)
    found, plain = kept.scales(values, prices), kept.scales(values)
    levels = LEVELS[format_name]
    for group, price, scale, own in zip(values, prices, found.tolist(), plain.tolist(), strict=True):
        best = min(lost(group, own * multiple, price, levels) for multiple in np.linspace(-1.5, 1.5, 601))
        assert lost(group, scale, price, levels) <= min(1.25 * best, lost(group, own, price, levels))


@pytest.mark.parametrize("format_name", SCALED)
def test_no_group_loses_more_than_with_the_formats_own_scale(format_name):
    values, prices = groups(200, seed=1)
    kept = load("coldpress.runtime.quantization", Format, format_name)

    def losses(scales: np.ndarray) -> np.ndarray:
        return (prices * np.square(values - kept.nearest(values, scales[:, None]))).sum(axis=1)

    found = kept.scales(values, prices)
    # scales are searched before they are rounded to float16, which costs a little
    assert (losses(found) <= 1.002 * losses(kept.scales(values))).all()
    assert np.array_equal(found, found.astype(np.float16).astype(np.float32))
    if format_name in LEVELS:
        assert losses(found).sum() < 0.97 * losses(kept.scales(values)).sum()
    else:
        assert np.array_equal(found, kept.scales(values)), "so many levels need no search"


@pytest.mark.parametrize("format_name", SCALED)
def test_zeros_tiny_and_huge_groups_have_finite_scales(format_name):
    kept = load("coldpress.runtime.quantization", Format, format_name)
    values = np.ones((4, 32), np.float32) * np.array([[0], [1e-9], [60000], [-60000]], np.float32)
    for prices in (np.ones((1, 32), np.float32), np.zeros((4, 32), np.float32)):
        scales = kept.scales(values, prices)
        assert np.isfinite(scales).all()
        assert np.abs(kept.nearest(values, scales[:, None]) - values)[2:].max() < 4000, "unknown prices ruin nothing"
    with pytest.raises(ColdpressError, match="float16 holds at most"):
        kept.scales(np.full((1, 32), 1e9, np.float32), np.ones((1, 32), np.float32))
    if format_name in LEVELS:
        values[0, 3] = np.nan
        with pytest.raises(ColdpressError, match="magnitude nan"):
            kept.scales(values, np.ones((1, 32), np.float32))


def weights(axis: str, importance: np.ndarray | None) -> Weights:
    """A matrix of 40 outputs and 72 inputs, in slices along `axis`; the last group is not whole."""
    matrix = groups(90, seed=2)[0].reshape(40, 72)
    slices = {"row": matrix, "column": np.ascontiguousarray(matrix.T)}[axis]
    return Weights(len(slices), slices.shape[1], axis, lambda at, stop: slices[at:stop], None, importance)


def decoded(given: Weights, format_name: str) -> np.ndarray:
    """What codes say, float32 [40, 72]."""
    values = load("coldpress.runtime.quantization", Format, format_name).decode(
        rtn.Plugin().quantize(given, format_name), given.length
    )
    return values.T if given.axis == "column" else values.reshape(40, 72)


IMPORTANCE = np.geomspace(1, 1e-3, 72, dtype=np.float32)


@pytest.mark.parametrize("axis", ["row", "column"])
@pytest.mark.parametrize("format_name", list(LEVELS))
def test_errors_count_by_the_input_that_they_meet(axis, format_name):
    matrix = decoded(weights("row", None), "fp16")
    plain, weighted, even = (
        np.square(decoded(weights(axis, importance), format_name) - matrix).sum(axis=0)
        for importance in (None, IMPORTANCE, np.ones(72, np.float32))
    )
    assert (IMPORTANCE * weighted).sum() < 0.95 * (IMPORTANCE * plain).sum()
    if axis == "column":
        assert np.array_equal(weighted, even), "a column meets one input, so its values are all worth the same"
    else:
        assert (IMPORTANCE * weighted).sum() < 0.97 * (IMPORTANCE * even).sum()


@pytest.mark.parametrize("format_name", ["fp16", "int8_group32"])
@pytest.mark.parametrize("axis", ["row", "column"])
def test_fine_formats_have_no_scales_to_choose(axis, format_name):
    given = weights(axis, IMPORTANCE)
    assert np.array_equal(
        rtn.Plugin().quantize(given, format_name), rtn.Plugin().quantize(replace(given, importance=None), format_name)
    )


def test_blocks_change_no_byte(monkeypatch):
    whole = rtn.Plugin().quantize(weights("row", IMPORTANCE), "int4_group32")
    monkeypatch.setattr("coldpress.compiler.rounding._weights.BLOCK_BYTES", 700)
    assert np.array_equal(rtn.Plugin().quantize(weights("row", IMPORTANCE), "int4_group32"), whole)
