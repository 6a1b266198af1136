"""benchmarks/verify.py: what it extrapolates to, and the error of a share, against drawn noise and numpy's own line."""

import numpy as np
import pytest

from benchmarks.compile import Stage
from benchmarks.verify import noise_of, of_whole, share_error, share_of_verify, weights_of


def stage(cpu_s: float, wall_s: float | None = None) -> Stage:
    wall_s = cpu_s if wall_s is None else wall_s
    return Stage(wall_s=wall_s, cpu_s=cpu_s, disk_s=0.0, cores=1, peak_rss_bytes=1, jobs=1)


@pytest.mark.parametrize("layers", [[1, 4], [1, 2, 4], [4, 1, 4, 1]])
def test_weights_are_those_of_the_line_of_least_squares(layers):
    seconds = np.random.default_rng(1).uniform(10, 20, len(layers))
    slope, start = np.polyfit(layers, seconds, 1)
    assert weights_of(layers, 22) @ seconds == pytest.approx(start + 22 * slope)


def test_builds_of_one_size_are_scaled():
    assert weights_of([2, 2], 22) @ np.array([3.0, 5.0]) == pytest.approx(4.0 * 11)


def test_a_line_gives_each_stage_its_seconds_for_all_layers():
    builds = [
        {"tokenize": stage(2), "order": stage(3 + 2 * count), "verify": stage(20 + 10 * count, 10 + 5 * count)}
        for count in (1, 4)
    ]
    found = of_whole([1, 4], builds, 22)
    assert found["share_cpu_whole"] == pytest.approx(240 / (2 + 47 + 240))
    assert found["stages_whole_s"] == pytest.approx(2 + 47 / 2 + 120)  # order's jobs run two at a time
    assert found["share_whole"] == pytest.approx(120 / (2 + 47 / 2 + 120))
    assert found["noise"] == found["share_whole_error"] == 0


def test_a_stage_takes_no_less_for_more_layers():
    builds = [{"order": stage(seconds), "verify": stage(10)} for seconds in (6, 4)]
    assert of_whole([1, 4], builds, 22)["share_cpu_whole"] == pytest.approx(10 / 15)


def test_one_build_has_no_error():
    found = of_whole([2], [{"tokenize": stage(2), "verify": stage(2)}], 2)
    assert found["share_whole"] == 0.5
    assert found["noise"] is found["share_whole_error"] is found["share_cpu_whole_error"] is None


@pytest.mark.slow
def test_the_errors_are_those_of_drawn_noise():
    """Shares of many builds with noise of 2 % scatter as the estimated error says."""
    rng, layers = np.random.default_rng(2), [1, 4]
    truth = {"tokenize": (4, 0), "preflight": (9, 0), "order": (20, 7), "verify": (30, 13)}
    rows = []
    for _ in range(2000):
        drawn = [
            {name: stage((start + slope * count) * rng.normal(1, 0.02)) for name, (start, slope) in truth.items()}
            for count in layers
        ]
        rows.append(of_whole(layers, drawn, 22))
    noise = np.sqrt(np.mean([row["noise"] ** 2 for row in rows]))
    assert noise == pytest.approx(0.02, rel=0.1)
    errors = np.sqrt(np.mean([row["share_cpu_whole_error"] ** 2 for row in rows]))
    assert errors == pytest.approx(np.std([row["share_cpu_whole"] for row in rows]), rel=0.1)


def test_repeated_builds_tell_the_noise_of_every_stage():
    layers = [1, 4, 1, 4]
    assert noise_of(layers, {"order": np.array([5.0, 11.0, 5.0, 11.0])}) == pytest.approx(0)
    assert noise_of(layers, {"order": np.array([5.0, 11.0, 6.0, 12.0])}) == pytest.approx((1 / 2) ** 0.5 / 8.5)
    assert noise_of(layers, {"tokenize": np.array([1.0, 1.0, 1.0, 1.2])}) == pytest.approx(0.1 / 1.05)
    assert noise_of([1, 4], {"order": np.array([5.0, 11.0])}) is None


def test_the_error_of_a_share_has_both_parts():
    seconds = {"verify": 30.0, "order": 70.0}
    step = 1e-6
    for name in seconds:
        moved = share_of_verify(seconds | {name: seconds[name] + step}) - share_of_verify(seconds)
        errors = dict.fromkeys(seconds, 0.0) | {name: step}
        assert share_error(seconds, errors) == pytest.approx(abs(moved), rel=1e-4)
