"""Writes a small real ReLU model whose units have a 7B's bytes as artifacts: real activity at the size of real reads.

`hidden_size` is filled up with zeros, so the tokens, logits and active units are those of the small model. Its selector
is `relu`, which is exact and needs no training, so no error of a predictor mixes into the activity. Units are ordered
and pinned by the activity on calibration text; another text is measured.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.harness.places import data
from benchmarks.shared.cache_traces import REAL, SPLITS, used_in
from benchmarks.shared.cases import CORPORA, blocks_of, case_of
from benchmarks.shared.planted import Material, recipe_of
from coldpress.schemas.model import ModelSpec, role_shape
from tests.support.hf import load_hf, roles_of, spec_of

CASE = "prose7m-relu"
CACHE = "s3fifo"
"""Cache of both systems that are compared (Ripple 6.1)."""
READ_BUFFER_BYTES = 1 << 20
"""Buffer of a few percent of the units, as in a planted case."""


def material(folder: Path, width: int) -> Material:
    """Returns the model widened to `width`, and the units that calibration text uses; `folder` is for scratch files."""
    model = load_hf(data() / "models" / CASE)
    spec, method = spec_of(model.config), REAL[CASE].method
    case = case_of(CASE, folder, {"calibration": SPLITS["calibration"]})
    masks = used_in(case, range(spec.num_hidden_layers), REAL[CASE])
    actives = {key: of_split["calibration"].T for key, of_split in masks.items()}
    density = float(np.mean([active.mean() for active in actives.values()]))
    wide, weights = widened(spec, roles_of(model, spec), width)
    recipe = replace(recipe_of(wide, method, density), cache=CACHE, read_buffer_bytes=READ_BUFFER_BYTES)
    return Material(recipe, weights, actives)


def widened(spec: ModelSpec, weights: Mapping[str, np.ndarray], width: int) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """Returns a model with `hidden_size` `width` that computes the same, and its tensors by role, float32.

    Zeros follow the hidden states, and RMSNorm counts them in its mean. The eps shrinks with the mean, and the weights
    with its root, so the norm's output stays the same. Groups of 32 weights get the same codes where the small model's
    `hidden_size` is a multiple of 32.
    """
    share = spec.hidden_size / width
    wide = spec.model_copy(update={"hidden_size": width, "norm_eps": spec.norm_eps * share})
    found: dict[str, np.ndarray] = {}
    for role, values in weights.items():
        found[role] = np.zeros(role_shape(wide, role), np.float32)
        found[role][tuple(map(slice, values.shape))] = values
        if found[role].shape == (width,):  # the weights of a norm over the hidden state
            found[role] *= share**0.5
    return wide, found


def passages(num_passages: int, num_tokens: int) -> np.ndarray:
    """Returns consecutive passages of test text, int32 [num_passages, num_tokens]."""
    blocks = blocks_of(data() / "models" / CASE, data() / "corpora" / CORPORA[CASE])
    return blocks["test"].ravel()[: num_passages * num_tokens].reshape(num_passages, num_tokens)
