"""The input of a recipe (compiler/stages/distill/_recipe.py): the model, and the units that the build will leave
out."""

from dataclasses import dataclass

from coldpress.compiler.stages.distill._masks import Mask
from coldpress.compiler.training.source import Source
from coldpress.schemas.sparsity import Sparsity


@dataclass(frozen=True)
class Task:
    source: Source
    sparsity: Sparsity
    masks: tuple[Mask, ...]
    seed: int
    device: str
    recompute: bool
    """True if the backward pass recomputes each layer instead of storing its inner values."""
