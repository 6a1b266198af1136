"""Layers and matrices whose formats in planes differ: the same plain codes, divided elsewhere, give the same logits and
tokens."""

from collections import deque

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coldpress.runtime.artifact import checks, errors
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli.inspect import describe, render
from coldpress.runtime.drafts import Draft
from coldpress.runtime.flash import direct
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plan.budget import fixed_bytes, refit, used_bytes, whole_bytes
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization._planes import planes_of
from coldpress.runtime.simulate import simulate
from coldpress.runtime.store.ahead_room import most_bytes
from coldpress.runtime.store.clock import Clock
from coldpress.runtime.store.resident import chosen_from, draft_seconds
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import Recorder
from coldpress.schemas.errors import CorruptPageError
from coldpress.schemas.manifest import RESIDENT_FILE
from tests.runtime.test_refine import ALL_IN_DRAM, TOKENS, logits_of
from tests.support.artifacts import Recipe, build_artifact, change_manifest, files_of, refuse, small_spec

FINER = {0: "int4_3_1", 3: "int4_3_1", 4: "int4_3_1", 10: "int4_3_1"}
MATRICES = FINER | {
    1: "int4_2_2+int4_3_1+int4_2_2",
    4: "int4_3_1+int4_2_2+int4_3_1",
    7: "int4_2_2+int4_2_2+int4_3_1",
    10: "int4_3_1+int4_3_1+int4_2_2",
}
PROMPT = [5, 17, 3, 60]
SPEC = small_spec(num_hidden_layers=11, intermediate_size=96, hidden_act="silu")


def mixed(folder, **changes):
    """An artifact of eleven layers: four have three coarse bits, the others two; by matrix with `MATRICES`."""
    fields = {"spec": SPEC, "method": "dense", "density": 1.0, "format": "int4_2_2", "layer_formats": FINER}
    return build_artifact(folder, Recipe(**(fields | changes)))


def split(codes: np.ndarray, layer: int, finer) -> tuple[np.ndarray, np.ndarray]:
    """The coarse planes and refinements of a layer's neurons, slice by slice."""
    name = finer.get(layer, "int4_2_2")
    names = name.split("+") if "+" in name else [name] * 3
    parts = zip(names, np.split(codes, 3, axis=1), strict=True)
    coarse, refinements = zip(*(planes_of(one).split(part) for one, part in parts), strict=True)
    return np.concatenate(coarse, axis=1), np.concatenate(refinements, axis=1)


def finer_bytes(layer: int, finer) -> int:
    """The bytes of a neuron on flash: 16 for each slice of 64 values of two bits, 8 for one of one bit."""
    name = finer.get(layer, "int4_2_2")
    return sum(8 if one == "int4_3_1" else 16 for one in (name.split("+") if "+" in name else [name] * 3))


@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("finer", [FINER, MATRICES])
@pytest.mark.parametrize("families", ["neuron", "mlp_in+mlp_mid", "mlp_mid"])
def test_everything_refined_is_the_plain_format_bit_for_bit(tmp_path, families, finer, experts):
    shape = {"num_hidden_layers": 11, "intermediate_size": 64, "hidden_act": "silu"}
    spec = small_spec(**shape, num_experts=experts, num_experts_per_tok=min(2, experts))
    common = {"spec": spec, "options": {"families": families}, "families": tuple(families.split("+")), **ALL_IN_DRAM}
    planar = mixed(tmp_path / "a", layer_formats=finer, **common)
    plain = build_artifact(tmp_path / "b", Recipe(format="int4_group32", method="dense", density=1.0, **common))
    assert verify_artifact(open_artifact(planar.path)) > 0
    assert (logits_of(Session(planar.path)) == logits_of(Session(plain.path))).all()


@pytest.mark.parametrize("finer", [FINER, MATRICES])
def test_refining_everything_in_dram_is_the_plain_format(tmp_path, finer):
    """A selector that refines few units uses all that are in DRAM, in layers of either format."""
    planar = mixed(tmp_path / "a", method="refine", density=0.1, layer_formats=finer, **ALL_IN_DRAM)
    plain = build_artifact(
        tmp_path / "b", Recipe(spec=SPEC, format="int4_group32", method="dense", density=1.0, **ALL_IN_DRAM)
    )
    found = []
    for one in (planar, plain):
        session = Session(one.path)
        session.decoder.begin(32)
        session.decoder.prefill(TOKENS[:4])
        found.append(np.stack([session.decoder.decode(token) for token in TOKENS[4:].tolist()]))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5 * np.abs(found[1]).max())


@pytest.mark.parametrize(("base", "other"), [("int4_2_2", "int4_3_1"), ("int4_3_1", "int4_2_2")])
def test_units_that_are_read_give_the_tokens_of_one_format(tmp_path, base, other):
    common = {"spec": small_spec(num_hidden_layers=11, intermediate_size=512), "format": base, "cache": "lfu"}
    expected = Session(mixed(tmp_path / "a", layer_formats={}, **common).path).generate(PROMPT, 24)
    session = Session(mixed(tmp_path / "b", layer_formats=dict.fromkeys(FINER, other), **common).path)
    found = session.generate(PROMPT, 24)
    assert found.token_ids == expected.token_ids
    assert found.metrics.hits > 0
    assert found.metrics.read_bytes > 0


@pytest.mark.parametrize("finer", [FINER, MATRICES])
def test_requests_and_passes_bring_each_layer_s_own_refinements(tmp_path, finer):
    built = mixed(tmp_path / "a", slots_share=0.3, layer_formats=finer)
    store = Session(built.path).store
    for again in (False, True):  # the second time some units are in slots
        for key, codes in built.units.items():
            expected = split(codes, key[0], finer)[1]
            ids = np.arange(key[0] % 3, 96, 5, dtype=np.int32)
            for batch in store.submit(key, ids):
                assert (batch.rows[batch.slots] == expected[batch.ids]).all()
            for found, rows in store.stream(key):
                assert (rows == expected[found]).all()
        store.end_tokens()
        assert (store.counters.hits > 0) or not again


@pytest.mark.parametrize("finer", [FINER, MATRICES])
def test_units_of_any_size_are_read_ahead(tmp_path, finer):
    """One region of memory serves layers whose units have other sizes; every guess is used and right."""
    built = mixed(tmp_path / "a", method="refine", slots_share=0.1, layer_formats=finer)
    artifact = open_artifact(built.path)
    plan, flash = artifact.manifest.plans[0], artifact.manifest.flash
    ahead = most_bytes(flash.sections, plan.parts, flash.page_bytes, 1 << 30)
    changes = {"preload_buffer_bytes": ahead, "dram_budget_bytes": plan.dram_budget_bytes + ahead}
    store = Store(artifact, plan.model_copy(update=changes), direct.Plugin(artifact, 8))
    ids = np.arange(0, 96, 7, dtype=np.int32)
    for _ in range(2):
        for layer in range(11):
            store.read_ahead((layer, "neuron"), ids)
            before = store.counters.preload_used_bytes
            absent = np.count_nonzero(~store.residency((layer, "neuron")).present[ids])
            expected = split(built.units[layer, "neuron"], layer, finer)[1]
            for batch in store.submit((layer, "neuron"), ids):
                assert (batch.rows[batch.slots] == expected[batch.ids]).all()
            assert store.counters.preload_used_bytes - before == absent * finer_bytes(layer, finer)
        store.end_tokens()
    assert store.counters.preload_used_bytes > 0


def test_a_coarse_unit_has_its_layer_s_bits(tmp_path):
    """What the draft model computes: with two bits in all layers, three in some, and three in all, it moves nearer;
    so it does where single matrices have three."""
    fine = dict.fromkeys(range(11), "int4_3_1")
    formats = ({}, FINER, dict.fromkeys(range(11), "int4_3_1+int4_2_2+int4_3_1") | FINER, fine)
    weights, found = mixed(tmp_path / "weights").weights, []
    for number, others in enumerate(formats):
        session = Session(
            build_artifact(
                tmp_path / f"{number}",
                Recipe(spec=SPEC, method="dense", density=1.0, format="int4_2_2", layer_formats=others),
                weights=weights,
            ).path
        )
        session.decoder.begin(32)
        coarse = np.stack([session.decoder.decode_coarse(token) for token in PROMPT])
        session.decoder.begin(32)
        found.append(np.abs(coarse - [session.decoder.decode(token) for token in PROMPT]).mean())
    assert found[0] > found[1] > found[2] > found[3]


def test_coarse_drafts_change_no_token(tmp_path):
    path = mixed(tmp_path / "a").path
    off, coarse = (load("coldpress.runtime.drafts", Draft, name) for name in ("off", "coarse"))

    class AsMany(Draft):
        """Drafts as many tokens per pass as it may, whatever they cost."""

        drafting = coarse.drafting

    alone, drafted = (
        Session(path).generate(PROMPT, 24, ignore_eos=True, draft=draft, draft_tokens=3) for draft in (off, AsMany())
    )
    assert drafted.token_ids == alone.token_ids
    assert sum(token.drafted for token in drafted.tokens) > 0


# Budgets and seconds


@pytest.mark.parametrize("finer", [FINER, MATRICES])
def test_the_budget_counts_each_layer_s_units(tmp_path, finer):
    """Against the sizes of the files, and by hand: 3 slices of 64 values have 48 bytes of two bits, 24 of one."""
    built = mixed(tmp_path / "a", layer_formats=finer)
    manifest, plan = built.manifest, built.manifest.plans[0]
    sizes = {layer: finer_bytes(layer, finer) for layer in range(11)}
    assert [section.unit_bytes for section in manifest.flash.sections] == list(sizes.values())
    held = sum((part.num_pinned + part.cache_slots) * sizes[part.layer] for part in plan.parts)
    assert used_bytes(manifest, plan) == fixed_bytes(manifest, plan) + held == plan.dram_budget_bytes
    store = Session(built.path).store
    assert sum(memory.slots.rows.nbytes for memory in store._memory.pools.values()) == held
    stored = {role: array.nbytes for role, array in load_file(built.path / RESIDENT_FILE).items()}
    assert plan.resident_bytes == sum(stored.values())
    assert stored["layers.3.neuron.coarse"] - stored["layers.2.neuron.coarse"] == 96 * 24
    assert whole_bytes(manifest, plan) - fixed_bytes(manifest, plan) + plan.read_buffer_bytes == 96 * sum(
        sizes.values()
    )


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
    recipe = {"method": "refine", "density": 0.5, "slots_share": 0.02}
    recorder = Recorder()
    built = mixed(tmp_path / "a", spec=small_spec(num_hidden_layers=11, intermediate_size=512), **recipe)
    session = Session(built.path, recorder=recorder)
    session.generate(PROMPT, 12)
    assert session.store.counters.read_bytes > 0
    assert simulate(session.artifact, session.plan, recorder.events).extents_sha256 == session.store.extents_sha256()


def test_the_clock_multiplies_units_in_their_layer_s_format(tmp_path):
    """Beside coarse planes where some are refined, at the layer's own format's bytes; joined where all are."""
    manifest = mixed(tmp_path / "a", method="refine").manifest
    found = chosen_from(manifest, manifest.plans[0])
    assert [found[layer, "neuron"].format for layer in range(11)] == [FINER.get(at, "int4_2_2") for at in range(11)]
    assert [found[layer, "neuron"].num_bytes // 96 for layer in range(11)] == [
        24 if at in FINER else 48 for at in range(11)
    ]
    dense = mixed(tmp_path / "b").manifest
    joined = chosen_from(dense, dense.plans[0])
    assert {one.passed * one.num_bytes for one in joined.values()} == {3 * 36 * 96}  # int4's bytes in every layer
    assert Clock(dense, dense.plans[0]).fetch_s == 0


def test_a_draft_takes_the_seconds_of_each_layer_s_coarse_planes(tmp_path):
    """Without rates of computing, seconds are bytes over DRAM bandwidth."""
    found = []
    for number, others in enumerate(({}, FINER)):
        manifest = mixed(tmp_path / f"{number}", layer_formats=others).manifest
        found.append(draft_seconds(manifest, manifest.plans[0]) * manifest.device.dram_bytes_per_s.value)
    assert found[1] - found[0] == pytest.approx(4 * 96 * 24)


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


def _of_role(manifest):
    next(one for one in manifest["resident"] if one["role"] == "layers.3.neuron.coarse")["format"] = "int4_2_2"


def _without(manifest):
    manifest["features"]["required"].remove("layer-formats")


def _plain_family(manifest):
    manifest["families"][0].update(format="int4_group32", unit_bytes=108)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (_of_section(format="int4_2_2"), errors.SectionError, ["sections[3].format", "one of int4_3_1, which share"]),
        (_of_section(format="int8_4_4"), errors.SectionError, ["sections[3].format", "'int8_4_4'", "one of int4_3_1"]),
        (_of_section(format="int4_group32"), errors.SectionError, ["sections[3].format", "'int4_group32'"]),
        (_of_section(format="int5_4_1"), errors.SectionError, ["sections[3].format", "'int5_4_1'"]),
        (
            _of_section(unit_bytes=48, stride_bytes=48),
            errors.SectionError,
            ["sections[3].unit_bytes is 48", "expected 24"],
        ),
        (
            lambda manifest: manifest["flash"]["sections"][3].pop("format"),
            errors.SectionError,
            ["sections[3].unit_bytes is 24"],
        ),
        (_of_section(format="int4_2_2+int4_3_1"), errors.SectionError, ["sections[3].format", "3 with + between"]),
        (_of_section(format="int4_3_1+int4_3_1+int4_3_1"), errors.SectionError, ["sections[3].format"]),
        (_of_section(format="int4_3_1+int8_4_4+int4_2_2"), errors.SectionError, ["sections[3].format", "int8_4_4"]),
        (_of_section(format="int4_3_1+int4_2_2+int4_2_2"), errors.SectionError, ["unit_bytes is 24, expected 40"]),
        (_of_section(format="int4_3_1+"), errors.SchemaError, ["sections.3.format"]),
        (_of_section(last_layer=4), errors.SectionError, ["sections[3].stride_bytes"]),
        (_of_role, errors.ModelError, ["resident[", "is int4_2_2, expected int4_3_1, as its units"]),
        (_without, errors.FeatureError, ["a list without layer-formats"]),
        (_plain_family, errors.SectionError, ["sections[0].format", "expected none"]),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path, change, kind, words):
    path = mixed(tmp_path / "a").path
    change_manifest(path, change)
    refuse(path, kind, *words)


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
    """A unit of layer 4 has 2 x 14, 2 x 10 and 2 x 14 coarse bytes."""
    built = mixed(tmp_path / "a", layer_formats=MATRICES)
    arrays = load_file(built.path / RESIDENT_FILE)
    coarse = arrays["layers.4.neuron.coarse"]
    assert coarse.shape[1] == 76
    coarse[5, (0, 28, 48)[slice_number] + 1] = 0x7C  # infinity
    save_file(arrays, built.path / RESIDENT_FILE)
    change_manifest(built.path, lambda manifest: manifest.update(files=files_of(built.path)))
    with pytest.raises(errors.NonFiniteError, match=r"layers\.4\.neuron\.coarse"):
        verify_artifact(open_artifact(built.path))


def test_an_older_reader_refuses_formats_of_slices(tmp_path, monkeypatch):
    built = mixed(tmp_path / "a", layer_formats=MATRICES)
    known = [name for name in checks.known_features() if name != "slice-formats"]
    monkeypatch.setattr(checks, "known_features", lambda: known)
    refuse(built.path, errors.FeatureError, "'slice-formats'", "use a newer runtime")


def test_inspect_counts_matrices(tmp_path):
    artifact = open_artifact(mixed(tmp_path / "a", layer_formats=MATRICES).path)
    summary = describe(artifact)
    assert summary["families"][0]["other_formats"]["7"] == "int4_2_2+int4_2_2+int4_3_1"
    assert summary["families"][0]["total_bytes"] == 96 * sum(finer_bytes(layer, MATRICES) for layer in range(11))
    assert "int4_2_2, 12 matrices int4_3_1" in render(summary, artifact.manifest.model)


def test_inspect_names_the_formats_and_counts_their_bytes(tmp_path):
    built = mixed(tmp_path / "a")
    artifact = open_artifact(built.path)
    summary = describe(artifact)
    (family,) = summary["families"]
    assert family["other_formats"] == {"0": "int4_3_1", "3": "int4_3_1", "4": "int4_3_1", "10": "int4_3_1"}
    assert family["total_bytes"] == 96 * (7 * 48 + 4 * 24)
    assert family["coarse_bytes"] == 96 * (7 * 60 + 4 * 84)
    assert "int4_2_2, 4 layers int4_3_1" in render(summary, artifact.manifest.model)
    (plan,) = summary["plans"]
    assert plan["pinned_bytes"] == sum(6 * (24 if layer in FINER else 48) for layer in range(11))
