"""compiler/workflow/settings.py: every refusal is one sentence, and what nobody said gets the default that suits the
model."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import LlamaConfig

from coldpress.compiler.candidates import methods_for
from coldpress.compiler.profiles import load_model
from coldpress.compiler.workflow import inputs, settings
from coldpress.compiler.workflow.keys import config_keys
from coldpress.runtime import plugins
from coldpress.schemas.errors import ColdpressError, UnknownNameError
from tests.support.llama_bench import write_llama_bench

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a config.json that `resolve` reads."""
    folder = tmp_path / "My model (v2)"
    folder.mkdir()
    write_config(folder)
    return folder


def write_config(folder: Path, **changes: object) -> None:
    """A complete config.json of a tiny Llama; `None` takes a key out."""
    values = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 9,
        "num_attention_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    kept = {key: value for key, value in {**values, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def refusal(**raw: object) -> str:
    with pytest.raises(ColdpressError) as caught:
        settings.resolve(raw)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults_suit_the_demo_model() -> None:
    built = settings.resolve({})
    assert (built.model.name, built.device.name) == ("relu-demo", "pixel6")
    assert (built["method"], built["dram_budget"], built["format"]) == ("relu", "80%", "fp16"), "the profile's"
    assert (built["corpus"], built["cache"], built["seed"]) == ("pydoc", "auto", 0)


def test_defaults_suit_a_model_without_exact_zeros() -> None:
    built = settings.resolve({"model": "mistral-7b", "device": "oneplus12", "corpus": "pydoc"})
    assert built["method"] == "auto", "allocate decides"
    assert not settings.needs_predictors(built)
    assert (built["format"], built["cache"]) == ("auto", "auto"), "and with it what goes with the method"
    given = settings.resolve({"model": "mistral-7b", "device": "oneplus12", "corpus": "pydoc", "method": "topk"})
    assert (given["format"], given["cache"]) == ("int4_group32", "auto"), "`plan` compares the caches"
    assert built["dram_budget"] == built.device.dram_budget_bytes.value
    assert built.model.source == "mistralai/Mistral-7B-v0.1"
    assert built.model.revision is not None


def test_the_user_goes_before_the_profile() -> None:
    built = settings.resolve({"format": "fp16", "dram_budget": "3GB", "context_length": 64})
    assert (built["format"], built["dram_budget"], built["context_length"]) == ("fp16", 3_000_000_000, 64)


@pytest.mark.parametrize(
    ("key", "raw", "expected"),
    [
        ("distill", "true", True),
        ("distill", "False", False),
        ("distill", True, True),
        ("seed", 7.0, 7),
        ("calibration_tokens", 1000.0, 1000),
        ("density", "30%", 0.3),
        ("density", 1, 1.0),
        ("dram_budget", 4096, 4096),
        ("dram_budget", "1.5GiB", 3 * 2**29),
        ("dram_budget", "12.5%", "12.5%"),
        ("corpus", 7, "7"),
    ],
)
def test_values_arrive_as_snakemake_parses_them(key: str, raw: object, expected: object) -> None:
    found = settings.resolve({key: raw})[key]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("key", "raw", "found", "expected"),
    [
        (
            "density",
            0,
            "is 0,",
            "expected a number above 0 and at most 1: share of the MLP's weights that a token uses",
        ),
        (
            "density",
            1.5,
            "is 1.5,",
            "expected a number above 0 and at most 1: share of the MLP's weights that a token uses",
        ),
        (
            "density",
            "half",
            "is 'half',",
            "expected a number above 0 and at most 1: share of the MLP's weights that a token uses",
        ),
        ("seed", -1, "is -1,", "expected a whole number at least 0: seed of everything that is drawn"),
        ("seed", 1.5, "is 1.5,", "expected a whole number at least 0: "),
        ("seed", True, "is True,", "expected a whole number at least 0: "),
        ("distill", "perhaps", "is 'perhaps',", "expected true or false: whether the model is distilled"),
        ("distill", 1, "is 1,", "expected true or false: "),
        ("calibration_tokens", 0, "is 0,", "expected a whole number at least 1: most tokens of calibration text"),
        ("layers_per_job", "two", "is 'two',", "expected a whole number at least 1: layers of one job"),
        ("max_ppl_ratio", 0, "is 0,", "expected a number above 0"),
        ("density", 2, "is 2,", "expected a number above 0 and at most 1: share of the MLP's weights"),
        ("corpus", ["a.txt", "b.txt"], "is ['a.txt', 'b.txt'],", "expected text: pydoc, a .txt"),
        ("cache", 7, "unknown cache '7'.", "Known: "),
        ("dram_budget", "3XB", "'3XB' is not an amount of memory;", "write bytes, or a number with B, kB"),
        ("dram_budget", "0%", "'0%' of the model is not a DRAM budget;", "give more than 0% and at most 100%"),
        ("dram_budget", "101%", "'101%' of the model is not a DRAM budget;", "give more than 0% and at most 100%"),
        ("dram_budget", 0, "'0' is less than one byte;", "give a positive amount of memory"),
        ("format", None, "config key 'format' has no value;", "leave it out to take its default"),
        ("format", "", "config key 'format' has no value;", "leave it out to take its default"),
        ("corpus_revision", "a branch", "is 'a branch',", "expected text: the commit that a hub dataset"),
        ("revision", "../main", "is '../main',", "expected text: a commit of the hub, or a branch"),
    ],
)
def test_bad_values_are_named_with_what_fits(key: str, raw: object, found: str, expected: str) -> None:
    text = refusal(**{key: raw})
    assert (f"config key '{key}' {found}" if found.startswith("is ") else found) in text
    assert expected in text


@pytest.mark.parametrize(
    ("raw", "nearest"),
    [
        ({"device": "pixel66"}, "pixel6"),
        ({"model": "mistal-7b"}, "mistral-7b"),
        ({"method": "predictors"}, "predictor"),
        ({"format": "int8_group"}, "int8_group32"),
        ({"format": "int4_group"}, "int4_group32"),
        ({"algorithm": "rtm"}, "rtn"),
        ({"explore": "wole"}, "whole"),
        ({"cache": "lruu"}, "lru"),
        ({"order": "riple"}, "ripple"),
    ],
)
def test_unknown_names_come_with_the_nearest_and_all(raw: dict[str, object], nearest: str) -> None:
    ((key, name),) = raw.items()
    assert refusal(**raw).startswith(f"unknown {key} '{name}'. Did you mean '{nearest}'? Known: ")


def test_an_unknown_key_comes_with_the_nearest_alone() -> None:
    """There are too many keys to list them beside it."""
    assert refusal(devise="pixel6") == "unknown config key 'devise'. Did you mean 'device'?"
    assert refusal(search_token=9) == "unknown config key 'search_token'. Did you mean 'search_tokens'?"
    assert refusal(zzz=1).startswith("unknown config key 'zzz'. Known: ")


@pytest.mark.parametrize(
    ("key", "value", "stage", "field"),
    [
        ("predictor_tolerance", 0.9, "size", "predictor_tolerance"),
        ("distill_steps", 3, "distill", "distill_steps"),
        ("learning_rate", 1e-3, "distill", "learning_rate"),
        ("evaluation_tokens", 512, "tokenize", "evaluation_tokens"),
        ("block_tokens", 64, "tokenize", "block_tokens"),
        ("pinned_share", 0.25, "place", "pinned_share"),
        ("search_tokens", 99, "order", "search_tokens"),
        ("order", "ripple", "order", "order"),
        ("algorithm", "rtn", "quantize", "algorithm"),
        ("max_ppl_ratio", 1.05, "publish", "max_ppl_ratio"),
        ("test_tokens", 64, "verify", "test_tokens"),
    ],
)
def test_a_stage_s_settings_are_keys(key: str, value: object, stage: str, field: str) -> None:
    built = settings.resolve({key: value})
    assert built.of_stage(stage)[field] == value
    assert f"--{field.replace('_', '-')} {value}" in settings.flags(built, stage)


def test_a_key_goes_to_the_stage_that_takes_it_and_to_no_other() -> None:
    before, after = (settings.of_all_stages(settings.resolve(raw)) for raw in ({}, {"cache": "lru"}))
    assert {stage for stage in before if before[stage] != after[stage]} == {"allocate", "plan"}


def test_flags_are_quoted_and_leave_out_what_nobody_said() -> None:
    built = settings.resolve({"corpus": "my texts.txt"})
    flags = settings.flags(built, "tokenize", folder=None, more={"a": 1})
    assert shlex.split(flags)[:2] == ["--seed", "0"]
    assert "--corpus 'my texts.txt'" in flags
    assert shlex.split(flags)[-2:] == ["--more", '{"a": 1}']
    assert "--density " not in settings.flags(built, "allocate")


@pytest.mark.parametrize(
    ("families", "sentence"),
    [
        ("gate_down+mlp_in", "families=gate_down+mlp_in: gate_proj is in two of them, expected it in one"),
        ("expert", "families=expert: unknown 'expert', known are neuron, "),
        ("gate_down+mlp_mid", "families=gate_down+mlp_mid: down_proj is in two of them, expected it in one"),
    ],
)
def test_families_are_checked_before_anything_is_read(families: str, sentence: str, checkpoint: Path) -> None:
    """A model of any size is refused before `ingest`."""
    settings.resolve({"model": str(checkpoint), "method": "dense", "families": "neuron+attn_in"})
    assert refusal(model=str(checkpoint), method="dense", families=families).startswith(sentence)
    assert refusal(model=str(checkpoint), families=families).startswith(sentence), "a candidate of method=auto"


def test_families_that_no_decoder_computes_are_refused(checkpoint: Path) -> None:
    expected = r"method=dense keeps up_down on flash, expected families from which an ungated MLP can be computed"
    assert refusal(model="opt-6.7b", revision="0" * 40, corpus="pydoc", method="dense", families="up_down").startswith(
        expected
    )
    assert settings.resolve({"model": str(checkpoint), "method": "dense", "families": "up_down"})["method"] == "dense"


def test_every_setting_is_resolved_and_nothing_else_is_accepted() -> None:
    built = settings.resolve({})
    open_still = {key for key, value in built.values.items() if value is None}
    assert open_still == {key for key in open_still if config_keys()[key].mark.default}, "words say what then holds"
    with pytest.raises(UnknownNameError):
        settings.resolve({"x": 1})


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"formatt": "fp16"}, "unknown config key 'formatt'. Did you mean 'format'?"),
        ({"density": 2}, "config key 'density' is 2, expected a number above 0"),
        ({"device": "pixel6"}, "a profile cannot set 'device'; give it with --config"),
    ],
)
def test_a_profile_is_checked_as_a_user_is(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, str | int], sentence: str
) -> None:
    profile = load_model("relu-demo").model_copy(update={"settings": setting})
    monkeypatch.setattr(settings, "load_model", lambda _: profile)
    assert f"profiles/models/relu-demo.yaml: settings: {sentence}" in refusal()


def test_a_folder_is_a_model(checkpoint: Path) -> None:
    built = settings.resolve({"model": str(checkpoint)})
    assert built.model.name == "My-model-v2"
    assert built.model.revision is None
    assert (built.model.num_hidden_layers, built["context_length"], built["method"]) == (9, 512, "auto")
    assert built.model.source == str(checkpoint)


def test_paths_read_the_same_wherever_snakemake_is_called(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the folder of the model's builds, through no link."""
    top = checkpoint.parent
    (top / "texts").mkdir()
    (top / "texts" / "a.txt").write_text("a")
    (top / "link").symlink_to(checkpoint)
    monkeypatch.chdir(top)
    here = settings.resolve({"model": "link", "corpus": "texts", "build_dir": "out"})
    monkeypatch.chdir(checkpoint)
    there = settings.resolve({"model": str(checkpoint), "corpus": "../texts", "build_dir": str(top / "out")})
    assert here.folder == there.folder == top / "out" / here.model.name
    for built in (here, there):
        assert built.checkpoint == f"../{checkpoint.name}"
        assert inputs.checkpoint_files(built) == [f"../{checkpoint.name}/config.json"]
        assert built["corpus"] == "../texts"
        assert inputs.corpus_files(built) == ["../texts/a.txt"]
    stages = ("tokenize", "preflight", "publish")
    assert [settings.flags(here, stage) for stage in stages] == [settings.flags(there, stage) for stage in stages]


def test_snakemake_is_told_of_names_that_it_takes_as_they_are(tmp_path: Path) -> None:
    """Others, such as one in braces, are followed by their size and time instead."""
    odd = ["a{b}.txt", "a\ttab.txt", "a\nline.txt", os.fsdecode(b"\xff.txt")]
    for name in (*odd, 'it\'s "plain".txt'):
        (tmp_path / name).write_text("a")
    built = settings.resolve({"corpus": str(tmp_path), "build_dir": str(tmp_path)})
    built.folder.mkdir()
    files = inputs.corpus_files(built)
    assert inputs.declared(files) == ['it\'s "plain".txt']
    found = inputs.stamps(built, files)
    assert {name for name, *_ in found} == set(odd)
    (tmp_path / odd[0]).write_text("other")
    assert inputs.stamps(built, files) != found


def test_a_plugin_that_an_option_names_is_in_use() -> None:
    """Its code is the build's, too: an edit of it runs stages again."""
    chosen = {"model": "relu-demo", "device": "pixel6", "cache": "linked"}
    assert settings.resolve(chosen).plugins()["coldpress.runtime.cache"] == ("linked", "lru")
    other = settings.resolve(chosen | {"linked_over": "s3fifo"})
    assert other.plugins()["coldpress.runtime.cache"] == ("linked", "s3fifo")
    assert "unknown linked_over 'static'. Known: lfu, lru, s3fifo, window." in refusal(**chosen, linked_over="static")


def test_the_formats_of_a_file_s_own_codes_are_in_use() -> None:
    """A file may keep its codes where another format was asked for."""
    chosen, package = {"format": "int4_group32", "method": "topk"}, "coldpress.runtime.quantization"
    of_file = settings.resolve({"model": "smollm2-135m-instruct", **chosen}).plugins()[package]
    assert {*of_file} == {*plugins.names(package)}
    of_folder = settings.resolve({"model": "relu-demo", **chosen}).plugins()[package]
    assert "q4_k" not in of_folder


def test_relu_decides_the_candidates(checkpoint: Path) -> None:
    write_config(checkpoint, hidden_act="relu")
    built = settings.resolve({"model": str(checkpoint)})
    assert settings.needs_predictors(built), "they are a candidate"
    every = plugins.names("coldpress.runtime.sparsity")
    assert built.plugins()["coldpress.runtime.sparsity"] == every, "all are looked at"
    candidates = methods_for("auto", built.model.exact_zeros, built.model.is_mixture)
    assert candidates[0] == "dense"
    assert set(candidates) == {*every}
    write_config(checkpoint)
    built = settings.resolve({"model": str(checkpoint), "attention": True})
    without_zeros = methods_for("auto", built.model.exact_zeros, built.model.is_mixture)
    assert {*candidates} - {*without_zeros} == {"relu", "fatrelu", "predictor"}
    assert built.of_stage("allocate")["options"] == {"attention": True}, "an option of a candidate"
    assert "method=relu" in refusal(model=str(checkpoint), method="relu")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a whole number from 1"),
        ({"num_hidden_layers": "12"}, "num_hidden_layers"),
    ],
)
def test_a_config_json_that_cannot_be_compiled(checkpoint: Path, changes: dict[str, object], found: str) -> None:
    write_config(checkpoint, **changes)
    assert found in refusal(model=str(checkpoint))


def test_a_key_that_config_json_lacks_has_the_default_of_the_class(checkpoint: Path) -> None:
    write_config(checkpoint, num_hidden_layers=None)
    assert settings.resolve({"model": str(checkpoint)}).model.num_hidden_layers == LlamaConfig().num_hidden_layers
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": None}))
    assert "num_hidden_layers is None, expected a whole number from 1" in refusal(model=str(checkpoint))


def test_folders_that_are_no_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    assert "does not exist" in refusal(model=str(tmp_path / "none"))
    assert "no config.json" in refusal(model=str(tmp_path))
    (tmp_path / "model.Q4_0.gguf").touch()
    assert "holds the GGUF file model.Q4_0.gguf" in refusal(model=str(tmp_path))
    (tmp_path / "adapter_config.json").touch()
    assert "holds a LoRA adapter (adapter_config.json); merge it" in refusal(model=str(tmp_path))
    (checkpoint / "config.json").write_text("{")
    assert "not JSON" in refusal(model=str(checkpoint))
    assert "has no meaning" in refusal(model=str(checkpoint), revision=COMMIT)


def test_a_branch_needs_a_reachable_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "there is no folder owner/name; as a model of the hub: only the hub knows" in refusal(model="owner/name")
    assert "is not in the local cache" in refusal(model="owner/name", revision=COMMIT)
    unknown = "only the hub knows which commit of the model facebook/opt-125m is main, and it cannot be reached; check"
    assert unknown in refusal(model="opt-125m")
    assert settings.resolve({"model": "opt-125m", "revision": COMMIT, "corpus": "pydoc"}).model.revision == COMMIT
    ref = tmp_path / "models--facebook--opt-125m" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text(COMMIT)
    assert settings.resolve({"model": "opt-125m"}).model.revision == COMMIT, "the local cache knows it"
    unknown = "only the hub knows which commit of the dataset owner/name is main"
    assert unknown in refusal(model=str(checkpoint), corpus="owner/name:subset")


def test_a_pinned_profile_needs_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    built = settings.resolve({"model": "mistral-7b", "locked": True})
    assert built["corpus"].startswith("Salesforce/wikitext:")
    assert re.fullmatch(r"[0-9a-f]{40}", built["corpus_revision"])
    assert built.pins == {}
    assert "has no meaning for the corpus pydoc" in refusal(corpus_revision=COMMIT)
    given = {"model": "mistral-7b", "corpus_revision": COMMIT, "corpus": "owner/name"}
    assert settings.resolve(given)["corpus_revision"] == COMMIT


def test_chunks_cover_all_layers_once(checkpoint: Path) -> None:
    built = settings.resolve({"model": str(checkpoint), "layers_per_job": 4})
    assert settings.chunks(built) == ["000-003", "004-007", "008-008"]
    assert settings.chunks(settings.resolve({"model": str(checkpoint), "layers_per_job": 99})) == ["000-008"]
    assert len(settings.chunks(settings.resolve({"model": str(checkpoint)}))) <= settings.DEFAULT_CHUNKS


def test_chunks_cut_no_layer_group(checkpoint: Path) -> None:
    built = settings.resolve({"model": str(checkpoint), "layers_per_group": 4})
    assert settings.chunks(built) == ["000-003", "004-007", "008-008"]
    assert built.of_stage("allocate")["layers_per_group"] == 4


def test_corpus_files_are_inputs(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    built = settings.resolve({"corpus": str(tmp_path), "build_dir": str(tmp_path)})
    assert inputs.corpus_files(built) == ["a.txt", "b.txt"]
    assert inputs.corpus_files(settings.resolve({"corpus": "pydoc"})) == []


def test_host_is_the_measured_profile_where_one_exists(tmp_path: Path) -> None:
    shipped = settings.resolve({"device": "host", "build_dir": str(tmp_path)}).device
    assert shipped.dram_bytes.source.startswith("assumption")
    measured = shipped.model_copy(update={"title": "measured"})
    (tmp_path / "host.yaml").write_text(measured.to_json())
    assert settings.resolve({"device": "host", "build_dir": str(tmp_path)}).device.title == "measured"


def test_a_device_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(settings.resolve({}).device.model_copy(update={"name": "mine"}).to_json())
    assert settings.resolve({"device": str(path)}).device.name == "mine"
    path.write_text("name: mine\nname: yours\n")
    assert "given twice" in refusal(device=str(path))
    path.write_text("name: mine\n")
    assert "missing key 'title'; missing key 'dram_bytes'; " in refusal(device=str(path))
    assert "no such profile" in refusal(device=str(tmp_path / "none.yaml"))


def test_an_importance_matrix_is_a_file_that_is_there(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "my imatrix").write_bytes(b"")
    built = settings.resolve({"model": str(checkpoint), "imatrix": str(tmp_path / "my imatrix")})
    assert (built.workdir / built["imatrix"]).resolve() == tmp_path / "my imatrix"
    assert settings.resolve({"model": str(checkpoint)})["imatrix"] is None
    for missing in (tmp_path / "nowhere", tmp_path):
        assert f"imatrix={missing} is no file" in refusal(model=str(checkpoint), imatrix=str(missing))


def test_a_file_of_llama_bench_is_read_before_anything_else(checkpoint: Path, tmp_path: Path) -> None:
    file = write_llama_bench(tmp_path / "bench.json", {})
    built = settings.resolve({"model": str(checkpoint), "llama_bench": str(file)})
    assert (built.workdir / built["llama_bench"]).resolve() == file
    assert f"llama_bench={tmp_path} is no file" in refusal(model=str(checkpoint), llama_bench=str(tmp_path))
    file.write_text("[]")
    assert "no test generates tokens" in refusal(model=str(checkpoint), llama_bench=str(file))


@pytest.mark.parametrize("key", ["model", "corpus", "imatrix", "llama_bench", "device", "build_dir"])
@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("~nosuchuser/x.yaml", "there is no such user, whose folder ~ would be"),
        (f"./{'x' * 256}.yaml", "the system refuses it (File name too long)"),
        (f"{'x' * 256}/y.yaml", "the system refuses it (File name too long)"),
        ("./a\0b.yaml", "it holds a null byte"),
    ],
)
def test_a_path_that_the_system_refuses_is_told(key: str, value: str, why: str) -> None:
    text = refusal(**{key: value})
    assert text.startswith(f"{key}=")
    assert f"names no file or folder: {why}; give another path" in text
    assert len(text) < 250


@pytest.mark.parametrize("digits", [301, 5000])
def test_numbers_of_thousands_of_digits_are_refused(digits: int) -> None:
    number = 10 ** (digits - 1)
    for key, declared in config_keys().items():
        if declared.names:
            continue
        said = f"config key '{key}' is a number of more than 300 digits; give a smaller one"
        assert refusal(**{key: number if digits > 301 else number * 10}) == said
    for key in ("calibration_tokens", "dram_budget", "pinned_share"):
        with sys_digits(6000):
            text = str(number)
        assert len(refusal(**{key: text})) < 600


@contextmanager
def sys_digits(most: int) -> Iterator[None]:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(most)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize("key", ["revision", "label", "corpus_revision", "corpus_field", "calibration_tokens"])
def test_a_long_value_is_not_echoed_whole(key: str) -> None:
    assert "(5002 characters)" in refusal(**{key: "g" * 5000})
    assert len(refusal(**{key: "g" * 5000})) < 600
    if key != "corpus_field":
        assert len(refusal(**{key: "/" * 4000})) < 600


def test_an_artifacts_name_is_no_longer_than_a_files(checkpoint: Path) -> None:
    folder = checkpoint.rename(checkpoint.parent / ("m" * 150))
    assert settings.resolve({"model": str(folder)}).model.name == "m" * 150
    assert "has more than 200 characters; it is made of the names of" in refusal(model=str(folder), label="l" * 40)


def test_the_jobs_that_share_calibration_text_are_bounded() -> None:
    """Snakemake plans each of them while it reads the rules."""
    assert settings.resolve({"calibration_shards": 1024})["calibration_shards"] == 1024
    for shards in (1025, 20_000, 10**9, "1000000000"):
        assert "a whole number at least 1 and at most 1024" in refusal(calibration_shards=shards)
