"""The base class of architectures, and what the supported ones share: Llama's names, shapes of roles, rotary
frequencies.

Decides nothing that differs between architectures; their files do. Shapes follow from the ModelSpec alone, so a
checkpoint's tensors can be checked before any of them is read.
"""

import importlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np

from coldpress.compiler.architectures._declared import Declared, declared
from coldpress.runtime.plugins import PluginBase
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.families import Signal
from coldpress.schemas.model import (
    ATTENTION_ROLES,
    Activation,
    AttentionKind,
    ModelSpec,
    RotaryKind,
    block_norms,
    norm_parts,
    qk_norms,
)

if TYPE_CHECKING:
    from torch import nn

THRESHOLD_KEY = "relu_threshold"
"""Our own key, unknown to transformers: the ReLU of a model that `relufy` made is zero below this threshold."""
KEYS = frozenset(
    {
        "architectures",
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        THRESHOLD_KEY,
    }
)
LLAMA_KEYS = frozenset(
    {
        "intermediate_size",
        "num_key_value_heads",
        "hidden_act",
        "rms_norm_eps",
        "rope_parameters",
        "original_max_position_embeddings",
    }
)
ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
ROPE_TYPES = ("default", "linear", "llama3", "longrope", "yarn")
UNSCALED_ROPE_TYPES = ROPE_TYPES[:3]
"""Those that leave cos and sin as they are."""


@dataclass(frozen=True)
class Tap:
    """The place of a layer's signal: the input or output of a module, or one of several equal parts of it."""

    path: str
    """Dotted path below a layer."""
    side: Literal["input", "output"] = "input"
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True)
class Modules:
    """The dotted paths of a causal LM's parts in transformers, below the model or below one layer."""

    prefix: str
    """Class names start with it: LlamaRotaryEmbedding."""
    base: str
    norm: str
    """The final norm, below `base`."""
    taps: Mapping[Signal, Tap]
    activation: str = "silu"
    """The activation if config.json names none."""
    activation_key: str = "hidden_act"
    partial_rotary: bool = False
    """True if the rotation may cover only part of each head's dimensions."""
    built_of: str | None = None
    """The `model_type` whose classes transformers uses for it, if it has none of its own."""
    adapt: Callable[[Any, ModelSpec], None] | None = None
    """Turns a layer of those classes, on torch's meta device, into one of this architecture."""
    router: str | None = None
    """The file of runtime/routers that picks among several experts; None: the MLP has none."""
    own_code: str | None = None
    """Prefix of class names in the code that such checkpoints ship, if it differs from `prefix`."""
    package: str | None = None
    """The package of transformers that has its classes, if its name is not the `model_type`."""
    layers: str = "layers"
    """The list of layers, below `base`."""
    rotary: Mapping[RotaryKind, str] = field(default_factory=lambda: {"main": ""})
    """The kinds of rotation, and the kind of layer (`layer_types`) that transformers has each for; empty: all."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """The implementation of attention in transformers; torch's own, sdpa, has no soft cap."""
    cache_argument: str = "past_key_values"
    layer_arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_mixture(self) -> bool:
        return self.router is not None


@dataclass(frozen=True)
class Place:
    """A part of a checkpoint's tensor that has the rows of one role."""

    tensor: str
    index: int | None = None
    """The entry of the tensor that it is, mostly an expert's; None if the tensor has no such entries."""
    num_entries: int | None = None
    """None: one for each expert."""
    part: int = 0
    num_parts: int = 1
    """The rows are one of so many equal parts of the entry's rows."""
    interleaved: bool = False
    """True if the parts' rows are stored in turn, instead of one part after the other."""
    transposed: bool = False
    packed: bool = False
    """True if a checkpoint may pack the tensor in `Architecture.PACKED`, row by row."""


class Architecture(PluginBase):
    """A kind of decoder: its keys, the place of its tensors, its arithmetic."""

    KEYS: ClassVar[frozenset[str]]
    """The keys of config.json that it reads, in addition to `_common.KEYS`."""
    DEFAULTS: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """The defaults that transformers' class computes, in addition to those that it declares (_declared.py)."""
    MODULES: ClassVar[Modules]
    PACKED: ClassVar[str | None] = None
    """The only `quant_method` that a checkpoint may have; None: it may not be quantized."""

    @classmethod
    def declared(cls) -> Declared:
        kind = cls.MODULES.built_of or cls.name()
        return declared(kind, cls.MODULES.package or kind)

    @classmethod
    def spellings(cls) -> dict[str, str]:
        """Second names of keys, which transformers' class takes as well -> the keys."""
        pairs = cls.declared().names.items()
        return {other: key for pair in pairs for other, key in (pair, pair[::-1]) if key in cls.KEYS}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {**cls.declared().defaults, **cls.DEFAULTS}

    def complete(self, config: Any) -> None:
        """Adds to `config`, from `filled`, what transformers derives from other keys."""
        return

    @abstractmethod
    def spec(self, config: Any) -> ModelSpec:
        """Returns the model's shape and arithmetic; `config` has all defaults: transformers' own object, or one from
        `filled`. Raises CheckpointError if the runtime cannot compute such a model."""

    def ignored(self, config: Any, spec: ModelSpec) -> str:
        """Returns a pattern of the names of tensors that a checkpoint may have beside the model's; empty for none."""
        return ""

    @abstractmethod
    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        """Returns tensor name -> the roles that it holds; several roles are stacked rows. A role that appears n times
        has its rows in n equal parts, at these places (the heads of q, k and v in turn)."""

    def places(self, spec: ModelSpec) -> Mapping[str, Place]:
        """Maps parameters to tensors that a checkpoint stores otherwise, fused or transposed; by default none."""
        return {}


class Llama(Architecture):
    """Llama's arithmetic and names; subclasses change what differs."""

    KEYS = LLAMA_KEYS

    def spec(self, config: Any) -> ModelSpec:
        return llama_spec(self.MODULES, config, **self.own(config))

    def own(self, config: Any) -> dict[str, Any]:
        """The fields of a spec that differ from Llama's; raises CheckpointError for what the runtime cannot compute."""
        return {}

    def parameters(self, config: Any, spec: ModelSpec) -> dict[str, tuple[str, ...]]:
        return llama_parameters(spec, self.biases(config, spec), self.qk_norm(config))

    def biases(self, config: Any, spec: ModelSpec) -> tuple[str, ...]:
        """Returns the projections that have a bias, for example `q_proj`: by Llama's keys, as far as it has them."""
        found = ATTENTION_ROLES if "attention_bias" in self.KEYS and config.attention_bias else ()
        return found + (mlp_projections(spec) if "mlp_bias" in self.KEYS and config.mlp_bias else ())

    def qk_norm(self, config: Any) -> bool:
        return False


def layer_taps(attention: str, mixed: str, mlp: str, act: str, down: str) -> dict[Signal, Tap]:
    """Places of a layer's signals: attention, its last matrix, the MLP, its activation, its last matrix."""
    return {
        "attention_input": Tap(attention),
        "attention_mixed": Tap(mixed),
        "mlp_input": Tap(mlp),
        "mlp_activation": Tap(act, "output"),
        "mlp_inner": Tap(down),
    }


def llama_modules(
    prefix: str, act_path: str = "mlp.act_fn", up: Tap | None = None, gated: bool = True, **own: Any
) -> Modules:
    """Places of signals in Llama and in all that share its names; `own` are further fields."""
    taps = layer_taps("self_attn", "self_attn.o_proj", "mlp", act_path, "mlp.down_proj")
    if gated:
        taps["mlp_up"] = up or Tap("mlp.up_proj", "output")
    return Modules(prefix=prefix, base="model", norm="norm", taps=taps, **own)


def source_config(modules: Modules, raw: Mapping[str, Any]) -> Any:
    """Returns transformers' configuration of a believed config.json, defaults filled in; raises CheckpointError with
    transformers' words."""
    from transformers import AutoConfig

    values = {key: value for key, value in raw.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(modules.built_of or raw["model_type"], **values)
    except Exception as error:  # its validation raises errors of several packages
        reason = " ".join(str(error).split())
        raise CheckpointError(f"config.json: transformers refuses its values ({reason[:300]})") from error


class Filled(SimpleNamespace):
    """A believed config.json with the architecture's defaults."""


def filled(architecture: Architecture, raw: Mapping[str, Any]) -> Filled | None:
    """Returns a configuration that `Architecture.spec` takes, without importing transformers, which takes seconds; None
    where only transformers knows all of it: it has the factors of some rotary embeddings; or its class is not read
    without it."""
    given = raw.get("rope_parameters") or {}
    each = [given.get(key) or {} if key else given for key in architecture.MODULES.rotary.values()]
    defaults = architecture.defaults()
    if any(one.get("rope_type", UNSCALED_ROPE_TYPES[0]) not in UNSCALED_ROPE_TYPES for one in each):
        return None
    unknown = architecture.declared().types.keys() & architecture.KEYS - defaults.keys() - raw.keys()
    if not defaults or unknown:
        return None
    found = Filled(**{"head_dim": None, **defaults, **raw})
    architecture.complete(found)
    return found


def causal_lm(modules: Modules, config: Any, spec: ModelSpec) -> "nn.Module":
    """Builds the whole model in float32 as transformers does, on torch's meta device, without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        how = modules.attention
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=how).eval()
        for layer in model.get_submodule(f"{modules.base}.{modules.layers}"):
            if modules.adapt:
                modules.adapt(layer, spec)
            if getattr(config, THRESHOLD_KEY, 0):
                layer.set_submodule(modules.taps["mlp_activation"].path, _fatrelu(getattr(config, THRESHOLD_KEY)))
    return model


def _fatrelu(threshold: float) -> "nn.Module":
    """Returns a module that passes x from `threshold` on and gives 0 below it; transformers has no such activation."""
    import torch

    class FatRelu(torch.nn.Module):
        def forward(self, x: "torch.Tensor") -> "torch.Tensor":
            return torch.where(x >= threshold, x, 0.0)

    return FatRelu()


def activation(name: str) -> Activation:
    """Translates Hugging Face's name of an activation; raises CheckpointError if the runtime has none such."""
    if name not in ACTIVATIONS:
        raise CheckpointError(f"config.json: the activation {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def activation_fields(modules: Modules, config: Any) -> dict[str, Any]:
    """Returns a spec's fields of the activation; raises CheckpointError if the runtime has no such activation, or one
    other than relu has a threshold."""
    name, threshold = activation(getattr(config, modules.activation_key)), getattr(config, THRESHOLD_KEY, 0) or 0
    if not threshold:
        return {"hidden_act": name}
    if name != "relu":
        raise CheckpointError(
            f"config.json: {THRESHOLD_KEY} is {threshold:g} with the activation {name}, expected it with relu only"
        )
    return {"hidden_act": "fatrelu", "activation_threshold": float(threshold)}


def rope(modules: Modules, config: Any) -> dict[RotaryKind, tuple[np.ndarray, float]]:
    """Returns (frequencies float32 [rotary_dim / 2], factor on cos and sin) of each kind of rotation, as transformers
    initializes them; only of those that some layer may use. For longrope these are the short factors: contexts are
    limited to the original length, unless both are equal. Raises CheckpointError if the kind of scaling depends on the
    length of the text or is unknown."""
    for kind in modules.rotary:
        scaling = rope_parameters(modules, config, kind)["rope_type"]
        if scaling not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise CheckpointError(f"config.json: the rope type {scaling!r} is not supported; known: {known}")
    module, found = rotary_module(modules, config), dict[RotaryKind, tuple[np.ndarray, float]]()
    for kind, layers in modules.rotary.items():
        prefix = f"{layers}_" if layers else ""
        if not hasattr(module, f"{prefix}inv_freq"):
            continue  # no layer is of that kind
        frequencies = getattr(module, f"{prefix}inv_freq").detach().cpu().numpy().astype(np.float32)
        factor = float(getattr(module, f"{prefix}attention_scaling"))
        if not np.isfinite(frequencies).all() or not np.isfinite(factor):
            raise CheckpointError("config.json: rope_parameters give frequencies that are not finite")
        found[kind] = frequencies, factor
    return found


def rope_parameters(modules: Modules, config: Any, kind: RotaryKind) -> Mapping[str, Any]:
    layers = modules.rotary[kind]
    return config.rope_parameters[layers] if layers else config.rope_parameters


def _rotation(modules: Modules, config: Any) -> tuple[int, float]:
    """(rotary dimensions, factor on cos and sin) of a head; raises CheckpointError if a kind besides main has one."""
    if not isinstance(config, Filled):
        found = rope(modules, config)
        for kind, (_, factor) in found.items():
            if kind != "main" and factor != 1:
                raise CheckpointError(
                    f"config.json: rope_parameters.{modules.rotary[kind]} multiplies cos and sin by {factor:g}, which "
                    "is supported for layers of full attention only"
                )
        (frequencies, _), *_ = found.values()
        return 2 * len(frequencies), found["main"][1] if "main" in found else 1.0
    given = rope_parameters(modules, config, "main")
    share = given.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    rotated = int((config.head_dim or config.hidden_size // config.num_attention_heads) * share)
    return 2 * -(-rotated // 2), 1.0


def rotary_module(modules: Modules, config: Any) -> Any:
    kind = modules.package or config.model_type
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    return getattr(module, f"{modules.prefix}RotaryEmbedding")(config)


def qkv(num_groups: int) -> tuple[str, ...]:
    """Roles of a fused tensor with rows of q, k and v in turn, for one group of heads after another."""
    return ("q_proj", "k_proj", "v_proj") * num_groups


def eos_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def llama_spec(
    modules: Modules,
    config: Any,
    sliding_window: int | None = None,
    layer_types: tuple[AttentionKind, ...] = (),
    **own: Any,
) -> ModelSpec:
    """Returns the spec of a Llama-like model: RMS norm, gated MLP, rotary positions; `own` fields are the
    architecture's. Leaves out a window at least as long as the context. Raises CheckpointError if numbers of heads or
    rotary dimensions do not fit together."""
    rotary_dim, scaling = _rotation(modules, config)
    context, heads = config.max_position_embeddings, config.num_attention_heads
    for kind in modules.rotary:
        given = rope_parameters(modules, config, kind)
        if given["rope_type"] == "longrope" and given["short_factor"] != given["long_factor"]:
            context = min(context, given["original_max_position_embeddings"])
    window = sliding_window if sliding_window and sliding_window < context else None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_value_heads = own.pop("num_key_value_heads", None) or getattr(config, "num_key_value_heads", None) or heads
    if heads % key_value_heads:
        raise CheckpointError(f"config.json: {heads} attention heads are no multiple of {key_value_heads} key heads")
    if rotary_dim > head_dim:
        raise CheckpointError(f"config.json: {rotary_dim} rotary dimensions in heads of {head_dim}")
    fields: dict[str, Any] = {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None),
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        **activation_fields(modules, config),
        "gated_mlp": True,
        "norm": "rms_norm",
        "position": "rotary",
        "rotary_dim": rotary_dim,
        "rotary_scaling": scaling,
        "sliding_window": window,
        "layer_types": layer_types if window else (),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": eos_ids(config.eos_token_id),
    }
    return ModelSpec(**{**fields, "norm_eps": getattr(config, "rms_norm_eps", None), **own})


def windows(config: Any, layer_types: Sequence[str] | None = None) -> dict[str, Any]:
    """Returns the fields of a spec that say which layers have a sliding window, if the configuration or `layer_types`
    names layers (Qwen); raises CheckpointError if it names another kind of attention."""
    types = tuple(layer_types or config.layer_types or ())
    unknown = sorted(set(types) - {*get_args(AttentionKind)})
    if unknown:
        raise CheckpointError(
            f"config.json: layers of {', '.join(unknown)} are not supported; known are "
            f"{' and '.join(get_args(AttentionKind))}"
        )
    if "sliding_attention" not in types:
        return {}
    if config.sliding_window is None:
        raise CheckpointError("config.json: sliding_window is null, but layer_types names layers with a window")
    return {"sliding_window": config.sliding_window, "layer_types": types if len(set(types)) > 1 else ()}


def mlp_projections(spec: ModelSpec) -> tuple[str, ...]:
    return ("gate_proj", "up_proj", "down_proj") if spec.gated_mlp else ("up_proj", "down_proj")


def llama_parameters(
    spec: ModelSpec, biased: tuple[str, ...] = (), qk_norm: bool = False
) -> dict[str, tuple[str, ...]]:
    """Tensor names of a Llama-like model and the role of each; `biased` lists the projections with a bias."""
    names = attention_parameters(spec, biased, qk_norm) | mlp_parameters(spec, biased)
    return outer(spec) | all_layers(spec, "model", {name: (role,) for name, role in names.items()})


def attention_parameters(spec: ModelSpec, biased: Collection[str] = (), qk_norm: bool = False) -> dict[str, str]:
    """Names and roles of the tensors of attention and of both norms in a layer of a Llama-like model."""
    names = {f"self_attn.{name}.weight": f"{name}.weight" for name in ATTENTION_ROLES}
    names |= {f"self_attn.{name}.bias": f"{name}.bias" for name in ATTENTION_ROLES if name in biased}
    names |= {f"{name}.{part}": f"{name}.{part}" for name in block_norms(spec) for part in norm_parts(spec)}
    names |= {"self_attn.sinks": "attention.sinks"} if spec.attention_sinks else {}
    if qk_norm:
        norms = [name for each in qk_norms(spec).values() for name in each]
        names |= {f"self_attn.{name}.{part}": f"{name}.{part}" for name in norms for part in norm_parts(spec)}
    return names


def mlp_parameters(spec: ModelSpec, biased: Collection[str] = ()) -> dict[str, str]:
    names = {f"mlp.{name}.weight": f"{name}.weight" for name in mlp_projections(spec)}
    return names | {f"mlp.{name}.bias": f"{name}.bias" for name in mlp_projections(spec) if name in biased}


def in_parts(names: Mapping[str, tuple[str, ...]], parts: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Expands modules -> roles to their tensors, `weight` or `bias`."""
    return {
        f"{name}.{part}": tuple(f"{role}.{part}" for role in roles) for name, roles in names.items() for part in parts
    }


def outer(
    spec: ModelSpec, embeddings: str = "model.embed_tokens", norm: str = "model.norm"
) -> dict[str, tuple[str, ...]]:
    found = {f"{embeddings}.weight": ("embed_tokens.weight",)} | in_parts({norm: ("norm",)}, norm_parts(spec))
    return found if spec.tie_word_embeddings else found | {"lm_head.weight": ("lm_head.weight",)}


def all_layers(
    spec: ModelSpec, base: str, names: Mapping[str, tuple[str, ...]], layers: str = "layers"
) -> dict[str, tuple[str, ...]]:
    return {
        f"{base}.{layers}.{layer}.{name}": tuple(f"layers.{layer}.{role}" for role in roles)
        for layer in range(spec.num_hidden_layers)
        for name, roles in names.items()
    }
