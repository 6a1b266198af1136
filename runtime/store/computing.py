"""The law of computing: seconds that a device takes for weights, copies and calls, and for a request with its reads.

A profile's kernel rates by format and density give the seconds of weights (schemas/compute.py). Without them, computing
and copying are bound by DRAM bandwidth: nothing else is known, and the seconds are a lower bound (`basis` says which).
LLM in a flash 3 has the same parts (I/O, memory management, computing) and adds them up. Here a request computes with
the units in DRAM while it reads, and with each portion of what it reads while the device reads the next one: the first
portion's reads and the last portion's computing overlap with nothing. Resident weights are used between requests,
because the next request depends on their results; only preloads run meanwhile.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from coldpress.runtime.artifact.contents import nbytes
from coldpress.runtime.quantization._mixed import VALUES
from coldpress.runtime.store import planner
from coldpress.schemas.compute import Figure
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import JOINT, UnitFormat, slice_formats

COPY_PASSES = 2
"""A copy reads each byte and writes it."""
FURTHER_SHARE = 0.6
"""Time of each further token's products in a pass, over the first token's, if the profile states none: measured with
int4 and AVX2, where the processor is the limit (docs/experiments/flash.md). Where memory is, it is less."""


class Weights(NamedTuple):
    format: UnitFormat
    num_bytes: int
    """Bytes of all units that a token may use: in a mixture, those of the experts that its router picks."""


class Arrival(NamedTuple):
    flash_s: float
    """Seconds of all reads on the device."""
    num_portions: int
    """Portions of equal size that can be used one after another."""
    reads_on: bool
    """True if the device reads the next portion while one is used: the buffer has two halves, or holds all reads."""


NOTHING = Arrival(0.0, 0, True)
"""A request that does not read."""


class Work(NamedTuple):
    """A request's seconds beside its reads."""

    deciding_s: float
    """Before its reads begin."""
    ready_s: float
    """Products with units in DRAM, while the first reads are under way."""
    arriving_s: float
    """Products with units that its own reads bring, their copies, and the handling of portions."""
    preloaded_s: float = 0.0
    """As `arriving_s`, with preloaded units: used after those in DRAM, and before the others."""

    @property
    def seconds(self) -> float:
        return self.deciding_s + self.ready_s + self.preloaded_s + self.arriving_s

    def with_reads(self, reads: Arrival, queued_s: float = 0.0) -> float:
        """Returns the request's seconds: a flow of portions from the device to the processor.

        `queued_s` are seconds of earlier reads that the device finishes first, and that the request waits for.
        Preloaded units are in memory when these reads end.
        """
        ready_s = max(self.ready_s, queued_s) + self.preloaded_s
        portions = max(1, reads.num_portions)
        portion_s, used_s = reads.flash_s / portions, self.arriving_s / portions
        first_s = queued_s + portion_s
        if not reads.reads_on:
            rest_s = (portions - 1) * (portion_s + used_s)
            return self.deciding_s + max(ready_s, first_s) + used_s + rest_s
        longest_s = max(
            max(ready_s, first_s) + self.arriving_s,  # the processor is the slower one
            queued_s + reads.flash_s + used_s,  # the device is
        )
        if portions > 2:  # both halves are full until the units that were there before have been used
            longest_s = max(longest_s, ready_s + 2 * used_s + (portions - 2) * portion_s)
        return self.deciding_s + longest_s


def basis(device: DeviceProfile) -> str:
    if device.compute is None:
        return "DRAM bandwidth, a lower bound: the profile has no rates of computing"
    formats = ", ".join(dict.fromkeys(rate.format for rate in device.compute.rates.value))
    return f"kernel rates of {formats} ({device.compute.rates.source}); other weights at DRAM bandwidth"


def weight_seconds(device: DeviceProfile, name: UnitFormat | None, num_bytes: float, density: float = 1.0) -> float:
    """Returns the seconds of a product with stored weights.

    Args:
        name: Format of the weights; None for float32, and for keys and values, which have DRAM bandwidth. In a joint
            format each slice has the rate of its own.
        num_bytes: Bytes of the weights that are used.
        density: Share of the matrix's rows that are used. Rates between the profile's densities are interpolated.
    """
    if name is not None and JOINT in name:
        sizes = [(one, nbytes(one, VALUES)) for one in slice_formats(name)]
        each = num_bytes / sum(size for _, size in sizes)
        return math.fsum(weight_seconds(device, one, each * size, density) for one, size in sizes)
    rates = () if device.compute is None else device.compute.rates.value
    known = [rate for rate in rates if rate.format == name]
    if not known:
        return num_bytes / device.dram_bytes_per_s.value
    densities, bytes_per_s = [rate.density for rate in known], [rate.bytes_per_s for rate in known]
    return num_bytes / float(np.interp(density, densities, bytes_per_s))


def dense_seconds(device: DeviceProfile, num_bytes: Mapping[UnitFormat | None, int]) -> float:
    return math.fsum(weight_seconds(device, name, size) for name, size in num_bytes.items())


def copy_seconds(device: DeviceProfile, num_bytes: float) -> float:
    rate = device.compute and device.compute.copy_bytes_per_s
    return num_bytes / rate.value if rate else COPY_PASSES * num_bytes / device.dram_bytes_per_s.value


def layer_seconds(device: DeviceProfile) -> float:
    return _stated(device.compute and device.compute.layer_s)


def token_seconds(device: DeviceProfile) -> float:
    return _stated(device.compute and device.compute.token_s)


def deciding_seconds(device: DeviceProfile, reads: bool) -> float:
    """Returns the seconds of deciding a request, or of guessing one; `reads` tells whether it begins reads."""
    compute = device.compute
    return _stated(compute and compute.request_s) + (_stated(compute and compute.reading_s) if reads else 0.0)


def products_of(device: DeviceProfile, num_tokens: float) -> float:
    """Returns how many products with one token take as long as one with a few tokens, which read weights once."""
    stated = device.compute and device.compute.further_share
    return 1 + (num_tokens - 1) * (stated.value if stated else FURTHER_SHARE)


def in_pass(device: DeviceProfile, num_tokens: int) -> DeviceProfile:
    """Returns a device on which one token computes as long as a pass of `num_tokens` does on `device`. A request's own
    cost counts once per pass; the other costs of layers and tokens count for every token."""
    compute, times = device.compute, products_of(device, num_tokens)
    changes: dict[str, object] = {"dram_bytes_per_s": _scaled(device.dram_bytes_per_s, 1 / times)}
    if compute is not None:
        rates = tuple(rate.model_copy(update={"bytes_per_s": rate.bytes_per_s / times}) for rate in compute.rates.value)
        besides = {name: getattr(compute, name) for name in ("layer_s", "token_s")}
        longer = {name: figure and _scaled(figure, num_tokens) for name, figure in besides.items()}
        of_rates = compute.rates.model_copy(update={"value": rates})
        changes["compute"] = compute.model_copy(update={"rates": of_rates, **longer})
    return device.model_copy(update=changes)


def request_work(
    device: DeviceProfile,
    weights: Weights,
    ready_bytes: int,
    read_bytes: int,
    kept_bytes: int,
    num_portions: int,
    preloaded_bytes: int = 0,
) -> Work:
    """Returns the cost of a request for units beside its reads.

    Args:
        ready_bytes: Bytes of the units in DRAM that it uses.
        read_bytes: Bytes of the units that it uses from flash, read now or preloaded.
        kept_bytes: Bytes of those that go to slots.
        num_portions: The portions in which its reads arrive; 0 if it does not read.
        preloaded_bytes: The part of `read_bytes` that was preloaded.
    """
    deciding_s = deciding_seconds(device, read_bytes > 0)
    density = (ready_bytes + read_bytes) / weights.num_bytes if weights.num_bytes else 1.0
    ready_s = weight_seconds(device, weights.format, ready_bytes, density)
    read_s = weight_seconds(device, weights.format, read_bytes, density)
    used_s = read_s + copy_seconds(device, kept_bytes)
    preloaded_share = preloaded_bytes / max(1, read_bytes)
    portion_s = _stated(device.compute and device.compute.portion_s)
    arriving_s = (1 - preloaded_share) * used_s + num_portions * portion_s
    preloaded_s = preloaded_share * used_s + planner.num_portions(preloaded_bytes) * portion_s
    return Work(deciding_s, ready_s, arriving_s, preloaded_s)


def fetch_seconds(
    device: DeviceProfile, weights: Weights, reads: Arrival, ready_bytes: int, read_bytes: int, kept_bytes: int
) -> float:
    work = request_work(device, weights, ready_bytes, read_bytes, kept_bytes, reads.num_portions)
    return work.with_reads(reads)


def _scaled(figure: Figure[float], by: float) -> Figure[float]:
    return figure.model_copy(update={"value": figure.value * by})


def _stated(figure: Figure[float] | None) -> float:
    return 0.0 if figure is None else figure.value
