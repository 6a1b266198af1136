"""What a recipe (compiler/stages/distill/_recipe.py) is given: the model, and the units that will be left out of it."""

from dataclasses import dataclass

from coldpress.compiler.stages.distill._masks import Mask
from coldpress.compiler.training.source import Source
from coldpress.schemas.sparsity import Sparsity


@dataclass(frozen=True)
class Task:
    """The model to train, and the units that will be left out of it."""

    source: Source
    sparsity: Sparsity
    masks: tuple[Mask, ...]
    seed: int
    device: str
    recompute: bool
    """Whether the backward pass runs each layer again instead of keeping what is inside it."""
