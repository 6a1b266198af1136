"""A simulated run decides exactly as the real one: hits, misses, evictions, every extent, every byte."""

import dataclasses
from collections import deque

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import choose_plan, fixed_bytes
from coldpress.runtime.extents import Extents
from coldpress.runtime.flash import direct, simulated
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import on_device, replay, simulate, simulate_opening
from coldpress.runtime.store import planner
from coldpress.runtime.store.clock import Clock, arrival
from coldpress.runtime.store.computing import NOTHING, Arrival
from coldpress.runtime.store.planner import ReadPlan, room_bytes
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import END, FETCH, RESET, Event, Recorder, load_trace
from coldpress.schemas.compute import Figure
from coldpress.schemas.errors import ArtifactError, ColdpressError
from coldpress.schemas.law import combined
from tests.support.caches import RUNNABLE
from tests.support.shapes import small_device
from tests.support.stores import ask, requests

CACHES = (*RUNNABLE, "belady")
DECISIONS = """hits misses evictions reads read_bytes used_bytes prefill_reads prefill_read_bytes extents_sha256
dram_used_bytes dram_budget_bytes num_tokens"""


def record(built, num_tokens=5):
    """The trace of a run: twice a prefill and then tokens."""
    recorder, artifact = Recorder(), open_artifact(built.path)
    store = Store(artifact, choose_plan(artifact.manifest), direct.Plugin(artifact, 8), recorder)
    for prompt in range(2):  # the second one finds the first one's units, but a new context
        store.reset()
        for layer, family in built.units:
            deque(store.stream((layer, family)), maxlen=0)
        ask(store, built, num_tokens, seed=prompt)
    return recorder


@pytest.mark.parametrize("name", ["relu_artifact", "topk_artifact", "predictor_artifact"])
@pytest.mark.parametrize("cache", RUNNABLE)
@pytest.mark.parametrize("gap", [0, 4096, 100_000])
@pytest.mark.parametrize("extra", [0, 30_000, 200_000, 5_000_000])
def test_simulated_equals_real(request, name, cache, gap, extra):
    built = request.getfixturevalue(name)
    artifact = open_artifact(built.path)
    trace = record_once(request, name, built)
    budget = fixed_bytes(artifact.manifest, artifact.manifest.plans[0]) + extra
    plan = choose_plan(artifact.manifest, budget).model_copy(update={"cache": cache, "collapse_gap_bytes": gap})
    real = Store(artifact, plan, direct.Plugin(artifact, 8), Clock(artifact.manifest, plan))
    replay(real, trace)
    measured = real.metrics(10, 1.0, 1.0, 1.0)
    modelled = simulate(artifact, plan, trace)
    for field in DECISIONS.split():
        assert getattr(modelled, field) == getattr(measured, field), field
    assert modelled.modelled_flash_s == measured.modelled_flash_s == pytest.approx(modelled.flash_s)
    assert modelled.misses == 0 or modelled.flash_s > 0
    assert modelled.num_tokens == 10  # as `measured` was told, so that memory time is that of the same tokens
    assert modelled.modelled_dram_s == measured.modelled_dram_s
    assert modelled.decode_s == modelled.modelled_s == measured.modelled_s
    parts = modelled.modelled_flash_s, modelled.modelled_dram_s
    assert max(parts) * (1 - 1e-9) <= modelled.modelled_s <= sum(parts) * (1 + 1e-9)


TRACES = {}


def record_once(request, name, built):
    """One recording per artifact serves all settings."""
    if name not in TRACES:
        TRACES[name] = record(built).events
    return TRACES[name]


def test_the_recording_run_itself_is_reproduced(relu_artifact, tmp_path):
    artifact, recorder = open_artifact(relu_artifact.path), Recorder()
    plan = choose_plan(artifact.manifest)
    store = Store(artifact, plan, direct.Plugin(artifact, 8), recorder)
    ask(store, relu_artifact, 4)
    recorder.save(tmp_path / "trace.safetensors")
    modelled = simulate(artifact, plan, load_trace(tmp_path / "trace.safetensors"))
    assert modelled.num_tokens == recorder.num_tokens == 4
    assert modelled.extents_sha256 == store.counters.extents_sha256()
    assert (modelled.hits, modelled.misses) == (store.counters.hits, store.counters.misses)


def test_another_decision_gives_another_digest(relu_artifact):
    artifact, trace = open_artifact(relu_artifact.path), record(relu_artifact, 2).events
    plan = choose_plan(artifact.manifest)
    other = plan.model_copy(update={"collapse_gap_bytes": 0})
    assert simulate(artifact, plan, trace).extents_sha256 != simulate(artifact, other, trace).extents_sha256


def test_modelled_seconds_are_the_device_profiles(relu_artifact):
    """One fetch of one page: a single read's time by the profile."""
    artifact = open_artifact(relu_artifact.path)
    plan = choose_plan(artifact.manifest).model_copy(update={"cache": "static"})
    unit = np.array([artifact.rank(0, "up_down")[-1]], np.int32)  # not pinned
    store = Store(artifact, plan, simulated.Plugin(artifact, 32))
    replay(store, [Event(FETCH, 1, 0, "up_down", unit)])
    flash = artifact.manifest.device.flash
    assert store.counters.flash_s == pytest.approx(max(1 / flash.iops, flash.latency_s.value, 4096 / flash.bytes_per_s))


@pytest.mark.parametrize("cache", CACHES)
def test_what_came_before_fills_caches_and_is_not_counted(relu_artifact, cache):
    artifact, trace = open_artifact(relu_artifact.path), record(relu_artifact).events
    plan = choose_plan(artifact.manifest).model_copy(update={"cache": cache})
    first, then = ([event for event in trace if (event.token > 7) == later] for later in (False, True))
    found, whole = simulate(artifact, plan, then, before=first), simulate(artifact, plan, trace)
    assert found.num_tokens == 3
    assert found.extents_sha256 == whole.extents_sha256
    if cache != "belady":  # which knows what comes, and chooses otherwise for the beginning alone
        alone = simulate(artifact, plan, first)
        for name in ("num_tokens", "hits", "misses", "evictions", "reads", "read_bytes", "modelled_s"):
            assert getattr(found, name) == pytest.approx(getattr(whole, name) - getattr(alone, name)), name


def test_a_trace_survives_the_disk(relu_artifact, tmp_path):
    recorder = record(relu_artifact, 3)
    recorder.save(tmp_path / "trace.safetensors")
    loaded = load_trace(tmp_path / "trace.safetensors")
    assert len(loaded) == len(recorder.events)
    assert max(event.token for event in loaded) == 6
    for found, expected in zip(loaded, recorder.events, strict=True):
        assert (found.kind, found.token, found.layer) == (expected.kind, expected.token, expected.layer)
        assert found.family == expected.family
        assert found.ids.tolist() == expected.ids.tolist()


def test_tokens_end_where_the_store_is_told(tmp_path):
    """Also where one layer is asked twice for a token, and several tokens are decoded together."""
    recorder, ids = Recorder(), np.array([1], np.int32)
    for count in (1, 3, 1):
        recorder.fetch(0, "mlp_in", ids)
        recorder.fetch(0, "mlp_in", ids)
        recorder.end_tokens(count)
    assert recorder.num_tokens == 5
    recorder.save(tmp_path / "trace")
    for events in (recorder.events, load_trace(tmp_path / "trace")):
        assert [event.token for event in events] == [1, 1, 1, 2, 2, 4, 5, 5, 5]
        assert [event.kind for event in events] == [FETCH, FETCH, END] * 3


def test_a_replay_ends_tokens_as_the_run_did(relu_artifact):
    """A window of one token keeps nothing of the token before, so a replay that ended none would have other hits."""
    artifact, trace = open_artifact(relu_artifact.path), record(relu_artifact, 4).events
    plan = choose_plan(artifact.manifest).model_copy(update={"cache": "window", "cache_options": {"window_tokens": 1}})
    without = [event for event in trace if event.kind != END]
    assert sum(event.kind == END for event in trace) == 8
    ended, never = simulate(artifact, plan, trace), simulate(artifact, plan, without)
    assert ended.evictions > never.evictions


def test_a_replay_ends_each_token_once(relu_artifact):
    """A window of three tokens, of which a replay that ended some twice would have kept fewer."""
    artifact, recorder = open_artifact(relu_artifact.path), Recorder()
    plan = choose_plan(artifact.manifest, artifact.manifest.plans[0].dram_budget_bytes + 200_000)
    plan = plan.model_copy(update={"cache": "window", "cache_options": {"window_tokens": 3}})
    store = Store(artifact, plan, direct.Plugin(artifact, 8), recorder)
    ask(store, relu_artifact, 8)
    modelled = simulate(artifact, plan, recorder.events)
    assert (modelled.hits, modelled.evictions) == (store.counters.hits, store.counters.evictions)
    assert modelled.evictions > 0


def test_a_cache_that_looks_ahead_misses_least_in_a_simulation_and_is_refused_in_a_run(relu_artifact):
    artifact, trace = open_artifact(relu_artifact.path), record(relu_artifact, 6).events
    plan = choose_plan(artifact.manifest)
    misses = {name: simulate(artifact, plan.model_copy(update={"cache": name}), trace).misses for name in CACHES}
    assert misses["belady"] < min(misses[name] for name in RUNNABLE)
    with pytest.raises(ColdpressError, match="'belady' has to know all requests to come"):
        Store(artifact, plan.model_copy(update={"cache": "belady"}), direct.Plugin(artifact, 8))


def test_a_trace_of_another_model_is_refused(relu_artifact, topk_artifact):
    events = record(topk_artifact, 1).events
    artifact = open_artifact(relu_artifact.path)
    with pytest.raises(ColdpressError, match="where the artifact has 0 units"):
        simulate(artifact, choose_plan(artifact.manifest), events)
    events = [Event(FETCH, 1, 0, "up_down", np.array([3, 512], np.int32))]
    with pytest.raises(ColdpressError, match=r"event 0 of the trace asks for unit 512 .* has 512 units"):
        simulate(artifact, choose_plan(artifact.manifest), events)


@pytest.mark.parametrize("change", ["ids", "start", "family", "kind", "token", "garbage"])
def test_a_damaged_trace_is_refused(tmp_path, change):
    path = tmp_path / "trace.safetensors"
    recorder = Recorder()
    recorder.fetch(0, "up_down", np.array([1, 5, 9], np.int32))
    recorder.fetch(1, "up_down", np.array([0, 2], np.int32))
    recorder.save(path)
    arrays = load_file(path)
    if change == "garbage":
        path.write_bytes(b"\x10" + path.read_bytes()[1:])
    else:
        arrays[change][1] = 200 if change not in ("ids", "token") else 0
        save_file(arrays, path)
    with pytest.raises(ArtifactError, match=r"trace\.safetensors: .*; record the trace again"):
        load_trace(path)


def test_recorded_ids_are_a_copy():
    recorder, ids = Recorder(), np.array([1, 2], np.int32)
    recorder.fetch(0, "neuron", ids)
    ids[0] = 0
    assert dataclasses.asdict(recorder.events[0])["ids"].tolist() == [1, 2]


def test_contexts_are_part_of_a_trace(topk_artifact):
    """Contextual counters start anew with each prompt; a replay that did not know would evict others."""
    artifact, trace = open_artifact(topk_artifact.path), record(topk_artifact, 4).events
    plan = choose_plan(artifact.manifest)
    assert plan.cache == "lfu"
    without = [event for event in trace if event.kind != RESET]
    assert len(trace) - len(without) == 2
    assert simulate(artifact, plan, trace).extents_sha256 != simulate(artifact, plan, without).extents_sha256


def test_layers_wait_for_each_other(relu_artifact):
    """One page in each of two layers is two requests: two first bytes' time, not one wave of two reads."""
    artifact = open_artifact(relu_artifact.path)
    plan = choose_plan(artifact.manifest).model_copy(update={"cache": "static"})
    last = {layer: artifact.rank(layer, "up_down")[-1:] for layer in (0, 1)}  # not pinned
    trace = [Event(FETCH, 1, layer, "up_down", unit.astype(np.int32)) for layer, unit in last.items()]
    found = simulate(artifact, plan, trace)
    assert found.reads == 2
    assert found.modelled_flash_s == pytest.approx(2 * artifact.manifest.device.flash.latency_s.value)


@pytest.mark.parametrize("seed", range(6))
def test_a_simulation_without_data_takes_the_seconds_of_one_with_data(relu_artifact, monkeypatch, seed):
    """Without data, requests are not cut into portions: seconds, counters and reads stay, over many buffer sizes."""
    monkeypatch.setattr(planner, "ARRIVAL_BYTES", 4096)
    monkeypatch.setattr(planner, "LEAST_HALF_BYTES", 4096)
    artifact = open_artifact(relu_artifact.path)
    changes = {"read_buffer_bytes": (4 + 10 * seed) * 4096, "cache": "lru", "dram_budget_bytes": 4 << 20}
    plan = choose_plan(artifact.manifest).model_copy(update=changes)
    found, ids, num_batches = [], [], []
    for data in (None, direct.Plugin(artifact, 8)):
        store = Store(artifact, plan, simulated.Plugin(artifact, 8, data), Clock(artifact.manifest, plan))
        yielded = [
            [batch.ids for batch in store.submit((layer, family), asked)]
            for layer, family, asked in requests(relu_artifact, 8, seed)
        ]
        found.append(
            (store.metrics(8, 0.0, 0.0, 0.0).model_dump(exclude={"peak_rss_bytes"}), store.counters.extents_sha256())
        )
        ids.append([np.concatenate([*each, np.empty(0, np.int32)]).tolist() for each in yielded])
        num_batches.append(sum(map(len, yielded)))
        store.close()
    assert ids[0] == ids[1]
    assert {**found[0][0], "direct_io": None} == {**found[1][0], "direct_io": None}
    assert found[0][1] == found[1][1]
    assert num_batches[0] < num_batches[1]


@pytest.mark.parametrize(("buffer_kib", "in_flight", "portions"), [(4096, 20, 3), (512, 4, 10), (2560, 20, 4)])
def test_a_buffer_bounds_the_reads_in_flight(buffer_kib, in_flight, portions):
    """20 reads of 128 KiB: 16 and 4 in two halves; two in each half; ten in each. A portion has a mebibyte."""
    flash = small_device().flash
    flash = flash.model_copy(update={"latency_s": Figure(value=2e-3, source="a test")})  # more than bytes take
    extents = Extents(np.arange(20) << 18, np.full(20, 128 << 10))
    plan = ReadPlan(extents, np.arange(20), np.zeros(20, np.int64))
    buffer_bytes = buffer_kib << 10
    found = arrival(flash, plan, buffer_bytes, room_bytes(buffer_bytes, 4096, 4096))
    waves_s = -(-20 // in_flight) * flash.latency_s.value
    bounds = 20 / flash.law.reads_per_s, waves_s, 20 * (128 << 10) / flash.law.bytes_per_s
    assert found == Arrival(pytest.approx(combined(bounds, flash.law.overlap)), portions, True)


@pytest.mark.parametrize(("cache", "copies"), [("static", 0), ("lru", 2)])
def test_memory_time_by_hand(relu_artifact, cache, copies):
    """What is resident, half the KV cache, each unit used once, and each that is read and kept copied."""
    artifact = open_artifact(relu_artifact.path)
    plan = choose_plan(artifact.manifest).model_copy(update={"cache": cache})
    rank = artifact.rank(0, "up_down")
    ids = np.sort(rank[[0, -1]]).astype(np.int32)  # the first is pinned, the last is not
    found = simulate(artifact, plan, [Event(FETCH, 1, 0, "up_down", ids)])
    size = artifact.manifest.families[0].unit_bytes
    assert (found.hits, found.misses, found.active_bytes) == (1, 1, 2 * size)
    assert found.kept_bytes == copies // 2 * size
    assert artifact.manifest.model.tie_word_embeddings  # so the embedding is the head, which is read whole
    resident = plan.resident_bytes + plan.kv_cache_bytes // 2
    bytes_per_s = artifact.manifest.device.dram_bytes_per_s.value
    assert found.modelled_dram_s == pytest.approx((resident + (2 + copies) * size) / bytes_per_s)
    first_byte_s = artifact.manifest.device.flash.latency_s.value
    arrived = (1 + copies) * size  # is used, and copied, behind the read; the pinned unit takes less than the read
    assert found.modelled_s == pytest.approx((resident + arrived) / bytes_per_s + first_byte_s)


def test_a_request_takes_the_longer_of_reading_and_computing(relu_artifact):
    """With memory so slow that computing with two units takes longer than reading one of them."""
    artifact = open_artifact(relu_artifact.path)
    device = artifact.manifest.device
    slow = device.model_copy(update={"dram_bytes_per_s": device.dram_bytes_per_s.model_copy(update={"value": 1e5})})
    artifact = on_device(artifact, slow)
    plan = choose_plan(artifact.manifest).model_copy(update={"cache": "static"})
    ids = np.sort(artifact.rank(0, "up_down")[[0, -1]]).astype(np.int32)
    found = simulate(artifact, plan, [Event(FETCH, 1, 0, "up_down", ids)])
    assert found.modelled_s == pytest.approx(found.modelled_dram_s)


@pytest.mark.parametrize("name", ["relu_artifact", "topk_artifact"])
def test_an_opening_reads_what_a_run_reads_before_its_first_token(request, name):
    """A session on simulated flash waits as long in its prefill, and has loaded its pinned units."""
    built = request.getfixturevalue(name)
    with Session(built.path, flash="simulated") as session:
        counters = session.store.counters
        loaded_bytes = counters.load_read_bytes
        session.generate([1, 2, 3], 1)
        found = simulate_opening(session.artifact, session.plan)
    assert set(found.passes) == set(built.units)
    assert sum(reads.flash_s for reads in found.passes.values()) == pytest.approx(counters.prefill_flash_s)
    assert (loaded_bytes > 0) == (found.load_s > 0) == (name == "relu_artifact"), "the other one pins nothing"
    flash = session.artifact.manifest.device.flash
    assert found.load_s >= loaded_bytes / flash.bytes_per_s


def test_with_everything_in_dram_an_opening_reads_all_and_a_prefill_nothing(topk_artifact):
    artifact = open_artifact(topk_artifact.path)
    plan = choose_plan(artifact.manifest, 1 << 30)
    found = simulate_opening(artifact, plan)
    assert set(found.passes.values()) == {NOTHING}
    units = sum(section.num_units * section.unit_bytes for section in artifact.manifest.flash.sections)
    assert found.load_s >= units / artifact.manifest.device.flash.bytes_per_s
