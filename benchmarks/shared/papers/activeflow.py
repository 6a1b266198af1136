"""ActiveFlow 4.1: a token's time with cross-layer groups, its memory, and the greedy search (Eqs. 1-9).

While a group of N layers computes, the active weights of the next group are read in chunks of N channels. The first
group is read before anything computes, and what a layer uses besides the guess is read on demand. Eq. 1 names one
overlap; a token has one for every group but the first.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.shared.papers.chunks import chunk_bytes_per_s
from coldpress.compiler.cost_model import llm_sparsity
from coldpress.runtime.store.computing import weight_seconds
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FormatName

LEAST_DECREMENT = 0.05
"""The search ends where one more layer shortens a layer's preloading by less than this share; the paper has "a
threshold" without a value."""


@dataclass(frozen=True)
class Sizes:
    """A model by its bytes; all layers are of one size."""

    num_layers: int
    layer_bytes: int
    """S_l."""
    model_bytes: int
    """S_m."""
    kv_cache_bytes: int
    """M_kv."""
    channel_bytes: int
    """A chunk of one channel of one layer, the unit of top-k."""
    format: FormatName


@dataclass(frozen=True)
class Parameters:
    """The paper's parameters of a plan, with the statistics that they imply."""

    sparsity: float
    """sp."""
    layers_per_group: int
    """N."""
    cache_bytes: int
    """M_cache."""
    hit_rate: float
    """hr: share of the active weights that the cache holds."""
    similarity: float
    """si: share of a layer's active weights that the guess has."""


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of a plan."""

    group_bytes: float
    load_s: float
    compute_s: float
    onload_s: float
    preload_s: float
    decode_s: float
    memory_bytes: float

    @property
    def overlap_s(self) -> float:
        """Returns T_overlap (Eq. 5)."""
        return self.onload_s + max(self.preload_s, self.compute_s)


def costs(sizes: Sizes, plan: Parameters, device: DeviceProfile) -> Costs:
    """Returns T_load, T_comp, T_onload, T_preload, T_decode and M of a plan (Eqs. 1 and 3-9)."""
    active_bytes = sizes.layer_bytes * (1 - plan.sparsity)
    group_bytes = active_bytes * plan.layers_per_group  # Eq. 9
    small = chunk_bytes_per_s(device.flash, sizes.channel_bytes)
    large = chunk_bytes_per_s(device.flash, sizes.channel_bytes * plan.layers_per_group)
    missed = 1 - plan.hit_rate
    load_s = group_bytes * missed / small  # Eq. 3
    compute_s = weight_seconds(device, sizes.format, group_bytes, 1 - plan.sparsity)  # Eq. 4
    onload_s = active_bytes * missed * (1 - plan.similarity) / small  # Eq. 6
    preload_s = group_bytes * missed / large  # Eq. 7
    num_groups = sizes.num_layers / plan.layers_per_group
    overlap_s = onload_s + max(preload_s, compute_s)  # Eq. 5
    return Costs(
        group_bytes=group_bytes,
        load_s=load_s,
        compute_s=compute_s,
        onload_s=onload_s,
        preload_s=preload_s,
        decode_s=load_s + (num_groups - 1) * overlap_s + compute_s,  # Eq. 1
        memory_bytes=group_bytes + plan.cache_bytes + sizes.kv_cache_bytes,  # Eq. 8
    )


def serial_seconds(sizes: Sizes, sparsity: float, hit_rate: float, device: DeviceProfile) -> float:
    """Returns a token's seconds without groups (Figure 17, N = 0): a layer loads its active weights, then computes."""
    plan = Parameters(sparsity, 1, 0, hit_rate, 0.0)
    found = costs(sizes, plan, device)
    return sizes.num_layers * (found.load_s + found.compute_s)


def greedy_search(
    sizes: Sizes,
    budget_bytes: int,
    device: DeviceProfile,
    hit_rate: Callable[[float, int], float],
    similarity: float,
    least_decrement: float = LEAST_DECREMENT,
) -> tuple[Parameters, Costs]:
    """Returns the plan that the paper's greedy search finds, and its costs.

    The sparsity is the least with which the active weights fit (sp = 1 - M_max / S_m). Then N grows as long as
    preloading a layer is slower than computing it, becomes faster by `least_decrement`, and the group leaves the budget
    something (Eq. 2). The cache gets the rest.

    Args:
        sizes: The model.
        budget_bytes: M_max.
        device: Bandwidths by chunk size, and the seconds of computing.
        hit_rate: (sparsity, bytes of the cache) -> hr.
        similarity: si.
        least_decrement: A share of a layer's T_preload.
    """
    sparsity = llm_sparsity(budget_bytes, sizes.model_bytes)
    found: tuple[Parameters, Costs] | None = None
    for plan in _growing(sizes, sparsity, budget_bytes, hit_rate, similarity):
        cost = costs(sizes, plan, device)
        if found is not None and not _pays(found, (plan, cost), least_decrement):
            break
        found = plan, cost
        if cost.preload_s <= cost.compute_s:
            break
    assert found is not None, "the first plan is always judged"
    return found


def _growing(
    sizes: Sizes, sparsity: float, budget_bytes: int, hit_rate: Callable[[float, int], float], similarity: float
) -> Iterator[Parameters]:
    """Yields plans of one more layer per group each, while they fit; the first one even if it does not."""
    for layers in range(1, sizes.num_layers + 1):
        group_bytes = sizes.layer_bytes * (1 - sparsity) * layers
        cache_bytes = int(budget_bytes - sizes.kv_cache_bytes - group_bytes)
        if layers > 1 and cache_bytes < 0:
            return
        cache_bytes = max(0, cache_bytes)
        yield Parameters(sparsity, layers, cache_bytes, hit_rate(sparsity, cache_bytes), similarity)


def _pays(before: tuple[Parameters, Costs], after: tuple[Parameters, Costs], least_decrement: float) -> bool:
    first_s, then_s = (cost.preload_s / plan.layers_per_group for plan, cost in (before, after))
    return then_s <= (1 - least_decrement) * first_s
