"""The base class of distillation recipes: files of this package with a class `Plugin`. Free of torch, so that memory
can be estimated without it."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from typing_extensions import TypeVar

from coldpress.compiler.training.memory import Size
from coldpress.runtime.plugins import PluginBase
from coldpress.schemas.base import Record
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.stages.distill._masks import Mask
    from coldpress.compiler.training.lesson import Lesson
    from coldpress.compiler.training.source import Source

OptionsT = TypeVar("OptionsT", bound=Record, default=Any)


@dataclass(frozen=True)
class Task:
    source: "Source"
    sparsity: Sparsity
    masks: "tuple[Mask, ...]"
    seed: int
    device: str
    recompute: bool
    """True if the backward pass recomputes each layer instead of storing its inner values."""


class Recipe(PluginBase, Generic[OptionsT]):
    """A way for a model to learn from its own dense self. The base class of all recipes."""

    @abstractmethod
    def ram_bytes(self, size: Size, options: OptionsT) -> int:
        """Returns the bytes of memory that training takes."""

    @abstractmethod
    def state_bytes(self, size: Size, options: OptionsT) -> int:
        """Returns the bytes of one state that an interrupted run leaves on disk."""

    @abstractmethod
    def prepare(self, task: Task, options: OptionsT) -> "Lesson":
        """Builds teacher and student, and says which parameters train."""
