"""Describes one family on a simulated device, without weights, for tests of compiler/seconds.py."""

from typing import Any

import numpy as np

from coldpress.compiler.seconds import Setting
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.layout import PartPlan, Plan, Section
from tests.support.statistics import device_of, model_of

FAMILY = "neuron"


def plan_of(parts: tuple[PartPlan, ...], device: DeviceProfile, **changes: Any) -> Plan:
    """Returns a plan with ample DRAM, without cache and gap, whose only weights are units; `changes` replace fields."""
    values: dict[str, Any] = {
        "name": "t",
        "method": "topk",
        "cache": "static",
        "dram_budget_bytes": 1 << 40,
        "context_length": 8,
        "resident_bytes": 0,
        "predictor_bytes": 0,
        "kv_cache_bytes": 0,
        "read_buffer_bytes": 4 << 20,
        "collapse_gap_bytes": 0,
        "queue_depth": device.flash.queue_depth.value,
        "parts": parts,
    }
    return Plan(**values | changes)


def setting_of(
    num_units: int,
    unit_bytes: int,
    num_layers: int = 1,
    pinned: np.ndarray | None = None,
    cache_slots: int = 0,
    device: DeviceProfile | None = None,
    order: np.ndarray | None = None,
    **changes: Any,
) -> Setting:
    """Returns a group of layers whose units lie together; all pin the same ids. `changes` replace the plan's fields."""
    device = device or device_of()
    section = Section(
        first_layer=0,
        last_layer=num_layers - 1,
        family=FAMILY,
        offset_bytes=0,
        num_units=num_units,
        unit_bytes=unit_bytes,
        stride_bytes=num_layers * unit_bytes,
    )
    first = np.zeros(0, np.int64) if pinned is None else pinned
    rank = np.concatenate([first, np.setdiff1d(np.arange(num_units), first)]).astype(np.int32)
    part = {"family": FAMILY, "density": 1.0, "num_pinned": first.size, "cache_slots": cache_slots}
    parts = tuple(PartPlan(layer=layer, **part) for layer in range(num_layers))
    return Setting(
        model_of(num_layers),
        "int8_group32",
        device,
        (section,),
        plan_of(parts, device, **changes),
        order={} if order is None else {(0, FAMILY): order.astype(np.int32)},
        rank=dict.fromkeys(((layer, FAMILY) for layer in range(num_layers)), rank),
    )
