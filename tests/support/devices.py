"""Gives devices rates of computing, for tests."""

from collections.abc import Iterable
from typing import Any

from coldpress.schemas.compute import Compute
from coldpress.schemas.device import DeviceProfile

SOURCE = "assumption: round figures for tests"


def with_compute(device: DeviceProfile, rates: Iterable[tuple[str, float, float]], **figures: float) -> DeviceProfile:
    """Returns the device with kernel rates (format, density, bytes per second) and further figures of `Compute`."""
    values: dict[str, Any] = {name: {"value": value, "source": SOURCE} for name, value in figures.items()}
    rows = tuple({"format": name, "density": density, "bytes_per_s": rate} for name, density, rate in rates)
    compute = Compute.model_validate(values | {"rates": {"value": rows, "source": SOURCE}})
    return device.model_copy(update={"compute": compute})
