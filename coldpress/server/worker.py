"""The one thread that owns the session: it runs waiting sequences together, and counts what that costs.

Sequences wait in the order in which they came. Those that wait when a pass ends begin together, if there is room for
their keys and values (runtime/generate/batch.py), so that they share the prefill's pass over flash and every later
read. A sequence whose client has left ends at its next token, or never begins.
"""

import logging
import threading
from collections import deque
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from coldpress.runtime.generate.batch import BatchRoom, Prompt, generate_each
from coldpress.runtime.generate.choice import asked_bytes
from coldpress.runtime.generate.completion import Totals
from coldpress.runtime.generate.prefixes import Prefixes
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Token
from coldpress.schemas.errors import ColdpressError
from coldpress.server.refusals import RefusalError
from coldpress.server.sequences import Sequence
from coldpress.server.settings import Settings

LOG = logging.getLogger("coldpress.server")


@dataclass
class Counts(Totals):
    sequences: int = 0
    """Sequences that ended, complete or not."""
    cancelled: int = 0
    """The part of `sequences` whose client left."""
    failed: int = 0


@dataclass
class Places:
    """Places in the queue, held while a request's prompts are turned into tokens."""

    count: int


class Worker:
    def __init__(self, session: Session, settings: Settings) -> None:
        """Takes the session over; `start` starts the thread."""
        self._session, self._settings = session, settings
        folder = None if settings.prefixes is None else Path(settings.prefixes)
        self.prefixes = folder and Prefixes(folder, session.artifact.sha256, settings.prefix_bytes)
        """None if nothing is kept."""
        self._changed = threading.Condition()
        self._queue = deque[Sequence]()
        self._running: dict[int, Sequence] = {}
        self._held, self._num_taken = 0, 0
        self.is_stopping = False
        """New sequences are refused."""
        self.totals = Counts()
        self._thread = threading.Thread(target=self._work, name="coldpress-worker", daemon=True)

    @property
    def context_length(self) -> int:
        """Most tokens of one sequence, prompt and new tokens together."""
        return self._session.plan.context_length

    def start(self) -> None:
        self._thread.start()

    def refuse_more(self) -> None:
        """Refuses new sequences from now on; those that were accepted go on."""
        self.is_stopping = True

    def stop(self) -> None:
        """Ends the thread when all accepted sequences have ended, and closes the session."""
        with self._changed:
            self.is_stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._session.close()

    def counts(self) -> tuple[int, int, Counts]:
        """Returns (sequences that wait, sequences that run, the totals)."""
        with self._changed:
            return len(self._queue), len(self._running), replace(self.totals)

    def memory(self) -> tuple[int, int]:
        """Returns (the DRAM budget, the DRAM in use), in bytes."""
        return self._session.plan.dram_budget_bytes, self._session.store.dram_used_bytes

    def resize(self, dram: int | str) -> None:
        """Changes the DRAM budget between two passes. Raises as `asked_bytes` and `Session.resize`."""
        self._session.resize(asked_bytes(self._session.artifact.manifest, dram))

    @contextmanager
    def places(self, count: int) -> Generator[Places]:
        """Reserves places in the queue; those that `submit` has not used by the end are free again. Raises
        `RefusalError`: 503 while the server stops, 429 if there are too few places."""
        most = self._settings.max_queue
        if count > most:
            raise RefusalError(
                413, f"the request has {count} sequences, expected at most {most}; send several requests"
            )
        with self._changed:
            if self.is_stopping:
                raise RefusalError(503, "the server is stopping, and takes no more requests; ask another one")
            if len(self._queue) + self._held + count > most:
                raise RefusalError(429, f"{most} sequences wait already, expected fewer; ask again later")
            self._held += count
        places = Places(count)
        try:
            yield places
        finally:
            with self._changed:
                self._held -= places.count

    def submit(self, places: Places, sequences: Several[Sequence]) -> None:
        with self._changed:
            self._held -= places.count
            places.count = 0
            self._queue.extend(sequences)
            self._changed.notify_all()

    def cancel(self, sequences: Several[Sequence]) -> None:
        """Ends sequences that nobody waits for: at once if they wait, else at their next token or pass."""
        with self._changed:
            for sequence in sequences:
                sequence.cancelled = True
            waiting = [sequence for sequence in self._queue if not sequence.cancelled]
            self.totals.sequences += len(self._queue) - len(waiting)
            self.totals.cancelled += len(self._queue) - len(waiting)
            self._queue = deque(waiting)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self.is_stopping:
                    self._changed.wait()
                if not self._queue and not self._held:
                    return
                if not self._queue:  # a request that was accepted is being turned into tokens
                    self._changed.wait(0.1)
                    continue
            try:
                self._run()
            except ColdpressError as error:
                self._fail(error)
            except Exception:
                LOG.exception("a pass failed")
                self._fail(ColdpressError("the server failed at this request; its log says why"))

    def _run(self) -> None:
        session, settings, longest = self._session, self._settings, self.context_length
        with self._changed:
            self._running.clear()
            self._num_taken = 0
        sequences = 1 if session.decoder.selection.sees_residency else settings.max_batch
        num_tokens = max(settings.batch_tokens or 0, longest)
        if not session.has_kv_room(num_tokens):  # of a budget that has shrunk
            num_tokens = longest
        room = BatchRoom(sequences, longest, num_tokens)
        each = generate_each(
            session, self._prompts(), 1, room, on_token=self._add, at_once=True, prefixes=self.prefixes
        )
        for _ in each:
            pass

    def _prompts(self) -> Iterator[Prompt | None]:
        while True:
            with self._changed:
                taken = self._queue.popleft() if self._queue else None
                if taken is not None:
                    self._running[self._num_taken] = taken
                    self._num_taken += 1
            yield None if taken is None else taken.asked()

    def _add(self, number: int, token: Token) -> bool:
        sequence = self._running[number]
        self.totals.add(token, len(sequence.ids))
        piece = sequence.take(token)
        if sequence.ended:  # counted before its client knows, who may ask for the numbers next
            with self._changed:
                del self._running[number]
                self.totals.sequences += 1
                self.totals.cancelled += sequence.was_left
                self.totals.failed += piece is not None and piece.error is not None
        if piece is not None:
            sequence.tell(piece)
        return sequence.ended

    def _fail(self, error: ColdpressError) -> None:
        """Ends all sequences that run; those that wait have their turn."""
        with self._changed:
            running, self._running = list(self._running.values()), {}
            self.totals.sequences += len(running)
            self.totals.failed += len(running)
        for sequence in running:
            sequence.tell(sequence.failed(error))
