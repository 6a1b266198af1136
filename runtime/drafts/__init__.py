"""Drafts: guesses of the next tokens, which the model then checks in one pass (LLM in a flash 5.2).

A file is a draft that needs no second model; its class `Plugin` extends `Draft`. A wrong draft costs reads, but never
changes the text: tokens that the model itself would not choose are taken back (runtime/generate/speculation.py).
runtime/generate/draft_model.py drafts with a second artifact.
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

import numpy as np

from coldpress.runtime.plugins import PluginBase

DRAFT_TOKENS = 4
"""Default number of drafts per pass, as in LLM in a flash 5.2."""
NO_DRAFT = "off"
"""The file that proposes nothing."""


class Propose(Protocol):
    def __call__(self, ids: Sequence[int], count: int, least_chance: float = 0.0, /) -> list[int]:
        """Returns token ids that may follow all tokens so far, `ids`: at most `count`, possibly none.

        A draft that computes probabilities makes no further one once all that it has made are right with a chance below
        `least_chance`.
        """
        ...


class Checked(Protocol):
    """The model that checks the drafts."""

    @property
    def has_coarse(self) -> bool:
        """Whether coarse planes of all units are in DRAM."""
        ...

    @property
    def length(self) -> int:
        """Tokens in the KV cache."""
        ...

    def decode_coarse(self, token: int) -> np.ndarray:
        """Appends a token by coarse planes alone, without any read, and returns its logits, float32 [vocab_size]."""
        ...

    def roll_back(self, length: int) -> None:
        """Takes back all tokens after the first `length`."""
        ...


class Drafting(Protocol):
    """A draft as a run uses it, with or without a second model."""

    def drafting(self, context_length: int, checked: Checked | None = None) -> AbstractContextManager[Propose]:
        """Begins a new sequence of at most `context_length` tokens, which ends when the context is closed.

        Whenever tokens are proposed, `checked` has all tokens so far but the last, and has the same again afterwards;
        None where a draft is only replayed over a text.

        Raises:
            ColdpressError: if the draft cannot begin a sequence now.
        """
        ...


class Draft(PluginBase):
    """A draft without a second model. The base class of the files of this package."""

    PROPOSES: ClassVar[bool] = True
    NEEDS_PLANES: ClassVar[bool] = False
    """True if it needs coarse planes, so that it cannot be replayed without an artifact."""

    @abstractmethod
    def drafting(self, context_length: int, checked: Checked | None = None) -> AbstractContextManager[Propose]:
        """See `Drafting`."""
