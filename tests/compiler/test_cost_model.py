"""cost_model: amounts of memory as text, bytes that equal what is stored, and the papers' equations."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldpress.compiler import cost_model
from coldpress.compiler.cost_model import budget_bytes, parse_share, read_buffer_bytes, stored_format
from coldpress.runtime.kernels.intervals import Times, _times
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from coldpress.runtime.store.planner import Strided, plan_reads
from coldpress.schemas.device import Flash, flash_seconds
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.law import Law
from tests.support.statistics import device_of, model_of, shapes_of

FORMATS = names("coldpress.runtime.quantization")


def test_budgets_in_percent_are_shares_of_the_dense_footprint() -> None:
    assert parse_share("50%") == 0.5
    assert parse_share("3GB") is None
    assert budget_bytes("12.5%", 1001, 30) == 155
    assert budget_bytes("2kB", 1001, 30) == 2000
    for text in ("0%", "101%"):
        with pytest.raises(ColdpressError, match="more than 0% and at most 100%"):
            budget_bytes(text, 1000, 0)


def test_storage_rule() -> None:
    assert stored_format("layers.11.q_proj.weight", "int4_group32") == "int4_group32"
    assert stored_format("layers.0.down_proj.weight", "fp16") == "fp16"
    assert stored_format("embed_tokens.weight", "int4_group32") == "int8_group32"
    assert stored_format("lm_head.weight", "fp16") == "fp16"
    for role in ("norm.weight", "layers.1.q_proj.bias", "layers.1.k_norm.weight", "embed_positions.weight"):
        assert stored_format(role, "int4_group32") is None


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("shape", [(3, 64), (5, 172), (1, 1), (2, 33)])
def test_tensor_bytes_are_those_of_the_codes(format_name: str, shape: tuple[int, int]) -> None:
    codes = load("coldpress.runtime.quantization", Format, format_name).encode(np.ones(shape, np.float32))
    assert cost_model.tensor_bytes("layers.0.up_proj.weight", shape, format_name) == codes.nbytes


@pytest.mark.parametrize("families", [("neuron",), ("up_down",), ("mlp_in", "mlp_mid"), ("mlp_mid",)])
@pytest.mark.parametrize("gated", [True, False])
def test_every_weight_is_counted_once(families: tuple, gated: bool) -> None:
    """In fp16 with whole groups, resident and flash bytes are 2 per weight and 4 per norm, wherever the line is."""
    model = model_of(gated_mlp=gated, tie_word_embeddings=True)
    shapes = shapes_of(model.spec)
    vectors = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 1) + model.spec.rotary_dim // 2
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    resident = cost_model.resident_bytes(model, families, "fp16")
    assert resident + cost_model.flash_bytes(families, model.spec, "fp16") == 2 * matrices + 4 * vectors
    assert cost_model.weight_bytes(model, "fp16") == 2 * matrices + 4 * vectors


def test_a_tied_head_is_stored_once() -> None:
    tied, untied = model_of(tie_word_embeddings=True), model_of(tie_word_embeddings=False)
    extra = cost_model.weight_bytes(untied, "int8_group32") - cost_model.weight_bytes(tied, "int8_group32")
    assert extra == 384 * 2 * 34  # 64 values are two groups of 32 bytes and a scale
    listed = tied.model_copy(update={"tensors": untied.tensors})
    assert cost_model.weight_bytes(listed, "int8_group32") == cost_model.weight_bytes(tied, "int8_group32")


def test_footprint_is_weights_and_kv_cache() -> None:
    model = model_of(num_hidden_layers=3)
    kv_cache = 2 * 2 * 3 * 2 * 16 * 100  # keys and values, fp16, layers, heads, head_dim, tokens
    assert cost_model.dense_footprint_bytes(model, "fp16", 100) == cost_model.weight_bytes(model, "fp16") + kv_cache


def test_the_read_buffer_holds_a_unit_and_stays_within_its_share() -> None:
    spec = model_of(hidden_size=1024, intermediate_size=4096).spec
    assert read_buffer_bytes(spec, "fp16", ["neuron"], 1 << 30, 4096) == cost_model.PEAK_READ_BYTES
    assert read_buffer_bytes(spec, "fp16", ["neuron"], 1 << 20, 4096) == 1 << 17
    # a unit of 6,144 bytes touches three pages at most
    assert read_buffer_bytes(spec, "fp16", ["neuron"], -5, 4096) == 3 * 4096


def test_the_least_sparsity_that_fits() -> None:
    """ActiveFlow 4.1: sp = 1 - M_max / S_m, and nothing is left out of a model that fits."""
    assert cost_model.llm_sparsity(3, 4) == 0.25
    assert cost_model.llm_sparsity(5, 4) == 0.0


@given(free=st.integers(0, 1 << 22))
def test_the_read_buffer_exceeds_what_is_free_only_by_its_least_size(free: int) -> None:
    spec = model_of().spec
    least = read_buffer_bytes(spec, "int8_group32", ["mlp_in", "mlp_mid"], 0, 4096)
    found = read_buffer_bytes(spec, "int8_group32", ["mlp_in", "mlp_mid"], free, 4096)
    assert least <= found <= max(least, free)


def test_what_a_read_costs_in_units() -> None:
    """100,000 reads of 4 KiB a second, at most 4 GB/s: a read takes as long as 40,000 bytes, and so does the first
    byte."""
    curve = ((4096, 4096e5), (1 << 20, 4e9))
    figure = {"source": "assumption: a test"}
    flash = Flash.model_validate(
        {
            "page_bytes": {"value": 4096, **figure},
            "queue_depth": {"value": 32, **figure},
            "latency_s": {"value": 1e-5, **figure},
            "read_curve": {
                "value": tuple({"read_bytes": size, "bytes_per_s": speed} for size, speed in curve),
                **figure,
            },
        }
    )
    assert cost_model.read_units(flash, 1000, 1).tolist() == pytest.approx([40, (4096 - 8) / 1000, 40, 1], rel=1e-3)
    assert cost_model.read_units(flash, 4096, 1).tolist() == pytest.approx(
        [40_000 / 4096, 0, 40_000 / 4096, 1], rel=1e-3
    )
    assert cost_model.read_units(flash, 1000, 4).tolist() == pytest.approx(
        [10, (4096 - 32 - 3000) / 4000, 10, 1], rel=1e-3
    )


@settings(deadline=None)
@given(
    overlap=st.sampled_from([0.0, 0.25, 0.6, 0.95, 1.0]),
    latency_s=st.floats(0, 1e-3),
    depth=st.integers(1, 64),
    num_reads=st.integers(1, 500),
    units_per_read=st.integers(1, 40),
)
def test_the_intervals_times_are_those_of_the_law(
    overlap: float, latency_s: float, depth: int, num_reads: int, units_per_read: int
) -> None:
    """But for the waves, which the form has no whole number of: within one latency, and a byte for each read."""
    law = Law(reads_per_s=5e4, bytes_per_s=2e9, overlap=overlap)
    flash = device_of(latency_s=0.0, queue_depth=depth).flash.model_copy(update={"law": law})
    flash = flash.model_copy(update={"latency_s": flash.latency_s.model_copy(update={"value": latency_s})})
    chosen = np.zeros((1, num_reads * (units_per_read + 1)), bool)
    chosen.reshape(num_reads, -1)[:, :units_per_read] = True
    own, edge, least, kept = cost_model.read_units(flash, 4096, 1)
    _, total = _times(chosen, Times(own, edge, least, kept))
    expected = float(flash_seconds(flash, num_reads, num_reads * units_per_read * 4096))
    assert float(total[0]) * 4096 / 2e9 == pytest.approx(expected, abs=latency_s + num_reads / 2e9, rel=1e-9)


def test_edges_of_reads_are_those_that_the_planner_makes() -> None:
    """On average over places, of reads of three units each."""
    units, page = Strided(65536, 1000, 1000), 4096
    plans = [plan_reads(units, np.arange(place, place + 3), page, 0, 1 << 20) for place in range(512)]
    edge = np.mean([plan.extents.num_bytes - 3000 for plan in plans])
    assert edge == pytest.approx(page - math.gcd(1000, page))
