"""A model that people use, from the package index."""

from pathlib import Path

import pytest

from coldpress.compiler.profiles import load_model
from tests.support.checkpoints import run
from tests.support.real import real_model


@pytest.mark.slow
def test_a_profile_agrees_with_its_packages(tmp_path: Path) -> None:
    profile = load_model("smollm2-135m-instruct")
    model = run(real_model(), tmp_path / "work")
    assert (model.spec.model_type, model.spec.hidden_act) == (profile.model_type, profile.hidden_act)
    assert (model.spec.num_hidden_layers, model.num_parameters) == (profile.num_hidden_layers, 134_515_008)
