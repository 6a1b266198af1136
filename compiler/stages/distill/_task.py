"""What a recipe (a public file of this package) is told.

A recipe has `Options`, its settings; `ram_bytes(size, options)`, what it takes; `state_bytes(size, options)`, what an
interrupted run leaves on disk; and `prepare(task, options) -> Lesson`.
"""

from dataclasses import dataclass

from coldpress.compiler.stages.distill._masks import Mask
from coldpress.compiler.training.source import Source
from coldpress.schemas.sparsity import Sparsity


@dataclass(frozen=True)
class Task:
    """The model that is to be trained, and what will be left out of it."""

    source: Source
    sparsity: Sparsity
    masks: tuple[Mask, ...]
    seed: int
    device: str
    recompute: bool
    """Whether the backward pass runs each layer again instead of keeping what is inside it."""
