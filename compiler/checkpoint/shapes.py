"""What a model will be, from its config.json alone: the spec, and every role's shape.

For checks before any weight is there; `ingest` holds the same shapes against the tensors themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from coldpress.compiler.architectures import _common
from coldpress.compiler.checkpoint.source_config import checked_config
from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.tensors import MAX_CONFIG_BYTES
from coldpress.schemas.model import ModelSpec, role_shape


@dataclass(frozen=True)
class Shape:
    """Of one tensor."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shapes:
    """A model without its weights; costs are counted of it as of a `Model`."""

    spec: ModelSpec
    tensors: Mapping[str, Shape]
    """By role."""

    @property
    def num_parameters(self) -> int:
        """Of all tensors."""
        return sum(prod(tensor.shape) for tensor in self.tensors.values())


def read_shapes(config: Path) -> Shapes:
    """The shapes that a config.json asks for.

    Raises:
        CheckpointError: if the model is not supported or config.json is not what it must be.
    """
    architecture, believed = checked_config(read_object(config, MAX_CONFIG_BYTES))
    source = _common.source_config(architecture.MODULES, believed)
    spec = architecture.spec(source)
    roles = (role for names in architecture.parameters(source, spec).values() for role in names)
    return Shapes(spec, {role: Shape(role_shape(spec, role)) for role in roles})
