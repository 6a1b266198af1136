"""Parts that the architectures with experts share: their names, and where signals of experts are.

transformers stores all experts' matrices in one tensor and gives no access to the values between them, so its block is
replaced by one that has a matrix per expert (`_expert_block.py`), under the names of the published checkpoints.
"""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

from coldpress.compiler.architectures import _common
from coldpress.runtime.plugins import load_class
from coldpress.runtime.routers import PACKAGE as ROUTERS
from coldpress.runtime.routers import Router, router_class
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import MLP_ROLES, MatrixRole, ModelSpec, matrices


@dataclass(frozen=True)
class Names:
    block: str = "mlp"
    """Path of the experts and their router."""
    router: str = "gate"
    correction: str | None = None
    """Correction that the router adds to the scores that it chooses by; below the router."""
    matrices: Mapping[MatrixRole, str] = field(default_factory=lambda: {role: role for role in MLP_ROLES})
    shared: str | None = None
    """The expert that every token uses, below the block."""
    shared_gate: str | None = None
    """The matrix whose output weights it, below the block."""
    biases: bool = False
    """True if router and experts have biases."""


DOWN_BIAS = "output_bias"
"""The bias of an expert's output, below its down matrix: no `bias`, as it is weighted like the output."""


def modules(prefix: str, names: Names, router: str = "softmax", **own: Any) -> _common.Modules:
    """Paths of a mixture that has Llama's names outside its experts; `own` are further fields."""
    block = names.block
    taps = _common.layer_taps("self_attn", "self_attn.o_proj", block, f"{block}.activated", f"{block}.inner")
    taps |= {
        "router_logits": _common.Tap(f"{block}.{names.router}", "output"),
        "router_scores": _common.Tap(f"{block}.scored"),
        "expert_inputs": _common.Tap(f"{block}.given"),
        "mlp_up": _common.Tap(f"{block}.up"),
    }
    own = {"adapt": functools.partial(adapt, names)} | own
    return _common.Modules(prefix=prefix, base="model", norm="norm", taps=taps, router=router, **own)


class Mixture(_common.Llama):
    """Llama's arithmetic and names with experts in place of the MLP."""

    NAMES: ClassVar[Names]
    NUM_EXPERTS: ClassVar[str] = "num_experts"
    """The key that has the number of experts."""
    STACKED: ClassVar[Mapping[str, _common.Place]] = MappingProxyType({})
    """Tensors of an expert -> their places in those of all experts below a layer; empty if each has its own."""

    def spec(self, config: Any) -> ModelSpec:
        return mixture_spec(self.MODULES, config, self.NUM_EXPERTS, **self.own(config))

    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        attention = self.attention(config, spec)
        dense, experts = (attention | own for own in (_common.mlp_parameters(spec), self._of_experts(spec)))
        found = _common.outer(spec)
        for layer in range(spec.num_hidden_layers):
            names = dense if spec.is_dense(layer) else experts
            found |= {f"model.layers.{layer}.{name}": (f"layers.{layer}.{role}",) for name, role in names.items()}
        return found

    def places(self, spec: ModelSpec) -> dict[str, _common.Place]:
        experts = f"{self.NAMES.block}.experts"
        return {
            f"model.layers.{layer}.{experts}.{expert}.{name}": replace(
                place, tensor=f"model.layers.{layer}.{place.tensor}", index=expert
            )
            for layer in range(spec.num_hidden_layers)
            for expert in range(spec.num_experts)
            for name, place in self.STACKED.items()
        }

    def attention(self, config: Any, spec: ModelSpec) -> dict[str, str]:
        return _common.attention_parameters(spec, self.biases(config, spec), self.qk_norm(config))

    def _of_experts(self, spec: ModelSpec) -> dict[str, str]:
        names = self.NAMES
        found = {f"{names.block}.{names.router}.weight": "router.weight"}
        if names.correction:
            found[f"{names.block}.{names.router}.{names.correction}"] = "router.correction"
        if names.biases:
            found[f"{names.block}.{names.router}.bias"] = "router.bias"
        for role, name in names.matrices.items():
            bias = DOWN_BIAS if role == "down_proj" else "bias"
            for expert, held in enumerate(matrices(role, spec)):
                own = f"{names.block}.experts.{expert}"
                found[f"{own}.{name}.weight"] = f"{held}.weight"
                found |= {f"{own}.{name}.{bias}": f"{held}.bias"} if names.biases else {}
        if names.shared:
            prefix = f"{names.block}.{names.shared}."
            found |= {f"{prefix}{role}.weight": f"shared_expert.{role}.weight" for role in MLP_ROLES}
        if names.shared_gate:
            found[f"{names.block}.{names.shared_gate}.weight"] = "shared_expert_gate.weight"
        return found


ROUTER_KEYS = {
    "num_experts_per_tok": "num_experts_per_tok",
    "norm_topk_prob": "router_normed",
    "routed_scaling_factor": "router_scaling",
    "n_group": "num_expert_groups",
    "topk_group": "num_expert_groups_per_tok",
}
"""Keys of config.json that all routers have in common, and their fields of a spec."""


def mixture_spec(modules: _common.Modules, config: Any, key: str = "num_experts", **own: Any) -> ModelSpec:
    """Returns the spec of a mixture, with its router's settings from the keys of the same names; `key` has the number
    of experts; `own` are fields as in `llama_spec`. Raises CheckpointError if the router's numbers do not fit
    together."""
    names = {field: name for name, field in ROUTER_KEYS.items()} | {"num_experts": key}
    found = {field: getattr(config, name, None) for field, name in names.items()}
    options = load_class(ROUTERS, Router, modules.router or "").OPTIONS.model_fields
    found |= {"router_scores": modules.router, "router_options": {name: getattr(config, name) for name in options}}
    fields = {field: value for field, value in found.items() if value is not None} | own
    if fields.get("num_experts", 0) < 2:
        raise CheckpointError(f"config.json: {key} is {found['num_experts']}, expected at least 2 experts")
    if "num_experts_per_tok" not in fields:
        raise CheckpointError("config.json: num_experts_per_tok is missing, expected the experts that a token uses")
    spec = _common.llama_spec(modules, config, **fields)
    flaw = router_class(spec).flaw(spec)
    if flaw is not None:
        field, expected = flaw
        raise CheckpointError(f"config.json: {names[field]} is {getattr(spec, field)}, expected {expected}")
    return spec


def layers_without(config: Any, dense: Collection[int]) -> dict[str, Any]:
    """Fields of a spec for layers with an MLP instead of experts; raises CheckpointError if all layers have one."""
    found = tuple(layer for layer in range(config.num_hidden_layers) if layer in dense)
    if len(found) == config.num_hidden_layers:
        raise CheckpointError(
            f"config.json: none of {len(found)} layers has experts, expected one that has; a model without any has "
            "another model_type"
        )
    return {"dense_layers": found, "dense_intermediate_size": config.intermediate_size} if found else {}


def stepped_layers(config: Any) -> dict[str, Any]:
    """Returns the same fields for Qwen's mixtures: every `decoder_sparse_step`th layer has experts, except for those in
    `mlp_only_layers`. Raises CheckpointError as `layers_without`."""
    layers, listed = range(config.num_hidden_layers), set(config.mlp_only_layers or ())
    return layers_without(config, {at for at in layers if at in listed or (at + 1) % config.decoder_sparse_step})


def adapt(names: Names, layer: Any, spec: ModelSpec) -> None:
    from coldpress.compiler.architectures._expert_block import Block  # torch takes seconds to import

    called = "mlp" if hasattr(layer, "mlp") else names.block  # the name that transformers calls
    own = layer.get_submodule(called)
    if not hasattr(own, "experts"):  # a layer without experts keeps transformers' MLP
        return
    delattr(layer, called)
    layer.register_module(names.block, Block(names, own, spec))
    if names.block != called:
        setattr(layer, called, layer.get_submodule(names.block).__call__)
