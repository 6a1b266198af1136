"""auto: what is hardly faster than a dense run is not taken, nor what is slower."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from coldpress.compiler.stages.allocate import _auto
from coldpress.compiler.stages.allocate._quality import Floor
from coldpress.compiler.stages.allocate._rules import Inputs
from tests.support.curves import curves_of
from tests.support.statistics import activations_of, model_of, sparsity_of


@pytest.mark.parametrize(("relative", "method"), [(1.01, "dense"), (0.96, "dense"), (0.94, "relu")])
def test_a_method_must_save_a_twentieth_of_the_dense_run_s_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: float, method: str
) -> None:
    seconds = {"dense": 0.02, "relu": 0.02 * relative}
    model, nothing = model_of(1, 64, 128), cast(Any, None)  # activations and device are not looked at
    floor = Floor(curves_of(model, tmp_path, {}, {"fp16": 1.01}), 1.1, "fp16")
    monkeypatch.setattr(_auto, "token_seconds", lambda found, *_: seconds[found.method])
    divisions = [sparsity_of("dense", {"neuron": (1.0,)}), sparsity_of("relu", {"up_down": (0.1,)})]
    inputs = Inputs(model, nothing, nothing, nothing, None, 1)
    found = _auto.choose(divisions, inputs, 1.75, floor)
    assert found.method == method
    assert {entry.method: entry.token_s for entry in found.tried} == seconds
    assert {entry.method: entry.density for entry in found.tried} == {
        "dense": 1.0,
        "relu": pytest.approx((1 + 2 * 0.1) / 3),  # of the MLP, whose gate stays in DRAM
    }
    assert {entry.ppl_ratio for entry in found.tried} == {1.01}, "the format's"


def test_units_that_are_active_only_in_held_out_text_are_not_hot(tmp_path: Path) -> None:
    """What DRAM holds is known from the text before."""
    active = np.zeros((8, 400), bool)
    active[[2, 6], 0] = True
    active[5, 300:] = True  # held out
    (entry,) = activations_of(tmp_path, [{"up_down": active}]).layers
    found = sparsity_of("relu", {"up_down": (0.1,)})
    tokens, hot = _auto._tokens(found, entry, "up_down", 8, 400, 1.0)
    assert hot[:2].tolist() == [2, 6]
    assert all(ids.tolist() == [5] for ids in tokens)


@pytest.mark.parametrize(("overprediction", "units"), [(1.0, 10), (1.75, 18), (3.0, 30), (100.0, 100)])
def test_predictors_are_judged_at_the_overprediction_that_was_asked_for(
    tmp_path: Path, overprediction: float, units: int
) -> None:
    active = np.zeros((100, 400), bool)
    active[:10] = True
    (entry,) = activations_of(tmp_path, [{"neuron": active}]).layers
    found = sparsity_of("predictor", {"neuron": (0.1,)})
    tokens, _ = _auto._tokens(found, entry, "neuron", 100, 400, overprediction)
    assert {ids.size for ids in tokens} == {units}
