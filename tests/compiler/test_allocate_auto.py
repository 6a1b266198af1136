"""auto: what is hardly faster than a dense run is not taken, nor what is slower."""

from typing import Any

import pytest

from coldpress.compiler.stages.allocate import _auto
from tests.support.statistics import sparsity_of


@pytest.mark.parametrize(("relative", "method"), [(1.01, "dense"), (0.96, "dense"), (0.94, "relu")])
def test_a_method_must_save_a_twentieth_of_the_dense_run_s_time(
    monkeypatch: pytest.MonkeyPatch, relative: float, method: str
) -> None:
    seconds = {"dense": 0.02, "relu": 0.02 * relative}
    nothing: Any = None  # neither model nor activations nor device are looked at where times are given
    monkeypatch.setattr(_auto, "token_seconds", lambda found, *_: seconds[found.method])
    divisions = [sparsity_of("dense", {"neuron": (1.0,)}), sparsity_of("relu", {"up_down": (0.1,)})]
    found = _auto.choose(divisions, nothing, nothing, nothing)
    assert found.method == method
    assert {entry.method: entry.token_s for entry in found.tried} == seconds
