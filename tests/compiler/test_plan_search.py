"""plan: compares plans on held-out tokens, records the comparison, and makes a plan for each of several budgets."""

import numpy as np
import pytest

from coldpress.compiler.activity.held_out import Window
from coldpress.compiler.io import save_arrays
from coldpress.compiler.stages.allocate import with_smaller
from coldpress.compiler.stages.plan import _search, plan_names
from coldpress.compiler.stages.plan._search import MeasuredPlan, PlanInputs, Replay
from coldpress.runtime.artifact.checks import check_manifest
from coldpress.runtime.dram.budget import holds_everything, least_budget_bytes, refit, used_bytes
from coldpress.schemas.activations import Activations, FamilyStatistics, LayerStatistics
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.families import num_units
from coldpress.schemas.order import GapCost, Order
from coldpress.schemas.sparsity import Densities, Tried
from tests.compiler.test_plan import check_layout, laid, records, whole_of, with_budget
from tests.support.methods import fitted
from tests.support.records import lay_out, manifest_of, tiny_order, tiny_sparsity
from tests.support.tiny import hashed, shuffled


def uneven(folder, model, sparsity, num_tokens=512):
    """Every tenth token uses other units than its neighbours, which use the same few: `num_tokens` of two kinds."""
    layers = []
    for layer in range(model.spec.num_hidden_layers):
        families = []
        for family in sparsity.families:
            count = num_units(family, model.spec)
            hot = shuffled(f"hot {layer} {family}", count) < count // 8
            active = np.repeat(hot[:, None], num_tokens, axis=1)
            active[:, ::10] = (hashed(f"rare {layer} {family}", count, -(-num_tokens // 10)) > 0.5).astype(bool)
            arrays = {"bits": np.packbits(active, axis=1, bitorder="little"), "counts": active.sum(axis=1)}
            saved = save_arrays(folder / f"uneven-{layer}-{family}.safetensors", arrays)
            families.append(
                FamilyStatistics(family=family, num_units=count, density=float(active.mean()), arrays=saved)
            )
        inputs = ArrayFile(array_file="", sha256="0" * 64)
        layers.append(LayerStatistics(layer=layer, families=tuple(families), inputs=inputs, input_similarity=None))
    return Activations(num_tokens=num_tokens, exact_zeros=False, layers=tuple(layers))


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Records of eleven layers with little DRAM, and orders whose reads cost something."""
    folder = tmp_path_factory.mktemp("compared")
    given = records(folder, share=0.15, num_hidden_layers=11, page_bytes=512)
    model, sparsity, *_ = given
    entries = tuple(
        entry.model_copy(update={"gap_costs": (GapCost(gap_bytes=0, flash_s_per_token=1e-3),)})
        for entry in tiny_order(folder, model, sparsity).entries
    )
    return given, (Order(entries=entries),), uneven(folder, model, sparsity)


@pytest.mark.slow
def test_what_is_kept_is_faster_than_the_default_on_the_tokens_that_it_was_chosen_on(compared):
    (model, sparsity, placement, device), order, activations = compared
    found = lay_out(model, sparsity, placement, device, None, order, activations, cache="auto")
    (choice,), (plan,) = found.made.choices, found.plans
    kept = [entry for entry in choice.tried if entry.kept]
    assert kept
    assert choice.token_s == kept[-1].token_s < _search.WORTH * choice.default_token_s
    for entry in kept:
        value = plan.cache if entry.setting.startswith("cache") else str(plan.read_buffer_bytes)
        assert value in entry.setting or "pinned" in entry.setting or "gap" in entry.setting
    tried = [entry.setting for entry in choice.tried]
    assert {"cache lru", "cache window", "cache s3fifo", "cache linked"} <= set(tried)
    assert not [setting for setting in tried if "belady" in setting or "static" in setting]
    assert any("on other tokens the changes take" in reason for reason in choice.reasons)
    check_layout(model, sparsity, placement, device, found)


@pytest.mark.slow
def test_changes_that_are_slower_on_other_tokens_are_taken_back(compared, monkeypatch):
    """The tokens that confirm say the opposite of those that choose."""
    (model, sparsity, placement, device), order, activations = compared
    measure, sides = Replay.measure, {}

    def crossed(self, plan):
        found = measure(self, plan)
        is_first = sides.setdefault(self.windows, len(sides)) == 0
        return found if is_first else MeasuredPlan(1 / found.token_s, found.hit_rate)

    monkeypatch.setattr(Replay, "measure", crossed)
    default = lay_out(model, sparsity, placement, device, None, order, cache="auto").plans
    found = lay_out(model, sparsity, placement, device, None, order, activations, cache="auto")
    assert found.plans == default
    (choice,) = found.made.choices
    assert choice.token_s == choice.default_token_s
    assert not any(entry.kept for entry in choice.tried)
    assert any("all changes are taken back" in reason for reason in choice.reasons)


@pytest.mark.parametrize("cache", ["auto", "lfu"])
def test_a_read_buffer_may_take_what_slots_would_have(compared, monkeypatch, cache):
    """Where larger reads are all that counts, another page would not fit, whatever the cache keeps about units."""
    (model, sparsity, placement, device), order, activations = compared
    monkeypatch.setattr(Replay, "measure", lambda _, plan: MeasuredPlan(1 / plan.read_buffer_bytes, 0.5))
    given = model, sparsity, placement, device
    found = lay_out(*given, None, order, activations, cache=cache)
    (choice,), (plan,) = found.made.choices, found.plans
    more = plan.model_copy(update={"read_buffer_bytes": plan.read_buffer_bytes + device.flash.page_bytes.value})
    assert least_budget_bytes(manifest_of(*given, found), plan) <= plan.dram_budget_bytes
    assert least_budget_bytes(manifest_of(*given, found), more) > plan.dram_budget_bytes - pinned_bytes(found, plan)
    assert "the largest read buffer" in [entry for entry in choice.tried if entry.kept][-1].setting
    check_layout(model, sparsity, placement, device, found)


def pinned_bytes(found, plan):
    sizes = {section.family: section.unit_bytes for section in found.sections}
    return sum(part.num_pinned * sizes[part.family] for part in plan.parts)


def test_what_the_user_gives_is_not_compared(compared):
    (model, sparsity, placement, device), order, activations = compared
    found = laid(model, sparsity, placement, device, "lru", None, order, activations, pinned_share=0.25)
    (choice,), (plan,) = found.made.choices, found.plans
    assert plan.cache == "lru"
    assert not [entry for entry in choice.tried if "cache" in entry.setting or "pinned" in entry.setting]
    assert {"cache lru, as given", "25% of the units' DRAM pinned, as given"} <= set(choice.reasons)
    assert {part.num_pinned for part in plan.parts} == {3}, "what `place` made of it"


@pytest.mark.parametrize(
    ("method", "share", "reason"),
    [
        ("topk", 3.0, "the whole model fits into"),
        ("dense", 0.05, "every token uses every unit"),
        ("topk", 0.05, "no activity was counted"),
    ],
)
def test_where_there_is_nothing_to_compare_it_says_so(tmp_path, method, share, reason):
    (choice,) = laid(*records(tmp_path, method, share=share, num_hidden_layers=11)).made.choices
    assert (choice.tried, choice.token_s) == ((), None)
    assert any(reason in sentence for sentence in choice.reasons)


def test_a_cache_that_finds_nothing_is_said(compared):
    """With room for the smallest read buffer, two pages here, and for no unit."""
    (model, sparsity, placement, device), order, activations = compared
    nothing = {"layers": tuple(entry.model_copy(update={"num_pinned": 0}) for entry in placement.layers)}
    given = model, sparsity, placement.model_copy(update=nothing), device
    found = laid(*given, "lfu")
    (plan,) = found.plans
    least = least_budget_bytes(manifest_of(*given, found), plan) - plan.read_buffer_bytes + 2 * 512
    (choice,) = laid(*with_budget(given, least), "lfu", None, order, activations).made.choices
    assert choice.hit_rate == 0
    assert any("nothing is found in DRAM: it holds 0 units, fewer than the" in reason for reason in choice.reasons)


def with_budgets(folder, model, sparsity, *decisions):
    """`sparsity` with further budgets, by bytes and density."""
    found = []
    for budget_bytes, density in decisions:
        decision = fitted(
            tiny_sparsity(model, sparsity.method, sparsity.format, density=density),
            model.spec,
            folder / str(budget_bytes),
        )
        budget = decision.budget.model_copy(update={"dram_budget_bytes": budget_bytes})
        found.append(decision.model_copy(update={"budget": budget}))
    return with_smaller(sparsity, found)


def test_an_artifact_has_a_plan_for_each_budget(tmp_path):
    """Each keeps the reader's rules; the tables have the arrays of all, and larger budgets pin more than the units that
    `place` pins for the smallest."""
    model, sparsity, placement, device = records(tmp_path, num_pinned=9, num_hidden_layers=11, share=0.8)
    most = sparsity.budget.dram_budget_bytes
    less = most - sparsity.budget.cache_bytes // 4, most - sparsity.budget.cache_bytes // 2
    several = with_budgets(tmp_path, model, sparsity, (less[0], 0.2), (less[1], 0.125))
    found = laid(model, several, placement, device)
    manifest = manifest_of(model, several, placement, device, found)
    check_manifest(manifest)
    assert [plan.dram_budget_bytes for plan in found.plans] == [most, *less]
    assert [{part.density for part in plan.parts} for plan in found.plans] == [{0.25}, {0.2}, {0.125}]
    pinned = [sum(part.num_pinned for part in plan.parts) for plan in found.plans]
    assert pinned[0] > pinned[1] > pinned[2]
    assert {part.num_pinned for part in found.plans[2].parts} == {9}
    assert [choice.reasons for choice in found.made.choices] == [
        ("no activity was counted that settings could be compared on",)
    ] * 3
    for plan in found.plans:
        assert used_bytes(manifest, plan) <= plan.dram_budget_bytes
        assert refit(manifest, plan, plan.dram_budget_bytes) == plan
    assert len({plan.name for plan in found.plans}) == 3
    assert [choice.plan for choice in found.made.choices] == [plan.name for plan in found.plans]


def test_a_larger_budget_of_a_dense_run_pins_whole_layers(tmp_path):
    """One after another, though the smallest budget has room for a part of the first alone."""
    model, sparsity, placement, device = records(tmp_path, "dense", num_pinned=0, num_hidden_layers=11, share=0.6)
    (first, *others) = placement.layers
    placement = placement.model_copy(update={"layers": (first.model_copy(update={"num_pinned": 5}), *others)})
    less = sparsity.budget.dram_budget_bytes - int(0.85 * sparsity.budget.cache_bytes)
    found = laid(model, with_budgets(tmp_path, model, sparsity, (less, 1.0)), placement, device)
    large, small = ([part.num_pinned for part in plan.parts] for plan in found.plans)
    units = num_units("neuron", model.spec)
    whole = large.count(units)
    assert whole >= 4
    assert large[:whole] == [units] * whole
    assert large[whole] < units
    assert not any(large[whole + 1 :])
    assert small == [5] + [0] * 10


def test_each_plan_says_which_density_and_why(tmp_path):
    model, sparsity, placement, device = records(tmp_path, num_hidden_layers=11, share=0.8)
    less = sparsity.budget.dram_budget_bytes - sparsity.budget.cache_bytes // 4
    sparsity = sparsity.model_copy(update={"tried": (Tried(method="topk", reason="the fastest"),)})
    several = with_budgets(tmp_path, model, sparsity, (less, 0.125))
    decision = several.smaller[0].model_copy(update={"tried": (Tried(method="topk", reason="the slowest"),)})
    choices = laid(model, several.model_copy(update={"smaller": (decision,)}), placement, device).made.choices
    assert choices[0].reasons[0] == "topk in int8_group32 at density 0.25: the fastest"
    assert choices[1].reasons[0].endswith(": the slowest")


def test_an_artifact_whose_largest_budget_holds_everything_says_so(tmp_path):
    model, sparsity, placement, device = records(tmp_path, share=3.0)
    several = with_budgets(tmp_path, model, sparsity, (whole_of((model, sparsity, placement, device)) - 20_000, 0.25))
    found = laid(model, several, placement, device)
    assert [holds_everything(plan, found.sections) for plan in found.plans] == [True, False]
    assert "the whole model fits" in found.made.choices[0].reasons[0]
    assert "the whole model fits" not in found.made.choices[1].reasons[0]


def test_tokens_of_another_density_are_drawn_from_those_that_were_counted(compared):
    (model, sparsity, placement, device), order, activations = compared
    sections = laid(model, sparsity, placement, device).sections
    known = PlanInputs(model, sparsity, sections, device, placement, order, activations)

    def tokens(density):
        per_layer = tuple(Densities(family=family, per_layer=(density,) * 11) for family in sparsity.families)
        wanted = sparsity.model_copy(update={"densities": per_layer})
        return known.traces(wanted, (Window(400, 400, 420),))[0].contexts[0].ids

    for ids, up, down in zip(tokens(0.25), tokens(0.5), tokens(0.125), strict=True):
        assert set(down) <= set(ids) <= set(up)
        assert down.size == max(1, round(ids.size / 2))
        assert up.size == min(64, 2 * ids.size)
        assert (np.diff(up) > 0).all()


@pytest.mark.parametrize(
    ("budgets", "names"),
    [
        ([5], ["default"]),
        ([4 * 10**9, 2 * 10**9, 10**9], ["4gb", "2gb", "1gb"]),
        ([1_500_000_000, 750_000_000], ["1.5gb", "750mb"]),
        ([1_500_000_001, 1_500_000_000], ["1.500000001gb", "1.5gb"]),
        ([999, 1], ["999b", "1b"]),
    ],
)
def test_plans_are_named_by_their_budgets(budgets, names):
    assert plan_names(budgets) == names
