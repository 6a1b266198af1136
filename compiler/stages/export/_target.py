"""Defines a format for another engine: a file of this package whose class `Plugin` extends `Target`."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic

from typing_extensions import TypeVar

from coldpress.compiler.stages.export._stored import StoredModel
from coldpress.runtime.plugins import PluginBase
from coldpress.schemas.base import Record
from coldpress.schemas.families import FormatName
from coldpress.schemas.model import ModelSpec

OptionsT = TypeVar("OptionsT", bound=Record, default=Any)


class Target(PluginBase, Generic[OptionsT]):
    """Writes a compiled model for another engine. The base class of all export formats."""

    @abstractmethod
    def check(self, spec: ModelSpec) -> None:
        """Refuses a model by its shape and its arithmetic alone, before anything is built.

        Raises:
            ColdpressError: if the other engine would compute something else.
        """

    @abstractmethod
    def write(self, model: StoredModel, options: OptionsT, path: Path) -> list[str]:
        """Writes the file; returns the names of the tensors whose values were rounded again.

        Raises:
            ColdpressError: if the other engine would compute something else.
        """

    @abstractmethod
    def disk_bytes(self, shapes: Mapping[str, tuple[int, ...]], stored: FormatName, options: OptionsT) -> int:
        """Returns the bytes of the file's tensors. `shapes` are those of all tensors of the model, by role, a tied head
        being its embedding; `stored` is the build's format."""
