"""A whole checkpoint as transformers loads it: builds it for training, and writes it back as a folder that it can load.
Reads one tensor and writes one layer at a time, so that memory holds at most one layer beside the model itself."""

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from coldpress.compiler.architectures import _common
from coldpress.compiler.checkpoint.headers import read_header
from coldpress.compiler.checkpoint.private import private_folder
from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.tensor_map import match_tensors
from coldpress.compiler.checkpoint.tensors import MAX_CONFIG_BYTES, fused, read_stored, stored_dtype
from coldpress.compiler.checkpoint.weight_files import INDEX, locate, scan, source_file
from coldpress.compiler.io import digest, replacing
from coldpress.runtime.plugins import load
from coldpress.schemas.model import Model

CONFIG = "config.json"
KINDS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Source:
    """A checkpoint: its configuration, and the roles that each of its tensors holds."""

    model: Model
    config: Any
    names: dict[str, tuple[str, ...]]
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json whose values replace those of the folder."""

    @staticmethod
    def of(model: Model, changes: Mapping[str, Any] | None = None) -> "Source":
        """Reads the configuration only; the record `model` already includes `changes` of config.json."""
        architecture = load("coldpress.compiler.architectures", _common.Architecture, model.spec.model_type)
        raw = {**read_object(private_folder(model) / CONFIG, MAX_CONFIG_BYTES), **(changes or {})}
        config = _common.source_config(architecture.MODULES, raw)
        return Source(model, config, architecture.parameters(config, model.spec), changes or {})

    @property
    def modules(self) -> _common.Modules:
        return load("coldpress.compiler.architectures", _common.Architecture, self.model.spec.model_type).MODULES

    def build(self, device: str, stored: bool = False) -> nn.Module:
        """Builds the whole model on `device`; it computes in float32. With `stored` matrices keep their stored dtype;
        then they cannot train, and each is widened at every use."""
        built: Any = _common.causal_lm(self.modules, self.config, self.model.spec)
        for name, roles in self.names.items():
            values = self.tensor(roles)
            kept = values if stored and values.ndim > 1 else values.float()
            module, _, leaf = name.rpartition(".")
            setattr(built.get_submodule(module), leaf, nn.Parameter(kept.to(device), requires_grad=not stored))
        if self.model.spec.tie_word_embeddings:
            built.lm_head.weight = built.get_input_embeddings().weight
        if self.model.spec.position == "rotary":
            rotary = _common.rotary_module(self.modules, built.config).to(device)
            built.get_submodule(self.modules.base).rotary_emb = rotary
        embedding = built.get_input_embeddings()
        if hasattr(embedding, "scalar_embed_scale"):  # Gemma's factor on embeddings is no parameter
            embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, device=device)
        left = [name for name, part in (*built.named_parameters(), *built.named_buffers()) if part.is_meta]
        if left:
            raise AssertionError(f"no weights for {', '.join(left)}")  # ingest checked that all tensors exist
        if stored:
            _widen_when_used(built)
        return built

    def tensor(self, roles: tuple[str, ...]) -> Tensor:
        """Returns one of transformers' tensors, on the CPU, in its stored dtype."""
        return fused(roles, self._of_role)

    def _of_role(self, role: str) -> Tensor:
        kept = torch.empty(self.model.tensors[role].shape, dtype=KINDS[stored_dtype(self.model, role)])
        read_stored(self.model, role, kept.view(torch.uint8).numpy().reshape(-1))
        return kept

    def matrices(self, roles: frozenset[str]) -> list[str]:
        """Returns the names of the matrices that hold one of `roles`, for example `up_proj`, in any layer."""
        return [
            name
            for name, held in self.names.items()
            if held[0].startswith("layers.")
            and any(role.split(".")[-2:] in ([r, "weight"] for r in roles) for role in held)
        ]

    def write(self, weight: Callable[[str], Tensor], folder: Path) -> Model:
        """Writes weights, which `weight` gives by name, beside the source's configuration and tokenizer into `folder`,
        which is replaced if it exists, one file per layer; returns the record."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(private_folder(self.model), folder, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
        if self.changes:
            values = {**read_object(folder / CONFIG, MAX_CONFIG_BYTES), **self.changes}
            with replacing(folder / CONFIG) as temporary:
                temporary.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        shards = self._shards()
        for file, names in shards.items():
            with replacing(folder / file) as temporary:
                # no variable: it would keep the tensors of the previous file in memory
                save_file(
                    {name: weight(name).detach().cpu().contiguous() for name in names}, temporary, {"format": "pt"}
                )
        index = {"metadata": {}, "weight_map": {name: file for file, names in shards.items() for name in names}}
        with replacing(folder / INDEX) as temporary:
            temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        files = tuple(scan(folder / file, list(read_header(folder / file).values())) for file in shards)
        replaced = {Path(tensor.file).name for tensor in self.model.tensors.values()}
        others = tuple(file for file in self.model.files if file.name not in replaced)
        return self.model.model_copy(
            update={
                "folder": str(folder.resolve()),
                "private_files": tuple(source_file(folder / file.name) for file in self.model.private_files),
                "tensors": match_tensors(self.model.spec, self.names, locate(folder)),
                "files": tuple(sorted((*files, *others), key=lambda file: file.name)),
                "weights_sha256": digest(*(text for file in files for text in (file.name, file.sha256))),
            }
        )

    def _shards(self) -> dict[str, list[str]]:
        count = self.model.spec.num_hidden_layers + 1
        shards: dict[str, list[str]] = {f"model-{i + 1:05d}-of-{count:05d}.safetensors": [] for i in range(count)}
        for name, roles in self.names.items():
            number = int(roles[0].split(".")[1]) + 1 if roles[0].startswith("layers.") else 0
            shards[list(shards)[number]].append(name)
        return shards


def layers_of(model: nn.Module, modules: _common.Modules) -> Iterator[nn.Module]:
    layers: Any = model.get_submodule(f"{modules.base}.{modules.layers}")
    yield from layers


def recompute_layers(model: nn.Module, modules: _common.Modules) -> None:
    """Makes the backward pass recompute each layer instead of storing its inner values (gradient checkpointing)."""
    for layer in layers_of(model, modules):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def _widen_when_used(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, nn.Linear):
            setattr(part, "forward", _product(part.weight, part.bias))  # noqa: B010
        elif isinstance(part, nn.Embedding):
            part.register_forward_hook(lambda _module, _inputs, output: output.float())


def _product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: nn.functional.linear(x, weight.to(x.dtype), bias)
