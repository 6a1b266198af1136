"""compiler/dense_run.py: the dense run that every choice is held against costs what the simulator says it does."""

import numpy as np
import pytest

from coldpress.compiler.cost_model import flash_bytes, kv_cache_bytes, resident_bytes, unit_bytes
from coldpress.compiler.dense_run import _buffer_sizes, dense_run
from coldpress.compiler.io import Workspace
from coldpress.compiler.quote.sources import activations_of
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.dram_shares import divided
from coldpress.compiler.search.replay import Replays
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.sections import dense_bookkeeping_bytes
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import END, FETCH, NO_IDS, Event
from coldpress.schemas.families import dense_family, num_units
from coldpress.schemas.layout import placed_parts
from tests.support.curves import curves_of
from tests.support.records import Build
from tests.support.statistics import device_of, model_of

CONTEXT = 64


def least_budget(model, device):
    """Bytes below which no dense run fits: what is resident, the KV cache, bookkeeping and the least read buffer."""
    family = dense_family(model.spec)
    unit = unit_bytes(family, model.spec, "int8_group32")
    fixed = resident_bytes(model, (family,), "int8_group32") + kv_cache_bytes(model.spec, CONTEXT)
    page_bytes = device.flash.page_bytes.value
    bookkeeping = dense_bookkeeping_bytes(model.spec, "int8_group32", page_bytes)
    return fixed + bookkeeping + span_bytes(unit, page_bytes)


def units_bytes(model):
    """Bytes of all units on flash."""
    family = dense_family(model.spec)
    per_layer = num_units(family, model.spec) * unit_bytes(family, model.spec, "int8_group32")
    return model.spec.num_hidden_layers * per_layer


def test_it_costs_what_the_simulator_says(tmp_path):
    """With nothing pinned and the same read buffer, an artifact whose every unit is fetched takes the same reads."""
    build = Build(tmp_path, method="dense", num_pinned=0)
    build.package()
    artifact = open_artifact(build.artifact)
    plan = artifact.manifest.plans[0]
    found = dense_run(
        build.model, "int8_group32", plan.context_length, least_budget(build.model, build.device), build.device
    )
    assert found is not None
    assert found.pinned_bytes == 0
    nothing = [part.model_copy(update={"num_pinned": 0, "cache_slots": 0}) for part in plan.parts]
    changes = {"cache": "static", "parts": tuple(nothing), "read_buffer_bytes": found.read_buffer_bytes}
    parts = placed_parts(plan, artifact.manifest.flash.sections)
    trace = [
        Event(FETCH, 1, part.layer, part.family, np.arange(section.num_units, dtype=np.int32))
        for part, section in parts
    ]
    trace.append(Event(END, 1, 0, "neuron", NO_IDS))
    simulated = simulate(artifact, plan.model_copy(update=changes), trace)
    assert simulated.reads == found.reads_per_token
    assert simulated.read_bytes == pytest.approx(found.flash_bytes_per_token, abs=4096)  # a row lies in a page or two
    assert simulated.modelled_flash_s == pytest.approx(found.flash_s)
    assert simulated.modelled_dram_s == pytest.approx(found.dram_s)
    assert simulated.modelled_s == pytest.approx(found.token_s)
    assert simulated.modelled_tokens_per_s == pytest.approx(found.tokens_per_s)


def test_more_dram_is_never_slower_and_enough_reads_nothing():
    model, device = model_of(num_hidden_layers=4), device_of()
    least = least_budget(model, device)
    total = units_bytes(model)
    runs = [dense_run(model, "int8_group32", CONTEXT, least + total * tenth // 10, device) for tenth in range(11)]
    speeds = [run.tokens_per_s for run in runs if run is not None]
    assert len(speeds) == 11
    assert speeds == sorted(speeds)
    assert runs[-1] is not None
    assert (runs[-1].reads_per_token, runs[-1].flash_s, runs[-1].pinned_bytes) == (0, 0.0, total)
    assert dense_run(model, "int8_group32", CONTEXT, least - 1, device) is None
    buffer = span_bytes(unit_bytes(dense_family(model.spec), model.spec, "int8_group32"), device.flash.page_bytes.value)
    enough, short = (
        dense_run(model, "int8_group32", CONTEXT, least - buffer + total - less, device) for less in (0, 1)
    )
    assert enough is not None
    assert enough.flash_bytes_per_token == 0  # where nothing is read, no buffer counts
    assert short is not None
    assert short.flash_bytes_per_token > 0


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (30_000, [8192, 12288, 20480, 28672]),
        (32_768, [8192, 12288, 20480, 32768]),
        (8192, [8192]),
        (8191, []),
    ],
)
def test_the_largest_buffer_is_tried(most, sizes):
    """A room just below a further size may hide a latency that the size before it shows twice."""
    assert list(_buffer_sizes(8192, most, 4096)) == sizes


def test_a_candidate_has_the_room_that_the_build_leaves(tmp_path):
    """A build whose cache is open keeps more beside its units than one with the default cache, for which all fits."""
    model, device = model_of(num_hidden_layers=11), device_of()
    total = units_bytes(model)
    buffer = span_bytes(unit_bytes(dense_family(model.spec), model.spec, "int8_group32"), device.flash.page_bytes.value)
    budget = least_budget(model, device) - buffer + total
    plain = dense_run(model, "int8_group32", CONTEXT, budget, device)
    assert plain is not None
    assert plain.reads_per_token == 0
    curves = curves_of(model, tmp_path, {}, num_tokens=2)
    activations = activations_of(curves, model.spec, tmp_path / "counted")
    inputs = AllocationInputs(model, activations, device, Workspace(tmp_path / "work", "test"), None, 1, curves)
    asked = {"format": "int8_group32", "dram_budget": budget, "context_length": CONTEXT}
    division = divided(AllocateConfig(method="dense", cache="auto", **asked), inputs)
    held = division.budget.cache_bytes + division.budget.buffer_bytes
    assert held < total
    (token,) = Replays(inputs).tokens(division)
    assert token.read_bytes >= total - held


def test_attention_on_flash_is_read_by_a_dense_candidate(tmp_path):
    """The fastest run is known for an MLP alone; with attention, every token reads what is not held."""
    model, device = model_of(num_hidden_layers=11), device_of()
    curves = curves_of(model, tmp_path, {}, num_tokens=2)
    activations = activations_of(curves, model.spec, tmp_path / "counted")
    inputs = AllocationInputs(model, activations, device, Workspace(tmp_path / "work", "test"), None, 1, curves)
    options = {"families": "neuron+attn_in+attn_out"}
    asked = {"format": "int8_group32", "dram_budget": "90%", "context_length": CONTEXT, "options": options}
    division = divided(AllocateConfig(method="dense", **asked), inputs)
    assert len(division.families) == 3
    held = division.budget.cache_bytes + division.budget.buffer_bytes
    total = flash_bytes(division.families, model.spec, division.format)
    assert held < total
    for token in Replays(inputs).tokens(division):
        assert token.read_bytes >= total - held


def test_what_an_int8_kv_cache_saves_is_for_units():
    model, device = model_of(num_hidden_layers=4, head_dim=32, rotary_dim=32), device_of()
    budget = least_budget(model, device) + units_bytes(model) // 2
    pinned = [dense_run(model, "int8_group32", CONTEXT, budget, device, kept).pinned_bytes for kept in ("fp16", "int8")]
    saved = 2 * 4 * model.spec.num_key_value_heads * CONTEXT * 30
    unit = unit_bytes(dense_family(model.spec), model.spec, "int8_group32")
    assert pinned[1] - pinned[0] == pytest.approx(saved, abs=unit)


def test_a_layer_in_dram_waits_for_nothing():
    """Half of the DRAM for units, layer by layer, less the read buffer: three layers wait, not four."""
    model, device = model_of(num_hidden_layers=4), device_of()
    total = units_bytes(model)
    found = dense_run(model, "int8_group32", CONTEXT, least_budget(model, device) + total // 2, device)
    assert found is not None
    assert found.flash_s == pytest.approx(3 * device.flash.latency_s.value, rel=0.01)
