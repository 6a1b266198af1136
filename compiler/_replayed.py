"""Whether simulated flash makes of a run's first tokens what the run made of them."""

import numpy as np

from runtime.generate import DEFAULT_FLASH, Session
from runtime.simulate import simulate
from runtime.trace import Recorder
from schemas.metrics import RunMetrics

MAX_TOKENS = 128
"""Decoded tokens that are compared: past the point where a cache is full and evicts, and what the store was asked for
fits in memory."""
DECISIONS = ("hits", "misses", "evictions", "reads", "read_bytes", "used_bytes", "prefill_reads", "prefill_read_bytes")
"""What must not depend on whether flash is real or simulated; the digest over all extents joins them."""


class Replayed:
    """A session whose first tokens can be held against simulated flash."""

    def __init__(self, folder: str, flash: str = DEFAULT_FLASH) -> None:
        """Opens the artifact; `session` is to run once, with this as its `on_logits`."""
        self._recorder = Recorder(max_tokens=MAX_TOKENS)
        self.session = Session(folder, recorder=self._recorder, flash=flash)
        self._decisions: dict[str, object] | None = None

    def __call__(self, logits: np.ndarray) -> None:
        """Keeps what was decided, once the last of these tokens is decoded."""
        if self._decisions is None and self._recorder.full:
            self._decisions = self._so_far()

    def equals(self) -> bool:
        """Whether hits, misses, evictions, bytes and the extents of all reads are the same."""
        simulated = simulate(self.session.artifact, self.session.plan, self._recorder.events)
        return (self._decisions or self._so_far()) == _decisions(simulated)

    def _so_far(self) -> dict[str, object]:
        return _decisions(self.session.store.metrics(self._recorder.num_tokens, 0.0, 0.0, 0.0))


def _decisions(metrics: RunMetrics) -> dict[str, object]:
    return {name: getattr(metrics, name) for name in (*DECISIONS, "extents_sha256")}
