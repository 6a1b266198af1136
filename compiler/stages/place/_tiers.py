"""Computes what a device's tiers cost: seconds of a unit (Eq. 5), least units per tier (Eq. 4), and tier weights.

A unit's time in a tier is its bytes over the tier's bandwidth; from flash it is one read of whole pages with the queue
full. Computing with a unit takes equally long wherever it came from, so it is in neither. One synchronization is the
accelerator's, or, where DRAM saves a flash read, that read's latency.
"""

import itertools
import math
from typing import get_args

from coldpress.schemas.device import Accelerator, DeviceProfile, flash_seconds
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.placement import Tier

WORTH_STEPS = 10_000
"""Weight of the fastest tier. Weights are integers so that different solvers agree exactly."""


def tiers_named(text: str) -> tuple[Tier, ...]:
    """Parses names such as `dram-flash`: two or more tiers, fastest first.

    Raises:
        ColdpressError: if a name is unknown, or the tiers are not ordered by speed.
    """
    known: tuple[Tier, ...] = get_args(Tier)
    several = (chosen for length in range(2, len(known) + 1) for chosen in itertools.combinations(known, length))
    for tiers in several:
        if "-".join(tiers) == text:
            return tiers
    raise ColdpressError(f"tiers '{text}' are unknown; join two or more of {', '.join(known)}, in that order, by -")


def accelerator_of(device: DeviceProfile) -> Accelerator:
    """Returns the device's accelerator.

    Raises:
        ColdpressError: if the device has none.
    """
    if device.accelerator is None:
        raise ColdpressError(f"device {device.name} has no accelerator; use tiers=dram-flash")
    return device.accelerator


def unit_seconds(tier: Tier, size_bytes: int, device: DeviceProfile) -> float:
    """Returns T_l^j (Eq. 5): seconds of one pass over a unit's weights in a tier."""
    if tier == "accelerator":
        return size_bytes / accelerator_of(device).bytes_per_s.value
    if tier == "dram":
        return size_bytes / device.dram_bytes_per_s.value
    flash, page = device.flash, device.flash.page_bytes.value
    together = flash.queue_depth.value
    return float(flash_seconds(flash, together, together * -(-size_bytes // page) * page)) / together


def min_units(size_bytes: int, tiers: tuple[Tier, ...], device: DeviceProfile) -> tuple[int, ...]:
    """Returns C_l of each tier but the slowest: the least C with C T_fast + T_sync <= C T_next (Eq. 4).

    Raises:
        ColdpressError: if a tier is not faster than the next one.
    """
    found: list[int] = []
    seconds = [unit_seconds(tier, size_bytes, device) for tier in tiers]
    for number, tier in enumerate(tiers[:-1]):
        fast_s, slow_s = seconds[number : number + 2]
        if fast_s >= slow_s:
            raise ColdpressError(
                f"device {device.name}: a unit of {size_bytes} bytes takes {fast_s:.3g} s in {tier} and {slow_s:.3g} s "
                f"in {tiers[number + 1]}, expected less; correct the profile's bandwidths"
            )
        sync = accelerator_of(device).sync_s if tier == "accelerator" else device.flash.latency_s
        found.append(math.ceil(sync.value / (slow_s - fast_s)))
    return tuple(found)


def worth(size_bytes: int, tiers: tuple[Tier, ...], device: DeviceProfile) -> tuple[int, ...]:
    """Returns an impact's weight per tier but the slowest: the seconds it saves, as a share of the fastest tier's. With
    two tiers this is (1,), the paper's own objective (Eq. 2)."""
    seconds = [unit_seconds(tier, size_bytes, device) for tier in tiers]
    saved = [(seconds[-1] - fast) / (seconds[-1] - seconds[0]) for fast in seconds[:-1]]
    return tuple(round(WORTH_STEPS * share) for share in saved) if len(saved) > 1 else (1,)
