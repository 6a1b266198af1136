"""Ripple 2.2 and 4.2: scattered reads are bound by their number, which neighbours that are used together lower."""

import numpy as np

from benchmarks.shared.papers.chunks import chunk_bytes_per_s
from coldpress.runtime.store.computing import weight_seconds
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FormatName


def expected_reads(used: np.ndarray) -> float:
    """Returns the expected reads of a token: those of all used neurons, less one for each pair of neighbours that are
    used together (Eqs. 4 and 5).

    Args:
        used: bool [T, num_units], columns in their order on flash.
    """
    return float(np.mean(np.count_nonzero(used, axis=1) - np.count_nonzero(used[:, 1:] & used[:, :-1], axis=1)))


def load_seconds(device: DeviceProfile, used_bytes: float, neuron_bytes: int) -> float:
    """Returns the seconds of loading scattered neurons: their bytes over the bandwidth of reads of one neuron (2.2,
    Figures 4 and 5)."""
    return used_bytes / chunk_bytes_per_s(device.flash, neuron_bytes)


def load_ratio(device: DeviceProfile, format_name: FormatName, loaded_s: float, model_bytes: float) -> float:
    """Returns the share of a token's latency that loading takes, before computing with all weights (Table 1)."""
    return loaded_s / (loaded_s + weight_seconds(device, format_name, model_bytes))
