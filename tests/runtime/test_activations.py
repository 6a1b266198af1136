"""The run's option for activations: it reaches every product of a decoded token with codes, and only those."""

import numpy as np
import pytest

from coldpress.runtime.generate.session import Session
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.schemas.errors import UnknownNameError
from tests.support.artifacts import Recipe, build_artifact

TOKENS = [1, 5, 9, 2, 7, 3, 11, 4]


def decoded(path, activations: str) -> np.ndarray:
    """Logits of tokens that go through selector and store, float32 [tokens, vocab_size]."""
    with Session(path, selector="dense", activations=activations) as session:
        session.decoder.begin(len(TOKENS))
        return np.stack([session.decoder.decode(token) for token in TOKENS])


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["predictor_artifact", "topk_artifact"])
def test_rounding_changes_logits_by_as_much_as_its_bits_say(fixture, request):
    path = request.getfixturevalue(fixture).path
    exact = decoded(path, "fp32")
    errors = {kind: np.abs(decoded(path, kind) - exact).max() / np.abs(exact).max() for kind in ("int16", "int8")}
    assert 1e-4 < errors["int8"] < 0.05
    assert 1e-7 < errors["int16"] < errors["int8"] / 32


def test_fp16_weights_are_multiplied_as_ever(relu_artifact):
    assert np.array_equal(decoded(relu_artifact.path, "int8"), decoded(relu_artifact.path, "fp32"))


def test_the_prefill_rounds_nothing(tmp_path):
    recipe = Recipe(method="predictor", format="int8_group32", context_length=FEW_TOKENS + 1)
    path = build_artifact(tmp_path / "a.coldpress", recipe).path

    def prefilled(activations: str) -> np.ndarray:
        with Session(path, activations=activations) as session:
            session.decoder.begin(FEW_TOKENS + 1)
            return session.decoder.prefill(np.resize(TOKENS, FEW_TOKENS + 1))

    assert np.array_equal(prefilled("int8"), prefilled("fp32"))


def test_an_unknown_format_is_refused(topk_artifact):
    with pytest.raises(UnknownNameError, match=r"unknown activation format 'int4'.*int8"):
        Session(topk_artifact.path, activations="int4")
