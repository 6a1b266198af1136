"""A layer's router outside a forward pass: its rules, and its logits for inputs that a file holds."""

import numpy as np

from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.runtime.decoder.router import Router
from coldpress.schemas.model import Model


def router_of(model: Model, layer: int) -> Router:
    """Returns the router of a layer."""
    role = f"layers.{layer}.router.correction"
    return Router(model.spec, read_role(model, role) if role in model.tensors else None)


def router_logits(model: Model, layer: int, inputs_TN: np.ndarray) -> np.ndarray:
    """Returns a layer's logits, float32 [T, num_experts], for the inputs of its MLP, float32 [T, hidden_size]."""
    prefix = f"layers.{layer}.router."
    logits = inputs_TN @ read_role(model, f"{prefix}weight").T
    return logits + read_role(model, f"{prefix}bias") if f"{prefix}bias" in model.tensors else logits
