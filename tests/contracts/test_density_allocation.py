"""Every rule of compiler/density_allocation divides the asked density, to a unit, and runs no more of the model than it
says."""

import pytest

from coldpress.compiler.density_allocation import Rule
from coldpress.runtime.plugins import load, names
from tests.support.allocation import separable, used_bytes

RULES = names("coldpress.compiler.density_allocation")


def test_the_known_rules_are_found() -> None:
    assert {"uniform", "greedy"} <= set(RULES)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("density", [0.15, 0.5, 0.9])
def test_the_mean_over_bytes_is_what_was_asked_for(rule: str, density: float) -> None:
    plugin = load("coldpress.compiler.density_allocation", Rule, rule)
    task, losses = separable(density, units=40)
    found = plugin.densities(task)
    assert set(found) == set(task.keys)
    assert all(0 < share <= 1 for share in found.values())
    whole = used_bytes(task, dict.fromkeys(task.keys, 1.0))
    assert abs(used_bytes(task, found) - density * whole) <= max(task.unit_bytes.values()) / 2 + 1e-6
    assert losses.at_once <= plugin.num_variants(len(task.layers), len(task.num_units))
    assert found == plugin.densities(task)
