"""The first token of a quote: every byte that is loaded and read, and the products of the prompt's tokens, by hand."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.cost_model import kv_cache_bytes
from coldpress.compiler.quote.first_token import Products, expected_experts, first_token, products_of_chunk
from coldpress.compiler.seconds import Setting
from coldpress.compiler.sections import make_sections
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.store.planner import MAX_READ_BYTES
from coldpress.schemas.device import DeviceProfile, flash_seconds
from coldpress.schemas.families import WHOLE_MLP
from coldpress.schemas.layout import PartPlan
from tests.support.devices import with_compute
from tests.support.settings import plan_of
from tests.support.statistics import device_of, model_of

LAYERS, HIDDEN, INTERMEDIATE, VOCAB = 11, 64, 1600, 384
UNIT_BYTES = 3 * (64 + 2 * 2)
"""Gate, up and down in int8 with a scale of two bytes for each 32 values."""
RESIDENT_BYTES = 600_000
RATE = 1e6
"""Bytes a second of products in int8: so slow that nothing else counts."""
COSTS = {"request_s": 3e-4, "reading_s": 5e-4, "layer_s": 7e-4, "token_s": 2e-3, "further_share": 1.0}


def setting(
    device: DeviceProfile,
    num_pinned: int = 0,
    experts: tuple[int, int] | None = None,
    tied: bool = True,
    **changes: Any,
) -> Setting:
    """All layers of a small model in int8, so many units of each pinned; `experts`: how many, and of them a token's."""
    of_experts = dict(zip(("num_experts", "num_experts_per_tok"), experts or (), strict=False))
    model = model_of(LAYERS, HIDDEN, INTERMEDIATE // (experts or [1])[0], tie_word_embeddings=tied, **of_experts)
    part = {"family": WHOLE_MLP, "density": 1.0, "num_pinned": num_pinned, "cache_slots": 0}
    parts = tuple(PartPlan(layer=layer, **part) for layer in range(LAYERS))
    values = {"resident_bytes": RESIDENT_BYTES, "predictor_bytes": 0, "read_buffer_bytes": 1 << 20} | changes
    bookkeeping = 700_000  # at most
    budget = sum(values.values()) + LAYERS * num_pinned * UNIT_BYTES + bookkeeping
    plan = plan_of(parts, device, **({"dram_budget_bytes": budget} | values))
    sections = make_sections(model.spec, (WHOLE_MLP,), "int8_group32")
    return Setting(model, "int8_group32", device, sections, plan)


def computing_device() -> DeviceProfile:
    return with_compute(device_of(dram_bytes_per_s=3e10), [("int8_group32", 1.0, RATE)], **COSTS)


def in_int8(rows: int, columns: int) -> int:
    return rows * (columns + columns // 32 * 2)


def products_s(num_products: float) -> tuple[float, float]:
    """Seconds of a layer's attention and MLP in int8, and of the head, which only the last token has."""
    attention = 2 * in_int8(HIDDEN, HIDDEN) + 2 * in_int8(HIDDEN // 2, HIDDEN)
    layer = attention + INTERMEDIATE * UNIT_BYTES
    return num_products * LAYERS * layer / RATE, in_int8(VOCAB, HIDDEN) / RATE


def besides_s(num_tokens: int) -> float:
    """Seconds of a token's norms in float32, and half of the prompt's keys and values, from DRAM."""
    kv_cache = kv_cache_bytes(model_of(LAYERS, HIDDEN, INTERMEDIATE).spec, num_tokens)
    frequencies = HIDDEN // 4 // 2
    return (4 * HIDDEN * (2 * LAYERS + 1) + 4 * frequencies + kv_cache // 2) / 3e10


@pytest.mark.parametrize(
    ("further_share", "tokens", "expected"),
    [
        (1.0, 1, (1, 1, 1)),
        (1.0, FEW_TOKENS, (32, 32, 32)),
        (1.0, FEW_TOKENS + 1, (32, 32, 33)),
        (1.0, 128, (32, 64, 128)),
        (1.0, 256, (32, 128, 256)),
        (0.5, FEW_TOKENS, (16.5, 16.5, 16.5)),
        (0.5, 256, (16.5, 128, 128.5)),
    ],
)
def test_few_tokens_share_the_passing_of_weights_and_many_are_a_matrix(
    further_share: float, tokens: int, expected: Products
) -> None:
    device = with_compute(device_of(), [("int8_group32", 1.0, RATE)], further_share=further_share)
    assert products_of_chunk(device, tokens) == expected


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_with_everything_in_dram_it_is_loading_and_products(tokens: int) -> None:
    """Each token is multiplied by every layer, the last one by the head, and a chunk has one call for each part."""
    device = computing_device()
    found = first_token(setting(device, INTERMEDIATE), tokens)
    units = LAYERS * INTERMEDIATE * UNIT_BYTES
    assert found.load_s >= (units + RESIDENT_BYTES) / device.flash.bytes_per_s
    layers_s, head_s = products_s(tokens)
    calls_s = LAYERS * (COSTS["layer_s"] + COSTS["request_s"]) + COSTS["token_s"]
    expected = found.load_s + layers_s + head_s + calls_s + tokens * besides_s(tokens)
    assert found.expected_s == pytest.approx(expected, rel=1e-6)
    assert found.least_s == found.expected_s == found.most_s


def test_a_layer_that_arrives_in_one_portion_is_multiplied_behind_its_read() -> None:
    """A pass costs what a request that reads costs, beside its reads; without time for products these are left."""
    slow = first_token(setting(computing_device()), 32)
    held = first_token(setting(computing_device(), INTERMEDIATE), 32)
    layer_bytes = -(-INTERMEDIATE * UNIT_BYTES // 4096) * 4096
    assert layer_bytes < MAX_READ_BYTES
    least_s, most_s = (
        LAYERS * float(flash_seconds(device_of().flash, 1, size)) for size in (layer_bytes, layer_bytes + 4096)
    )
    beside_s = (held.expected_s - held.load_s) + LAYERS * COSTS["reading_s"]
    assert least_s <= slow.expected_s - slow.load_s - beside_s <= most_s
    free = first_token(setting(with_compute(device_of(dram_bytes_per_s=1e14), [("int8_group32", 1.0, 1e14)])), 32)
    assert least_s <= free.expected_s - free.load_s <= 1.01 * most_s


def test_loading_counts_resident_weights_predictors_and_pinned_units() -> None:
    device = device_of()
    bare, pinned = (first_token(setting(device, count), 1).load_s for count in (0, INTERMEDIATE // 2))
    more = first_token(setting(device, resident_bytes=2_600_000), 1).load_s
    predicted = first_token(setting(device, predictor_bytes=2_000_000), 1).load_s
    assert bare >= RESIDENT_BYTES / device.flash.bytes_per_s
    assert pinned - bare >= LAYERS * INTERMEDIATE // 2 * UNIT_BYTES / device.flash.bytes_per_s
    assert more - bare == pytest.approx(1e-3, rel=0.3)
    assert predicted == more


def test_a_prompt_of_two_chunks_reads_everything_twice() -> None:
    free = setting(with_compute(device_of(dram_bytes_per_s=1e14), [("int8_group32", 1.0, 1e14)]))
    once, twice = (first_token(free, tokens) for tokens in (256, 512))
    assert twice.expected_s - twice.load_s == pytest.approx(2 * (once.expected_s - once.load_s), rel=1e-3)
    assert twice.load_s == once.load_s


def test_longer_prompts_take_longer_within_their_bounds() -> None:
    found = [first_token(setting(computing_device()), tokens) for tokens in (1, 16, 32, 33, 64, 128, 300)]
    for one in found:
        assert one.least_s <= one.expected_s <= one.most_s
    assert [one.expected_s for one in found] == sorted(one.expected_s for one in found)
    assert found[5].most_s - found[5].load_s > 1.5 * (found[5].expected_s - found[5].load_s)


def test_a_plan_with_room_for_all_units_loads_them() -> None:
    """As the runtime does; the bytes of the read buffer count, because nothing is read afterwards."""
    device = device_of()
    units = LAYERS * INTERMEDIATE * UNIT_BYTES
    roomy = setting(device)
    enough = {"dram_budget_bytes": RESIDENT_BYTES + units + 700_000}
    roomy = replace(roomy, plan=roomy.plan.model_copy(update=enough))
    found, held = (first_token(one, 1) for one in (roomy, setting(device, INTERMEDIATE)))
    assert found.load_s >= (RESIDENT_BYTES + units) / device.flash.bytes_per_s
    assert found.expected_s - found.load_s == pytest.approx(held.expected_s - held.load_s)


# Mixtures


@pytest.mark.parametrize(("count", "chosen", "tokens"), [(4, 2, 1), (4, 2, 3), (5, 1, 4), (3, 3, 2)])
def test_the_experts_to_expect_are_the_mean_over_all_choices(count: int, chosen: int, tokens: int) -> None:
    subsets = [picked for picked in product((0, 1), repeat=count) if sum(picked) == chosen]
    unions = [np.any(each, axis=0).sum() for each in product(subsets, repeat=tokens)]
    shares = np.full((2, count), chosen / count)
    assert expected_experts(shares, tokens) == pytest.approx(np.mean(unions))


def test_layers_that_prefer_some_experts_use_fewer() -> None:
    shares = np.array([[1, 1, 0, 0], [0.5, 0.5, 0.5, 0.5]])
    assert expected_experts(shares, 1) == 2
    assert expected_experts(shares, 2) == pytest.approx((2 + 3) / 2)
    assert expected_experts(shares, 256) == pytest.approx(3)


@pytest.mark.parametrize("tokens", [1, 4, 32])
def test_each_expert_multiplies_its_own_tokens(tokens: int) -> None:
    """With everything in DRAM; further tokens of an expert cost half of its first."""
    device = with_compute(device_of(), [("int8_group32", 1.0, RATE)], further_share=0.5)
    of_expert = INTERMEDIATE // 8 * UNIT_BYTES
    used = 8 * (1 - 0.75**tokens)
    units_s = LAYERS * used * of_expert * (1 + 0.5 * (2 * tokens / used - 1)) / RATE
    found = first_token(setting(device, INTERMEDIATE, (8, 2)), tokens)
    layers_s, head_s = products_s(1)
    attention_s = (layers_s - LAYERS * INTERMEDIATE * UNIT_BYTES / RATE) * (1 + 0.5 * (tokens - 1))
    assert found.expected_s - found.load_s == pytest.approx(units_s + attention_s + head_s, rel=1e-4)


@pytest.mark.parametrize(("tokens", "read"), [(1, 2), (4, 5), (256, 8)])
def test_a_prompt_reads_as_many_experts_as_it_is_expected_to_use(tokens: int, read: int) -> None:
    """Where computing takes no time, a pass takes as long as the reads of these experts."""
    device = with_compute(device_of(dram_bytes_per_s=1e14), [("int8_group32", 1.0, 1e14)])
    found = first_token(setting(device, experts=(8, 2), collapse_gap_bytes=0), tokens)
    num_bytes = LAYERS * read * INTERMEDIATE // 8 * UNIT_BYTES
    least_s = num_bytes / device.flash.bytes_per_s
    most_s = (num_bytes + LAYERS * read * 2 * 4096) / device.flash.bytes_per_s + LAYERS * read / device.flash.iops
    assert least_s <= found.expected_s - found.load_s <= 1.05 * most_s + LAYERS * device.flash.latency_s.value


def test_a_prompt_reads_the_experts_that_a_trace_shows() -> None:
    device = with_compute(device_of(dram_bytes_per_s=1e14), [("int8_group32", 1.0, 1e14)])
    of = setting(device, experts=(8, 2))
    shares = np.array([[1, 1, 0, 0, 0, 0, 0, 0]] * 3)
    same_two, one_token, all_experts = first_token(of, 256, shares), first_token(of, 1), first_token(of, 256)
    assert same_two.expected_s == pytest.approx(one_token.expected_s, rel=1e-2)
    assert same_two.expected_s < 0.8 * all_experts.expected_s


def test_a_prompt_reads_its_embeddings_together_or_they_are_loaded_with_what_stays() -> None:
    device = device_of()
    tied, untied = (first_token(setting(device, tied=tied), 200) for tied in (True, False))
    row_bytes = HIDDEN + 2 * HIDDEN // 32
    read_s = float(flash_seconds(device.flash, 200, 200 * (row_bytes + 4096 - 4)))
    assert untied.load_s == tied.load_s
    assert untied.expected_s - tied.expected_s == pytest.approx(read_s)
    whole = {"num_pinned": INTERMEDIATE, "dram_budget_bytes": 1 << 29}
    tied, untied = (first_token(setting(device, tied=tied, **whole), 200) for tied in (True, False))
    extra = sum(
        sign * float(flash_seconds(device.flash, -(-size // MAX_READ_BYTES), size))
        for sign, size in ((1, RESIDENT_BYTES + VOCAB * row_bytes), (-1, RESIDENT_BYTES))
    )
    assert untied.load_s - tied.load_s == pytest.approx(extra)
    assert untied.expected_s - tied.expected_s == pytest.approx(extra)
