"""The reader believes nothing: every way in which an artifact can be wrong has its error, which names the place."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from coldpress.runtime.artifact import errors
from coldpress.runtime.artifact.reader import open_artifact
from tests.support.artifacts import (
    Recipe,
    build_artifact,
    change_arrays,
    change_manifest,
    files_of,
    open_descriptors,
    refuse,
    small_spec,
    write_manifest,
)


def test_a_valid_artifact_hands_out_what_is_in_it(relu_artifact):
    artifact = open_artifact(relu_artifact.path)
    assert artifact.manifest == relu_artifact.manifest
    assert (artifact.resident["norm.weight"] == relu_artifact.weights["norm.weight"]).all()
    expected = relu_artifact.weights["layers.3.gate_proj.weight"].astype(np.float16)
    assert (artifact.resident["layers.3.gate_proj.weight"].view(np.float16) == expected).all()
    assert "layers.3.up_proj.weight" not in artifact.resident
    for section in artifact.manifest.flash.sections:
        key = section.first_layer, section.family
        assert (artifact.order(section) == relu_artifact.order[key]).all()
        assert (artifact.rank(*key)[:32] == relu_artifact.pinned[key]).all()
    assert artifact.predictors == {}
    assert artifact.skipped_plans == ()


def test_predictors_come_with_their_thresholds(predictor_artifact):
    predictors = open_artifact(predictor_artifact.path).predictors
    assert sorted(predictors) == list(range(12))
    assert predictors[4].format == "int8_group32"
    assert (predictors[4].fc1.dtype, predictors[4].fc1.shape) == (np.uint8, (8, 68))
    assert (predictors[4].fc2.dtype, predictors[4].fc2.shape) == (np.uint8, (512, 34))
    assert predictors[4].threshold == 0.1


def test_the_identity_is_the_manifests_digest(path):
    first = open_artifact(path).sha256
    change_manifest(path, lambda manifest: manifest["source"].update(name="other"))
    assert open_artifact(path).sha256 != first


def test_other_architectures_pass_the_same_checks(tmp_path):
    spec = small_spec(
        num_hidden_layers=2, gated_mlp=False, norm="layer_norm", position="learned", rotary_dim=0, position_offset=2
    )
    artifact = open_artifact(build_artifact(tmp_path / "opt", Recipe(spec=spec)).path)
    assert artifact.resident["embed_positions.weight"].shape == (66, 64)
    assert artifact.resident["layers.1.down_proj.bias"].shape == (64,)
    assert {section.family for section in artifact.manifest.flash.sections} == {"mlp_mid"}


def test_files_are_read_with_their_digest(path):
    (path / "tokenizer").mkdir()
    (path / "tokenizer/tokenizer.json").write_bytes(b"{}")
    change_manifest(path, lambda manifest: None, relist=True)
    assert open_artifact(path).read_bytes("tokenizer/tokenizer.json", 2) == b"{}"
    with pytest.raises(errors.FileSizeError, match=r"tokenizer/tokenizer.json: the size is 2 bytes, expected at most"):
        open_artifact(path).read_bytes("tokenizer/tokenizer.json", 1)
    (path / "tokenizer/tokenizer.json").write_bytes(b"[]")
    with pytest.raises(errors.DigestError, match=r"tokenizer/tokenizer.json: the sha256 is"):
        open_artifact(path).read_bytes("tokenizer/tokenizer.json", 2)
    with pytest.raises(KeyError):
        open_artifact(path).read_bytes("README.md", 2)


def test_the_folder_is_closed_with_the_last_that_uses_it(path):
    before = open_descriptors(path, collect=True)
    artifact = open_artifact(path)
    copied = dataclasses.replace(artifact, sha256="0" * 64)
    del artifact
    assert copied.resident
    del copied
    assert open_descriptors(path) == before


# The folder and its files


# The manifest as text


# Versions and features


def test_another_major_version_is_refused_whatever_else_has_changed(path):
    write_manifest(path, {"format": {"name": "coldpress", "major": 3, "minor": 1}, "everything": "else"})
    refuse(path, errors.VersionError, "is 3.1", "2.x", "up to 2.0")
    change = {"format": {"name": "gguf", "major": 2, "minor": 0}}
    write_manifest(path, change)
    refuse(path, errors.VersionError, "'gguf'", "'coldpress'")


def test_unknown_required_features_are_refused_and_optional_ones_ignored(path):
    change_manifest(path, lambda manifest: manifest["features"]["optional"].append("sparkles"))
    open_artifact(path)
    change_manifest(path, lambda manifest: manifest["features"]["required"].append("zstd-sections"))
    refuse(path, errors.FeatureError, "'zstd-sections'", "crc32c-pages")


def test_unknown_fields_are_dropped_only_from_a_newer_minor_version(path):
    def extend(manifest):
        manifest["extra"] = {"a": 1}
        manifest["plans"][0]["window"] = 5
        manifest["flash"]["sections"][3]["note"] = "x"

    plain = open_artifact(path).manifest
    change_manifest(path, extend)
    refuse(path, errors.SchemaError, "manifest.json")
    change_manifest(path, lambda manifest: manifest["format"].update(minor=7))
    found = open_artifact(path).manifest
    assert found == plain.model_copy(update={"format": found.format})


def test_a_newer_minor_version_may_have_more_tensors(path):
    change_arrays(path, "tables.safetensors", lambda arrays: arrays.update(windows=np.zeros(3, np.int32)))
    refuse(path, errors.TensorFileError, "tables.safetensors", "'windows'")
    change_manifest(path, lambda manifest: manifest["format"].update(minor=1))
    open_artifact(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.pop("families"),
        lambda manifest: manifest["model"].update(hidden_size="64"),
        lambda manifest: manifest["model"].update(hidden_size=-64),
        lambda manifest: manifest["model"].update(hidden_act="swishy"),
        lambda manifest: manifest["flash"].update(page_bytes=4096.0),
        lambda manifest: manifest["files"][0].update(sha256="abc"),
        lambda manifest: manifest.update(byte_order="big"),
        lambda manifest: manifest.update(plans=[]),
    ],
)
def test_fields_outside_the_schema_are_refused(path, change):
    change_manifest(path, change)
    refuse(path, errors.SchemaError, "what the schema says")


# What the manifest says about itself: (change, error, words)

SECTIONS = errors.SectionError
MANIFEST_CASES = {
    "unaligned": (lambda m: section(m, 1, offset_bytes=131072 + 4096), SECTIONS, "sections[1].offset_bytes"),
    "overlap": (lambda m: section(m, 1, offset_bytes=65536), SECTIONS, "sections[1].offset_bytes"),
    "hole": (lambda m: section(m, 11, offset_bytes=1 << 30), SECTIONS, "sections[11].offset_bytes"),
    "late start": (
        lambda m: section(m, 0, offset_bytes=65536),
        SECTIONS,
        "sections[0].offset_bytes is 65536, expected 0",
    ),
    "order": (lambda m: m["flash"]["sections"].reverse(), SECTIONS, "sections[0].offset_bytes"),
    "twice": (lambda m: layers(m, 1, 0, 0), SECTIONS, "sections[1]", "layer 0"),
    "layer": (lambda m: layers(m, 1, 99, 99), SECTIONS, "sections[1]", "layer 99"),
    "family": (lambda m: section(m, 1, family="neuron"), SECTIONS, "sections[1]", "neuron"),
    "one less": (lambda m: m["flash"]["sections"].pop(), SECTIONS, "covers 11", "12 layers"),
    "units": (lambda m: section(m, 2, num_units=511), SECTIONS, "sections[2].num_units is 511, expected 512"),
    "unit size": (lambda m: section(m, 2, unit_bytes=128), SECTIONS, "sections[2].unit_bytes is 128, expected 256"),
    "family size": (lambda m: m["families"][0].update(unit_bytes=128), SECTIONS, "families[0].unit_bytes"),
    "slices": (lambda m: m["families"][0]["slices"].reverse(), SECTIONS, "families[0].slices", "up_proj row"),
    "families twice": (lambda m: m["families"].append(m["families"][0]), SECTIONS, "families"),
    "page": (lambda m: m["flash"].update(page_bytes=3000), SECTIONS, "page_bytes is 3000"),
    "page size": (lambda m: m["flash"].update(page_bytes=131072), SECTIONS, "page_bytes is 131072"),
    "image size": (lambda m: m["flash"].update(size_bytes=1 << 20), SECTIONS, "size_bytes is 1048576", "as in files"),
    "a billion layers": (
        lambda m: m["model"].update(num_hidden_layers=10**9),
        SECTIONS,
        "num_hidden_layers is 1000000000",
        "resident tensors",
    ),
    "a billion layers in a section": (lambda m: layers(m, 1, 1, 10**9), SECTIONS, "layers 1 to 1000000000"),
    "two layers in two": (lambda m: layers(m, 1, 1, 2), SECTIONS, "sections[1].stride_bytes is 256, expected 512"),
    "backwards": (lambda m: layers(m, 1, 1, 0), SECTIONS, "sections[1]", "layers 1 to 0"),
    "stride": (lambda m: section(m, 2, stride_bytes=512), SECTIONS, "sections[2].stride_bytes is 512, expected 256"),
    "files": (lambda m: m["files"].pop(0), errors.FileNameError, "without flash.img"),
    "heads": (lambda m: m["model"].update(num_key_value_heads=3), errors.ModelError, "num_key_value_heads is 3"),
    "rotary": (
        lambda m: m["model"].update(rotary_dim=18),
        errors.ModelError,
        "rotary_dim is 18",
        "at most head_dim, 16",
    ),
    "odd rotary": (lambda m: m["model"].update(rotary_dim=15), errors.ModelError, "rotary_dim is 15", "even"),
    "no rotary": (lambda m: m["model"].update(rotary_dim=0), errors.ModelError, "rotary_dim is 0", "positive"),
    "token": (
        lambda m: m["model"].update(eos_token_ids=[96]),
        errors.ModelError,
        "eos_token_ids",
        "below vocab_size, 96",
    ),
    "resident role": (lambda m: m["resident"].pop(0), errors.ModelError, "embed_tokens.weight"),
    "resident twice": (lambda m: m["resident"].append(m["resident"][0]), errors.ModelError, "distinct roles"),
    "resident shape": (
        lambda m: m["resident"][0].update(shape=[96, 63]),
        errors.ModelError,
        "resident[0]",
        "[96, 64]",
    ),
    "strange role": (lambda m: resident(m, "layers.3.magic.weight"), errors.ModelError, "magic"),
    "flash role": (lambda m: resident(m, "layers.3.up_proj.weight"), errors.ModelError, "up_proj"),
    "too many layers": (lambda m: resident(m, "layers.12.q_proj.bias"), errors.ModelError, "layers.12"),
    "predictors": (lambda m: m["predictors"].append(predictor(0)), errors.FileNameError, "predictors.safetensors"),
    "cache": (
        lambda m: plan(m, cache="magic"),
        errors.FeatureError,
        "the cache 'magic'",
        "belady, lfu, linked, lru",
    ),
    "selector": (lambda m: plan(m, method="magic"), errors.FeatureError, "the selector 'magic'", "predictor", "relu"),
    "no name": (lambda m: plan(m, cache="../lru"), errors.SchemaError, "plans.0.cache"),
    "method": (lambda m: plan(m, method="predictor"), errors.PlanError, "plans[0].method", "up_down"),
    "selector arrays": (lambda m: plan(m, method="topk"), errors.PlanError, "plans[0].arrays", "num_selected int32"),
    "context": (lambda m: plan(m, context_length=65), errors.PlanError, "context_length is 65, expected at most 64"),
    "resident sum": (lambda m: plan(m, resident_bytes=1), errors.PlanError, "resident_bytes is 1,"),
    "predictor sum": (lambda m: plan(m, predictor_bytes=1), errors.PlanError, "predictor_bytes is 1, expected 0"),
    "KV sum": (lambda m: plan(m, kv_cache_bytes=5), errors.PlanError, "kv_cache_bytes is 5, expected 49152"),
    "buffer": (lambda m: plan(m, read_buffer_bytes=4096), errors.PlanError, "read_buffer_bytes is 4096", "least 8192"),
    "odd buffer": (lambda m: plan(m, read_buffer_bytes=32769), errors.PlanError, "read_buffer_bytes is 32769"),
    "plan parts": (lambda m: m["plans"][0]["parts"].reverse(), errors.PlanError, "plans[0].parts"),
    "too many slots": (lambda m: part(m, 4, cache_slots=481), errors.PlanError, "plans[0].parts[4]", "at most 512"),
    "budget": (lambda m: plan(m, dram_budget_bytes=100_000), errors.PlanError, "dram_budget_bytes is 100000"),
    "budget by a byte": (lambda m: plan(m, dram_budget_bytes=used(m) - 1), errors.PlanError, "at least", "its parts"),
    "plan names": (lambda m: m["plans"].append(m["plans"][0]), errors.PlanError, "distinct names"),
    "more pinned": (lambda m: part(m, 4, num_pinned=513, cache_slots=0), errors.PlanError, "plans[0].parts[4]", "512"),
    "family not required": (
        lambda m: m["features"]["required"].remove("family.up_down"),
        errors.FeatureError,
        "family.up",
    ),
}


def section(manifest, index, **changes):
    manifest["flash"]["sections"][index].update(changes)


def layers(manifest, index, first, last):
    section(manifest, index, first_layer=first, last_layer=last)


def plan(manifest, **changes):
    manifest["plans"][0].update(changes)


def used(manifest):
    """DRAM that the first plan takes, by FORMAT.md: all its fixed parts, and slots of pinned and cached units."""
    found = manifest["plans"][0]
    sizes = {entry["family"]: entry["unit_bytes"] for entry in manifest["families"]}
    fixed = sum(found[f"{name}_bytes"] for name in ("resident", "predictor", "kv_cache", "read_buffer"))
    slots = sum((entry["num_pinned"] + entry["cache_slots"]) * sizes[entry["family"]] for entry in found["parts"])
    return fixed + slots


def part(manifest, index, **changes):
    manifest["plans"][0]["parts"][index].update(changes)


def resident(manifest, role):
    manifest["resident"].append({"role": role, "format": None, "shape": [64]})


def predictor(layer):
    return {"layer": layer, "rank": 4, "format": "fp16", "threshold": 0.5}


@pytest.mark.parametrize("case", MANIFEST_CASES)
def test_a_manifest_that_contradicts_itself_is_refused(path, case):
    change, kind, *words = MANIFEST_CASES[case]
    change_manifest(path, change)
    refuse(path, kind, *words)


def test_a_predictor_plan_needs_predictors_where_units_are_left_out(predictor_artifact, tmp_path):
    path = shutil.copytree(predictor_artifact.path, tmp_path / "a")

    def without_the_last(manifest):
        manifest["predictors"].pop()
        manifest["plans"][0]["predictor_bytes"] -= 8 * 68 + 512 * 34

    change_manifest(path, without_the_last)
    refuse(path, errors.PlanError, "parts[11].density is 0.25", "1, since layer 11 has no predictor")
    change_manifest(path, lambda manifest: part(manifest, 11, density=1))
    refuse(path, errors.TensorFileError, "predictors.safetensors: tensor '11.fc1' is present")
    change_manifest(path, lambda manifest: manifest.update(predictors=[]))
    refuse(path, errors.PlanError, "plans[0].method is 'predictor'")


@pytest.mark.parametrize("layers", [[0, 2, 1], [0, 0], [5, 12]])
def test_predictors_are_listed_by_layer(predictor_artifact, tmp_path, layers):
    path = shutil.copytree(predictor_artifact.path, tmp_path / "a")
    change_manifest(path, lambda manifest: manifest.update(predictors=[predictor(layer) for layer in layers]))
    refuse(path, errors.ModelError, f"predictors is for layers {layers}", "ascending layers from 0 to 11")


@pytest.mark.parametrize(("field", "value"), [("rank", 7), ("format", "int4_group32")])
def test_a_predictor_of_another_rank_or_format_is_refused(predictor_artifact, tmp_path, field, value):
    path = shutil.copytree(predictor_artifact.path, tmp_path / "a")
    change_manifest(path, lambda manifest: manifest["predictors"][3].update({field: value}))
    refuse(path, errors.PlanError, "predictor_bytes")


def test_a_predictor_in_an_unknown_format_is_refused(predictor_artifact, tmp_path):
    path = shutil.copytree(predictor_artifact.path, tmp_path / "a")
    change_manifest(path, lambda manifest: manifest["predictors"][3].update(format="int3"))
    refuse(path, errors.ModelError, "predictors[3].format is int3", "one of fp16, int4_group32, int8_group32")


# Tensor files: (header as a function of a valid one, words)


# Contents


@pytest.mark.parametrize("value", [511, 512, -1, 2**31 - 1])
def test_an_order_that_is_no_permutation_is_refused(path, value):
    def spoil(arrays):
        order = arrays["order.6.up_down"]
        order[np.argmin(order)] = value

    change_arrays(path, "tables.safetensors", spoil)
    refuse(path, errors.TableError, "order.6.up_down", "without unit 0", "permutation of 512 units")


def test_a_rank_that_is_no_permutation_is_refused(path):
    change_arrays(path, "tables.safetensors", lambda arrays: arrays["rank.0.up_down"].__setitem__(3, 512))
    refuse(path, errors.TableError, "rank.0.up_down", "permutation of 512 units")


def flip_last(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_in_the_tables_is_refused(path):
    flip_last(path / "tables.safetensors")
    refuse(path, errors.DigestError, "tables.safetensors: the sha256 is")


def test_a_flipped_bit_in_the_resident_tensors_is_refused_before_use(path):
    flip_last(path / "resident.safetensors")
    with pytest.raises(errors.DigestError, match=r"resident.safetensors: the sha256 is [0-9a-f]{64}, expected"):
        _ = open_artifact(path).resident


def test_weights_that_are_not_finite_are_refused_before_use(path):
    change_arrays(path, "resident.safetensors", lambda arrays: arrays["norm.weight"].__setitem__(3, np.nan))
    with pytest.raises(errors.NonFiniteError, match=r"tensor 'norm.weight' is holding 1 values"):
        _ = open_artifact(path).resident


@pytest.mark.parametrize(
    ("families", "gated_mlp", "kind"),
    [
        (("neuron", "mlp_mid"), True, "a gated"),
        (("mlp_in", "up_down"), True, "a gated"),
        (("up_down",), False, "an ungated"),
    ],
)
def test_families_that_no_decoder_computes_are_refused(tmp_path, families, gated_mlp, kind):
    spec = small_spec(num_hidden_layers=1, gated_mlp=gated_mlp)
    path = build_artifact(tmp_path / "a", Recipe(spec=spec, method="dense", families=families)).path
    expected = f"expected families from which {kind} MLP can be computed: each matrix in one of them"
    refuse(path, SECTIONS, f"families is {list(families)}, {expected}")


def test_a_family_that_this_runtime_does_not_have_is_refused(path):
    """Such as whole experts, which an early runtime named and no decoder computed."""

    def rename(manifest):
        manifest["families"][0]["family"] = "expert"
        manifest["features"]["required"].append("family.expert")

    change_manifest(path, rename)
    refuse(path, errors.FeatureError, "a required feature is 'family.expert'", "one of crc32c-pages, family.neuron")


@pytest.mark.parametrize("method", ["flash", "dip_ca", "threshold"])
def test_what_a_selector_keeps_has_the_shape_that_the_model_gives_it(tmp_path, method):
    """An array of another length would end in a traceback when a token first selects."""
    built = build_artifact(tmp_path / "a", Recipe(method=method, spec=small_spec(num_hidden_layers=1)))
    for index, array in enumerate(built.manifest.plans[0].arrays):
        copy = shutil.copytree(built.path, tmp_path / str(index))
        tensor = f"selector.0.{array.layer}.{array.family}.{array.name}"

        def longer(arrays, tensor=tensor):
            arrays[tensor] = np.append(arrays[tensor], arrays[tensor][:1])

        (length,) = array.shape
        change_manifest(copy, lambda m, index=index, n=length: m["plans"][0]["arrays"][index].update(shape=[n + 1]))
        change_arrays(copy, "tables.safetensors", longer)
        found = f"plans[0].arrays[{index}] is {array.name} {array.dtype} [{length + 1}]"
        refuse(copy, errors.PlanError, found, f"expected {array.dtype} [{length}]")


def test_what_a_selector_keeps_is_finite(tmp_path):
    path = build_artifact(tmp_path / "a", Recipe(method="wina", spec=small_spec(num_hidden_layers=1))).path
    norms = "selector.0.0.mlp_mid.unit_norms"
    change_arrays(path, "tables.safetensors", lambda arrays: arrays[norms].__setitem__(3, np.nan))
    refuse(path, errors.NonFiniteError, f"tables.safetensors: tensor '{norms}' is holding 1 values")


def test_a_threshold_must_be_a_number(predictor_artifact, tmp_path):
    path = shutil.copytree(predictor_artifact.path, tmp_path / "a")
    text = (path / "manifest.json").read_text().replace('"threshold": 0.1', '"threshold": 1e400', 1)
    (path / "manifest.json").write_text(text)
    refuse(path, errors.JsonError, "1e400")


def test_a_swapped_flash_image_is_not_taken_for_this_one(path, tmp_path):
    """Same sizes, other weights: the page checksums in the tables belong to the manifest."""
    other = build_artifact(tmp_path / "other", Recipe(seed=5)).path
    shutil.copy(other / "tables.safetensors", path / "tables.safetensors")
    refuse(path, errors.DigestError, "tables.safetensors")
    assert {entry["path"] for entry in files_of(path)} == {"flash.img", "resident.safetensors", "tables.safetensors"}


EXTENDED = {
    "residual": {"residual": "parallel"},
    "attention_scale": {"attention_scale": 0.5},
    "attention_softcap": {"attention_softcap": 50.0},
    "logits_softcap": {"logits_softcap": 30.0},
    "embedding_multiplier": {"embedding_multiplier": 8.0},
    "residual_multiplier": {"residual_multiplier": 0.5},
    "logits_scaling": {"logits_scaling": 4.0},
    "rotary_pairs": {"rotary_pairs": "neighbours"},
    "layer_rotary": {"layer_rotary": ("none", "main")},
    "norm.rms_norm_1p": {"norm": "rms_norm_1p"},
    "norm_placement.around": {"norm_placement": "around"},
}


@pytest.mark.parametrize("name", EXTENDED)
def test_an_older_runtime_refuses_what_it_cannot_compute(tmp_path, name):
    """A model's extension is a required feature; a plain model has none, and none of the fields."""
    plain = build_artifact(tmp_path / "plain", Recipe(small_spec(num_hidden_layers=2), method="dense"))
    kept = json.loads((plain.path / "manifest.json").read_text())
    assert not [feature for feature in kept["features"]["required"] if feature.startswith("model.")]
    assert name not in kept["model"]
    built = build_artifact(tmp_path / "a", Recipe(small_spec(num_hidden_layers=2, **EXTENDED[name]), method="dense"))
    required = json.loads((built.path / "manifest.json").read_text())["features"]["required"]
    assert [feature for feature in required if feature.startswith("model.")] == [f"model.{name}"]
    open_artifact(built.path)
    change_manifest(built.path, lambda manifest: manifest["features"]["required"].remove(f"model.{name}"))
    refuse(built.path, errors.FeatureError, f"a list without model.{name}")
