"""A model's spec and every role's shape, from its config.json, or a GGUF file's header, alone. For checks before any
weight is there; `ingest` checks the tensors themselves against the same shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from coldpress.compiler.architectures import _common
from coldpress.compiler.checkpoint.gguf_files import open_gguf
from coldpress.compiler.checkpoint.source_config import checked_config
from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.tensors import MAX_CONFIG_BYTES
from coldpress.schemas.model import ModelSpec, role_shape


@dataclass(frozen=True)
class Shape:
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shapes:
    """A model without its weights; cost functions accept it in place of a `Model`."""

    spec: ModelSpec
    tensors: Mapping[str, Shape]
    """By role."""
    promised_tokens: int = 0
    """max_position_embeddings of config.json, where the model can be built for fewer tokens, too."""

    @property
    def num_parameters(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.tensors.values())


def read_shapes(config: Path) -> Shapes:
    """Returns the shapes that a config.json or a GGUF file describes, mostly without transformers, which takes seconds
    to import; it may refuse values later that are taken here. Raises CheckpointError for others."""
    if config.suffix == ".json":
        raw = read_object(config, MAX_CONFIG_BYTES)
    else:
        from coldpress.compiler.checkpoint.gguf_config import source_config_of  # here: a device is measured without it

        raw = source_config_of(open_gguf(config))
    architecture, believed = checked_config(raw)
    source = _common.filled(architecture, believed) or _common.source_config(architecture.MODULES, believed)
    spec = architecture.spec(source)
    roles = (role for names in architecture.parameters(source, spec).values() for role in names)
    shapes = {role: Shape(role_shape(spec, role)) for role in roles}
    return Shapes(spec, shapes, raw.get("max_position_embeddings") or 0)


def why_shorter(promised_tokens: int, spec: ModelSpec) -> str:
    """Explains why config.json promises more tokens than the model can be built for; empty if it does not."""
    if promised_tokens <= spec.max_position_embeddings:
        return ""
    return (
        f" (config.json has {promised_tokens}, but longrope's short factors hold up to "
        "original_max_position_embeddings; longrope=long takes the long ones)"
    )
