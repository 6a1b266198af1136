"""Layers and matrices whose formats differ: they compute with the values of their codes, wherever these lie."""

from collections import deque

import numpy as np
import pytest

from coldpress.runtime.artifact import checks, errors
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli.inspect import describe, render
from coldpress.runtime.dram.budget import fixed_bytes, refit, used_bytes, whole_bytes
from coldpress.runtime.flash import direct
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import simulate
from coldpress.runtime.store.clock import Clock
from coldpress.runtime.store.preload_room import most_bytes
from coldpress.runtime.store.resident import chosen_from
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import Recorder
from coldpress.schemas.errors import CorruptPageError
from tests.support.artifacts import Recipe, build_artifact, change_manifest, refuse, small_spec
from tests.support.dense_codes import flash_values, resident_values

BASE, FINE = "int4_group32", "int8_group32"
FINER = {0: FINE, 3: FINE, 4: FINE, 10: FINE}
MATRICES = FINER | {
    1: f"{BASE}+{FINE}+{BASE}",
    4: f"{FINE}+{BASE}+{FINE}",
    7: f"{BASE}+{BASE}+{FINE}",
    10: f"{FINE}+{FINE}+{BASE}",
}
THREE = dict.fromkeys(range(11), "int8_group32+q5_0+fp16")
SIZES = {"fp16": 128, FINE: 68, BASE: 36, "q5_0": 44}
"""Bytes of a slice of 64 values: 2 a value, or 2 groups of 34, 18 or 22 bytes."""
TOKENS = np.array([3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26])
PROMPT = [5, 17, 3, 60]
SPEC = small_spec(num_hidden_layers=11, intermediate_size=96, hidden_act="silu")
ALL_IN_DRAM = {"pinned_share": 1.0, "slots_share": 0.0, "read_buffer_bytes": 1 << 20}


def mixed(folder, **changes):
    """An artifact of eleven layers: four have 8 bits, the others 4; by matrix with `MATRICES`."""
    fields = {"spec": SPEC, "method": "dense", "density": 1.0, "format": BASE, "layer_formats": FINER}
    if (fields | changes)["method"] == "dense":
        fields |= {"families": ("neuron",)}
    return build_artifact(folder, Recipe(**(fields | changes)))


def neuron_bytes(layer: int, formats) -> int:
    name = formats.get(layer, BASE)
    return sum(SIZES[one] for one in (name.split("+") if "+" in name else [name] * 3))


def logits_of(session):
    """Logits of prefilled tokens, of tokens one by one, and of tokens together."""
    session.decoder.begin(32)
    prefilled = session.decoder.prefill(TOKENS[:4])
    alone = [session.decoder.decode(token) for token in TOKENS[4:9].tolist()]
    return np.concatenate([prefilled, alone, session.decoder.decode_many(TOKENS[9:])])


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("formats", [FINER, MATRICES, THREE])
@pytest.mark.parametrize("families", ["neuron", "mlp_in+mlp_mid", "mlp_mid", "up_down"])
def test_logits_are_those_of_the_values_of_the_codes(tmp_path, families, formats, experts):
    """Against an artifact in fp16 with these values as weights, which only rounds them to eleven bits."""
    shape = {"num_hidden_layers": 11, "intermediate_size": 64, "hidden_act": "silu"}
    spec = small_spec(**shape, num_experts=experts, num_experts_per_tok=min(2, experts))
    common = {"spec": spec, "options": {"families": families}, "families": tuple(families.split("+")), **ALL_IN_DRAM}
    built = mixed(tmp_path / "a", layer_formats=formats, **common)
    assert verify_artifact(open_artifact(built.path)) > 0
    session = Session(built.path)
    values = {**built.weights, **resident_values(session.artifact), **flash_values(session)}
    plain = build_artifact(tmp_path / "b", Recipe(format="fp16", method="dense", density=1.0, **common), values)
    found, expected = logits_of(session), logits_of(Session(plain.path))
    errors_T = np.abs(found - expected).max(axis=1) / np.abs(expected).max()
    # where two experts have nearly equal scores, a token may take the other one, and later tokens see it
    assert (errors_T.max() if experts == 1 else np.median(errors_T)) < 3e-3


@pytest.mark.parametrize("formats", [FINER, MATRICES])
@pytest.mark.parametrize("families", ["up_down", "mlp_in+mlp_mid"])
def test_a_selector_leaves_out_units_of_any_format(tmp_path, families, formats):
    """Of units that are all used, a selector's requests add up to a dense run's logits."""
    method = "gate" if families == "up_down" else "dip"
    common = {"layer_formats": formats, "families": tuple(families.split("+")), **ALL_IN_DRAM}
    dense = mixed(tmp_path / "a", options={"families": families}, **common)
    sparse = mixed(tmp_path / "b", method=method, density=1.0, **common)
    expected = logits_of(Session(dense.path))
    np.testing.assert_allclose(logits_of(Session(sparse.path)), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("formats", [FINER, MATRICES])
def test_units_that_are_read_give_the_tokens_of_those_in_dram(tmp_path, formats):
    spec = small_spec(num_hidden_layers=11, intermediate_size=512)
    common = {"spec": spec, "layer_formats": formats, "cache": "lfu"}
    expected = Session(mixed(tmp_path / "a", **common, **ALL_IN_DRAM).path).generate(PROMPT, 24)
    found = Session(mixed(tmp_path / "b", **common).path).generate(PROMPT, 24)
    assert found.token_ids == expected.token_ids
    assert found.metrics.hits > 0
    assert found.metrics.read_bytes > 0


@pytest.mark.parametrize("finer", [FINER, MATRICES])
def test_requests_and_passes_bring_each_layer_s_own_units(tmp_path, finer):
    built = mixed(tmp_path / "a", slots_share=0.3, layer_formats=finer)
    store = Session(built.path).store
    for again in (False, True):  # the second time some units are in slots
        for key, codes in built.units.items():
            ids = np.arange(key[0] % 3, 96, 5, dtype=np.int32)
            for batch in store.submit(key, ids):
                assert (batch.rows[batch.slots] == codes[batch.ids]).all()
            for found, rows in store.stream(key):
                assert (rows == codes[found]).all()
        store.end_tokens()
        assert (store.counters.hits > 0) or not again


@pytest.mark.parametrize("finer", [FINER, MATRICES])
def test_units_of_any_size_are_preloaded(tmp_path, finer):
    """One region of memory serves layers whose units have other sizes; every guess is used and right."""
    built = mixed(tmp_path / "a", slots_share=0.1, layer_formats=finer)
    artifact = open_artifact(built.path)
    plan, flash = artifact.manifest.plans[0], artifact.manifest.flash
    ahead = most_bytes(flash.sections, plan.parts, flash.page_bytes, 1 << 30)
    changes = {"preload_buffer_bytes": ahead, "dram_budget_bytes": plan.dram_budget_bytes + ahead}
    store = Store(artifact, plan.model_copy(update=changes), direct.Plugin(artifact, 8))
    ids = np.arange(0, 96, 7, dtype=np.int32)
    for _ in range(2):
        for layer in range(11):
            store.preload((layer, "neuron"), ids)
            before = store.counters.preload_used_bytes
            absent = np.count_nonzero(~store.residency((layer, "neuron")).present[ids])
            expected = built.units[layer, "neuron"]
            for batch in store.submit((layer, "neuron"), ids):
                assert (batch.rows[batch.slots] == expected[batch.ids]).all()
            assert store.counters.preload_used_bytes - before == absent * neuron_bytes(layer, finer)
        store.end_tokens()
    assert store.counters.preload_used_bytes > 0


# Budgets and seconds


@pytest.mark.parametrize("finer", [FINER, MATRICES])
def test_the_budget_counts_each_layer_s_units(tmp_path, finer):
    """Against the sizes of the files, and by hand."""
    built = mixed(tmp_path / "a", layer_formats=finer)
    manifest, plan = built.manifest, built.manifest.plans[0]
    sizes = {layer: neuron_bytes(layer, finer) for layer in range(11)}
    assert [section.unit_bytes for section in manifest.flash.sections] == list(sizes.values())
    held = sum((part.num_pinned + part.cache_slots) * sizes[part.layer] for part in plan.parts)
    assert used_bytes(manifest, plan) == fixed_bytes(manifest, plan) + held == plan.dram_budget_bytes
    store = Session(built.path).store
    assert sum(memory.slots.rows.nbytes for memory in store._memory.pools.values()) == held
    assert whole_bytes(manifest, plan) - fixed_bytes(manifest, plan) + plan.read_buffer_bytes == 96 * sum(
        sizes.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("extra_bytes", [0, 3_000, 20_000, 1_000_000])
def test_another_budget_is_divided_by_each_layer_s_units(tmp_path, extra_bytes):
    built = mixed(tmp_path / "a")
    manifest, plan = built.manifest, built.manifest.plans[0]
    budget = plan.dram_budget_bytes + extra_bytes
    found = refit(manifest, plan, budget)
    assert used_bytes(manifest, found) <= budget
    session = Session(built.path, dram_budget_bytes=budget)
    assert session.generate(PROMPT, 16).token_ids == Session(built.path).generate(PROMPT, 16).token_ids


def test_a_run_takes_another_budget_between_tokens(tmp_path):
    """Slots of both sizes move, and units stay where they were read to."""
    built = mixed(tmp_path / "a", slots_share=0.4)
    expected = Session(built.path).generate(PROMPT, 24).token_ids
    session = Session(built.path)
    budget, found = session.plan.dram_budget_bytes, []
    session.decoder.begin(32)
    logits = session.decoder.prefill(np.array(PROMPT))[-1]
    for number in range(24):
        found.append(int(np.argmax(logits)))
        logits = session.decoder.decode(found[-1])
        session.resize(budget - 3_000 if number % 2 else budget + 3_000)
    assert tuple(found) == expected


def test_a_simulation_makes_the_reads_of_a_run(tmp_path):
    recipe = {"method": "topk", "density": 0.5, "slots_share": 0.02}
    recorder = Recorder()
    built = mixed(tmp_path / "a", spec=small_spec(num_hidden_layers=11, intermediate_size=512), **recipe)
    session = Session(built.path, recorder=recorder)
    session.generate(PROMPT, 12)
    assert session.store.counters.read_bytes > 0
    assert (
        simulate(session.artifact, session.plan, recorder.events).extents_sha256
        == session.store.counters.extents_sha256()
    )


@pytest.mark.parametrize("formats", [FINER, MATRICES])
def test_the_clock_multiplies_units_in_their_layer_s_format(tmp_path, formats):
    manifest = mixed(tmp_path / "a", layer_formats=formats).manifest
    found = chosen_from(manifest)
    for layer in range(11):
        weights = found[layer, "neuron"]
        assert (weights.format, weights.num_bytes) == (formats.get(layer, BASE), 96 * neuron_bytes(layer, formats))
    assert Clock(manifest, manifest.plans[0]).fetch_s == 0


# What the reader refuses, and what people see


def test_an_old_reader_refuses_by_the_feature_s_name(tmp_path, monkeypatch):
    built = mixed(tmp_path / "a")
    assert "layer-formats" in built.manifest.features.required
    monkeypatch.setattr("coldpress.runtime.artifact.checks.known_features", lambda: ("crc32c-pages",))
    change_manifest(built.path, lambda manifest: manifest["features"].update(required=["layer-formats"]))
    refuse(built.path, errors.FeatureError, "'layer-formats'", "use a newer runtime")


def test_a_plain_artifact_needs_no_feature_and_has_no_field(tmp_path):
    path = mixed(tmp_path / "a", layer_formats={}).path
    assert "layer-formats" not in open_artifact(path).manifest.features.required
    assert '"format": null' not in (path / "manifest.json").read_text().split('"sections"')[1].split("]")[0]
    section = open_artifact(path).manifest.flash.sections[0]
    assert "format" not in section.model_dump()


def _of_section(**changes):
    return lambda manifest: manifest["flash"]["sections"][3].update(changes)


def _without(manifest):
    manifest["features"]["required"].remove("layer-formats")


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (_of_section(format=BASE), errors.SectionError, ["sections[3].format", "one of fp16, int8_group32"]),
        (_of_section(format="int5"), errors.SectionError, ["sections[3].format", "'int5'"]),
        (_of_section(format="int4_2_2"), errors.SectionError, ["sections[3].format", "'int4_2_2'"]),
        (
            _of_section(unit_bytes=108, stride_bytes=108),
            errors.SectionError,
            ["sections[3].unit_bytes is 108", "expected 204"],
        ),
        (
            lambda manifest: manifest["flash"]["sections"][3].pop("format"),
            errors.SectionError,
            ["sections[3].unit_bytes is 204"],
        ),
        (
            _of_section(format=f"{BASE}+{FINE}"),
            errors.SectionError,
            ["sections[3].format", "or 3 of", "+ between"],
        ),
        (_of_section(format=f"{FINE}+{FINE}+{FINE}"), errors.SectionError, ["sections[3].format", "not all the same"]),
        (_of_section(format=f"{FINE}+int5+{BASE}"), errors.SectionError, ["sections[3].format", "int5"]),
        (_of_section(format=f"{FINE}+{BASE}+{BASE}"), errors.SectionError, ["unit_bytes is 204, expected 140"]),
        (_of_section(format=f"{FINE}+"), errors.SchemaError, ["sections.3.format"]),
        (_of_section(last_layer=4), errors.SectionError, ["sections[3].stride_bytes"]),
        (_without, errors.FeatureError, ["a list without layer-formats"]),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path, change, kind, words):
    path = mixed(tmp_path / "a").path
    change_manifest(path, change)
    refuse(path, kind, *words)


@pytest.mark.parametrize("name", ["int4_2_2", "int4_3_1", "int8_4_4"])
def test_codes_in_two_planes_are_refused(tmp_path, name):
    """Artifacts of older builds, whatever else they have: the sentence says what to do."""
    path = mixed(tmp_path / "a").path
    change_manifest(path, lambda manifest: manifest["features"]["required"].append(f"format.{name}"))
    refuse(path, errors.FeatureError, f"'format.{name}'", "expected formats whose codes are whole", "build it again")


@pytest.mark.parametrize("finer", [FINER, MATRICES])
def test_damaged_units_are_found(tmp_path, finer):
    built = mixed(tmp_path / "a", layer_formats=finer)
    section = built.manifest.flash.sections[4]
    with (built.path / "flash.img").open("r+b") as file:
        file.seek(section.offset_bytes + 30)
        file.write(b"\xff\xff\xff")
    with pytest.raises(CorruptPageError, match="layer 4, family neuron"):
        deque(Session(built.path).store.stream((4, "neuron")), maxlen=0)


@pytest.mark.parametrize("slice_number", range(3))
def test_scales_that_are_not_finite_are_found_in_every_slice(tmp_path, slice_number):
    """A unit of layer 4 has 68, 36 and 68 bytes."""
    built = mixed(tmp_path / "a", layer_formats=MATRICES)
    units = dict(built.units)
    codes = units[4, "neuron"] = units[4, "neuron"].copy()
    assert codes.shape[1] == 172
    codes[5, (0, 68, 104)[slice_number] + 1] = 0x7C  # infinity
    damaged = build_artifact(tmp_path / "b", built.recipe, built.weights, units)
    with pytest.raises(errors.NonFiniteError, match="layer 4, family neuron"):
        verify_artifact(open_artifact(damaged.path))


def test_an_older_reader_refuses_formats_of_slices(tmp_path, monkeypatch):
    built = mixed(tmp_path / "a", layer_formats=MATRICES)
    known = [name for name in checks.known_features() if name != "slice-formats"]
    monkeypatch.setattr(checks, "known_features", lambda: known)
    refuse(built.path, errors.FeatureError, "'slice-formats'", "use a newer runtime")


def test_inspect_counts_matrices(tmp_path):
    artifact = open_artifact(mixed(tmp_path / "a", layer_formats=MATRICES).path)
    summary = describe(artifact)
    assert summary["families"][0]["other_formats"]["7"] == f"{BASE}+{BASE}+{FINE}"
    assert summary["families"][0]["total_bytes"] == 96 * sum(neuron_bytes(layer, MATRICES) for layer in range(11))
    assert "int4_group32, 12 matrices int8_group32" in render(summary, artifact.manifest.model)


def test_inspect_names_the_formats_and_counts_their_bytes(tmp_path):
    artifact = open_artifact(mixed(tmp_path / "a").path)
    summary = describe(artifact)
    (family,) = summary["families"]
    assert family["other_formats"] == {"0": FINE, "3": FINE, "4": FINE, "10": FINE}
    assert family["total_bytes"] == 96 * (7 * 108 + 4 * 204)
    assert "int4_group32, 4 layers int8_group32" in render(summary, artifact.manifest.model)
    (plan,) = summary["plans"]
    assert plan["pinned_bytes"] == sum(6 * (204 if layer in FINER else 108) for layer in range(11))
