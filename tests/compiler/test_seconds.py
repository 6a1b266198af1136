"""The one model of seconds: the form for searches and the dense run cost what the store on simulated flash does."""

import ast
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldpress.compiler import seconds
from coldpress.compiler.cost_model import kv_cache_bytes, resident_bytes
from coldpress.compiler.dense_run import dense_run
from coldpress.compiler.seconds import Reading, simulated, token_seconds
from coldpress.compiler.sections import dense_bookkeeping_bytes, make_sections
from coldpress.runtime.cache import CacheFacts, make
from coldpress.runtime.simulate import simulate_choices
from coldpress.runtime.sparsity import Residency
from coldpress.runtime.store.planner import Strided
from coldpress.schemas.compute import Overlap
from coldpress.schemas.device import flash_seconds
from coldpress.schemas.families import dense_family
from coldpress.schemas.layout import PartPlan
from tests.support.caches import RUNNABLE
from tests.support.data import ROOT
from tests.support.devices import with_compute
from tests.support.settings import FAMILY, plan_of, setting_of
from tests.support.statistics import device_of, model_of

NUM_UNITS, NUM_TOKENS = 60, 14


def requests(seed: int, num_tokens: int = NUM_TOKENS) -> list[np.ndarray]:
    """Per token ids, some of them none, with runs and lone units."""
    random = np.random.default_rng(seed)
    chance = random.random((num_tokens, 1)) * random.random(NUM_UNITS) ** 2
    return [np.flatnonzero(row).astype(np.int32) for row in random.random((num_tokens, NUM_UNITS)) < chance]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    policy=st.sampled_from(RUNNABLE),
    slots=st.sampled_from([0, 7, 30]),
    num_pinned=st.sampled_from([0, 9]),
    unit_bytes=st.sampled_from([100, 432, 4096, 6912, 24576]),
    num_layers=st.sampled_from([1, 3]),
    gap_bytes=st.sampled_from([0, 8192, 1 << 20]),
    buffer_bytes=st.sampled_from([32 << 10, 100 << 10, 300 << 10, 4 << 20]),
)
def test_a_search_counts_the_seconds_of_the_store(
    seed: int,
    policy: str,
    slots: int,
    num_pinned: int,
    unit_bytes: int,
    num_layers: int,
    gap_bytes: int,
    buffer_bytes: int,
) -> None:
    """Caches, strides, gaps, and buffers with and without halves, behind tokens that are not counted."""
    pinned = np.random.default_rng(seed).permutation(NUM_UNITS)[:num_pinned]
    setting = setting_of(
        NUM_UNITS,
        unit_bytes,
        num_layers,
        pinned,
        0 if policy == "static" else slots,
        cache=policy,
        collapse_gap_bytes=gap_bytes,
        read_buffer_bytes=buffer_bytes,
    )
    asked, num_warm = requests(seed), 5
    trace = seconds.requests_of([{(0, FAMILY): ids} for ids in asked])
    warm, counted = ([event for event in trace if (event.token > num_warm) == late] for late in (False, True))
    found = simulated(setting, counted, warm)
    cache = make(policy, {}, CacheFacts(NUM_UNITS, setting.plan.parts[0].cache_slots, pinned, np.arange(NUM_UNITS)))
    units = Strided(0, unit_bytes, num_layers * unit_bytes)
    reading = Reading(setting.device.flash, units, gap_bytes, buffer_bytes)
    assert sum(reading.replay(cache, asked, num_warm)) == pytest.approx(found.modelled_flash_s, rel=1e-12)
    again = make(policy, {}, CacheFacts(NUM_UNITS, setting.plan.parts[0].cache_slots, pinned, np.arange(NUM_UNITS)))
    reads = [reading.reads(ids[~again.serve(ids)]) for ids in asked][num_warm:]
    assert sum(read.num_reads for read in reads) == found.reads
    assert sum(read.num_bytes for read in reads) == found.read_bytes


@pytest.mark.parametrize("policy", ["lru", "lfu", "static"])
def test_choices_made_in_the_run_cost_what_their_trace_does(policy: str) -> None:
    """Windows behind tokens that only warm the cache, and a selector that uses what is in DRAM."""
    slots = 0 if policy == "static" else 20
    setting = setting_of(NUM_UNITS, 4096, 1, np.arange(9), slots, cache=policy)
    asked, seen = requests(3, 24), []

    def choose(key: seconds.Key, token: int, residency: Residency) -> np.ndarray:
        assert key == (0, FAMILY)
        ids = np.union1d(asked[token], np.flatnonzero(residency.present)[:4]).astype(np.int32)
        seen.append(ids)
        return ids

    windows, fill = [range(2, 10), range(12, 20)], {(0, FAMILY): np.arange(12, 24, dtype=np.int32)}
    found = list(simulate_choices(setting.artifact, setting.plan, choose, windows, 3, fill))
    first, second = ([{(0, FAMILY): ids} for ids in seen[at : at + 8]] for at in (0, 8))
    before = seconds.requests_of([fill, *first[:3]])
    traced = simulated(setting, seconds.requests_of([fill, *first])[len(before) :], before)
    before = seconds.requests_of([fill, *first, *second[:3]])
    traced_later = simulated(setting, seconds.requests_of([fill, *first, *second])[len(before) :], before)
    for one, other in zip(found, (traced, traced_later), strict=True):
        assert one.num_tokens == other.num_tokens == 5
        assert (one.hits, one.misses, one.reads, one.read_bytes) == (
            other.hits,
            other.misses,
            other.reads,
            other.read_bytes,
        )
        assert one.modelled_s == pytest.approx(other.modelled_s, rel=1e-12)


def test_a_token_by_hand() -> None:
    """Two of four layers ask; a token has their requests twice, what is resident once, and its predictors."""
    device, size = device_of(), 432
    setting = setting_of(NUM_UNITS, size, 1, device=device)
    model = model_of(4, tie_word_embeddings=False)
    section = setting.sections[0]
    sections = tuple(
        section.model_copy(update={"first_layer": layer, "last_layer": layer, "offset_bytes": layer << 16})
        for layer in range(4)
    )
    parts = tuple(PartPlan(layer=layer, family=FAMILY, density=1, num_pinned=0, cache_slots=0) for layer in (0, 3))
    changes = {"resident_bytes": 10**7, "predictor_bytes": 10**6, "kv_cache_bytes": 2000}
    found = seconds.Setting(model, setting.formats, device, sections, plan_of(parts, device, **changes))
    ids = np.arange(20)
    trace = seconds.requests_of([{(0, FAMILY): ids, (3, FAMILY): ids}] * 2)
    read = Reading(device.flash, Strided(0, size, size), 0, 4 << 20).reads(ids)
    computed = resident_bytes(model, (FAMILY,), setting.formats) + 1000
    computed += 4 * ids.size * size  # once they have been read
    row_bytes = 2 * 34  # 64 values of an embedding in groups of 32, each with a scale; in one page or two
    row_s = float(flash_seconds(device.flash, 1, row_bytes + 4096 - 4))
    expected = row_s + 4 * read.flash_s + (computed + 10**6) / device.dram_bytes_per_s.value
    assert read.num_reads == 1
    assert token_seconds(found, trace) == pytest.approx(expected)


@pytest.mark.parametrize("tenth", [0, 3, 6, 10])
@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("inner", [160, 1600])
@pytest.mark.parametrize("rates", [(), (("int8_group32", 0.5, 1e9), ("int8_group32", 1.0, 2e9))])
def test_a_dense_run_costs_what_the_store_does(tenth: int, experts: int, inner: int, rates: Any) -> None:
    """Whole layers pinned, a layer in part, and buffers of both kinds; of a mixture any two experts that are apart."""
    mixture = {"num_experts": experts, "num_experts_per_tok": 2} if experts > 1 else {}
    model, device = model_of(4, intermediate_size=inner, hidden_act="silu", **mixture), device_of(latency_s=1e-6)
    if rates:
        device = with_compute(device, rates, request_s=1e-5, reading_s=1e-5, layer_s=1e-5, token_s=1e-4)
    family = dense_family(model.spec)
    sections = make_sections(model.spec, (family,), "int8_group32")
    total = sum(section.length_bytes for section in sections)
    resident, kv_cache = resident_bytes(model, (family,), "int8_group32"), kv_cache_bytes(model.spec, 64)
    page_bytes = device.flash.page_bytes.value
    fixed = resident + kv_cache + dense_bookkeeping_bytes(model.spec, "int8_group32", page_bytes) + 8 * page_bytes
    run = dense_run(model, "int8_group32", 64, fixed + total * tenth // 10, device, preloads=False)
    assert run is not None
    unit, num_units = sections[0].unit_bytes, sections[0].num_units
    pinned = run.pinned_bytes // unit
    parts = tuple(
        PartPlan(
            layer=layer,
            family=family,
            density=1,
            num_pinned=max(0, min(num_units, pinned - layer * num_units)),
            cache_slots=0,
        )
        for layer in range(4)
    )
    changes = {"resident_bytes": resident, "kv_cache_bytes": kv_cache, "read_buffer_bytes": run.read_buffer_bytes}
    setting = seconds.Setting(model, "int8_group32", device, sections, plan_of(parts, device, **changes))
    tokens = []
    for first in range(experts):
        used = np.zeros(experts, bool)
        used[[first, (first + experts // 2) % experts]] = True
        ids = np.flatnonzero(np.repeat(used, num_units // experts))
        tokens.append({(layer, family): ids for layer in range(4)})
    found = simulated(setting, seconds.requests_of(tokens))
    count = len(tokens)
    assert run.token_s == pytest.approx(found.modelled_s / count)
    for overlap in get_args(Overlap):
        assert run.seconds(overlap) == pytest.approx(found.modelled_seconds(overlap) / count)
    assert run.flash_s == pytest.approx(found.modelled_flash_s / count)
    assert run.dram_s == pytest.approx(found.modelled_dram_s / count)
    assert run.reads_per_token == pytest.approx(found.reads / count, abs=0.5)
    assert run.flash_bytes_per_token == pytest.approx(found.read_bytes / count, abs=0.5)
    assert (found.misses == 0) == (tenth == 10)


LAWS = ("flash_seconds", "arrival", "request_work", "fetch_seconds", "weight_seconds", "dense_seconds")
"""What seconds are made of (schemas/device.py, runtime/store/clock.py, runtime/store/computing.py)."""


def importing(folder: str) -> dict[str, set[str]]:
    """The laws that each module of a folder imports."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in nodes for alias in node.names} & set(LAWS)
        if names:
            found[path.relative_to(ROOT).as_posix()] = names
    return found


@pytest.mark.slow
def test_the_compiler_counts_seconds_in_one_place_and_no_benchmark_adds_memory_to_flash() -> None:
    """Beside the one model: the dense run and `order`, which tests hold to it; the evaluation, which has the
    requests of many tokens at once; what one unit costs in the integer program of `place`; what a profile shows of
    its law; a quote's first token; the share that predictors take; the measured cost of a portion; and the bound
    that a refusal names where attention is read, too. The papers' own equations, among the benchmarks, count
    theirs. A benchmark takes a request's seconds whole."""
    found = importing("compiler")
    assert found == {
        "compiler/dense_run.py": {"flash_seconds", "request_work"},
        "compiler/stages/order/_task.py": {"flash_seconds"},
        "compiler/stages/place/_program.py": {"flash_seconds"},
        "compiler/stages/preflight/budget.py": {"flash_seconds"},
        "compiler/stages/report/page_charts.py": {"dense_seconds"},
        "compiler/seconds.py": {"weight_seconds", "arrival"},
        "compiler/device/shown.py": {"flash_seconds"},
        "compiler/device/overheads.py": {"fetch_seconds"},
        "compiler/quote/first_token.py": {"flash_seconds", "fetch_seconds", "dense_seconds", "weight_seconds"},
    }
    computing = {"request_work", "weight_seconds", "dense_seconds"}
    found = importing("benchmarks")
    papers = ("benchmarks/shared/published/", "benchmarks/shared/papers/")  # the published tables, beside ours
    assert not computing & set().union(*(names for path, names in found.items() if not path.startswith(papers)))
