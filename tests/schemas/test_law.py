"""The law of reads and its fit: against laws that are known, scipy's least squares, and what every law must obey."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import least_squares

from coldpress.schemas.device import Flash, ReadPoint, flash_seconds
from coldpress.schemas.law import Grid, Law, combined, fit, read_seconds
from tests.support.shapes import small_device
from tests.support.statistics import device_of

SIZES = np.array([4096.0 * 2**step for step in range(11)], np.float64)
DEPTHS = (1.0, 4.0, 32.0)
LAWS = st.builds(
    Law,
    reads_per_s=st.floats(1e3, 1e6),
    bytes_per_s=st.floats(1e8, 1e10),
    overlap=st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]),
)


def grid_of(law: Law, latency_s: float, noise: float = 0.0) -> Grid:
    sizes, depths = np.repeat(SIZES, len(DEPTHS)), np.tile(np.array(DEPTHS, np.float64), len(SIZES))
    random = np.random.default_rng(3).normal(0, noise, sizes.size) if noise else 0.0
    return Grid(sizes, depths, read_seconds(law, latency_s, sizes, depths) * np.exp(random))


@settings(deadline=None, max_examples=30)
@given(LAWS, st.floats(1e-5, 1e-3), st.booleans())
def test_a_known_law_is_found_again(law: Law, latency_s: float, is_known: bool) -> None:
    found = fit(grid_of(law, latency_s), latency_s if is_known else None)
    assert np.abs(found.errors).max() < 0.01


def test_the_parameters_are_found_where_every_bound_shows() -> None:
    law = Law(reads_per_s=1e5, bytes_per_s=2e9, overlap=0.0)
    found = fit(grid_of(law, 5e-5), None)
    assert found.law.reads_per_s == pytest.approx(1e5, rel=1e-3)
    assert found.law.bytes_per_s == pytest.approx(2e9, rel=1e-3)
    assert found.latency_s == pytest.approx(5e-5, rel=1e-3)
    assert found.law.overlap == 0


@pytest.mark.parametrize("overlap", [0.0, 0.3, 0.6])
def test_the_fit_is_scipys_least_squares(overlap: float) -> None:
    """Under noise, with the overlap that was fitted: no parameters have smaller squares."""
    grid = grid_of(Law(reads_per_s=8e4, bytes_per_s=1.5e9, overlap=overlap), 9e-5, noise=0.08)
    found = fit(grid, None)
    power = 1 / (1 - found.law.overlap)

    def off(logs: np.ndarray) -> np.ndarray:
        operation, latency, byte = np.exp(logs)
        bounds = np.stack([np.full_like(grid.read_s, operation), latency / grid.in_flight, grid.read_bytes * byte])
        return np.log((bounds**power).sum(axis=0) ** (1 / power) / grid.read_s)

    best = least_squares(off, np.log([1e-5, 1e-4, 1e-9]), x_scale=0.1, xtol=1e-12, ftol=1e-12)
    ours = np.log1p(found.errors)
    assert ours @ ours == pytest.approx(2 * best.cost, rel=1e-3)


@given(LAWS, st.floats(0, 1e-3), st.integers(1, 64), st.data())
def test_more_reads_or_bytes_never_take_less(law: Law, latency_s: float, depth: int, data: st.DataObject) -> None:
    flash = device_of(latency_s=0.0, queue_depth=depth).flash.model_copy(update={"law": law})
    flash = flash.model_copy(update={"latency_s": flash.latency_s.model_copy(update={"value": latency_s})})
    reads, more = np.sort(data.draw(st.tuples(st.integers(0, 2000), st.integers(0, 2000))))
    size, larger = np.sort(data.draw(st.tuples(st.integers(0, 1 << 30), st.integers(0, 1 << 30))))
    seconds = flash_seconds(flash, np.array([reads, more, reads, more]), np.array([size, size, larger, larger]))
    few, many, large, both = seconds
    assert max(many, large) <= both * (1 + 1e-9)
    assert few <= min(many, large) * (1 + 1e-9)
    assert float(flash_seconds(flash, reads, size)) == pytest.approx(few, rel=1e-12)
    bounds = (reads / law.reads_per_s, -(-reads // depth) * latency_s, size / law.bytes_per_s)
    assert max(bounds) * (1 - 1e-9) <= few <= sum(bounds) * (1 + 1e-9)


def test_the_ends_are_the_maximum_and_the_sum() -> None:
    bounds = (np.array([1.0, 0.0]), np.array([2.0, 0.0]), np.array([4.0, 0.0]))
    assert combined(bounds, 1.0).tolist() == [4, 0]
    assert combined(bounds, 0.0).tolist() == [7, 0]
    assert combined(bounds, 0.5).tolist() == pytest.approx([21**0.5, 0])
    assert combined(bounds, 0.999999).tolist() == pytest.approx([4, 0], rel=1e-5)


def test_a_lone_read_is_one_read_in_flight() -> None:
    """What the first unit of a request waits for."""
    flash = device_of(queue_depth=32).flash.model_copy(
        update={"law": Law(reads_per_s=1e5, bytes_per_s=1e9, overlap=0.0)}
    )
    assert float(flash_seconds(flash, 1, 10**6)) == pytest.approx(1e-5 + 1e-4 + 1e-3)
    assert float(read_seconds(flash.law, 1e-4, 10**6, 1)) == pytest.approx(1e-5 + 1e-4 + 1e-3)


def flash_with(*points: tuple[int, float, int | None], **changes: Any) -> Flash:
    values = json.loads(small_device().flash.to_json())
    del values["law"]
    curve = [{"read_bytes": size, "bytes_per_s": rate, "reads_in_flight": depth} for size, rate, depth in points]
    values["read_curve"]["value"] = curve
    for name, value in changes.items():
        values[name]["value"] = value
    return Flash.model_validate_json(json.dumps(values))


def test_points_have_their_reads_in_flight() -> None:
    law = Law(reads_per_s=1e5, bytes_per_s=1e9, overlap=0.0)
    points = [
        (size, size / float(read_seconds(law, 1e-4, size, depth)), depth)
        for size in (4096, 65536, 1 << 20)
        for depth in (1, 8, 32)
    ]
    flash = flash_with(*points)
    assert flash.law.overlap == 0
    assert np.abs(flash.law_errors).max() < 1e-3


def test_modelled_times_are_as_far_off_as_whole_tokens_and_the_median_point() -> None:
    """Three points at exactly, 10 % above and 40 % above the law's seconds: the median is 10 %, of the measured
    seconds."""
    law, points = Law(reads_per_s=1e5, bytes_per_s=1e9, overlap=1.0), []
    for size, slower in ((4096, 1.0), (65536, 1 / 0.9), (1 << 20, 1 / 0.6)):
        points.append((size, size / (slower * float(read_seconds(law, 1e-4, size, 8))), 8))
    flash = flash_with(*points).model_copy(update={"law": law})
    assert small_device().model_copy(update={"flash": flash}).modelled_error == pytest.approx(0.2 + 0.1)


def test_a_record_keeps_the_law_that_it_has() -> None:
    flash = small_device().flash
    other = flash.model_copy(update={"law": Law(reads_per_s=7.0, bytes_per_s=8.0, overlap=0.5)})
    assert Flash.model_validate_json(other.to_json()).law == other.law
    assert Flash.model_validate_json(flash.to_json()) == flash


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            [(4096, 3.6864e9, None)],
            r"900000 reads of 4096 bytes a second, but 32 in flight, each with a latency_s of 0\.0001, come 320000 ",
        ),
        ([(4096, 8.192e7, 1)], r"20000 reads of 4096 bytes a second, but 1 in flight, .* come 10000 times a second"),
        ([(4096, 8e7, 64)], "64 reads in flight, expected at most queue_depth, 32"),
        ([(4096, 8e7, 8), (4096, 8e7, 4)], r"ascending, distinct read sizes, found \[\(4096, 8\), \(4096, 4\)\]"),
    ],
)
def test_a_flash_that_contradicts_itself_is_refused_with_both_figures(points: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_with(*points)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 2**53 - 1), st.floats(1, 1e15)), min_size=1, max_size=6, unique_by=lambda p: p[0])
)
def test_any_curve_has_a_law_or_a_reason(points: list[tuple[int, float]]) -> None:
    """A stranger's profile: nothing else is raised, and the law is finite."""
    try:
        flash = flash_with(*((size, rate, None) for size, rate in sorted(points)), latency_s=0.0)
    except ValueError as error:
        pytest.fail(str(error))
    assert np.isfinite(flash_seconds(flash, 10, 10**6))
    assert ReadPoint(read_bytes=1, bytes_per_s=1.0).reads_in_flight is None
