"""Plans the reads of a choice for many tokens at once, by the runtime's own planner and the device's law.

Reads where units lie and which of them each token must read; returns reads, bytes and modelled seconds per token, and
the units that those reads bring whole. Each token gets its own stretch of a long flash, a lap behind the one before, so
one plan has exactly the reads that the runtime makes token by token.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.store import planner
from coldpress.runtime.store.computing import Arrival, Weights, fetch_seconds
from coldpress.schemas.device import DeviceProfile, Flash, flash_seconds
from coldpress.schemas.families import FormatName

FORMAT: FormatName = "int4_group32"
"""Format of the units, by which their computing is timed."""


@dataclass(frozen=True)
class Placed:
    """Places of the units of one family of one layer."""

    units: planner.Strided
    order: np.ndarray
    """Integers [num_units]: the unit at each flash position."""

    @property
    def position(self) -> np.ndarray:
        """Returns the flash position of each unit, int32 [num_units]."""
        found = np.empty(self.order.size, np.int32)
        found[self.order] = np.arange(self.order.size, dtype=np.int32)
        return found


@dataclass(frozen=True)
class Reading:
    """Rules by which units are read, and by which a token uses them."""

    flash: Flash
    gap_bytes: int
    """Reads whose pages are at most this far apart become one."""
    max_read_bytes: int
    use_read_units: bool
    """Whether a token also uses the units in DRAM and those that its reads bring (runtime/sparsity)."""
    placed: Mapping[tuple[int, str], Placed]
    """Places by layer and family."""
    device: DeviceProfile | None = None
    """Device for the seconds of whole requests, computing included; None leaves them out."""

    @property
    def page_bytes(self) -> int:
        """Returns the size of a page."""
        return self.flash.page_bytes.value


@dataclass(frozen=True)
class Reads:
    """Reads per token; a family of a layer is one request, and its reads fit the read buffer."""

    num_reads: np.ndarray
    """Number of reads, int64 [T]."""
    num_bytes: np.ndarray
    """Bytes read, int64 [T]."""
    seconds: np.ndarray
    """Seconds by the device's law, float64 [T]."""
    brought: np.ndarray
    """Units by id that lie whole inside a token's reads, bool [T, num_units]."""


def reads_of(wanted: np.ndarray, placed: Placed, reading: Reading) -> Reads:
    """Plans the reads that bring `wanted`, bool [T, num_units] by unit id, from flash."""
    num_tokens, num_units = wanted.shape
    units, page_bytes = placed.units, reading.page_bytes
    token, place = np.nonzero(wanted[:, placed.order])
    between = -(-(reading.gap_bytes + 3 * page_bytes) // units.stride_bytes)
    even = page_bytes // math.gcd(units.stride_bytes, page_bytes)  # positions until units cut pages the same way again
    lap = -(-(num_units + between) // even) * even
    plan = planner.plan_reads(units, token * lap + place, page_bytes, reading.gap_bytes, reading.max_read_bytes)
    token_of = token[np.searchsorted(plan.unit_extent, np.arange(len(plan.extents)))]
    num_reads = np.bincount(token_of, minlength=num_tokens)
    num_bytes = np.bincount(token_of, plan.extents.lengths, num_tokens).astype(np.int64)
    found = planner.brought(units, num_tokens * lap, plan.extents)
    found = found[found % lap < num_units]  # drops positions in the gap between two laps
    brought = np.zeros(wanted.shape, bool)
    brought[found // lap, placed.order[found % lap]] = True
    return Reads(num_reads, num_bytes, flash_seconds(reading.flash, num_reads, num_bytes), brought)


def requests_seconds(
    device: DeviceProfile,
    all_bytes: int,
    reads: Reads,
    active_bytes: np.ndarray,
    missed_bytes: np.ndarray,
    kept_bytes: np.ndarray,
) -> float:
    """Returns the seconds of all requests for a family of a layer, of `all_bytes` bytes; the others are int64 [T]."""
    weights = Weights(FORMAT, all_bytes)
    portions = planner.num_portions(reads.num_bytes)
    sizes = (active_bytes - missed_bytes).tolist(), missed_bytes.tolist(), kept_bytes.tolist()
    return math.fsum(
        fetch_seconds(device, weights, Arrival(flash_s, count, True), *request)
        for flash_s, count, *request in zip(reads.seconds.tolist(), portions.tolist(), *sizes, strict=True)
    )
