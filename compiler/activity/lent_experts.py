"""Lends the matrices of a layer's experts to the blocks that run side by side, one expert at a time.

All experts of a layer take gigabytes (gpt-oss-120b: 13 GB in float32), one of them megabytes. So blocks of tokens run
in waves: each block runs up to its experts and waits there; an expert's matrices are read, all blocks of the wave that
use it compute with it, and it makes room for the next. Every wave reads the experts again, so a wave has as many blocks
as WAITING_BYTES hold. A block computes what it would compute alone, in the same order. The experts of a small layer
are read once and kept for all blocks: waiting for each other would take longer than computing.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from coldpress.schemas.model import ModelSpec

if TYPE_CHECKING:
    from torch import nn

WAITING_BYTES = 1 << 30
"""Memory that the blocks of a wave keep while they wait."""
KEPT_BYTES = 64 << 20
"""A layer keeps its experts if they take at most so many bytes."""
HIDDEN_COPIES = 8
"""Copies of its hidden states that a waiting block keeps, those of its experts' inputs aside."""

Load = Callable[[int, str], "nn.Module"]
"""Reads a matrix of an expert, by the expert's number and the matrix's name below it."""


def blocks_at_once(spec: ModelSpec, block_tokens: int, item_bytes: int, threads: int) -> int:
    """Returns the number of blocks of a wave, at least one for every core. On one core blocks run one after another, in
    their order: callers that run caches along with the text rely on it."""
    return 1 if threads == 1 else max(threads, WAITING_BYTES // waiting_bytes(spec, block_tokens, item_bytes))


def kept_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """Returns the bytes of the experts that a layer keeps; 0 if it lends them one at a time."""
    found = 3 * spec.hidden_size * spec.intermediate_size * spec.num_experts * item_bytes
    return found if found <= KEPT_BYTES else 0


def waiting_bytes(spec: ModelSpec, block_tokens: int, item_bytes: int) -> int:
    """Returns the arrays of a block that waits: inputs, gate and up of the experts that its tokens use."""
    used = spec.num_experts_per_tok * (spec.hidden_size + 2 * spec.intermediate_size)
    return block_tokens * item_bytes * (used + HIDDEN_COPIES * spec.hidden_size)


class Lender:
    """Lends the experts of one layer; outside of `each` to one block at a time."""

    def __init__(self, load: Load, cores: int, at_once: int, *, keeps: bool = False) -> None:
        """`at_once` blocks are in memory at a time, and `cores` of them run. With `keeps` experts stay once read."""
        self._load, self._num_cores, self.at_once = load, cores, at_once
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, str], nn.Module] | None = {} if keeps else None
        self._begin(1)

    def _begin(self, num_blocks: int) -> None:
        self._blocks = threading.Barrier(num_blocks)
        self._cores = threading.Semaphore(self._num_cores)
        self._wanted: set[int] = set()
        self._lent: list[nn.Module] = []

    def each(self, work: Callable[[int], None], count: int, blocks_per_call: int = 1) -> None:
        """Calls `work` with 0 … count - 1, in waves; each call runs the layer once, on so many blocks. Raises the first
        Exception of a call."""
        if self._kept is not None:
            with ThreadPoolExecutor(self._num_cores) as pool:
                list(pool.map(work, range(count)))
            return
        calls_at_once = max(1, self.at_once // blocks_per_call)
        for start in range(0, count, calls_at_once):
            wave = range(start, min(start + calls_at_once, count))
            self._begin(len(wave))
            with ThreadPoolExecutor(len(wave)) as pool:
                calls = [pool.submit(self._one, work, index) for index in wave]
            self._begin(1)
            errors = [error for call in calls if (error := call.exception())]
            if errors:  # the first of a block, rather than that another one waited for it in vain
                raise next((one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0])

    def lend(self, used: Sequence[int], names: Sequence[str]) -> Iterator[tuple[int, "list[nn.Module]"]]:
        """Yields (an expert, its matrices of these names) for each of the experts that a block uses, ascending. Every
        block of a wave comes here equally often, and with the same names. The list of matrices is emptied when the next
        expert is asked for; callers keep none of them, so that memory holds one expert."""
        if self._kept is not None:
            for number in sorted(set(used)):
                with self._lock:
                    for name in names:
                        if (number, name) not in self._kept:
                            self._kept[number, name] = self._load(number, name)
                yield number, [self._kept[number, name] for name in names]
            return
        with self._lock:
            self._wanted.update(used)
        self._together(lambda: None)
        found = sorted(self._wanted)
        self._together(self._wanted.clear)
        for number in found:
            self._together(lambda number=number: self._take(number, names))
            if number in used:
                yield number, self._lent
        self._together(self._lent.clear)

    def _take(self, number: int, names: Sequence[str]) -> None:
        self._lent.clear()  # before the next is read, so that memory holds one
        self._lent.extend(self._load(number, name) for name in names)

    def _together(self, do: Callable[[], object]) -> None:
        """Waits for all blocks of the wave; then one of them calls `do`."""
        self._cores.release()
        try:
            if self._blocks.wait() == 0:
                do()
            self._blocks.wait()
        finally:
            self._cores.acquire()

    def _one(self, work: Callable[[int], None], index: int) -> None:
        with self._cores:
            try:
                work(index)
            except BaseException:
                self._blocks.abort()  # the others would wait for ever
                raise
