"""DIP: dense rows of Tables 2, 5 and 6, and DIP-CA at the hit rates that D states, on its device of bytes alone.

Sizes are the published, rounded ones. The density of DIP-CA is fitted to its row at 4 GB (Table 5) and serves for the
other rows. Dense rows leave DRAM out; the other rows fit the sum of flash and DRAM.
"""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from scipy.optimize import brentq

from benchmarks.shared.papers.dip import Moved, dense, tokens_per_s
from benchmarks.shared.published.cells import PHI_3_MEDIUM, Cell
from coldpress.compiler.cost_model import flash_bytes, weight_bytes
from coldpress.schemas.compute import Overlap
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import WHOLE_MLP

GB = 1e9
TABLE_2 = {
    "Phi-3-medium": (7.4, 4.0, 0.29),
    "Phi-3-mini": (2.4, 1.5, 1.15),
    "Llama-3-8B": (4.3, 2.5, 0.57),
    "Mistral-7B": (3.9, 2.0, 0.54),
}
"""Model -> (model size in GB, DRAM in GB, dense tokens/s)."""
TABLE_5 = {2.0: (0.19, 0.31, 0.08), 4.0: (0.29, 0.56, 0.53), 6.0: (0.71, 1.94, 0.89)}
"""DRAM in GB -> (dense tokens/s, DIP-CA tokens/s, hit rate of DIP-CA (D)) of Phi-3-medium."""
TABLE_6 = {0.5: (0.15, 0.28), 1.0: (0.29, 0.56), 2.0: (0.59, 1.09)}
"""Flash in GB/s -> (dense tokens/s, DIP-CA tokens/s) of Phi-3-medium with 4 GB."""
MODEL_BYTES = 7.4 * GB
SUM: Overlap = "none"
FLASH_ALONE: Overlap = "all"


def cells() -> Iterator[Cell]:
    """Yields all cells."""
    device = bytes_only()
    for name, (size, dram, published) in TABLE_2.items():
        moved = dense(size * GB, 0.2 * size * GB, dram * GB)
        ours = tokens_per_s(device, moved, FLASH_ALONE)
        yield Cell("Table 2", f"dense, {name}", "tokens/s", published, ours, "published sizes, rounded", 0.05)
    static = MODEL_BYTES * (1 - mlp_share())
    for dram, (published, _, _) in TABLE_5.items():
        ours = tokens_per_s(device, dense(MODEL_BYTES, static, dram * GB), FLASH_ALONE)
        yield Cell("Table 5", f"dense, {dram:g} GB", "tokens/s", published, ours, "published sizes, rounded", 0.05)
    density = fitted_density()
    for dram, (_, published, hit_rate) in TABLE_5.items():
        if dram != 4.0:
            ours = tokens_per_s(device, dip_ca(density, hit_rate), SUM)
            basis = f"hit rate {hit_rate:.0%} (D), density {density:.3f} fitted to the row of 4 GB"
            yield Cell("Table 5", f"DIP-CA, {dram:g} GB", "tokens/s", published, ours, basis, 0.15)
    for rate, (of_dense, of_dip_ca) in TABLE_6.items():
        device = bytes_only(rate * GB)
        ours = tokens_per_s(device, dense(MODEL_BYTES, static, 4 * GB), FLASH_ALONE)
        yield Cell("Table 6", f"dense, {rate:g} GB/s", "tokens/s", of_dense, ours, "published sizes, rounded", 0.05)
        if rate != 1.0:
            ours = tokens_per_s(device, dip_ca(density, TABLE_5[4.0][2]), SUM)
            basis = f"hit rate 53 % (D), density {density:.3f} fitted to Table 5's row of 4 GB"
            yield Cell("Table 6", f"DIP-CA, {rate:g} GB/s", "tokens/s", of_dip_ca, ours, basis, 0.15)


def mlp_share() -> float:
    """Returns the MLPs' share of Phi-3-medium's weights."""
    return flash_bytes((WHOLE_MLP,), PHI_3_MEDIUM.spec, "fp16") / weight_bytes(PHI_3_MEDIUM, "fp16")


def dip_ca(density: float, hit_rate: float) -> Moved:
    """Returns the bytes of Phi-3-medium in 4 bits, for a density and a hit rate."""
    return Moved(MODEL_BYTES * (1 - mlp_share()), MODEL_BYTES * mlp_share(), density, hit_rate)


def fitted_density() -> float:
    """Returns the density at which DIP-CA has the published speed with 4 GB."""
    _, published, hit_rate = TABLE_5[4.0]
    return cast(float, brentq(partial(_excess, bytes_only(), published, hit_rate), 0.05, 1.0))


def _excess(device: DeviceProfile, published: float, hit_rate: float, density: float) -> float:
    return tokens_per_s(device, dip_ca(density, hit_rate), SUM) - published


def bytes_only(bytes_per_s: float = GB) -> DeviceProfile:
    """Returns the device of DIP's simulator: one bandwidth whatever a read's size, and no latency."""

    def figure(value: Any) -> dict[str, Any]:
        return {"value": value, "source": "DIP, A"}

    curve = [{"read_bytes": size, "bytes_per_s": bytes_per_s} for size in (512, 1 << 20)]
    flash = {"page_bytes": 512, "queue_depth": 32, "latency_s": 0.0, "read_curve": curve}
    values = {"dram_bytes": 8 << 30, "dram_budget_bytes": 4 << 30, "dram_bytes_per_s": 60e9, "num_cores": 6}
    profile: dict[str, Any] = {name: figure(value) for name, value in values.items()}
    profile |= {"name": "bytes-only", "title": "DIP's simulator", "flash": {n: figure(v) for n, v in flash.items()}}
    return DeviceProfile.model_validate_json(json.dumps(profile))
