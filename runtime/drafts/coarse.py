"""Coarse planes: the model drafts for itself with the high bits of its units, which are in DRAM, and reads nothing.

Needs units in planes (runtime/quantization/_planes.py), and no DRAM besides: attention, head and KV cache are the
model's own. Drafts are greedy, and end where the coarse model doubts them. Their keys and values are taken back before
the check, whose pass writes the right ones.
SPEQ (2510.18525) drafts with part of the bits of a model in DRAM.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np

from coldpress.runtime.drafts import Checked, Draft, Propose
from coldpress.schemas.errors import ColdpressError


class Plugin(Draft):
    """Proposes what the coarse model would write."""

    NEEDS_PLANES = True

    @contextmanager
    def drafting(self, context_length: int, checked: Checked | None = None) -> Generator[Propose]:
        """Raises `ColdpressError` if the units have no coarse planes."""
        if checked is None or not checked.has_coarse:
            raise ColdpressError(
                "the draft 'coarse' needs units in planes, and this artifact has none; use the draft 'lookup', or "
                "build with a format in planes, such as format=int4_2_2"
            )

        def propose(ids: Sequence[int], count: int, least_chance: float = 0.0, /) -> list[int]:
            length, token, drafts, chance = checked.length, ids[-1], list[int](), 1.0
            try:
                while len(drafts) < count and chance >= least_chance:
                    logits = checked.decode_coarse(token)
                    token = int(logits.argmax())
                    drafts.append(token)
                    second, first = np.partition(logits, -2)[-2:]
                    chance /= 1 + float(np.exp(second - first))  # that the likelier of two stays so with all bits
            finally:
                checked.roll_back(length)
            return drafts

        yield propose
