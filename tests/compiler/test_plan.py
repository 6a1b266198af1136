"""plan: the budget kept exactly, and the reader's own rules on any shape; what is compared, and what is kept of it."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coldpress.runtime.artifact.checks import check_manifest
from coldpress.runtime.artifact.errors import FieldError
from coldpress.runtime.dram.budget import holds_everything, refit, used_bytes, whole_bytes
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.layout import SECTION_ALIGN_BYTES, placed_parts
from coldpress.schemas.order import FamilyOrder, GapCost, Order
from tests.support.methods import fitted
from tests.support.records import Laid, lay_out, manifest_of, tiny_placement, tiny_predictors, tiny_sparsity
from tests.support.tiny import describe, tensor_shapes, tiny_device, tiny_spec


def records(folder, method="topk", format_name="int8_group32", num_pinned=3, share=0.5, page_bytes=4096, **changes):
    spec = tiny_spec(**changes)
    model = describe(spec, tensor_shapes(spec), Path("nowhere/model.safetensors"))
    sparsity = fitted(tiny_sparsity(model, method, format_name, share), spec, folder)
    return model, sparsity, tiny_placement(folder, model, sparsity, num_pinned), tiny_device(page_bytes)


def laid(model, sparsity, placement, device, cache="lru", predictors=None, order=(), activations=None, **config):
    sparsity = sparsity.model_copy(update={"cache": cache})
    return lay_out(model, sparsity, placement, device, predictors, order, activations, **config)


def test_an_int8_kv_cache_is_what_the_plan_says_and_leaves_more_to_units(tmp_path):
    """Two layers of two heads of 32 values: 34 bytes each where fp16 has 64."""
    spec = tiny_spec(head_dim=32, rotary_dim=32)
    model = describe(spec, tensor_shapes(spec), Path("nowhere/model.safetensors"))
    found = {}
    for kept in ("fp16", "int8"):
        sparsity = fitted(tiny_sparsity(model, "topk", "int8_group32", 0.2, kept=kept), spec, tmp_path / kept)
        budget = sparsity.budget.model_copy(update={"dram_budget_bytes": 128_000 + sparsity.budget.bookkeeping_bytes})
        sparsity = sparsity.model_copy(update={"budget": budget})
        placement = tiny_placement(tmp_path / kept, model, sparsity, 3)
        layout = laid(model, sparsity, placement, tiny_device(4096))
        check_manifest(manifest_of(model, sparsity, placement, tiny_device(4096), layout))
        found[kept] = layout.plans[0]
    heads = 2 * spec.num_hidden_layers * spec.num_key_value_heads * found["fp16"].context_length
    assert {kept: (plan.kv_cache, plan.kv_cache_bytes) for kept, plan in found.items()} == {
        "fp16": ("fp16", 64 * heads),
        "int8": ("int8", 34 * heads),
    }
    slots = {kept: sum(part.cache_slots for part in plan.parts) for kept, plan in found.items()}
    assert slots["int8"] > slots["fp16"]


SHAPES = st.fixed_dictionaries(
    {
        "intermediate_size": st.integers(1, 700),
        "hidden_size": st.integers(1, 5).map(lambda n: 16 * n),
        "num_hidden_layers": st.integers(1, 5),
        "gated_mlp": st.booleans(),
        "tie_word_embeddings": st.booleans(),
    }
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=SHAPES,
    method=st.sampled_from(("dense", "relu", "predictor", "topk")),
    format_name=st.sampled_from(("fp16", "int8_group32", "int4_group32")),
    cache=st.sampled_from(("lru", "lfu", "static")),
    page_bytes=st.sampled_from((512, 4096, 16384, 65536)),
    share=st.floats(0, 3),
    num_pinned=st.integers(0, 1),
)
def test_any_layout_keeps_the_readers_rules(tmp_path, shape, method, format_name, cache, page_bytes, share, num_pinned):
    model, sparsity, placement, device = records(tmp_path, method, format_name, num_pinned, share, page_bytes, **shape)
    predictors = tiny_predictors(tmp_path, model, sparsity) if method == "predictor" else None
    try:
        layout = laid(model, sparsity, placement, device, cache, predictors)
    except DoesNotFitError:
        return
    check_layout(model, sparsity, placement, device, layout, predictors)


def check_layout(model, sparsity, placement, device, layout, predictors=None):
    """Aligned, no overlap, no hole, every unit once, budget kept: the reader's rules, and what the runtime sums up."""
    manifest = manifest_of(model, sparsity, placement, device, layout, predictors.layers if predictors else ())
    check_manifest(manifest)
    plan = layout.plans[0]
    slack = plan.dram_budget_bytes - used_bytes(manifest, plan)
    assert slack >= 0
    full = all(
        part.num_pinned + part.cache_slots == section.num_units for part, section in placed_parts(plan, layout.sections)
    )
    rounding = sum(section.stride_bytes for section in layout.sections)
    assert full or plan.cache == "static" or slack < rounding
    assert refit(manifest, plan, plan.dram_budget_bytes) == plan


def test_the_checker_sees_what_is_wrong(tmp_path):
    """A layout that is off by a byte, a unit or a slot must not pass, or the test above says nothing."""
    given = records(tmp_path)
    good = laid(*given)
    sections, plan = good.sections, good.plans[0]
    used = used_bytes(manifest_of(*given, good), plan)

    def changed(index, **values):
        return tuple(part.model_copy(update=values) if i == index else part for i, part in enumerate(sections))

    much = plan.parts[0].model_copy(update={"cache_slots": 10**6})
    parts = (plan.model_copy(update={"parts": (much, *plan.parts[1:])}),)
    for update in (
        {"sections": changed(1, offset_bytes=sections[1].offset_bytes + 1)},
        {"sections": changed(1, offset_bytes=sections[1].offset_bytes + SECTION_ALIGN_BYTES)},
        {"sections": changed(2, offset_bytes=0)},
        {"sections": changed(0, num_units=63)},
        {"sections": (*sections[:3], sections[2])},
        {"sections": sections[:3]},
        {"flash_bytes": good.layout.flash_bytes + SECTION_ALIGN_BYTES},
        {"plans": parts},
        {"plans": (plan.model_copy(update={"dram_budget_bytes": used - 1}),)},
    ):
        of_plans = {key: value for key, value in update.items() if key == "plans"}
        layout = good.layout.model_copy(update={key: value for key, value in update.items() if key != "plans"})
        with pytest.raises(FieldError):
            check_layout(*given, Laid(layout, good.made.model_copy(update=of_plans)))


def test_cache_slots_are_even_over_layers_and_leave_room_for_pinned_units(tmp_path):
    layout = laid(*records(tmp_path, num_pinned=3, num_hidden_layers=4))
    by_family: dict[str, set[int]] = {}
    for part in layout.plans[0].parts:
        assert part.num_pinned == 3
        assert part.cache_slots > 0
        by_family.setdefault(part.family, set()).add(part.cache_slots)
    assert all(len(counts) == 1 for counts in by_family.values())


def test_a_static_cache_has_no_slots(tmp_path):
    given = records(tmp_path)
    plan = laid(*with_budget(given, whole_of(given) - 1), cache="static").plans[0]
    assert {part.cache_slots for part in plan.parts} == {0}
    assert {part.num_pinned for part in plan.parts} == {3}


def whole_of(given):
    """The DRAM in which these records' model reads no unit."""
    layout = laid(*given)
    return whole_bytes(manifest_of(*given, layout), layout.plans[0]) - layout.layout.tables[0].length_bytes


def with_budget(given, budget_bytes):
    model, sparsity, placement, device = given
    budget = sparsity.budget.model_copy(update={"dram_budget_bytes": budget_bytes})
    return model, sparsity.model_copy(update={"budget": budget}), placement, device


@pytest.mark.parametrize("cache", ["lru", "static"])
@pytest.mark.parametrize("method", ["dense", "topk"])
def test_a_budget_with_room_for_every_unit_holds_every_unit(tmp_path, method, cache):
    """And is one that the reader takes, to the byte: the read buffer, which is never used, does not count."""
    given = records(tmp_path, method)
    whole = whole_of(given)
    enough, short = (laid(*with_budget(given, whole - missing), cache=cache) for missing in (0, 1))
    for layout, full in ((enough, True), (short, False)):
        check_layout(*with_budget(given, layout.plans[0].dram_budget_bytes), layout)
        assert holds_everything(layout.plans[0], layout.sections) == full
    assert enough.plans[0].read_buffer_bytes > 0
    assert used_bytes(manifest_of(*with_budget(given, whole), enough), enough.plans[0]) == whole
    more = whole + enough.layout.tables[0].length_bytes
    for budget, used in ((more, more), (more - 1, whole)):  # token embeddings are held where all of them fit, too
        layout = laid(*with_budget(given, budget), cache=cache)
        assert used_bytes(manifest_of(*with_budget(given, budget), layout), layout.plans[0]) == used


def test_predictors_are_counted_as_they_are(tmp_path):
    model, sparsity, placement, device = records(tmp_path, "predictor")
    fitted = tiny_predictors(tmp_path, model, sparsity)
    smaller = fitted.model_copy(
        update={"layers": tuple(entry.model_copy(update={"rank": 4}) for entry in fitted.layers)}
    )
    half = fitted.model_copy(
        update={"layers": tuple(entry.model_copy(update={"format": "fp16"}) for entry in fitted.layers)}
    )

    def stored(predictors):
        return laid(model, sparsity, placement, device, predictors=predictors).plans[0].predictor_bytes

    # two layers of fc1 [rank, 64] and fc2 [72, rank], in groups of 34 bytes: two a row of fc1, one a row of fc2
    assert stored(fitted) == 2 * (8 * 2 * 34 + 72 * 34)
    assert stored(smaller) == 2 * (4 * 2 * 34 + 72 * 34)
    assert stored(half) == 2 * 2 * 8 * 136
    one = fitted.model_copy(update={"layers": fitted.layers[1:]})
    assert stored(one) == 8 * 2 * 34 + 72 * 34


def test_a_budget_that_is_too_small_is_refused_with_both_numbers(tmp_path):
    model, sparsity, placement, device = records(tmp_path)
    budget = sparsity.budget.model_copy(update={"dram_budget_bytes": 30_000})
    with pytest.raises(
        DoesNotFitError,
        match=r"budget of 30,000 bytes was asked for, [\d,]+ are needed before any unit is cached: [\d,]+ resident",
    ):
        laid(model, sparsity.model_copy(update={"budget": budget}), placement, device)


def test_pinned_units_count_in_the_budget(tmp_path):
    """With none of them the same budget will do."""
    model, sparsity, placement, device = records(tmp_path, num_pinned=0)
    plan = laid(model, sparsity, placement, device).plans[0]
    less = {"dram_budget_bytes": plan.resident_bytes + plan.kv_cache_bytes + 30_000}
    less["dram_budget_bytes"] += sparsity.budget.bookkeeping_bytes
    sparsity = sparsity.model_copy(update={"budget": sparsity.budget.model_copy(update=less)})
    laid(model, sparsity, placement, device)
    sizes = {"mlp_in": 64, "mlp_mid": 72}
    layers = tuple(entry.model_copy(update={"num_pinned": sizes[entry.family]}) for entry in placement.layers)
    with pytest.raises(DoesNotFitError, match=rf"{2 * (64 * 204 + 72 * 68):,} pinned units; .* raise dram_budget"):
        laid(model, sparsity, placement.model_copy(update={"layers": layers}), device)


def test_the_largest_plan_has_the_largest_budget(tmp_path):
    """What runs where no budget is given, wherever it stands in the list."""
    made = laid(*records(tmp_path)).made
    plan = made.plans[0]
    small = plan.model_copy(update={"name": "small", "dram_budget_bytes": plan.dram_budget_bytes - 1})
    for plans in ((small, plan), (plan, small)):
        assert made.model_copy(update={"plans": plans}).largest_plan == plan


def ordered(tmp_path, layer, seconds):
    """An entry whose gaps of 0, 1, 2 … pages cost `seconds`."""
    arrays = ArrayFile(array_file=str(tmp_path / "order.safetensors"), sha256="0" * 64)
    costs = tuple(GapCost(gap_bytes=4096 * page, flash_s_per_token=cost) for page, cost in enumerate(seconds))
    values = {"heuristic": "ripple", "arrays": arrays, "adjacent_coactivation": 0.5, "gap_costs": costs}
    return FamilyOrder(layer=layer, family="mlp_in", **values)


def test_the_gap_costs_the_least_over_all_sections(tmp_path):
    first, second = ordered(tmp_path, 0, (3.0, 1.0, 2.0)), ordered(tmp_path, 1, (1.0, 4.0, 1.5))
    parts = (Order(entries=(first,)), Order(entries=(second,)))
    assert laid(*records(tmp_path), order=parts).plans[0].collapse_gap_bytes == 8192
    assert laid(*records(tmp_path), order=parts[:1]).plans[0].collapse_gap_bytes == 4096
    assert laid(*records(tmp_path), order=parts[1:]).plans[0].collapse_gap_bytes == 0


@pytest.mark.parametrize(
    ("seconds", "gap_bytes"),
    [((2, 1, 1), 8192), ((2, 1, 1.004, 1.006), 8192), ((1, 1, 1, 1, 1, 1, 1, 1), 20480), ((1, 2, 3), 0)],
)
def test_of_gaps_as_good_the_one_nearest_to_break_even_is_taken(tmp_path, seconds, gap_bytes):
    order = (Order(entries=(ordered(tmp_path, 0, seconds),)),)
    assert laid(*records(tmp_path), order=order).plans[0].collapse_gap_bytes == gap_bytes


def test_without_costs_the_gap_is_where_two_reads_cost_as_much_as_one(tmp_path):
    flash = tiny_device().flash  # 2 GB/s over 100,000 reads per second
    assert flash.break_even_gap_bytes == 20_000
    assert laid(*records(tmp_path)).plans[0].collapse_gap_bytes == 20_000
    assert laid(*records(tmp_path)).plans[0].queue_depth == 32


def test_a_foreign_placement_is_refused(tmp_path):
    model, sparsity, placement, device = records(tmp_path)
    short = placement.model_copy(update={"layers": placement.layers[:2]})
    with pytest.raises(ColdpressError, match="pins None of 64 mlp_in units in layer 1"):
        laid(model, sparsity, short, device)
    first = placement.layers[0]
    more = placement.model_copy(update={"layers": (first.model_copy(update={"num_pinned": 65}), *placement.layers[1:])})
    with pytest.raises(ColdpressError, match=r"pins 65 of 64 mlp_in units in layer 0; it was made for another model"):
        laid(model, sparsity, more, device)
