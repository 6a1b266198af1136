"""Whether a build reads ahead: the law by hand, what the guess is worth, and the plan that comes of it."""

import pytest

from compiler import preloading
from runtime.artifact.checks import check_manifest
from runtime.budget import used_bytes
from schemas.activations import TopPrecision
from schemas.base import ArrayFile
from schemas.errors import ColdpressError
from schemas.order import FamilyOrder, GapCost, Order
from tests.compiler.test_layout import lay_out, records
from tests.support.records import manifest_of, tiny_activations

LAYERS = 11
FLASH_S = 2e-5
"""Of a token's misses of `mlp_in` in one layer; those of `mlp_mid` cost nothing here."""


@pytest.fixture
def given(tmp_path):
    """(what `layout` takes, activations whose guess has a precision, orders whose reads cost FLASH_S)."""
    model, sparsity, placement, device = records(tmp_path, share=0.5, num_hidden_layers=LAYERS)
    measured = tiny_activations(tmp_path, model, sparsity)

    def activations(precision):
        points = tuple(TopPrecision(density=at, precision=precision) for at in (0.1, 0.3, 0.5, 0.8))
        layers = tuple(
            layer.model_copy(update={"top_precision": points if layer.layer else ()}) for layer in measured.layers
        )
        return measured.model_copy(update={"layers": layers})

    arrays = ArrayFile(array_file=str(tmp_path / "order.safetensors"), sha256="0" * 64)
    values = {"family": "mlp_in", "heuristic": "ripple", "arrays": arrays, "adjacent_coactivation": 0.5}
    entries = tuple(
        FamilyOrder(layer=layer, gap_costs=(GapCost(gap_bytes=0, flash_s_per_token=FLASH_S),), **values)
        for layer in range(LAYERS)
    )
    return (model, sparsity, placement, device), activations, (Order(entries=entries),)


def run_of(given, precision, **changes):
    (model, sparsity, _, device), activations, order = given
    sections = lay_out(*given[0]).sections
    return preloading.Run(model, sparsity, sections, order, 0, changes.get("device", device), activations(precision))


def test_seconds_of_a_token_by_hand(given):
    """At 3 GB/s: q, k, v and o in int8, half of the keys and values, then the inputs' columns, then the others."""
    (_, sparsity, _, device), *_ = given
    device = device.model_copy(update={"dram_bytes_per_s": device.dram_bytes_per_s.model_copy(update={"value": 3e9})})
    run = run_of(given, 0.75, device=device)
    spec = run.model.spec
    heads, kept = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    row = 34 * -(-spec.hidden_size // 32)  # 32 values and a scale
    attention = (heads + 2 * kept) * row + spec.hidden_size * 34 * -(-heads // 32)
    between_s = (attention + 2 * kept * sparsity.context_length) / 3e9
    inputs_s = int(sparsity.density("mlp_in", 1) * 64 * 204) / 3e9
    inner_s = int(sparsity.density("mlp_mid", 1) * 72 * 68) / 3e9
    plain_s = between_s + max(FLASH_S, inputs_s) + inner_s
    assert preloading._token_s(run, False) == pytest.approx(LAYERS * plain_s)
    left_s = max(0.0, FLASH_S - between_s)
    ahead_s = between_s + max(left_s + 0.25 * FLASH_S, inputs_s) + inner_s
    assert preloading._token_s(run, True) == pytest.approx(plain_s + (LAYERS - 1) * ahead_s)
    assert 0 < left_s < FLASH_S  # a part of the reads is hidden


def test_a_guess_is_worth_what_was_measured_and_less_with_every_layer(given):
    """What is known better than by chance is a power of the steps; nothing is known where nothing was measured."""
    run = run_of(given, 0.8)
    density = run.sparsity.density("mlp_in", 1)
    section, by_chance = run.sections[4], density
    known = 0.8
    for steps in (1, 2, 3):
        skill = ((known - by_chance) / (1 - by_chance)) ** steps
        assert preloading.precision(run, section, steps) == pytest.approx(by_chance + (1 - by_chance) * skill)
    inner = next(section for section in run.sections if section.family == "mlp_mid")
    assert preloading.precision(run, inner, 1) == 0
    unknown = preloading.Run(*(getattr(run, name) for name in run.__dataclass_fields__ if name != "activations"), None)
    assert preloading.precision(unknown, section, 1) == 0
    assert not preloading.pays(unknown)


@pytest.mark.parametrize(("precision", "switched_on"), [(0.99, True), (0.5, False)])
def test_auto_reads_ahead_where_that_takes_less_time(given, precision, switched_on):
    (model, sparsity, placement, device), activations, order = given
    device = device.model_copy(update={"dram_bytes_per_s": device.dram_bytes_per_s.model_copy(update={"value": 3e9})})
    wanted = {"order": order, "activations": activations(precision)}
    layout = lay_out(model, sparsity, placement, device, preload="auto", **wanted)
    (plan,) = layout.plans
    assert (plan.preload_buffer_bytes > 0) == switched_on
    assert lay_out(model, sparsity, placement, device, **wanted).plans[0].preload_buffer_bytes == 0
    manifest = manifest_of(model, sparsity, placement, device, layout)
    check_manifest(manifest)
    assert used_bytes(manifest, plan) <= plan.dram_budget_bytes


def test_on_takes_its_buffer_from_the_caches(given):
    (model, sparsity, placement, device), _, _ = given
    without, ahead = (lay_out(model, sparsity, placement, device, preload=word).plans[0] for word in ("off", "on"))
    assert (
        0
        < ahead.preload_buffer_bytes
        <= 0.25 * sum(part.cache_slots * {"mlp_in": 204, "mlp_mid": 68}[part.family] for part in without.parts) + 4096
    )
    assert sum(part.cache_slots for part in ahead.parts) < sum(part.cache_slots for part in without.parts)
    assert [part.num_pinned for part in ahead.parts] == [part.num_pinned for part in without.parts]


def test_on_is_refused_where_nothing_can_be_read_ahead(tmp_path):
    with pytest.raises(ColdpressError, match=r"preload=on was asked for, and up_down in 2 sections.*expected neuron"):
        lay_out(*records(tmp_path, "relu"), preload="on")
