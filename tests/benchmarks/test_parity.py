"""Which differences of greedy tokens `parity` allows."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.parity import near_ties

FIRST, SECOND, NEAR, FAR = range(4)


def source(tokens: Any, past_key_values: Any) -> Any:
    """Returns logits that are largest for FIRST at every position; NEAR is .1 behind it, and SECOND and FAR more."""
    import torch

    assert past_key_values is None
    return SimpleNamespace(logits=torch.tensor([10.0, 9.0, 9.9, -20.0]).expand(1, tokens.shape[1], 4))


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([FIRST, FIRST, FIRST], (0, True)),
        ([FIRST, NEAR, FIRST], (1, True)),
        ([NEAR, FIRST, NEAR], (2, True)),
        ([FIRST, FIRST, SECOND], (1, False)),
        ([NEAR, FAR, FIRST], (2, False)),
    ],
)
def test_only_near_ties_may_differ(tokens: list[int], found: tuple[int, bool]) -> None:
    """With an error of .0026 of the largest logit, 20, two logits may be .104 apart."""
    assert near_ties(source, [SECOND, FAR], tokens, 0.0026) == found
    assert near_ties(source, [SECOND], tokens, 0.0024) == (found[0], tokens == [FIRST] * 3)
