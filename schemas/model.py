"""Records that describe a causal LM: its shape (`ModelSpec`), and where its tensors are stored (`Model`).

Tensors are named by role, with Hugging Face's module names and no prefix:
`embed_tokens.weight`, `embed_positions.weight`, `norm.weight`, `norm.bias`, `lm_head.weight`, `rotary.inv_freq`, and
per layer `layers.<i>.{input_layernorm,post_attention_layernorm,pre_feedforward_layernorm,post_feedforward_layernorm,
q_norm,k_norm,q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj}.{weight,bias}`. The head may have a bias.
compiler/architectures/<model_type>.py translates the names of architectures that use other names or fuse matrices. A
two-matrix MLP (OPT) has only `up_proj` and `down_proj`. In a mixture of experts the MLP's matrices are
`layers.<i>.experts.<e>.{gate_proj,up_proj,down_proj}.{weight,bias}`, and there is
`layers.<i>.router.{weight,bias,correction}`. An expert that every token uses is
`layers.<i>.shared_expert.{gate_proj,up_proj,down_proj}.weight`, with `layers.<i>.shared_expert_gate.weight` if a gate
weights it. `norm_placement` and `residual` determine which norms a layer has, see `placed_norms`.
Layers that rotate with frequencies of their own use `rotary_local.inv_freq`. If every head has its own norm, the roles
are `layers.<i>.heads.<h>.{q_norm,k_norm}.weight`. Heads' sinks are `layers.<i>.attention.sinks`.
With latent attention (`kv_lora_rank`) `k_proj` gives a token's latent and the rotated part of its key, `kv_b_proj`
expands latents to the heads' keys and values, and there is no `v_proj`; with `q_lora_rank` `q_proj` gives the latent of
the queries, which `q_b_proj` expands. `q_norm` and `k_norm` are those of the latents.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from coldpress.schemas.base import Count, Extended, Many, Options, PositiveCount, Record, Sha256, Share
from coldpress.schemas.errors import clipped

Activation = Literal["relu", "relu2", "drelu", "fatrelu", "silu", "gelu", "gelu_tanh", "swiglu_oai"]
"""The activation of the gate, or of up in an MLP without a gate. `relu2` is relu(x)**2 (So et al. 2021); `drelu`
applies relu to both, relu(gate) * relu(up) (Bamboo, TurboSparse); `fatrelu` is x at or above a threshold and 0 below
(Kurtz et al. 2020); `swiglu_oai` is g sigmoid(1.702 g) for the gate, g = min(gate, c), times clip(up, -c, c) + 1, where
c is the threshold (gpt-oss)."""
EXACT_ZEROS: frozenset[Activation] = frozenset(("relu", "relu2", "drelu", "fatrelu"))
"""Activations that are exactly zero for part of their inputs, so that units can be left out without any error."""
MatrixRole = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
AttentionKind = Literal["full_attention", "sliding_attention"]
"""The positions that a layer's attention sees: all up to the token's own, or the last `sliding_window` of them. Hugging
Face's names (`layer_types`)."""
RotaryKind = Literal["none", "main", "local"]
"""Rotation of q and k in a layer: none, by the model's frequencies, or by a second set of them (Gemma 3)."""
FREQUENCIES: Mapping[RotaryKind, str] = {"main": "rotary.inv_freq", "local": "rotary_local.inv_freq"}
ATTENTION_ROLES: tuple[MatrixRole, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_ROLES: tuple[MatrixRole, ...] = ("gate_proj", "up_proj", "down_proj")
MIXTURE_FIELDS = (
    "router_scores",
    "router_normed",
    "router_scaling",
    "router_options",
    "num_expert_groups",
    "num_expert_groups_per_tok",
    "shared_intermediate_size",
    "dense_layers",
    "dense_intermediate_size",
)
"""Fields that only mixtures have, beside the numbers of experts."""
LATENT_FIELDS = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim")
"""Fields that only models with latent attention have."""
EXTENSIONS = (
    *MIXTURE_FIELDS,
    *LATENT_FIELDS,
    "residual",
    "attention_scale",
    "attention_softcap",
    "attention_sinks",
    "logits_softcap",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "rotary_pairs",
    "layer_rotary",
)
"""Fields of a ModelSpec that only some artifacts have; such an artifact requires the feature `model.<field>`."""


class ModelSpec(Extended):
    """Shape and arithmetic of a decoder-only transformer; all that the runtime's decoder needs besides tensors."""

    LATER = EXTENSIONS

    model_type: str
    vocab_size: PositiveCount
    hidden_size: PositiveCount
    intermediate_size: PositiveCount
    num_hidden_layers: PositiveCount
    num_attention_heads: PositiveCount
    num_key_value_heads: PositiveCount
    head_dim: PositiveCount
    max_position_embeddings: PositiveCount
    hidden_act: Activation
    activation_threshold: float = Field(default=0.0, ge=0)
    """The threshold of `fatrelu`, and what `swiglu_oai` clamps to; 0 for other activations."""
    gated_mlp: bool
    num_experts: PositiveCount = 1
    """Experts of a layer, among which a router chooses; 1 without a router."""
    num_experts_per_tok: PositiveCount = 1
    """Experts that the router picks for a token: those with the largest scores."""
    router_scores: str = "softmax"
    """The router, a file of runtime/routers: scores that it makes of its logits. It chooses by them, and a tensor
    `router.correction` is added to them for the choice alone."""
    router_options: Options = Field(default={})
    """Settings that only this router has."""
    router_normed: bool = True
    """True if the scores of the picked experts are divided by their sum before they weight the outputs."""
    router_scaling: float = Field(default=1.0, gt=0)
    """Factor on the experts' weights."""
    num_expert_groups: PositiveCount = 1
    """Groups of consecutive experts; a token's experts are all in a few of them."""
    num_expert_groups_per_tok: PositiveCount = 1
    """Groups that a token's experts are in: those whose best scores have the largest sums."""
    shared_intermediate_size: Count = 0
    """Width of an MLP beside the experts that every token uses; 0 for none."""
    dense_layers: Many[Count] = ()
    """In a mixture, the layers with one MLP instead of experts, ascending."""
    dense_intermediate_size: Count = 0
    """Width of the MLP of these layers; 0 without any."""
    norm: Literal["rms_norm", "rms_norm_1p", "layer_norm", "layer_norm_1p"]
    """The kind of all norms. With `rms_norm_1p` (Gemma) and `layer_norm_1p` (Nemotron) a weight w stands for 1 + w."""
    norm_eps: float = Field(gt=0)
    norm_placement: Literal["before", "after", "around"] = "before"
    """Place of attention's and MLP's norms: x + f(norm(x)), x + norm(f(x)) (OLMo 2), x + norm(f(norm(x))) (Gemma 2)."""
    residual: Literal["sequential", "parallel", "parallel_shared"] = "sequential"
    """Input of the MLP: the hidden states after attention, or the layer's input, like attention. `parallel_shared` has
    one norm for both (Phi)."""
    qk_norm: Literal["head", "width", "heads"] = "head"
    """Norms of q and k, where a layer has them: over each head separately (Qwen3), over all heads together (OLMo 2), or
    over each head separately with weights of its own (StableLM)."""
    attention_scale: float | None = Field(default=None, gt=0)
    """Factor on attention scores; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = Field(default=None, gt=0)
    """Attention scores s become c tanh(s / c) (Gemma 2); None: they stay as they are."""
    attention_sinks: bool = False
    """True if each head of a layer has a logit that counts in the softmax of its scores and adds no value (gpt-oss)."""
    logits_softcap: float | None = Field(default=None, gt=0)
    """The same for logits."""
    embedding_multiplier: float = 1.0
    """Factor on token embeddings (Gemma, Granite)."""
    residual_multiplier: float = 1.0
    """Factor on what attention and the MLP add to the hidden states (Granite)."""
    logits_scaling: float = Field(default=1.0, gt=0)
    """Logits are divided by it (Granite)."""
    kv_lora_rank: Count = 0
    """Latent attention (DeepSeek-V2): the width of the latent that a token's keys and values are made of; 0 for other
    attention. The cache holds the latent and the rotated part of the keys: `head_dim` is this plus `rotary_dim`."""
    q_lora_rank: Count = 0
    """The width of the latent that queries are made of; 0 if they are made of attention's input."""
    qk_nope_head_dim: Count = 0
    """With latent attention, the part of a head's query and key that is not rotated."""
    v_head_dim: Count = 0
    """With latent attention, the width of a head's value."""
    position: Literal["rotary", "learned"]
    rotary_dim: Count
    """Leading dimensions of each head that are rotated; 0 with learned positions."""
    rotary_scaling: float = 1.0
    """Factor on cos and sin (transformers' attention_scaling, YaRN and longrope) of the kind `main`."""
    rotary_pairs: Literal["halves", "neighbours"] = "halves"
    """The dimensions of a head that are rotated together: i and i + rotary_dim / 2, or 2 i and 2 i + 1 (GLM-4)."""
    layer_rotary: Many[RotaryKind] = ()
    """Rotation of each layer; empty if all layers rotate by the kind `main`."""
    position_offset: Count = 0
    """Added to a position before the learned table is read (OPT: 2)."""
    sliding_window: PositiveCount | None = None
    """Most positions that attention sees, including the token's own; None for all."""
    layer_types: Many[AttentionKind] = ()
    """The kind of attention of each layer; empty if all layers have the same kind."""
    tie_word_embeddings: bool
    bos_token_id: Count | None = None
    eos_token_ids: Many[Count] = ()

    @model_validator(mode="after")
    def _one_type_per_layer(self) -> Self:
        count = len(self.layer_types)
        if count and (count != self.num_hidden_layers or self.sliding_window is None):
            raise ValueError(
                f"layer_types has {count} entries and sliding_window is {self.sliding_window}, expected one entry for "
                f"each of {self.num_hidden_layers} layers, and a window"
            )
        if self.layer_rotary and len(self.layer_rotary) != self.num_hidden_layers:
            raise ValueError(
                f"layer_rotary has {len(self.layer_rotary)} entries, expected one for each of "
                f"{self.num_hidden_layers} layers"
            )
        return self

    @property
    def head_role(self) -> Literal["embed_tokens.weight", "lm_head.weight"]:
        """The tensor that gives logits: the embeddings, where the head is tied to them."""
        return "embed_tokens.weight" if self.tie_word_embeddings else "lm_head.weight"

    def first_layers(self, count: int) -> Self:
        cut = {"layer_types": self.layer_types[:count], "layer_rotary": self.layer_rotary[:count]}
        dense = tuple(layer for layer in self.dense_layers if layer < count)
        cut |= {"dense_layers": dense, "dense_intermediate_size": self.dense_intermediate_size if dense else 0}
        return self.model_copy(update={"num_hidden_layers": count, **cut})

    def rotary_of(self, layer: int) -> RotaryKind:
        if self.position != "rotary":
            return "none"
        return self.layer_rotary[layer] if self.layer_rotary else "main"

    @property
    def frequencies(self) -> dict[RotaryKind, str]:
        used = (self.layer_rotary or ("main",)) if self.position == "rotary" else ()
        return {kind: role for kind, role in FREQUENCIES.items() if kind in used}

    @model_validator(mode="after")
    def _dense_layers_in_order(self) -> Self:
        found = self.dense_layers
        fits = list(found) == sorted({layer for layer in found if layer < self.num_hidden_layers})
        if not fits or len(found) >= self.num_hidden_layers or (len(found) > 0) != (self.dense_intermediate_size > 0):
            raise ValueError(
                f"dense_layers is {clipped(str(list(found)))} and dense_intermediate_size is "
                f"{self.dense_intermediate_size}, expected some of {self.num_hidden_layers} layers in order, not all "
                "of them, and a width, or neither"
            )
        if not self.is_mixture and (found or self.shared_intermediate_size):
            raise ValueError(
                f"shared_intermediate_size is {self.shared_intermediate_size} and dense_layers has {len(found)} "
                "entries, expected 0 and none in a model without experts"
            )
        return self

    def is_dense(self, layer: int) -> bool:
        """Returns whether a layer of a mixture has one MLP instead of experts."""
        place = bisect_left(self.dense_layers, layer)
        return place < len(self.dense_layers) and self.dense_layers[place] == layer

    def has_experts(self, layer: int) -> bool:
        return self.is_mixture and not self.is_dense(layer)

    def of_layer(self, layer: int) -> "ModelSpec":
        """Returns the spec of a model all of whose layers are like `layer`: without experts, if it has none."""
        return self._of_one_mlp(self.dense_intermediate_size) if self.is_dense(layer) else self

    @property
    def of_shared_expert(self) -> "ModelSpec":
        return self._of_one_mlp(self.shared_intermediate_size)

    def _of_one_mlp(self, intermediate_size: int) -> "ModelSpec":
        kinds = type(self).model_fields
        names = ("num_experts", "num_experts_per_tok", *MIXTURE_FIELDS)
        return self.model_copy(
            update={name: kinds[name].default for name in names} | {"intermediate_size": intermediate_size}
        )

    def window_of(self, layer: int) -> int | None:
        """Returns the most positions that a layer's attention sees, including the token's own; None for all."""
        is_full = bool(self.layer_types) and self.layer_types[layer] == "full_attention"
        return None if is_full else self.sliding_window

    @property
    def is_latent(self) -> bool:
        """True if keys and values are made of a latent of each token."""
        return self.kv_lora_rank > 0

    @property
    def mixed_size(self) -> int:
        """The width of the mixed heads, the input of o_proj."""
        return self.num_attention_heads * (self.v_head_dim if self.is_latent else self.head_dim)

    @property
    def attention_roles(self) -> tuple[MatrixRole, ...]:
        """The matrices of attention that take its input or the mixed heads."""
        return tuple(role for role in ATTENTION_ROLES if not (self.is_latent and role == "v_proj"))

    @property
    def expanding_matrices(self) -> tuple[str, ...]:
        """The matrices of attention that expand latents."""
        return ("q_b_proj",) * (self.q_lora_rank > 0) + ("kv_b_proj",) * self.is_latent

    @property
    def exact_zeros(self) -> bool:
        """True if inactive units of the MLP are exactly zero."""
        return self.hidden_act in EXACT_ZEROS

    @property
    def is_mixture(self) -> bool:
        return self.num_experts > 1

    @property
    def activated_up(self) -> bool:
        """True if up goes through an activation, too."""
        return self.hidden_act in ("drelu", "swiglu_oai")


EXTENDED_VALUES: Mapping[str, tuple[str, ...]] = {
    "hidden_act": ("swiglu_oai",),
    "norm": ("rms_norm_1p",),
    "norm_placement": ("around",),
    "qk_norm": ("heads",),
}
"""Values of older fields that require the feature `model.<field>.<value>`."""
MODEL_FEATURES = (
    *(f"model.{name}" for name in EXTENSIONS),
    *(f"model.{name}.{value}" for name, values in EXTENDED_VALUES.items() for value in values),
)


def features_of_model(spec: ModelSpec) -> set[str]:
    kept = spec.model_dump()
    found = {f"model.{name}" for name in EXTENSIONS if name in kept}
    return found | {f"model.{name}.{kept[name]}" for name, values in EXTENDED_VALUES.items() if kept[name] in values}


def rows_on_flash(spec: ModelSpec) -> tuple[str, ...]:
    """Returns the matrices that may lie on flash, since a token needs one row; a tied head needs all rows."""
    return () if spec.tie_word_embeddings else ("embed_tokens.weight",)


def role_shape(spec: ModelSpec, role: str) -> tuple[int, ...]:
    """Returns the shape of the tensor `role`, with a layer (`layers.3.q_proj.weight`) or without (`q_proj.weight`)."""
    *above, module, kind = role.split(".")
    if "shared_expert" in above:
        spec = spec.of_shared_expert
    elif above[:1] == ["layers"] and "experts" not in above:
        spec = spec.of_layer(int(above[1]))
    hidden, inner = spec.hidden_size, spec.intermediate_size
    heads, keys = spec.num_attention_heads, spec.num_key_value_heads * spec.head_dim
    queries = heads * (spec.qk_nope_head_dim + spec.rotary_dim if spec.is_latent else spec.head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (spec.vocab_size, hidden),
        "embed_positions": (spec.max_position_embeddings + spec.position_offset, hidden),
        "lm_head": (spec.vocab_size, hidden),
        "rotary": (spec.rotary_dim // 2,),
        "rotary_local": (spec.rotary_dim // 2,),
        "q_proj": (spec.q_lora_rank or queries, hidden),
        "q_b_proj": (queries, spec.q_lora_rank),
        "kv_b_proj": (heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, spec.mixed_size),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "q_norm": (spec.q_lora_rank or (queries if spec.qk_norm == "width" else spec.head_dim),),
        "k_norm": (spec.kv_lora_rank or (keys if spec.qk_norm == "width" else spec.head_dim),),
        "router": (spec.num_experts, hidden),
        "shared_expert_gate": (1, hidden),
        "attention": (heads,),
    }
    shape = shapes.get(module, (hidden,))
    return shape[:1] if kind in ("bias", "correction") else shape


def placed_norms(spec: ModelSpec) -> tuple[tuple[str | None, str | None], tuple[str | None, str | None]]:
    """Returns Hugging Face's names of the norms (before, after) attention and (before, after) the MLP; None: no norm.
    `post_attention_layernorm` comes after attention wherever it is: before the MLP, or on attention's output."""
    if spec.norm_placement == "after":
        return (None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")
    if spec.norm_placement == "around":
        before_mlp = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        return ("input_layernorm", "post_attention_layernorm"), before_mlp
    shared = spec.residual == "parallel_shared"
    return ("input_layernorm", None), ("input_layernorm" if shared else "post_attention_layernorm", None)


def block_norms(spec: ModelSpec) -> tuple[str, ...]:
    """Returns Hugging Face's names of a layer's norms of attention and MLP, each once, in the order of their use."""
    return tuple(dict.fromkeys(name for pair in placed_norms(spec) for name in pair if name is not None))


def norm_parts(spec: ModelSpec) -> tuple[str, ...]:
    return ("weight",) if spec.norm in ("rms_norm", "rms_norm_1p") else ("weight", "bias")


def qk_norms(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Returns the names of a layer's norms of q and of k, if it has them: one, or one for each head."""
    if spec.qk_norm != "heads":
        return {"q_norm": ("q_norm",), "k_norm": ("k_norm",)}
    heads = {"q_norm": spec.num_attention_heads, "k_norm": spec.num_key_value_heads}
    return {name: tuple(f"heads.{head}.{name}" for head in range(count)) for name, count in heads.items()}


def matrices(role: str, spec: ModelSpec) -> tuple[str, ...]:
    """Returns the names of a layer's matrices with a role: `down_proj`, or one per expert, as `experts.3.down_proj`."""
    if not spec.is_mixture or role not in MLP_ROLES:
        return (role,)
    return tuple(f"experts.{expert}.{role}" for expert in range(spec.num_experts))


class StoredTensor(Record):
    file: str
    """Path of the safetensors file; absolute in memory."""
    tensor: str


class TensorSource(Extended):
    """Place of a role's values: a tensor of a safetensors or GGUF file, or rows of a fused tensor.

    The rows are consecutive, or in equal parts at equal distances (the heads of q, k and v in turn, GPT-NeoX).
    """

    LATER = ("index", "transposed", "scales", "paired_heads", "added", "quantized")

    file: str
    """Path of the safetensors or GGUF file; absolute in memory."""
    tensor: str
    row_start: Count
    row_stop: Count
    """End of the first part."""
    num_parts: PositiveCount = 1
    stride_rows: Count = 0
    """Rows from the start of a part to that of the next."""
    shape: tuple[PositiveCount, ...]
    index: Count | None = None
    """The entry of the file's tensor that has the rows, if there is one for each expert (gpt-oss, Granite)."""
    transposed: bool = False
    """True if the rows are columns of that entry."""
    scales: StoredTensor | None = None
    """The scales, if the file's tensor has the blocks of MXFP4 (compiler/checkpoint/mxfp4.py)."""
    paired_heads: Count = 0
    """Heads in which rows that are rotated together are neighbours in the file, while the role has them half a head
    apart; 0 if the file has the role's order (GGUF)."""
    added: float = 0.0
    """A number that the file's values have more than the role's (GGUF's norms of Gemma)."""
    quantized: str | None = None
    """GGUF's type of the file's tensor, if that has blocks of codes."""

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Yields (first, last + 1) of the consecutive rows of the file's tensor that are rows `start` to `stop` of the
        role's; all by default."""
        size = self.row_stop - self.row_start
        stop = self.num_parts * size if stop is None else stop
        for part in range(start // size, -(-stop // size)):
            moved = self.row_start + part * (self.stride_rows - size)
            yield moved + max(start, part * size), moved + min(stop, (part + 1) * size)


class SourceFile(Record):
    name: str
    size_bytes: Count
    sha256: Sha256


class DistillationPoint(Record):
    step: Count
    """Updates before it."""
    loss: float | None
    """Mean over the steps since the previous evaluation; None for the first."""
    validation_kl: float
    """Divergence from the dense model on validation text, nats per token."""
    validation_penalty: float = 0.0
    """Penalty that is added to the divergence; 0 without one."""

    @property
    def validation_loss(self) -> float:
        """The loss by which weights are chosen."""
        return self.validation_kl + self.validation_penalty


class Distillation(Record):
    recipe: str
    curve: Many[DistillationPoint]
    """The weights come from its lowest point."""
    share: Share = 1.0
    """Position of the final weights between the source's weights (0) and the distilled ones (1)."""


class Model(Record):
    """A checked checkpoint, the result of `ingest`, `relufy` and `distill`."""

    spec: ModelSpec
    name: str
    """The name the user gave it: profile name, or the folder's last part."""
    source: str
    """Hub id, or `local`: never a path, since it goes into the artifact."""
    revision: str | None
    license: str | None
    folder: str
    """Folder with config.json as re-serialised by ingest, tokenizer files; absolute in memory, for transformers."""
    tensors: dict[str, TensorSource]
    files: tuple[SourceFile, ...]
    private_files: tuple[SourceFile, ...] = ()
    """The other files in `folder`: configuration and tokenizer."""
    license_files: tuple[SourceFile, ...] = ()
    """Licence texts that `ingest` found: they are in `folder`, and every artifact of the model contains them."""
    weights_sha256: Sha256
    """Digest over the weight files' names and digests: the identity of the weights."""
    num_parameters: PositiveCount
    relufication: Distillation | None = None
    """Training by `relufy`; the recipe is the new activation."""
    distillation: Distillation | None = None
