"""Models a token of a dense run: what its layers read, and how long their requests take.

Either whole layers are pinned, and the others wait for every byte. Or each layer has an equal share of the pinned
units, and the next layer's first units are read ahead while this layer computes: no guess, since a token uses them all.
A layer's request then reads what the preload buffer has no room for. Reads and seconds are those of the store and its
clock (runtime/store/ahead.py, clock.py), which tests/compiler/test_dense_run.py holds this to.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from coldpress.compiler.seconds import Reading, Reads
from coldpress.runtime.store.ahead_room import first_batch
from coldpress.runtime.store.clock import FlashQueue
from coldpress.runtime.store.computing import Early, Weights, Work, deciding_seconds, request_work
from coldpress.runtime.store.planner import Strided, num_portions
from coldpress.schemas.device import DeviceProfile, Flash, flash_seconds
from coldpress.schemas.families import FamilyName, UnitFormat, layers_of, num_experts, num_units, used_share
from coldpress.schemas.model import ModelSpec


class Token(NamedTuple):
    """A token's figures, summed over the requests of all layers."""

    reads: float
    read_bytes: float
    flash_s: float
    """Seconds of the reads alone."""
    work_s: float
    """Seconds of the requests without their reads."""
    requests_s: float
    """Seconds of the requests."""


class Ahead(NamedTuple):
    num_units: int
    reads: int
    read_bytes: int
    flash_s: float


NO_AHEAD = Ahead(0, 0, 0, 0.0)


@dataclass(frozen=True)
class Stream:
    """The units of a dense run, which every token uses."""

    spec: ModelSpec
    device: DeviceProfile
    family: FamilyName
    format: UnitFormat
    unit_bytes: int
    """Bytes of a unit; where layers' formats differ, in the mean."""
    largest_bytes: int
    """Bytes of the largest unit."""

    @property
    def num_layers(self) -> int:
        return len(layers_of(self.family, self.spec))

    @property
    def num_units(self) -> int:
        return num_units(self.family, self.spec)

    @property
    def used_bytes(self) -> int:
        """Bytes of a layer's units that a token uses."""
        return int(self.num_units * used_share(self.family, self.spec)) * self.unit_bytes

    @property
    def weights(self) -> Weights:
        return Weights(self.format, self.used_bytes)

    def in_whole_layers(self, num_streamed: int, buffer_bytes: int) -> Token:
        """Returns the figures of a token that reads `num_streamed` units of all layers: whole layers, and the last
        units of one more. Layers that read equally much take equally long."""
        layers = self.num_layers
        shape = self.num_units, num_experts(self.family, self.spec), self.spec.num_experts_per_tok
        whole, rest = divmod(num_streamed, self.num_units)
        totals = np.zeros(5)
        for times, count in ((whole, self.num_units), (int(rest > 0), rest), (layers - whole - (rest > 0), 0)):
            flash: Any = self.device.flash  # records are frozen, thus hashable, which type checkers do not see
            requests = _requests(flash, self.unit_bytes, buffer_bytes, count, shape) if times else ()
            for read, num_read in requests:
                work = self._work(read, num_read, NO_AHEAD)
                seconds = read.flash_s, work.seconds, work.with_reads(read.arrival)
                totals += times / len(requests) * np.array([read.num_reads, read.num_bytes, *seconds])
        return Token(*totals.tolist())

    def ahead(self, num_streamed: int, buffer_bytes: int, preload_bytes: int, seconds_before: Sequence[float]) -> Token:
        """Returns the figures of a token that reads `num_streamed` units, as many in each layer, the first of them
        ahead; `seconds_before` is what each layer with units computes before its request."""
        layers = self.num_layers
        flash: Any = self.device.flash
        counts = [units_of_layer(num_streamed, layer, layers) for layer in range(layers)]
        aheads = [_ahead(flash, self.unit_bytes, preload_bytes, self.num_units, count) for count in counts]
        queue, totals = FlashQueue(), np.zeros(5)
        queue.begin(aheads[0].flash_s)  # the token before has read the first layer ahead
        for layer, (count, early, before_s) in enumerate(zip(counts, aheads, seconds_before, strict=True)):
            read = _request(flash, self.unit_bytes, buffer_bytes, self.num_units, count - early.num_units)
            work = self._work(read, count, early)
            queue.compute(before_s)
            request_s = queue.fetch_s(read.arrival, work, early=early.num_units > 0)
            after = aheads[(layer + 1) % layers]
            guess_s = deciding_seconds(self.device, after.num_units > 0)
            queue.compute(guess_s)
            queue.begin(after.flash_s)
            totals += np.array([read.num_reads, read.num_bytes, read.flash_s, work.seconds, request_s])
            totals += np.array([after.reads, after.read_bytes, after.flash_s, guess_s, guess_s])
        return Token(*totals.tolist())

    def _work(self, read: Reads, num_read: int, ahead: Ahead) -> Work:
        read_bytes, early_bytes = num_read * self.unit_bytes, ahead.num_units * self.unit_bytes
        early = Early(early_bytes, num_portions(early_bytes))
        ready_bytes = self.used_bytes - read_bytes
        return request_work(self.device, self.weights, ready_bytes, read_bytes, 0, read.arrival.num_portions, early)


def units_of_layer(num_units: int, layer: int, layers: int) -> int:
    """Returns the share of `num_units` that a layer has of as many in each; the whole numbers add up to all."""
    return num_units * (layer + 1) // layers - num_units * layer // layers


@lru_cache(maxsize=4096)  # a search asks again for whole layers with every budget, selector and format
def _requests(
    flash: Flash, unit_bytes: int, buffer_bytes: int, count: int, shape: tuple[int, int, int]
) -> tuple[tuple[Reads, int], ...]:
    """Returns the reads of equally likely requests that read those of the last `count` units, which are not in DRAM,
    that a token uses, and how many units these are; `shape` has units and experts of a layer, and experts of a
    token."""
    reading, first = Reading(flash, Strided(0, unit_bytes, unit_bytes), 0, buffer_bytes), shape[0] - count
    read = [np.flatnonzero(used[first:]) + first for used in _used_together(*shape)]
    return tuple((reading.reads(positions), positions.size) for positions in read)


@lru_cache(maxsize=4096)
def _request(flash: Flash, unit_bytes: int, buffer_bytes: int, units: int, count: int) -> Reads:
    reading = Reading(flash, Strided(0, unit_bytes, unit_bytes), 0, buffer_bytes)
    return reading.reads(np.arange(units - count, units))


@lru_cache(maxsize=4096)
def _ahead(flash: Flash, unit_bytes: int, preload_bytes: int, units: int, count: int) -> Ahead:
    """Returns the reads ahead for a layer whose last `count` units are on flash: the first that fit the buffer."""
    if not count:
        return NO_AHEAD
    positions, units_on_flash = np.arange(units - count, units), Strided(0, unit_bytes, unit_bytes)
    batch = first_batch(units_on_flash, positions, flash.page_bytes.value, 0, preload_bytes)
    reads, read_bytes = len(batch.extents), batch.extents.num_bytes
    return Ahead(batch.buffer_offset.size, reads, read_bytes, float(flash_seconds(flash, reads, read_bytes)))


def _used_together(units: int, experts: int, experts_per_token: int) -> list[np.ndarray]:
    """Returns equally likely sets of a layer's units that one token uses, bool [num_units]: all units, or those of
    experts spaced as far apart as possible, starting once from each expert."""
    step = experts // experts_per_token
    found = []
    for first in range(experts):
        used = np.zeros(experts, bool)
        used[(first + step * np.arange(experts_per_token)) % experts] = True
        found.append(np.repeat(used, units // experts))
    return found
