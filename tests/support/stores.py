"""Opens stores of small artifacts and checks their requests: the right units, in memory when they are yielded."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from coldpress.runtime.artifact.errors import DeviceError
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import choose_plan
from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import Flash, Ticket, direct
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import Recorder
from tests.support.artifacts import Built


def open_store(
    built: Built, recorder: Recorder | None = None, dram_budget_bytes: int | None = None, **changes: Any
) -> Store:
    """Opens the store of an artifact on real flash; `changes` replace fields of its plan."""
    artifact = open_artifact(built.path)
    plan = choose_plan(artifact.manifest, dram_budget_bytes).model_copy(update=changes)
    return Store(artifact, plan, direct.Plugin(artifact, 8), *([recorder] if recorder else []))


class Failing:
    """A device whose reads fail after the first `left`."""

    direct = moves_data = True

    def __init__(self, inner: Flash, left: int) -> None:
        """Reads with `inner`."""
        self.inner, self.left = inner, left

    def submit(self, extents: Extents, into: np.ndarray, landing: Any = None) -> Ticket:
        """See `Flash`."""
        self.left -= 1
        if self.left < 0:
            raise DeviceError("flash.img", "a read", "failing", "data", "check the storage device")
        return self.inner.submit(extents, into, landing)

    def close(self) -> None:
        """See `Flash`."""
        self.inner.close()


def requests(built: Built, num_tokens: int = 6, seed: int = 1) -> Iterator[tuple[int, Any, np.ndarray]]:
    """Yields (layer, family, ids) as a decoder asks for them: skewed, so that there are hits."""
    random = np.random.default_rng(seed)
    for _ in range(num_tokens):
        for (layer, family), codes in built.units.items():
            weight = np.linspace(4, 0.1, len(codes)) ** 2
            count = int(random.integers(0, len(codes) // 2))
            ids = random.choice(len(codes), count, replace=False, p=weight / weight.sum())
            yield layer, family, np.sort(ids).astype(np.int32)


def ask(store: Store, built: Built, num_tokens: int, seed: int = 1) -> None:
    """Submits the requests of `requests` to the store, token by token."""
    *_, last = built.units
    for layer, family, ids in requests(built, num_tokens, seed):
        deque(store.submit((layer, family), ids), maxlen=0)
        if (layer, family) == last:
            store.end_tokens()


def check_fetch(
    store: Store, built: Built, layer: int, family: Any, ids: np.ndarray, asked: np.ndarray | None = None
) -> None:
    """Requests `asked` (default: `ids`) and checks that `ids` arrive, in memory when their batch is yielded."""
    codes, seen = built.units[layer, family], []
    for batch in store.submit((layer, family), ids if asked is None else asked):
        assert batch.ids.dtype == batch.slots.dtype == np.int32
        assert len(set(batch.slots.tolist())) == batch.slots.size
        assert (batch.rows[batch.slots] == codes[batch.ids]).all()
        seen.append(batch.ids)
    found = np.sort(np.concatenate(seen)) if seen else ids[:0]
    assert (found == ids).all()
