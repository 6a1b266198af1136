"""A widened model is the small one, with units of a larger one's bytes."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.shared.widened import widened
from coldpress.runtime.generate.session import Session
from coldpress.runtime.trace import Recorder
from tests.support.artifacts import Recipe, build_artifact, random_weights
from tests.support.shapes import small_spec

TOKENS = np.random.default_rng(1).integers(96, size=(1, 24))


def decoded(path: Path) -> tuple[np.ndarray, list[list[int]], int]:
    """Logits of the tokens, the units that each request asked for, and the bytes of a unit."""
    recorder, logits = Recorder(), list[np.ndarray]()
    with Session(path, recorder=recorder, activations="fp32") as session:
        session.perplexity(TOKENS, sparse=True, on_logits=lambda some: logits.append(some.copy()))
        (family,) = session.artifact.manifest.families
    return np.concatenate(logits), [sorted(event.ids.tolist()) for event in recorder.events], family.unit_bytes


@pytest.mark.slow
def test_a_widened_model_uses_the_same_units_and_has_the_same_logits(tmp_path: Path) -> None:
    spec = small_spec(norm_eps=0.1)  # an eps that counts
    weights = random_weights(spec, np.random.default_rng(0))
    wide_spec, wide_weights = widened(spec, weights, 1024)  # 16 times as wide: the norms' factor is exact
    small = build_artifact(tmp_path / "small", Recipe(spec=spec, format="int4_group32"), weights)
    wide = build_artifact(tmp_path / "wide", Recipe(spec=wide_spec, format="int4_group32"), wide_weights)
    logits, used, unit_bytes = decoded(small.path)
    wide_logits, wide_used, wide_unit_bytes = decoded(wide.path)
    assert wide_unit_bytes == 16 * unit_bytes
    np.testing.assert_allclose(wide_logits, logits, atol=1e-3 * np.abs(logits).max())
    assert len(used) >= (TOKENS.size - 2) * spec.num_hidden_layers
    differing = [one for one, other in zip(used, wide_used, strict=True) if one != other]
    assert len(differing) <= 0.02 * len(used)  # a gate may be zero up to rounding
