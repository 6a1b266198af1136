"""Coarse planes: the model drafts for itself with the high bits of its units, which are in DRAM, and reads nothing.

Needs units in planes (runtime/quantization/_planes.py), and no DRAM besides: attention, head and KV cache are the
model's own. Drafts are greedy. Their keys and values are taken back before the check, whose pass writes the right ones.
SPEQ (2510.18525) drafts with part of the bits of a model in DRAM.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from coldpress.runtime.drafts import Checked, Draft, Propose
from coldpress.schemas.errors import ColdpressError


class Plugin(Draft):
    """Proposes what the coarse model would write."""

    NEEDS_PLANES = True

    @contextmanager
    def drafting(self, context_length: int, checked: Checked | None = None) -> Generator[Propose]:
        """See `coldpress.runtime.drafts.Drafting`.

        Raises:
            ColdpressError: if the units have no coarse planes.
        """
        if checked is None or not checked.has_coarse:
            raise ColdpressError(
                "the draft 'coarse' needs units in planes, and this artifact has none; use the draft 'lookup', or "
                "build with a format in planes, such as format=int4_2_2"
            )

        def propose(ids: Sequence[int], count: int) -> list[int]:
            length, token, drafts = checked.length, ids[-1], list[int]()
            try:
                for _ in range(count):
                    token = int(checked.decode_coarse(token).argmax())
                    drafts.append(token)
            finally:
                checked.roll_back(length)
            return drafts

        yield propose
