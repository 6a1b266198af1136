"""Makes records from arrays without running any stage: activation statistics, a model's shape and a device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coldpress.compiler.io import Workspace, save_arrays
from coldpress.compiler.stages.order._task import Activity, Demand, OrderTask
from coldpress.schemas.activations import Activations, FamilyStatistics, LayerStatistics
from coldpress.schemas.corpus import SPLITS, Corpus, Split, TokenBlocks
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FamilyName, FormatName, Method
from coldpress.schemas.model import MLP_ROLES, Model, ModelSpec, TensorSource, matrices
from coldpress.schemas.placement import LayerPlacement, Placement
from coldpress.schemas.sparsity import Budget, Densities, Sparsity


def workspace(folder: Path) -> Workspace:
    """Returns a stage's workspace with a fixed fingerprint."""
    return Workspace(folder, "test")


def few_blocks(folder: Path) -> Corpus:
    """Writes a corpus of three random blocks of 24 tokens, the same in every split."""
    tokens = np.random.default_rng(5).integers(2, 384, (3, 24)).astype(np.int32)
    arrays = save_arrays(folder / "tokens.safetensors", {"tokens": tokens})
    blocks = (TokenBlocks(split=split, arrays=arrays, num_blocks=3, block_tokens=24) for split in SPLITS)
    return Corpus(name="random", text_sha256="0" * 64, splits=tuple(blocks))


def corpus_of_tokens(folder: Path, tokens: Mapping[Split, np.ndarray]) -> Corpus:
    """Writes a corpus of these blocks, int32 [num_blocks, block_tokens] by split."""
    splits = []
    for split, blocks in tokens.items():
        arrays = save_arrays(folder / f"{split}.safetensors", {"tokens": blocks})
        splits.append(TokenBlocks(split=split, arrays=arrays, num_blocks=len(blocks), block_tokens=blocks.shape[1]))
    return Corpus(name="test", text_sha256="0" * 64, splits=tuple(splits))


def pack(active: np.ndarray) -> np.ndarray:
    """Packs bool [num_units, num_tokens] into bits, as in an activation file."""
    return np.packbits(active, axis=1, bitorder="little")


def topical(num_units: int, num_tokens: int, num_topics: int, seed: int = 0) -> np.ndarray:
    """Returns bool [num_units, num_tokens]: units fire with their topic, whose units are scattered over the ids."""
    rng = np.random.default_rng(seed)
    topics, texts = rng.integers(0, num_topics, num_units), rng.integers(0, num_topics, num_tokens)
    return rng.random((num_units, num_tokens)) < np.where(topics[:, None] == texts, 0.8, 0.05)


def task_of(active: np.ndarray, pinned: tuple[int, ...] | np.ndarray = (), **changes: Any) -> OrderTask:
    """Returns an ordering task of bool [num_units, num_tokens], or [num_layers, num_units, num_tokens] for a group.
    By default there is no cache, and a unit takes a page; `changes` replace fields of the task or its parts. `pinned`
    are ids in every layer, or a mask [num_layers, num_units].
    """
    layers = active if active.ndim == 3 else active[None]
    mask = np.zeros(layers.shape[:2], bool)
    if isinstance(pinned, np.ndarray):
        mask |= pinned
    else:
        mask[:, list(pinned)] = True
    values: dict[str, Any] = {"cache": "static", "cache_slots": 0, "search_tokens": 4096}
    values |= {"unit_bytes": 4096, "flash": device_of().flash} | changes
    slots = values["cache_slots"]
    bits = np.concatenate([pack(layer) for layer in layers], axis=1)
    demand = Demand(
        activity=Activity(bits, layers.shape[2], len(layers)),
        pinned=mask,
        cache=values["cache"],
        cache_slots=slots if isinstance(slots, tuple) else (slots,) * len(layers),
        search_tokens=values["search_tokens"],
    )
    return OrderTask(demand, values["unit_bytes"], values["flash"])


def placement_of(
    folder: Path, layers: list[Mapping[FamilyName, np.ndarray]], pinned: tuple[int, ...] = ()
) -> Placement:
    """Writes a placement that pins the units `pinned` of every family; `layers` as in `activations_of`."""
    pairs = [(number, family, active) for number, families in enumerate(layers) for family, active in families.items()]
    arrays = {f"{number}.{family}": np.ones(len(active), np.int8) for number, family, active in pairs}
    for places in arrays.values():
        places[list(pinned)] = 0
    return Placement(
        solver="none",
        layers=tuple(LayerPlacement(layer=n, family=f, num_pinned=len(pinned), min_pinned=0) for n, f, _ in pairs),
        arrays=save_arrays(folder / "placement.safetensors", arrays),
        objective=0.0,
        gap=0.0,
        pinned_bytes=0,
        pinned_share=0.0,
    )


def statistics_of(folder: Path, layer: int, family: FamilyName, active: np.ndarray) -> FamilyStatistics:
    """Writes the statistics of one family from bool [num_units, num_tokens].

    Magnitudes of active units are spread evenly from 1 to 2, those of the others are 0.
    """
    arrays = {"bits": pack(active), "counts": active.sum(axis=1, dtype=np.int64)}
    histogram = [active.size - active.sum(), 0, active.sum() // 2, active.sum() - active.sum() // 2, 0]
    arrays["magnitude_histogram"] = np.array(histogram, np.uint64)
    arrays["magnitude_edges"] = np.array([0, 0.5, 1, 1.5, 2, 3e38], np.float32)
    return FamilyStatistics(
        family=family,
        num_units=len(active),
        density=float(active.mean()),
        arrays=save_arrays(folder / f"{layer}.{family}.safetensors", arrays),
    )


def activations_of(
    folder: Path,
    layers: list[Mapping[FamilyName, np.ndarray]],
    inputs: list[np.ndarray] | None = None,
    exact_zeros: bool = True,
) -> Activations:
    """Writes activations from bool [num_units, num_tokens] per family and layer.

    `inputs` are the MLP inputs of each layer, [num_tokens, hidden_size]; by default they are 0.
    """
    num_tokens = next(iter(layers[0].values())).shape[1]
    entries = []
    for number, families in enumerate(layers):
        values = inputs[number] if inputs else np.zeros((num_tokens, 4))
        entries.append(
            LayerStatistics(
                layer=number,
                families=tuple(statistics_of(folder, number, family, active) for family, active in families.items()),
                inputs=save_arrays(folder / f"{number}.inputs.safetensors", {"mlp_inputs": values.astype(np.float16)}),
                input_similarity=None,
            )
        )
    return Activations(num_tokens=num_tokens, exact_zeros=exact_zeros, layers=tuple(entries))


def model_of(num_hidden_layers: int = 2, hidden_size: int = 64, intermediate_size: int = 160, **spec: Any) -> Model:
    """Returns a Llama-shaped model record without files, for stages that read shapes only."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": 256,
        "hidden_act": "relu",
        "gated_mlp": True,
        "norm": "rms_norm",
        "norm_eps": 1e-5,
        "position": "rotary",
        "rotary_dim": hidden_size // 4,
        "tie_word_embeddings": True,
    }
    shape = ModelSpec(**(values | spec))
    shapes = shapes_of(shape)
    return Model(
        spec=shape,
        name="shape",
        source="local",
        revision=None,
        license=None,
        folder="/nowhere",
        tensors={
            role: TensorSource(file="/nowhere/x", tensor=role, row_start=0, row_stop=size[0], shape=size)
            for role, size in shapes.items()
        },
        files=(),
        weights_sha256="0" * 64,
        num_parameters=sum(int(np.prod(size)) for size in shapes.values()),
    )


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Returns role -> shape of the tensors of a Llama without biases."""
    hidden, queries = spec.hidden_size, spec.num_attention_heads * spec.head_dim
    keys = spec.num_key_value_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (spec.vocab_size, hidden), "norm.weight": (hidden,)}
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_hidden_layers):
        parts: dict[str, tuple[int, ...]] = {"q_proj": (queries, hidden), "o_proj": (hidden, queries)}
        parts |= {"k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        parts |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        for role in MLP_ROLES:
            if spec.gated_mlp or role != "gate_proj":
                size = (spec.intermediate_size, hidden)
                parts |= dict.fromkeys(matrices(role, spec), size[::-1] if role == "down_proj" else size)
        parts |= {"router": (spec.num_experts, hidden)} if spec.is_mixture else {}
        shapes |= {f"layers.{layer}.{name}.weight": size for name, size in parts.items()}
    return shapes


def sparsity_of(
    method: Method,
    densities: Mapping[FamilyName, tuple[float, ...]],
    cache_bytes: int = 1 << 20,
    predictor_rank: tuple[int, ...] = (),
    predictor_format: FormatName = "fp16",
    cache: str = "lfu",
) -> Sparsity:
    """Returns a decision of `allocate` whose budget has `cache_bytes` for units."""
    return Sparsity(
        method=method,
        format="fp16",
        cache=cache,
        context_length=64,
        densities=tuple(Densities(family=family, per_layer=values) for family, values in densities.items()),
        predictor_rank=predictor_rank,
        predictor_format=predictor_format if predictor_rank else None,
        budget=Budget(
            dram_budget_bytes=cache_bytes + 4096,
            resident_bytes=4096,
            predictor_bytes=0,
            kv_cache_bytes=0,
            bookkeeping_bytes=0,
            buffer_bytes=0,
            cache_bytes=cache_bytes,
        ),
    )


def device_of(**changes: Any) -> DeviceProfile:
    """Returns a phone with round figures: 16 us a small read, 100 us latency, 4 KiB pages; `changes` are plain values.

    Keys: dram_budget_bytes, dram_bytes_per_s, latency_s, read_curve, queue_depth, and accelerator (a dict).
    """

    def figure(value: Any) -> dict[str, Any]:
        return {"value": value, "source": "assumption: a test"}

    curve = changes.get("read_curve", ((4096, 2.56e8), (65536, 2e9), (1 << 20, 2e9)))
    accelerator = changes.get("accelerator")
    data = {
        "name": "test",
        "title": "A test's device",
        "dram_bytes": figure(8 << 30),
        "dram_budget_bytes": figure(changes.get("dram_budget_bytes", 1 << 30)),
        "dram_bytes_per_s": figure(changes.get("dram_bytes_per_s", 3e10)),
        "num_cores": figure(8),
        "flash": {
            "page_bytes": figure(4096),
            "queue_depth": figure(changes.get("queue_depth", 32)),
            "latency_s": figure(changes.get("latency_s", 1e-4)),
            "read_curve": figure(tuple({"read_bytes": size, "bytes_per_s": rate} for size, rate in curve)),
        },
        "accelerator": {name: figure(value) for name, value in accelerator.items()} if accelerator else None,
    }
    return DeviceProfile.model_validate(data)
