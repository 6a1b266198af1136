"""Repairs what sparsity costs: a short self-distillation of the model under its own masks (ActiveFlow 5, KL and STE).

Model in, model out, so all later stages work on either. The teacher is the dense model, the student the same weights
with the method's masks; AdamW moves all weights on calibration blocks, validation blocks decide which are kept. Off by
default; models that do not fit whole in float32 are refused.
"""

import functools
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field
from safetensors.numpy import save_file

from compiler._io import Workspace, digest, load_arrays, replacing
from compiler._shared_settings import SeedSetting
from compiler.activity.choice import choice_of
from compiler.architectures import _common
from compiler.checkpoint.headers import read_header
from compiler.checkpoint.private import private_folder
from compiler.checkpoint.source_json import read_object
from compiler.checkpoint.tensor_map import match_tensors
from compiler.checkpoint.tensors import MAX_CONFIG_BYTES, read_role
from compiler.checkpoint.weight_files import INDEX, locate, scan
from runtime._plugins import load, options_of
from schemas.base import PositiveCount
from schemas.config import Key
from schemas.corpus import Corpus
from schemas.errors import ColdpressError
from schemas.families import FAMILIES, num_units
from schemas.model import Model
from schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from torch import nn

    from compiler.distill import _training as distillation

LOG = logging.getLogger(__name__)
MAX_PARAMETERS = 150_000_000
"""Teacher, student, Adam's two moments and the gradients of some blocks, all of them float32: about 5 GB."""


class DistillConfig(SeedSetting):
    """Settings of `distill`."""

    steps: Annotated[PositiveCount, Key("distill_steps")] = Field(
        default=40, description="updates of the weights in distillation"
    )
    blocks_per_step: Annotated[PositiveCount, Key("distill_blocks")] = Field(
        default=8, description="calibration blocks per update in distillation"
    )
    learning_rate: Annotated[float, Key()] = Field(
        default=2e-4, gt=0, description="AdamW's first step size in distillation"
    )
    validation_blocks: Annotated[PositiveCount, Key()] = Field(
        default=16, description="validation blocks that decide which distilled weights are kept"
    )


def run(
    config: DistillConfig, model: Model, corpus: Corpus, sparsity: Sparsity, work: Workspace, threads: int
) -> Model:
    """The distilled model, its weights in a folder that transformers can load; the source where nothing is left out.

    Raises:
        ColdpressError: if the model is too large.
    """
    masks = _masks(model, sparsity)
    if not masks:
        LOG.info("distill: method %s leaves nothing out, so the model stays as it is", sparsity.method)
        return model
    if model.num_parameters > MAX_PARAMETERS:
        raise ColdpressError(
            f"model {model.name} has {model.num_parameters:,} parameters, distill trains whole models of at most "
            f"{MAX_PARAMETERS:,}; build with distill=false"
        )
    from compiler.distill import _training as distillation

    source = _Source.of(model)
    teacher, student = source.build(), source.build()
    teacher.requires_grad_(False)
    distillation.attach(student, load("compiler.architectures", model.spec.model_type).MODULES, masks)
    training = load_arrays(corpus.split("calibration").arrays, "tokens")["tokens"]
    validation = load_arrays(corpus.split("validation").arrays, "tokens")["tokens"][: config.validation_blocks]
    schedule = distillation.Schedule(config.steps, config.blocks_per_step, config.learning_rate, config.seed, threads)
    before, after = distillation.distill(teacher, student, training, validation, schedule)
    LOG.info("distill: KL to the dense model %.4f before, %.4f after, in nats per validation token", before, after)
    return _write(source, student, work.folder / "source")


def _masks(model: Model, sparsity: Sparsity) -> "tuple[distillation.Mask, ...]":
    """What the selector leaves out, as masks on signals of transformers' modules; none where that is nothing.

    Of a selector that misses some of the units that are active, what it misses is left out, too.
    """
    from compiler.distill import _training as distillation

    choice = choice_of(sparsity)
    selector = choice.selector
    if selector.EXACT:
        return ()
    options = options_of(selector, sparsity.options)
    missed = selector.MISSED_SHARE if model.spec.hidden_act == "relu" else 0.0
    masks: list[distillation.Mask] = []
    for densities in sparsity.densities:
        family, total = FAMILIES[densities.family], num_units(densities.family, model.spec)
        for layer, density in enumerate(densities.per_layer):
            arrays = choice.arrays[layer, family.name]
            if missed:
                arrays = selector.fit(total, (1 - missed) * density, {}, options)
            if missed or density < 1:
                kept = functools.partial(selector.select_many, arrays=arrays)
                masks.append(distillation.Mask(layer, family.activity, kept))
    return tuple(masks)


@dataclass(frozen=True)
class _Source:
    """A checkpoint as transformers knows it: its configuration, and the roles that each of its tensors holds."""

    model: Model
    config: Any
    names: dict[str, tuple[str, ...]]

    @staticmethod
    def of(model: Model) -> "_Source":
        config = _common.source_config(read_object(private_folder(model) / "config.json", MAX_CONFIG_BYTES))
        names = load("compiler.architectures", model.spec.model_type).parameters(config, model.spec)
        return _Source(model, config, names)

    def build(self) -> "nn.Module":
        """The whole model in float32."""
        import torch
        from transformers import AutoModelForCausalLM

        built = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32, attn_implementation="sdpa").eval()
        state = {name: torch.tensor(self._tensor(roles)) for name, roles in self.names.items()}
        if self.model.spec.tie_word_embeddings:
            (embeddings,) = (name for name, roles in self.names.items() if roles == ("embed_tokens.weight",))
            state["lm_head.weight"] = state[embeddings]
        built.load_state_dict(state, strict=True)
        return built

    def _tensor(self, roles: tuple[str, ...]) -> np.ndarray:
        parts = [read_role(self.model, role) for role in roles]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _write(source: _Source, student: "nn.Module", folder: Path) -> Model:
    """Writes the student beside the source's configuration and tokenizer, one file per layer; gives its record."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(private_folder(source.model), folder, ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    state, shards = student.state_dict(), _shards(source)
    for file, names in shards.items():
        with replacing(folder / file) as temporary:
            arrays = {name: np.ascontiguousarray(state[name].numpy(), np.float32) for name in names}
            save_file(arrays, temporary, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in shards.items() for name in names}}
    with replacing(folder / INDEX) as temporary:
        temporary.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    files = tuple(scan(folder / file, list(read_header(folder / file).values())) for file in shards)
    others = tuple(file for file in source.model.files if not file.name.endswith(".safetensors"))
    return source.model.model_copy(
        update={
            "folder": str(folder.resolve()),
            "tensors": match_tensors(source.model.spec, source.names, locate(folder)),
            "files": tuple(sorted((*files, *others), key=lambda file: file.name)),
            "weights_sha256": digest(*(text for file in files for text in (file.name, file.sha256))),
        }
    )


def _shards(source: _Source) -> dict[str, list[str]]:
    """File name -> names of its tensors: what all layers share, then one file per layer."""
    count = source.model.spec.num_hidden_layers + 1
    shards: dict[str, list[str]] = {f"model-{i + 1:05d}-of-{count:05d}.safetensors": [] for i in range(count)}
    for name, roles in source.names.items():
        _, _, place = roles[0].rpartition("layers.")
        number = int(place.split(".")[0]) + 1 if roles[0].startswith("layers.") else 0
        shards[list(shards)[number]].append(name)
    return shards
