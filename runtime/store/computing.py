"""The law of computing: seconds that a device takes for weights, copies and calls, and for a request with its reads.

A profile's kernel rates by format and density give the seconds of weights (schemas/compute.py). Without them, computing
and copying are bound by DRAM bandwidth: nothing else is known, and the seconds are a lower bound (`basis` says which).
LLM in a flash 3 has the same parts (I/O, memory management, computing) and adds them up; here a request computes with
and copies its first units while it reads the rest. Resident weights are used between requests, because the next request
depends on their results; only reads ahead run meanwhile.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FormatName
from coldpress.schemas.figure import Figure

COPY_PASSES = 2
"""A copy reads each byte and writes it."""


class Weights(NamedTuple):
    """The units that a request chooses from."""

    format: FormatName
    num_bytes: int
    """Bytes of all units that a token may use: in a mixture, those of the experts that its router picks."""


class Work(NamedTuple):
    """A request's seconds beside its reads."""

    deciding_s: float
    """Before its reads begin."""
    moving_s: float
    """Products and copies, which overlap with its reads."""

    @property
    def seconds(self) -> float:
        """Returns the seconds of both."""
        return self.deciding_s + self.moving_s

    def with_reads(self, flash_s: float) -> float:
        """Returns the request's seconds if its reads take `flash_s`: after deciding, the longer of both."""
        return self.deciding_s + max(flash_s, self.moving_s)


def basis(device: DeviceProfile) -> str:
    """Returns where the seconds of computing come from, for people."""
    if device.compute is None:
        return "DRAM bandwidth, a lower bound: the profile has no rates of computing"
    formats = ", ".join(dict.fromkeys(rate.format for rate in device.compute.rates.value))
    return f"kernel rates of {formats} ({device.compute.rates.source}); other weights at DRAM bandwidth"


def weight_seconds(
    device: DeviceProfile, format_name: FormatName | None, num_bytes: float, density: float = 1.0
) -> float:
    """Returns the seconds of a product with stored weights.

    Args:
        device: Gives the rates.
        format_name: Format of the weights; None for float32, and for keys and values, which have DRAM bandwidth.
        num_bytes: Bytes of the weights that are used.
        density: Share of a matrix's rows that they are. Rates between the profile's densities are interpolated.
    """
    rates = () if device.compute is None else device.compute.rates.value
    known = [rate for rate in rates if rate.format == format_name]
    if not known:
        return num_bytes / device.dram_bytes_per_s.value
    densities, bytes_per_s = [rate.density for rate in known], [rate.bytes_per_s for rate in known]
    return num_bytes / float(np.interp(density, densities, bytes_per_s))


def dense_seconds(device: DeviceProfile, num_bytes: Mapping[FormatName | None, int]) -> float:
    """Returns the seconds of dense products with weights, given their bytes by format."""
    return math.fsum(weight_seconds(device, name, size) for name, size in num_bytes.items())


def copy_seconds(device: DeviceProfile, num_bytes: float) -> float:
    """Returns the seconds of copying units from the read buffer to their slots (memory management)."""
    rate = device.compute and device.compute.copy_bytes_per_s
    return num_bytes / rate.value if rate else COPY_PASSES * num_bytes / device.dram_bytes_per_s.value


def layer_seconds(device: DeviceProfile) -> float:
    """Returns what a layer costs beside its products and requests."""
    return _stated(device.compute and device.compute.layer_s)


def token_seconds(device: DeviceProfile) -> float:
    """Returns what a token costs beside its layers."""
    return _stated(device.compute and device.compute.token_s)


def request_work(device: DeviceProfile, weights: Weights, active_bytes: int, kept_bytes: int, *, reads: bool) -> Work:
    """Returns what one request for units costs beside its reads.

    Args:
        device: Gives the rates.
        weights: The units that it chooses from.
        active_bytes: Bytes of the units that it uses, from DRAM or from flash.
        kept_bytes: Bytes of the units that were read and go to slots.
        reads: Whether it reads.
    """
    deciding_s = _stated(device.compute and device.compute.request_s)
    if reads:
        deciding_s += _stated(device.compute and device.compute.reading_s)
    density = active_bytes / weights.num_bytes if weights.num_bytes else 1.0
    moving_s = weight_seconds(device, weights.format, active_bytes, density) + copy_seconds(device, kept_bytes)
    return Work(deciding_s, moving_s)


def fetch_seconds(device: DeviceProfile, weights: Weights, flash_s: float, active_bytes: int, kept_bytes: int) -> float:
    """Returns the seconds of one request: deciding, then reading, or computing and copying, whichever takes longer.

    Args:
        device: See `request_work`.
        weights: See `request_work`.
        flash_s: Seconds of its reads.
        active_bytes: See `request_work`.
        kept_bytes: See `request_work`.
    """
    return request_work(device, weights, active_bytes, kept_bytes, reads=flash_s > 0).with_reads(flash_s)


def _stated(figure: Figure[float] | None) -> float:
    return 0.0 if figure is None else figure.value
