"""What the training loop is given: a student, its teacher, and what of the student may move."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor, nn

as_it_is = nullcontext[None]
"""Nothing changes while the student runs."""


def nothing_added() -> AbstractContextManager[list[Tensor]]:
    """The loss is as it is."""
    return nullcontext([])


@dataclass
class Switch:
    """Whether masks are on; the teacher may be the student without them."""

    on: bool = True


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
    dense_share: float = 0.0
    """Of a step's blocks, those that the student runs without masks."""
    cross_entropy: float = 0.0
    """Share of the text's own tokens in the loss; the rest is the teacher's."""
    at_share: Callable[[Sequence[Tensor], float], None] | None = None
    """(values of `parameters`, share): puts the student's weights that share of the way from the source's to where
    those values have them; None where there is no such way."""
    kept_gain: float = 1.0
    """Share of what training won on validation text that has to stay when weights are moved back; 1 moves nothing."""
    watched: Callable[[], AbstractContextManager[list[Tensor]]] = nothing_added
    """Around a forward pass of the student and what is derived from it, in the thread that runs it: what the pass adds
    to the loss, in the order of layers."""
