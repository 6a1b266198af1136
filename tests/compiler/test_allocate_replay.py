"""The replay of a division: which tokens count, and which units they use."""

from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.search.replay import WINDOW_TOKENS, calibrated, windows_of
from tests.support.statistics import activations_of, sparsity_of


def test_units_that_are_active_only_in_held_out_text_are_not_hot(tmp_path: Path) -> None:
    """What DRAM holds is known from the text before."""
    active = np.zeros((8, 400), bool)
    active[[2, 6], 0] = True
    active[5, 276:] = True  # held out, and the tokens that warm caches
    (entry,) = activations_of(tmp_path, [{"up_down": active}]).layers
    text = calibrated(sparsity_of("relu", {"up_down": (0.1,)}), entry, "up_down", 8, 400)
    assert sorted(text.hot[:3].tolist()) == [2, 5, 6]
    assert all(ids.tolist() == [5] for ids in text.ids.values())


@pytest.mark.parametrize(("overprediction", "units"), [(1.0, 10), (1.75, 18), (3.0, 30), (100.0, 100)])
def test_predictors_are_judged_at_the_most_that_they_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overprediction: float, units: int
) -> None:
    monkeypatch.setattr("coldpress.compiler.search.replay.OVERPREDICTION", overprediction)
    active = np.zeros((100, 400), bool)
    active[:10] = True
    (entry,) = activations_of(tmp_path, [{"neuron": active}]).layers
    text = calibrated(sparsity_of("predictor", {"neuron": (0.1,)}), entry, "neuron", 100, 400)
    assert {ids.size for ids in text.ids.values()} == {units}
    assert all(set(range(10)) <= set(ids.tolist()) for ids in text.ids.values())


@pytest.mark.parametrize(("num_tokens", "num_warm"), [(256, 24), (256, 0), (72, 24), (8192, 24), (2, 24)])
def test_windows_are_held_out_and_warmed_by_the_tokens_before(num_tokens: int, num_warm: int) -> None:
    windows, warm = windows_of(num_tokens, num_warm)
    assert warm <= num_warm
    for window in windows:
        counted = window[warm:]
        assert 0 <= window[0] <= counted[0] < num_tokens
        assert counted[0] >= int(0.75 * num_tokens)
        assert counted[-1] < num_tokens
        assert len(counted) <= WINDOW_TOKENS
    assert len({len(window) for window in windows}) == 1
