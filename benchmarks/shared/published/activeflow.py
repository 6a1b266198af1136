"""ActiveFlow: the gain of cross-layer groups by Eqs. 1-9 (Figures 16 and 17), and the size of its search's groups.

The model is Llama-2-7B in Q4_0 with sparsity 0.6, a guess that has 95 % of the next layers' units, and no cache. Small
chunks are channels of 4 KB, large ones N of them.
"""

from collections.abc import Iterator
from statistics import fmean

from benchmarks.shared.papers.activeflow import (
    LEAST_DECREMENT,
    Parameters,
    Sizes,
    costs,
    greedy_search,
    serial_seconds,
)
from benchmarks.shared.published.cells import LLAMA_2_7B, Cell
from coldpress.compiler.cost_model import kv_cache_bytes, slice_bytes, weight_bytes
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.model import ATTENTION_ROLES, MLP_ROLES, role_shape

PHONES = ("oneplus12", "pixel6", "infinix-zero30")
SPARSITY, SIMILARITY = 0.6, 0.95
FORMAT = "int4_group32"
FEW_LAYERS = 8
"""Layers of the model of Figure 17b."""
SAME_CHUNK = "with N = 1 Eqs. 3 and 7 have the same chunk: all that is gained is the overlap with little computing"
FLATTER = "by the profiles 4 channels are read at four times the bandwidth of one; Figure 7's curves are flatter"
FIRST_GROUP = "Eq. 3 loads the first group in small chunks, a large part of a token of 8 layers"
NO_THRESHOLD = f"the paper states no threshold; ours ends where a layer gains less than {LEAST_DECREMENT:.0%}"


def sizes(num_layers: int = 32) -> Sizes:
    """Returns the sizes of Llama-2-7B, or of its first layers."""
    spec = LLAMA_2_7B.spec
    shapes = [role_shape(spec, f"{role}.weight") for role in (*ATTENTION_ROLES, *MLP_ROLES)]
    return Sizes(
        num_layers=num_layers,
        layer_bytes=sum(rows * slice_bytes(columns, FORMAT) for rows, columns in shapes),
        model_bytes=weight_bytes(LLAMA_2_7B, FORMAT),
        kv_cache_bytes=kv_cache_bytes(spec, 512),
        channel_bytes=4096,
        format=FORMAT,
    )


def gain(model: Sizes, layers_per_group: int, device: DeviceProfile) -> float:
    """Returns the seconds of a serial token over those of a token with groups."""
    plan = Parameters(SPARSITY, layers_per_group, 0, 0.0, SIMILARITY)
    return serial_seconds(model, SPARSITY, 0.0, device) / costs(model, plan, device).decode_s


def cells() -> Iterator[Cell]:
    """Yields all cells."""
    phones = [load_device(name) for name in PHONES]
    basis = "Eqs. 1-9, sp 0.6, si 0.95, hr 0; mean of the three phones"
    for layers, published, note in ((1, 1.10, SAME_CHUNK), (4, 2.2, FLATTER)):
        ours = fmean(gain(sizes(), layers, phone) for phone in phones)
        yield Cell("Fig. 16", f"N = {layers} over serial", "ratio", published, ours, basis, 0.15, note)
    for layers, published, note in ((1, 1 / 0.48, SAME_CHUNK), (4, 4.1, FIRST_GROUP)):
        ours = gain(sizes(FEW_LAYERS), layers, load_device("oneplus12"))
        name = f"8 layers, N = {layers} over N = 0"
        yield Cell("Fig. 17b", name, "ratio", published, ours, "Eqs. 1-9, OnePlus 12", 0.15, note)
    model = sizes()
    budget, basis = round((1 - SPARSITY) * model.model_bytes), "greedy search (4.1), sp 0.6, hr 0"
    for phone in phones:
        plan, _ = greedy_search(model, budget, phone, lambda _sparsity, _bytes: 0.0, SIMILARITY)
        name, found = f"N found on {phone.title}", plan.layers_per_group
        yield Cell("3", name, "layers", 4, found, basis, 0.25, NO_THRESHOLD)
