"""compiler/workflow/settings.py: every refusal is one sentence, and what nobody said gets the default that suits the
model."""

import json
from pathlib import Path

import pytest

from compiler.workflow import settings
from schemas.config import BuildRequest
from schemas.errors import ColdpressError, UnknownNameError

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
    assert (built.model.name, built.device.name) == ("demo", "pixel6")
    assert built.method == "predictor"
    assert (built.dram_budget, built.format, built.corpus) == ("50%", "int8_group32", "pydoc")


def test_defaults_suit_a_model_without_exact_zeros() -> None:
    built = settings.resolve({"model": "mistral-7b", "device": "oneplus12", "corpus": "pydoc"})
    assert built.method == "topk"
    assert built.format == "int4_group32"
    assert built.dram_budget == built.device.dram_budget_bytes.value
    assert built.model.source == "mistralai/Mistral-7B-v0.1"
    assert built.model.revision is not None


def test_the_user_goes_before_the_profile() -> None:
    built = settings.resolve({"format": "fp16", "dram_budget": "3GB", "context_length": 64})
    assert (built.format, built.dram_budget, built.context_length) == ("fp16", 3_000_000_000, 64)


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
    found = getattr(settings.resolve({key: raw}), key)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("key", "raw"),
    [
        ("density", 0),
        ("density", 1.5),
        ("density", "half"),
        ("seed", -1),
        ("seed", 1.5),
        ("seed", True),
        ("distill", "perhaps"),
        ("distill", 1),
        ("calibration_tokens", 0),
        ("layers_per_job", "two"),
        ("corpus", ["a.txt", "b.txt"]),
        ("dram_budget", "3XB"),
        ("dram_budget", "0%"),
        ("dram_budget", "101%"),
        ("dram_budget", 0),
        ("format", None),
        ("format", ""),
        ("revision", "main"),
    ],
)
def test_bad_values_are_named(key: str, raw: object) -> None:
    text = refusal(**{key: raw})
    assert str(raw) in text or "no value" in text


@pytest.mark.parametrize(
    ("raw", "nearest"),
    [
        ({"devise": "pixel6"}, "device"),
        ({"device": "pixel66"}, "pixel6"),
        ({"model": "mistal-7b"}, "mistral-7b"),
        ({"method": "predictors"}, "predictor"),
        ({"format": "int8_group"}, "int8_group32"),
        ({"cache": "lruu"}, "lru"),
        ({"order": "riple"}, "ripple"),
        ({"place": "pulp_high"}, "pulp_highs"),
    ],
)
def test_unknown_names_come_with_the_nearest_and_all(raw: dict[str, object], nearest: str) -> None:
    text = refusal(**raw)
    assert next(iter(raw.values())) in text or next(iter(raw)) in text
    assert f"Did you mean '{nearest}'?" in text
    assert "Known: " in text


def test_every_setting_is_resolved_and_nothing_else_is_accepted() -> None:
    built = settings.resolve({})
    assert set(BuildRequest.model_fields) - set(type(built).model_fields) == {"revision"}
    with pytest.raises(UnknownNameError):
        settings.resolve({"x": 1})


def test_a_folder_is_a_model(checkpoint: Path) -> None:
    built = settings.resolve({"model": str(checkpoint)})
    assert built.model.name == "My-model-v2"
    assert built.model.revision is None
    assert (built.model.num_hidden_layers, built.context_length, built.method) == (9, 512, "topk")
    assert settings.checkpoint_files(built) == [str(checkpoint / "config.json")]


def test_a_relative_folder_is_taken_from_the_working_directory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint.parent)
    assert settings.resolve({"model": f"./{checkpoint.name}"}).model.source == checkpoint.name


def test_relu_decides_the_method(checkpoint: Path) -> None:
    write_config(checkpoint, hidden_act="relu")
    assert settings.resolve({"model": str(checkpoint)}).method == "predictor"
    write_config(checkpoint)
    assert "method=relu" in refusal(model=str(checkpoint), method="relu")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "12"}, "num_hidden_layers"),
    ],
)
def test_a_config_json_that_cannot_be_compiled(checkpoint: Path, changes: dict[str, object], found: str) -> None:
    write_config(checkpoint, **changes)
    assert found in refusal(model=str(checkpoint))


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


def test_hub_models_need_a_commit_and_a_reachable_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "needs a pinned revision" in refusal(model="owner/name")
    assert "is not in the local cache" in refusal(model="owner/name", revision=COMMIT)
    assert "needs revision=" in refusal(model="opt-125m")
    assert settings.resolve({"model": "opt-125m", "revision": COMMIT, "corpus": "pydoc"}).model.revision == COMMIT


def test_hub_datasets_need_a_commit(checkpoint: Path) -> None:
    assert "needs corpus_revision=<40 hexadecimal digits>" in refusal(model="mistral-7b")
    assert "needs corpus_revision=" in refusal(model=str(checkpoint), corpus="owner/name:subset")
    assert "has no meaning for the corpus pydoc" in refusal(corpus_revision=COMMIT)
    built = settings.resolve({"model": "mistral-7b", "corpus_revision": COMMIT})
    assert built.corpus_revision == COMMIT
    given = {"model": "mistral-7b", "corpus_revision": COMMIT, "corpus": "owner/name"}
    assert settings.resolve(given).corpus_revision == COMMIT


def test_chunks_cover_all_layers_once(checkpoint: Path) -> None:
    built = settings.resolve({"model": str(checkpoint), "layers_per_job": 4})
    assert settings.chunks(built) == ["000-003", "004-007", "008-008"]
    assert settings.chunks(settings.resolve({"model": str(checkpoint), "layers_per_job": 99})) == ["000-008"]
    assert len(settings.chunks(settings.resolve({"model": str(checkpoint)}))) <= settings.DEFAULT_CHUNKS


def test_corpus_files_are_inputs(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    built = settings.resolve({"corpus": str(tmp_path)})
    assert settings.corpus_files(built) == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert settings.corpus_files(settings.resolve({"corpus": "pydoc"})) == []


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
    assert "Field required" in refusal(device=str(path))
    assert "no such profile" in refusal(device=str(tmp_path / "none.yaml"))
