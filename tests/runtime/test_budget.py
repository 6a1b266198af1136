"""The division of the DRAM budget: what is taken first, what is left, and who gets it."""

import numpy as np
import pytest

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.flash import direct
from coldpress.runtime.plan.bookkeeping import bookkeeping_bytes
from coldpress.runtime.plan.budget import choose_plan, fixed_bytes, refit, used_bytes
from coldpress.runtime.plan.kv_cache import kv_cache_bytes
from coldpress.runtime.store.store import Store
from coldpress.schemas.errors import DoesNotFitError


def test_the_parts_are_those_that_the_brief_lists(relu_artifact):
    """Resident, predictors, KV cache, read buffer, bookkeeping, slots; computed here by hand."""
    manifest, plan = relu_artifact.manifest, relu_artifact.manifest.plans[0]
    unit_bytes = 2 * 64 * 2  # an up row and a down column of 64 values in fp16
    assert kv_cache_bytes(manifest.model, 32) == 12 * 32 * 2 * (2 * 16) * 2
    pages = 12 * 2 * 65536 // 4096  # a section of 512 units takes two steps of 64 KiB
    tables = 4 * pages + 12 * 512 * (8 + 12 + 18)
    objects, token = (128 + 12 * (8 + 12)) * 1024, 512 * 64 + 64 * 32 + 96 * 48
    assert bookkeeping_bytes(manifest) == tables + objects + token
    fixed = plan.resident_bytes + 12 * 32 * 2 * (2 * 16) * 2 + 32768 + tables + objects + token
    assert fixed_bytes(manifest, plan) == fixed
    assert used_bytes(manifest, plan) == fixed + 12 * (32 + 64) * unit_bytes


def test_without_a_budget_the_largest_plan_is_taken(relu_artifact):
    small = relu_artifact.manifest.plans[0]
    large = small.model_copy(update={"name": "large", "dram_budget_bytes": small.dram_budget_bytes + 1})
    manifest = relu_artifact.manifest.model_copy(update={"plans": (large, small)})
    assert choose_plan(manifest) == large
    assert choose_plan(manifest, small.dram_budget_bytes).name == small.name
    assert choose_plan(manifest, large.dram_budget_bytes).name == "large"
    assert choose_plan(manifest, small.dram_budget_bytes - 1).name == small.name  # cut to fit


@pytest.mark.parametrize("extra", [0, 1, 256, 100_000, 500_000, 10_000_000])
def test_a_budget_is_used_up_but_never_exceeded(relu_artifact, extra):
    manifest = relu_artifact.manifest
    budget = fixed_bytes(manifest, manifest.plans[0]) + extra
    plan = choose_plan(manifest, budget)
    used = used_bytes(manifest, plan)
    assert plan.dram_budget_bytes == budget
    assert used <= budget
    everything = all(part.num_pinned + part.cache_slots == 512 for part in plan.parts)
    assert everything or budget - used < len(plan.parts) * 256  # less than one unit per section is left over


def test_layers_of_equal_density_get_equal_slots(relu_artifact):
    manifest = relu_artifact.manifest
    plan = choose_plan(manifest, manifest.plans[0].dram_budget_bytes + 300_000)
    assert len({part.cache_slots for part in plan.parts}) == 1


def test_slots_follow_demand_and_go_round_full_sections(relu_artifact):
    manifest = relu_artifact.manifest
    plan = manifest.plans[0]
    dense_first = tuple(
        part.model_copy(update={"density": 1.0 if part.layer == 0 else 0.1, "num_pinned": 0}) for part in plan.parts
    )
    plan = plan.model_copy(update={"parts": dense_first})
    room = 256 * 300  # 300 slots: by demand 1.0 against 11 x 0.1
    slots = [part.cache_slots for part in refit(manifest, plan, fixed_bytes(manifest, plan) + room).parts]
    assert slots[0] == 142 + 2  # 300 / 2.1, and by demand of the 4 that rounding left, then of the 3 left of those
    assert set(slots[1:]) == {14}
    room = 256 * 2000  # layer 0 would get 952 of them but has 512 units: the others get the rest
    slots = [part.cache_slots for part in refit(manifest, plan, fixed_bytes(manifest, plan) + room).parts]
    assert slots[0] == 512
    assert set(slots[1:]) == {135}


def test_pinned_units_come_first_and_shrink_together(relu_artifact):
    manifest, plan = relu_artifact.manifest, relu_artifact.manifest.plans[0]
    pinned_bytes = 12 * 32 * 256
    exact = refit(manifest, plan, fixed_bytes(manifest, plan) + pinned_bytes)
    assert [(part.num_pinned, part.cache_slots) for part in exact.parts] == [(32, 0)] * 12
    half = refit(manifest, plan, fixed_bytes(manifest, plan) + pinned_bytes // 2)
    assert [(part.num_pinned, part.cache_slots) for part in half.parts] == [(16, 0)] * 12


def test_a_policy_that_admits_nothing_gets_no_slots(relu_artifact):
    manifest = relu_artifact.manifest
    plan = manifest.plans[0].model_copy(update={"cache": "static"})
    grown = refit(manifest, plan, plan.dram_budget_bytes + 1_000_000)
    assert all(part.cache_slots == 0 for part in grown.parts)


def test_a_budget_below_the_resident_part_is_refused_with_both_numbers(relu_artifact):
    manifest = relu_artifact.manifest
    fixed = fixed_bytes(manifest, manifest.plans[0])
    with pytest.raises(DoesNotFitError, match=rf"needs {fixed} bytes .* the budget is {fixed - 1};"):
        choose_plan(manifest, fixed - 1)


def test_under_a_smaller_budget_the_hottest_stay(relu_artifact):
    """What stays are the first of the rank, not the first in flash order."""
    manifest, plan = relu_artifact.manifest, relu_artifact.manifest.plans[0]
    artifact = open_artifact(relu_artifact.path)
    half = refit(manifest, plan, fixed_bytes(manifest, plan) + 12 * 16 * 256)
    store = Store(artifact, half, direct.Flash(artifact, half.queue_depth))
    for (layer, family), hottest in relu_artifact.pinned.items():
        assert set(np.flatnonzero(store.residency(layer, family).present)) == set(hottest[:16].tolist())


def test_where_nothing_is_admitted_a_larger_budget_pins_the_next(relu_artifact):
    manifest, plan = relu_artifact.manifest, relu_artifact.manifest.plans[0]
    static = plan.model_copy(
        update={"cache": "static", "parts": tuple(part.model_copy(update={"cache_slots": 0}) for part in plan.parts)}
    )
    spent = static.model_copy(update={"dram_budget_bytes": used_bytes(manifest, static)})
    assert refit(manifest, spent, spent.dram_budget_bytes) == spent
    grown = refit(manifest, spent, spent.dram_budget_bytes + 12 * 10 * 256)
    assert [(part.num_pinned, part.cache_slots) for part in grown.parts] == [(42, 0)] * 12
