"""Artifacts that several tests read; built once, never changed."""

import shutil

import numpy as np
import pytest

from tests.support.artifacts import Recipe, build_artifact


@pytest.fixture(scope="session")
def relu_artifact(tmp_path_factory):
    """fp16, ReLU: family up_down."""
    return build_artifact(tmp_path_factory.mktemp("relu") / "a.coldpress")


@pytest.fixture(scope="session")
def topk_artifact(tmp_path_factory):
    """int4, top-k: families mlp_in and mlp_mid."""
    recipe = Recipe(method="topk", format="int4_group32", cache="lfu", pinned_share=0)
    return build_artifact(tmp_path_factory.mktemp("topk") / "a.coldpress", recipe)


@pytest.fixture(scope="session")
def predictor_artifact(tmp_path_factory):
    """int8, predictors: family neuron."""
    recipe = Recipe(method="predictor", format="int8_group32")
    return build_artifact(tmp_path_factory.mktemp("predictor") / "a.coldpress", recipe)


@pytest.fixture
def rng():
    """Random numbers, the same in every run."""
    return np.random.default_rng(7)


@pytest.fixture
def path(relu_artifact, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(relu_artifact.path, tmp_path / "a.coldpress")
