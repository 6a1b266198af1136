"""Norms of the decoder: those of hidden states, and those of q and k, by the kind that the ModelSpec names."""

from dataclasses import dataclass

import numpy as np

from coldpress.runtime.arithmetic import layer_norm, rms_norm
from coldpress.runtime.decoder.matrix import Resident
from coldpress.schemas.model import ModelSpec, norm_parts, qk_norms


@dataclass(frozen=True)
class Norm:
    weight: np.ndarray
    """float32 [n], or [heads, n]."""
    bias: np.ndarray | None
    eps: float
    centred: bool
    """True if the mean is subtracted (LayerNorm)."""

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Norms the last axis of `x`, float32 [..., n] or [..., heads, n]."""
        if self.centred:
            return layer_norm(x, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps)


def norm_of(name: str, spec: ModelSpec, resident: Resident) -> Norm:
    return _norm(spec, resident.vector(f"{name}.weight"), resident.optional_vector(f"{name}.bias"))


def qk_norm_of(layer: int, name: str, spec: ModelSpec, resident: Resident) -> Norm | None:
    """Returns a layer's norm of q or k, `q_norm` or `k_norm`; None if it has none."""
    roles = [f"layers.{layer}.{role}" for role in qk_norms(spec)[name]]
    if resident.optional_vector(f"{roles[0]}.weight") is None:
        return None
    if spec.qk_norm != "heads":
        return norm_of(roles[0], spec, resident)
    return _norm(spec, np.stack([resident.vector(f"{role}.weight") for role in roles]), None)


def _norm(spec: ModelSpec, weight: np.ndarray, bias: np.ndarray | None) -> Norm:
    counts_from_one = spec.norm.endswith("_1p")
    return Norm(weight + 1 if counts_from_one else weight, bias, spec.norm_eps, "bias" in norm_parts(spec))
