"""Drafts: guesses of the next tokens, which the model then checks in one pass (LLM in a flash 5.2).

A file is a draft; its class `Plugin` extends `Draft`. A wrong draft costs reads, but never changes the text: tokens
that the model itself would not choose are taken back (runtime/generate/speculation.py).
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Protocol

from coldpress.runtime.plugins import PluginBase

DRAFT_TOKENS = 4
"""Default number of drafts per pass, as in LLM in a flash 5.2."""
NO_DRAFT = "off"
"""The file that proposes nothing."""


@dataclass
class Acceptance:
    """The drafts of a sequence that were accepted, beside those that the draft model's probabilities promise."""

    accepted: int = 0
    expected: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times as likely as its probability says a draft is to be accepted; 1 before anything is known."""
        return (1 + self.accepted) / (1 + self.expected)


class Propose(Protocol):
    def __call__(self, ids: Sequence[int], count: int, /) -> list[int]:
        """Returns token ids that may follow all tokens so far, `ids`: at most `count`, possibly none."""
        ...


class Drafting(Protocol):
    """A draft as a run uses it."""

    def drafting(self, context_length: int) -> AbstractContextManager[Propose]:
        """Begins a new sequence of at most `context_length` tokens, which ends when the context is closed. Raises
        `ColdpressError` if the draft cannot begin a sequence now."""
        ...


class Draft(PluginBase):
    """The base class of the files of this package."""

    PROPOSES: ClassVar[bool] = True
    NEEDS_MODEL: ClassVar[bool] = False
    """Whether it proposes with the artifact's draft model."""

    @abstractmethod
    def drafting(self, context_length: int, model: Drafting | None = None) -> AbstractContextManager[Propose]:
        """See `Drafting`; `model` is the draft model, where one is needed."""
