"""Makes weights whose MLP inputs have a planted similarity from layer to layer (ActiveFlow 2.2, Fig. 17a)."""

import numpy as np

from coldpress.schemas.model import ModelSpec
from tests.support.artifacts import random_weights

FIRST_SIZE = 0.05
"""Root mean square of an embedding: small, since the residual stream grows by layer, but above the norms' epsilon."""
ATTENTION_SHARE = 0.05
"""Size of attention's output, as a share of the residual stream."""


def similar_weights(spec: ModelSpec, similarity: float, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random weights by role such that the cosine of the MLP inputs of consecutive layers is `similarity`.

    Each layer adds to the residual stream an independent vector that is tan(arccos(similarity)) times as long. So the
    stream grows by 1 / similarity per layer, and cosines over several layers are powers of `similarity`.
    """
    weights = random_weights(spec, np.random.default_rng(seed))
    weights["embed_tokens.weight"] *= FIRST_SIZE / np.sqrt(np.mean(weights["embed_tokens.weight"] ** 2))
    added, inner = np.sqrt(1 / similarity**2 - 1), _inner_size(spec)
    for layer in range(spec.num_hidden_layers):
        size = FIRST_SIZE / similarity**layer
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"layers.{layer}.{name}.weight"][:] = 1
        weights[f"layers.{layer}.down_proj.weight"] *= size * added / inner
        weights[f"layers.{layer}.o_proj.weight"] *= size * ATTENTION_SHARE
    return weights


def _inner_size(spec: ModelSpec) -> float:
    """Returns the root mean square of act(gate) * up for standard normal gate and up."""
    gate, up = np.random.default_rng(1).standard_normal((2, 100_000))
    act = np.maximum(gate, 0) if spec.hidden_act == "relu" else gate / (1 + np.exp(-gate))
    return float(np.sqrt(np.mean((act * up) ** 2)))
