"""A dense run that preloads the next layer: its seconds, the plan that a build gives it, and the run itself."""

from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.dense_run import buffers_of, dense_run
from coldpress.compiler.io import load_arrays
from coldpress.compiler.quote.sources import activations_of as activations_from
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.seconds import Setting, token_seconds
from coldpress.compiler.sections import make_sections
from coldpress.compiler.stages.allocate import run as allocate
from coldpress.compiler.stages.place import PlaceConfig
from coldpress.compiler.stages.place import run as place
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import used_bytes
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import on_device, pass_seconds, simulate, token_seconds_of
from coldpress.runtime.store.computing import in_pass
from coldpress.runtime.trace import END, FETCH, NO_IDS, PRELOAD, Event
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import dense_family, num_units
from coldpress.schemas.layout import PartPlan, Plan
from coldpress.schemas.metrics import DenseRun
from coldpress.schemas.model import Model
from tests.compiler.test_plan import laid
from tests.support.artifacts import Built, Recipe, build_artifact, random_weights, small_spec
from tests.support.curves import curves_of
from tests.support.records import manifest_of, tiny_order
from tests.support.statistics import device_of, model_of, sparsity_of, workspace

LAYERS, UNITS, CONTEXT = 11, 600, 64
FORMAT = "int8_group32"


@pytest.fixture
def model() -> Model:
    return model_of(num_hidden_layers=LAYERS, hidden_size=128, intermediate_size=UNITS)


@pytest.fixture
def device() -> DeviceProfile:
    """Attention takes about as long as reading a third of a layer."""
    return device_of(dram_bytes_per_s=1e9, latency_s=2e-5)


def of_share(
    model: Model, device: DeviceProfile, share: float, *, naive: bool = False, preloads: bool = True
) -> DenseRun:
    """The dense run with room for a share of the units and buffers."""
    unit_bytes = make_sections(model.spec, ("neuron",), FORMAT)[0].unit_bytes
    room = round(share * LAYERS * UNITS * unit_bytes)
    found = dense_run(model, FORMAT, CONTEXT, 1 << 40, device, room_bytes=room, naive=naive, preloads=preloads)
    assert found is not None
    return found


def events(
    number: int, layers: int = LAYERS, units: int = UNITS, *, ahead: bool = True, family: str = "neuron"
) -> list[Event]:
    """A token that uses every unit, and after each layer begins to read the next one's, at last the next token's."""
    every = np.arange(units, dtype=np.int32)
    found: list[Event] = []
    for layer in range(layers):
        found.append(Event(FETCH, number, layer, family, every))
        if ahead:
            found.append(Event(PRELOAD, number, (layer + 1) % layers, family, every))
    return [*found, Event(END, number, 0, family, NO_IDS)]


def setting_of(model: Model, device: DeviceProfile, run: DenseRun) -> Setting:
    """The run as a plan: its pinned units are divided here by hand, the odd ones to the last layers as they add up."""
    sections = make_sections(model.spec, ("neuron",), FORMAT)
    pinned = run.pinned_bytes // sections[0].unit_bytes
    missing = LAYERS * UNITS - pinned
    streamed = [missing * (layer + 1) // LAYERS - missing * layer // LAYERS for layer in range(LAYERS)]
    parts = [
        PartPlan(layer=layer, family="neuron", density=1.0, num_pinned=UNITS - count, cache_slots=0)
        for layer, count in enumerate(streamed)
    ]
    plan = Plan(
        name="dense",
        method="dense",
        cache="static",
        dram_budget_bytes=1 << 40,
        context_length=CONTEXT,
        resident_bytes=0,
        predictor_bytes=0,
        kv_cache_bytes=CONTEXT * 2 * 2 * LAYERS * model.spec.num_key_value_heads * model.spec.head_dim,
        read_buffer_bytes=run.read_buffer_bytes,
        preload_buffer_bytes=run.preload_buffer_bytes,
        collapse_gap_bytes=0,
        queue_depth=device.flash.queue_depth.value,
        parts=tuple(parts),
    )
    return Setting(model, FORMAT, device, sections, plan)


@pytest.mark.parametrize("dram_bytes_per_s", [1e9, 6e9])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_it_costs_what_the_simulator_says(model: Model, dram_bytes_per_s: float, share: float) -> None:
    """Whether the processor is slower than flash, or flash is."""
    device = device_of(dram_bytes_per_s=dram_bytes_per_s, latency_s=2e-5)
    found = of_share(model, device, share)
    assert found.preload_buffer_bytes > 0
    setting = setting_of(model, device, found)
    assert token_seconds(setting, events(2), events(1)) == pytest.approx(found.token_s, rel=1e-9)
    run = simulate(setting.artifact, setting.plan, events(2), events(1))
    assert run.reads == found.reads_per_token
    assert run.read_bytes == found.flash_bytes_per_token
    assert run.modelled_flash_s == pytest.approx(found.flash_s)
    assert run.preload_precision == 1.0, "what it reads for the next token, it has found itself"


def test_no_buffer_that_was_tried_is_faster(model: Model, device: DeviceProfile) -> None:
    """Nor is pinning whole layers, the only other choice."""
    found = of_share(model, device, 0.7)
    assert found.token_s < 0.95 * of_share(model, device, 0.7, preloads=False).token_s
    for times in (0.5, 2):
        preload = round(times * found.preload_buffer_bytes) // 4096 * 4096
        held = found.pinned_bytes + found.preload_buffer_bytes - preload
        other = found.model_copy(update={"preload_buffer_bytes": preload, "pinned_bytes": held})
        assert token_seconds(setting_of(model, device, other), events(2), events(1)) >= 0.999 * found.token_s


def test_nothing_is_preloaded_where_that_cannot_help(model: Model, device: DeviceProfile) -> None:
    assert of_share(model, device, 0.7, naive=True).preload_buffer_bytes == 0
    assert of_share(model, device, 1.01).preload_buffer_bytes == 0, "everything is in DRAM"
    fast = device_of(dram_bytes_per_s=1e12, latency_s=5e-4)
    assert of_share(model, fast, 0.7).preload_buffer_bytes == 0, "each layer would wait for a first byte"
    shape = {"hidden_size": 128, "intermediate_size": UNITS, "num_experts": 4, "num_experts_per_tok": 2}
    experts = model_of(num_hidden_layers=LAYERS, **shape)
    run = dense_run(experts, FORMAT, CONTEXT, 1 << 40, device, room_bytes=8_000_000)
    assert run is not None
    assert run.preload_buffer_bytes == 0, "a router's choice is not known before its layer"


def test_layer_groups_preload_nothing(model: Model, device: DeviceProfile) -> None:
    sparsity = sparsity_of("dense", {"neuron": (1.0,) * LAYERS}).model_copy(update={"format": FORMAT})
    assert buffers_of(model, sparsity, 1_500_000, device).preload > 0
    grouped = sparsity.model_copy(update={"layers_per_group": 4})
    assert buffers_of(model, grouped, 1_500_000, device).preload == 0


def test_a_build_pins_as_many_units_in_each_layer_and_preloads(
    tmp_path: Path, model: Model, device: DeviceProfile
) -> None:
    """The smallest budget's units are pinned by `place`, those of a larger one by `plan`; both say what they take."""
    curves = curves_of(model, tmp_path, {}, num_tokens=2)
    activations = activations_from(curves, model.spec, tmp_path / "counted")
    config = AllocateConfig(
        method="dense", cache="static", format=FORMAT, context_length=CONTEXT, draft="off", dram_budget="60%,80%"
    )
    sparsity = allocate(config, model, activations, device, workspace(tmp_path / "w"), curves=curves)
    placement = place(PlaceConfig(), model, activations, sparsity, device, workspace(tmp_path / "p"))
    ranks = load_arrays(placement.arrays)
    found = laid(model, sparsity, placement, device, "static", order=(tiny_order(tmp_path, model, sparsity),))
    manifest = manifest_of(model, sparsity, placement, device, found)
    assert len(found.plans) == 2
    for choice in found.made.choices:
        assert any("bytes of the next layer's are preloaded" in reason for reason in choice.reasons)
    for plan, decision in zip(found.plans, sparsity.decisions, strict=True):
        room = decision.budget.buffer_bytes + decision.budget.cache_bytes
        expected = dense_run(model, FORMAT, CONTEXT, plan.dram_budget_bytes, device, room_bytes=room)
        assert expected is not None
        assert expected.preload_buffer_bytes > 0
        assert plan.preload_buffer_bytes == expected.preload_buffer_bytes
        assert plan.read_buffer_bytes == expected.read_buffer_bytes
        pinned = [part.num_pinned for part in plan.parts]
        assert max(pinned) - min(pinned) <= 1
        for layer in range(LAYERS):
            first = ranks[f"rank.{layer}.neuron"][: pinned[layer]]
            assert (first == np.arange(pinned[layer])).all(), "the units on flash are one run"
        assert used_bytes(manifest, plan) <= plan.dram_budget_bytes
        setting = Setting(model, FORMAT, device, found.sections, plan)
        assert token_seconds(setting, events(2), events(1)) == pytest.approx(expected.token_s, rel=0.02)


@pytest.fixture(scope="module", params=[100, 640])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A dense artifact of eleven layers of neurons, or of blocks of 32; a third of the units are pinned in each."""
    spec = small_spec(num_hidden_layers=LAYERS, hidden_act="silu", intermediate_size=request.param)
    family = dense_family(spec)
    assert family == ("neuron" if request.param == 100 else "block")
    recipe = Recipe(
        spec=spec,
        method="dense",
        density=1.0,
        format=FORMAT,
        cache="static",
        pinned_share=0.3,
        slots_share=0.0,
        rank={(layer, family): np.arange(num_units(family, spec), dtype=np.int32) for layer in range(LAYERS)},
    )
    weights = random_weights(spec, np.random.default_rng(0))
    return build_artifact(tmp_path_factory.mktemp("dense") / "artifact", recipe, weights)


def preloading_plan(built: Built, pages: int) -> Plan:
    """The artifact's plan, with a preload buffer beside its budget."""
    (plan,) = built.manifest.plans
    ahead = pages * built.manifest.flash.page_bytes
    changes = {"preload_buffer_bytes": ahead, "dram_budget_bytes": plan.dram_budget_bytes + ahead}
    return plan.model_copy(update=changes)


@pytest.mark.parametrize("pages", [3, 5, 100])
def test_a_run_has_the_tokens_and_the_seconds_that_the_law_says(built: Built, pages: int) -> None:
    """Whether the preload buffer holds a part of what a layer misses, or all of it."""
    plan = preloading_plan(built, pages)
    with Session(built.path) as session:
        expected = session.generate([5, 17, 3], 8, ignore_eos=True).token_ids
    with Session(built.path, plan=plan, modelled=True) as session:
        first, *runs = [session.generate([5, 17, 3], count, ignore_eos=True) for count in (8, 3, 8)]
    assert first.token_ids == expected
    few, metrics = (run.metrics for run in runs)
    assert metrics.preload_reads > 0
    assert metrics.preload_precision > 0.98, "all but what the last token read for a next one"
    (one_s,) = pass_seconds(open_artifact(built.path), plan, 1)
    # nothing was preloaded for the first layer of a context
    assert metrics.modelled_s - few.modelled_s == pytest.approx(5 * one_s, rel=1e-6)


@pytest.mark.parametrize("count", [1, 4])
def test_a_pass_preloads_as_a_token_does(built: Built, count: int) -> None:
    """Its products take longer, so that more is read meanwhile."""
    artifact, plan = open_artifact(built.path), preloading_plan(built, 100)
    slower = on_device(artifact, in_pass(artifact.manifest.device, count))
    (entry,) = artifact.manifest.families
    units = num_units(entry.family, artifact.manifest.model)
    each = [events(number, units=units, family=entry.family) for number in (2, 1)]
    run = simulate(slower, plan, *each)
    expected = token_seconds_of(slower.manifest, plan, run)
    assert pass_seconds(artifact, plan, 4)[count - 1] == pytest.approx(expected, rel=1e-9)
    without = pass_seconds(artifact, plan.model_copy(update={"preload_buffer_bytes": 0}), 4)[count - 1]
    assert expected < without
