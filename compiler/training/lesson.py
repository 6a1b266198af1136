"""The input of the training loop: a student, its teacher, and the parameters that train."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor, nn

as_it_is = nullcontext[None]
"""A context in which the student runs unchanged."""


def nothing_added() -> AbstractContextManager[list[Tensor]]:
    return nullcontext([])


@dataclass
class Switch:
    """Turns masks on and off; the teacher may be the student without them."""

    on: bool = True


@dataclass(frozen=True)
class Lesson:
    teacher: nn.Module
    student: nn.Module
    """Runs under its masks; may be the same model as the teacher."""
    parameters: list[nn.Parameter]
    """float32."""
    weight: Callable[[str], Tensor]
    """Tensor name -> the trained tensor to store."""
    teach: Callable[[bool], None] = field(default=lambda _: None)
    """Called with True before the teacher runs, and with False before the student does."""
    running: Callable[[], AbstractContextManager[None]] = as_it_is
    """Context around every run of the student."""
    masks: Switch = field(default_factory=Switch)
    dense_share: float = 0.0
    """Share of a step's blocks that the student runs without masks."""
    cross_entropy: float = 0.0
    """Share of the loss that is the text's own next tokens; the rest is the teacher's distribution."""
    at_share: Callable[[Sequence[Tensor], float], None] | None = None
    """(values of `parameters`, share): moves the student's weights that share of the way from the source's to those
    values; None if the weights cannot move back."""
    kept_gain: float = 1.0
    """Share of the gain on validation text that must remain when weights are moved back; 1 moves nothing."""
    watched: Callable[[], AbstractContextManager[list[Tensor]]] = nothing_added
    """Context around a forward pass of the student and its backward pass, in the thread that runs it; yields what the
    pass adds to the loss, in the order of layers."""
