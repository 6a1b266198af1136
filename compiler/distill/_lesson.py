"""What a recipe (a public file of this package) gives to the training loop, and what it is told.

A recipe has `Options`, its settings; `ram_bytes(size, options)`, what it takes; `state_bytes(size, options)`, what an
interrupted run leaves on disk; and `prepare(task, options) -> Lesson`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor, nn

from compiler.distill._masks import Mask, Switch
from compiler.distill._source import Source
from schemas.sparsity import Sparsity

as_it_is = nullcontext[None]
"""Nothing changes while the student runs."""


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


@dataclass(frozen=True)
class Lesson:
    """A student, its teacher, and what of the student may move."""

    teacher: nn.Module
    student: nn.Module
    """Under its masks; it may be the teacher itself."""
    parameters: list[nn.Parameter]
    """float32."""
    weight: Callable[[str], Tensor]
    """What the student's tensor of a name is to be stored as, once it is trained."""
    teach: Callable[[bool], None] = field(default=lambda _: None)
    """Said before the teacher runs (True), and before the student does."""
    running: Callable[[], AbstractContextManager[None]] = as_it_is
    """Around whatever the student runs in."""
    masks: Switch = field(default_factory=Switch)
    """Of the student's masks."""
    cross_entropy: float = 0.0
    """Share of the text's own tokens in the loss; the rest is the teacher's."""
