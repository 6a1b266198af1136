"""A layer's router outside a forward pass: its rules, and its logits for inputs that a file holds."""

import numpy as np

from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.runtime import routers
from coldpress.runtime.routers import Router
from coldpress.schemas.model import Model


def router_of(model: Model, layer: int) -> Router:
    role = f"layers.{layer}.router.correction"
    return routers.router_of(model.spec, read_role(model, role) if role in model.tensors else None)


def router_logits(model: Model, layer: int, inputs_TN: np.ndarray) -> np.ndarray:
    """Returns a layer's logits, float32 [T, num_experts], for the inputs of its MLP, float32 [T, hidden_size]."""
    weight, bias = router_matrix(model, layer)
    logits = inputs_TN @ weight.T
    return logits if bias is None else logits + bias


def router_matrix(model: Model, layer: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns a layer's router: its weight, float32 [num_experts, hidden_size], and its bias, if it has one."""
    prefix = f"layers.{layer}.router."
    bias = read_role(model, f"{prefix}bias") if f"{prefix}bias" in model.tensors else None
    return read_role(model, f"{prefix}weight"), bias
