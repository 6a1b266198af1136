"""The division of the DRAM budget: what is taken first, what is left, and who gets it."""

import numpy as np
import pytest

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.bookkeeping import bookkeeping_bytes
from coldpress.runtime.dram.budget import (
    as_run,
    choose_plan,
    fixed_bytes,
    least_budget_bytes,
    refit,
    used_bytes,
    whole_bytes,
)
from coldpress.runtime.dram.kv_cache import kv_cache_bytes
from coldpress.runtime.flash import direct
from coldpress.runtime.generate.session import Session
from coldpress.runtime.store.store import Store
from coldpress.schemas.errors import DoesNotFitError


def test_the_parts_are_those_that_the_brief_lists(relu_artifact):
    """Resident, predictors, KV cache, read buffer, bookkeeping, slots; computed here by hand."""
    manifest, plan = relu_artifact.manifest, relu_artifact.manifest.plans[0]
    unit_bytes = 2 * 64 * 2  # an up row and a down column of 64 values in fp16
    assert kv_cache_bytes(manifest.model, 32) == 12 * 32 * 2 * (2 * 16) * 2
    pages = 12 * 2 * 65536 // 4096  # a section of 512 units takes two steps of 64 KiB
    tables = 4 * pages + 12 * 512 * (2 + 2 + 2 + 2 + 2)
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
    with pytest.raises(DoesNotFitError, match=rf"budget of {fixed - 1:,} bytes was asked for, {fixed:,} are needed"):
        choose_plan(manifest, fixed - 1)


def test_under_a_smaller_budget_the_hottest_stay(relu_artifact):
    """What stays are the first of the rank, not the first in flash order."""
    manifest, plan = relu_artifact.manifest, relu_artifact.manifest.plans[0]
    artifact = open_artifact(relu_artifact.path)
    half = refit(manifest, plan, fixed_bytes(manifest, plan) + 12 * 16 * 256)
    store = Store(artifact, half, direct.Plugin(artifact, half.queue_depth))
    for (layer, family), hottest in relu_artifact.pinned.items():
        assert set(np.flatnonzero(store.residency((layer, family)).present)) == set(hottest[:16].tolist())


def test_where_nothing_is_admitted_a_larger_budget_pins_the_next(relu_artifact):
    manifest, plan = relu_artifact.manifest, relu_artifact.manifest.plans[0]
    static = plan.model_copy(
        update={"cache": "static", "parts": tuple(part.model_copy(update={"cache_slots": 0}) for part in plan.parts)}
    )
    spent = static.model_copy(update={"dram_budget_bytes": used_bytes(manifest, static)})
    assert refit(manifest, spent, spent.dram_budget_bytes) == spent
    grown = refit(manifest, spent, spent.dram_budget_bytes + 12 * 10 * 256)
    assert [(part.num_pinned, part.cache_slots) for part in grown.parts] == [(42, 0)] * 12


@pytest.mark.parametrize("cache", ["lru", "lfu", "static", "window", "linked", "s3fifo"])
@pytest.mark.parametrize("beyond_bytes", [0, 1, 100_000_000])
def test_with_room_for_everything_nothing_is_read(relu_artifact, cache, beyond_bytes):
    """Neither by the first token nor by any other, nor by the prefill, whatever policy the plan names."""
    whole = whole_bytes(relu_artifact.manifest, relu_artifact.manifest.plans[0])
    with Session(relu_artifact.path, dram_budget_bytes=whole + beyond_bytes, cache=cache) as session:
        for _ in range(2):
            run = session.generate([3, 14, 15], 6, ignore_eos=True).metrics
            assert (run.reads, run.misses, run.prefill_reads) == (0, 0, 0)
            assert run.hits > 0
            assert run.dram_used_bytes == run.whole_model_bytes == whole


@pytest.mark.parametrize("selector", [None, "dense"])
def test_one_byte_less_is_divided_as_before(relu_artifact, selector):
    manifest = relu_artifact.manifest
    whole = whole_bytes(manifest, manifest.plans[0])
    with Session(relu_artifact.path, dram_budget_bytes=whole - 1, selector=selector) as session:
        plan = session.plan
        assert used_bytes(manifest, plan) < whole
        assert [part.num_pinned for part in plan.parts] == [part.num_pinned for part in manifest.plans[0].parts]
        assert session.generate([3, 14, 15], 6, ignore_eos=True).metrics.reads > 0


def test_what_the_whole_model_takes_by_hand(relu_artifact):
    manifest, plan = relu_artifact.manifest, relu_artifact.manifest.plans[0]
    beside = fixed_bytes(manifest, plan) - plan.read_buffer_bytes - plan.preload_buffer_bytes
    assert whole_bytes(manifest, plan) == beside + 12 * 512 * 256


def test_a_plan_that_holds_everything_can_be_cut_as_if_it_never_had(relu_artifact):
    """A budget that was large once leaves no trace in how a smaller one is divided."""
    manifest = relu_artifact.manifest
    plan = manifest.plans[0]
    small = fixed_bytes(manifest, plan) + 300_000
    whole = refit(manifest, plan, 100_000_000)
    assert refit(manifest, whole, small).parts == refit(manifest, plan, small).parts
    pinned = as_run(manifest, whole)
    assert {(part.num_pinned, part.cache_slots) for part in pinned.parts} == {(512, 0)}
    assert as_run(manifest, plan) == plan


def test_the_least_budget_can_be_divided_and_one_byte_less_cannot(relu_artifact):
    manifest = relu_artifact.manifest
    buffered = manifest.plans[0].model_copy(update={"read_buffer_bytes": 100 << 20})
    for plan in (manifest.plans[0], buffered):
        least = least_budget_bytes(manifest, plan)
        assert used_bytes(manifest, refit(manifest, plan, least)) == least
        with pytest.raises(DoesNotFitError):
            refit(manifest, plan, least - 1)
    assert least_budget_bytes(manifest, buffered) == whole_bytes(manifest, buffered)


def test_a_session_reads_nothing_more_once_it_is_given_room_for_everything(relu_artifact):
    """And reads again, through the plan's buffer, when it has to give the room back; the text stays throughout."""
    manifest = relu_artifact.manifest
    plan = manifest.plans[0]
    expected = Session(relu_artifact.path).generate([3, 14, 15], 18, ignore_eos=True).token_ids
    with Session(relu_artifact.path) as session:
        tokens = []
        for token in session.stream([3, 14, 15], 18, ignore_eos=True):
            tokens.append(token)
            if len(tokens) in (6, 12):
                session.resize(whole_bytes(manifest, plan) if len(tokens) == 6 else plan.dram_budget_bytes)
                if len(tokens) == 6:
                    buffer = session.store._memory.buffer.size
                    assert buffer < plan.read_buffer_bytes
        assert session.store._memory.buffer.size == plan.read_buffer_bytes
    assert tuple(token.id for token in tokens) == expected
    assert min(token.reads for token in tokens[1:6]) > 0
    assert max(token.reads for token in tokens[6:12]) == 0
    assert max(token.reads for token in tokens[12:]) > 0


def test_the_prefill_of_a_model_in_dram_is_the_one_that_reads_it(relu_artifact):
    """The same sums in the same order: its units lie in flash order, too."""
    prompt = np.arange(1, 20)
    with Session(relu_artifact.path) as reading, Session(relu_artifact.path, dram_budget_bytes=100_000_000) as holding:
        for session in (reading, holding):
            session.decoder.begin(32)
        found = [session.decoder.prefill(prompt) for session in (reading, holding)]
    assert (found[0] == found[1]).all()


def test_an_artifact_whose_budget_has_always_been_enough_is_divided_anew(relu_artifact):
    """One that was built before plans knew of it, or whose plan says less than its budget holds."""
    manifest = relu_artifact.manifest
    plan = manifest.plans[0].model_copy(update={"dram_budget_bytes": whole_bytes(manifest, manifest.plans[0])})
    found = choose_plan(manifest.model_copy(update={"plans": (plan,)}))
    assert all(part.num_pinned + part.cache_slots == 512 for part in found.parts)
