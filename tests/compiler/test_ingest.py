"""ingest: what it finds in good checkpoints, in a folder or in the hub's cache."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.__main__ import main
from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.compiler.io import load_record
from coldpress.schemas.model import Model
from tests.support.checkpoints import REVISION, WEIGHTS, edit, edit_config, refusal, run
from tests.support.data import data_folder
from tests.support.models import random_weights, write_model, write_weights

# --- good checkpoints


def test_the_record_describes_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\nlicense: of the text\n")
    (folder / "LICENSE").write_text("the licence\n")
    model = run(folder, tmp_path / "work")
    assert (model.name, model.source, model.revision, model.license) == ("tiny", "local", None, "apache-2.0")
    assert model.spec.hidden_act == "relu"
    assert model.spec.eos_token_ids == (1,)
    assert model.num_parameters == sum(
        values.size for values in random_weights(json.loads((folder / "config.json").read_text())).values()
    )
    assert [file.name for file in model.files] == [
        "config.json",
        WEIGHTS,
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(path.name for path in Path(model.folder).iterdir()) == [
        "LICENSE",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [(file.name, file.size_bytes) for file in model.license_files] == [("LICENSE", 12)]
    assert str(tmp_path) not in model.model_copy(update={"folder": "", "tensors": {}}).to_json()


def test_the_command_line_saves_a_record_that_moves_with_its_folder(folder: Path, tmp_path: Path) -> None:
    assert (
        main(["ingest", "--model", str(folder), "--name", "demo", "--output", str(tmp_path / "out/ingest.json")]) == 0
    )
    model = load_record(tmp_path / "out/ingest.json", Model)
    assert model.name == "demo"
    assert str(tmp_path) not in (tmp_path / "out/ingest.json").read_text()
    assert Path(model.folder, "tokenizer.json").is_file()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sharded_and_single_files_hold_the_same_model(tmp_path: Path, dtype: str) -> None:
    one = run(write_model(tmp_path / "one", num_hidden_layers=2, dtype=dtype), tmp_path / "a")
    many = run(write_model(tmp_path / "many", num_hidden_layers=2, dtype=dtype, num_shards=4), tmp_path / "b")
    assert one.tensors.keys() == many.tensors.keys()
    assert one.weights_sha256 != many.weights_sha256
    assert len([file for file in many.files if file.name.endswith(".safetensors")]) == 4
    for role in one.tensors:
        assert np.array_equal(read_role(one, role), read_role(many, role))


def test_both_spellings_of_the_rotary_settings_mean_the_same(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    new = write_model(
        tmp_path / "new", num_hidden_layers=1, overrides={"rope_parameters": scaling | {"rope_theta": 5e5}}
    )
    spelled = {"rope_parameters": ..., "rope_theta": 5e5, "torch_dtype": "float32", "dtype": ...}
    spelled["rope_scaling"] = {"type": "llama3"} | {key: scaling[key] for key in scaling if key != "rope_type"}
    old = write_model(tmp_path / "old", num_hidden_layers=1, overrides=spelled)
    written = [
        Path(run(folder, tmp_path / folder.name / "w").folder, "config.json").read_text() for folder in (new, old)
    ]
    assert written[0] == written[1]
    assert '"rope_theta": 500000.0' in written[0]


def test_end_of_text_ids_come_from_both_files(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 1], "do_sample": true}')
    model = run(folder, tmp_path / "work")
    assert model.spec.eos_token_ids == (1, 5)
    assert json.loads(Path(model.folder, "generation_config.json").read_text()) == {"eos_token_id": [5, 1]}


def test_transformers_sees_only_known_keys(folder: Path, tmp_path: Path) -> None:
    edit_config(folder, _name_or_path="/somewhere", use_cache=True, some_new_key={"a": 1}, torch_dtype="float16")
    edit(folder / "tokenizer_config.json", lambda settings: settings.update(auto_map={"AutoTokenizer": ["x.Y", None]}))
    model = run(folder, tmp_path / "work")
    config = json.loads(Path(model.folder, "config.json").read_text())
    assert not config.keys() & {"_name_or_path", "use_cache", "some_new_key", "torch_dtype", "dtype"}
    assert "auto_map" not in Path(model.folder, "tokenizer_config.json").read_text()


def test_a_tied_model_may_store_either_tensor_or_both(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", num_hidden_layers=1, tie=True)
    weights = random_weights(json.loads((folder / "config.json").read_text()))
    embeddings = weights.pop("model.embed_tokens.weight")
    for number, names in enumerate((["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"])):
        write_weights(folder, weights | dict.fromkeys(names, embeddings))
        model = run(folder, tmp_path / str(number))
        assert np.array_equal(read_role(model, "embed_tokens.weight"), embeddings)
        assert "lm_head.weight" not in model.tensors


def test_old_buffers_and_a_missing_prefix_are_understood(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", num_hidden_layers=1, tie=True)
    weights = random_weights(json.loads((folder / "config.json").read_text()))
    renamed = {name.removeprefix("model."): values for name, values in weights.items()}
    write_weights(folder, renamed | {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    assert run(folder, tmp_path / "work").tensors["norm.weight"].tensor == "norm.weight"


@pytest.mark.parametrize(("kind", "prefix"), [("phi3", "Phi3"), ("bamboo", "Bamboo")])
def test_code_that_is_known_is_left_alone(kind: str, prefix: str, tmp_path: Path) -> None:
    """Phi-3's own repositories carry auto_map; the classes are those of transformers, or of ours for Bamboo."""
    auto_map = {
        "AutoConfig": f"configuration_{kind}.{prefix}Config",
        "AutoModelForCausalLM": f"modeling_{kind}.{prefix}ForCausalLM",
    }
    folder = write_model(tmp_path / "tiny", kind, num_hidden_layers=1, overrides={"auto_map": auto_map})
    assert "auto_map" not in Path(run(folder, tmp_path / "work").folder, "config.json").read_text()


@pytest.mark.needs_data
@pytest.mark.parametrize(
    "name",
    [
        *("stories260k", "tinystories656k", "tinystories656k-relu", "tinystories-opt-0.9m", "prose7m", "prose7m-relu"),
        "tinystories-mixtral-8x",
    ],
)
def test_real_checkpoints(name: str, tmp_path: Path) -> None:
    assert run(data_folder() / "models" / name, tmp_path / "work").num_parameters > 250_000


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_local_experts": 1}, "num_local_experts is 1, expected at least 2 experts"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected at most 4 experts"),
        ({"num_local_experts": 5}, "block_sparse_moe.gate.weight has the shape [4, 64], expected [5, 64] by config"),
    ],
)
def test_experts_that_are_not_there(tmp_path: Path, changes: dict[str, int], found: str) -> None:
    folder = write_model(tmp_path / "tiny", "mixtral", num_hidden_layers=1)
    edit_config(folder, **changes)
    assert found in refusal(folder, tmp_path / "work")


# --- the hub


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with one model in it, as huggingface_hub lays it out; no network."""
    from huggingface_hub import constants

    written = write_model(tmp_path / "written", num_hidden_layers=1)
    repository = tmp_path / "cache" / "models--owner--tiny"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(written.iterdir())):
        file.rename(repository / "blobs" / f"{number:064d}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:064d}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_cached_hub_model_needs_no_network(cached: Path, tmp_path: Path) -> None:
    model = run("owner/tiny", tmp_path / "work", revision=REVISION, license="mit")
    assert (model.name, model.source, model.revision, model.license) == ("tiny", "owner/tiny", REVISION, "mit")
    assert run(cached, tmp_path / "other").weights_sha256 == model.weights_sha256


def test_a_hub_model_that_is_not_there(cached: Path, tmp_path: Path) -> None:
    text = refusal("owner/other", tmp_path / "work", revision=REVISION)
    assert text == (
        f"owner/other at revision {REVISION} is not in the local cache and the hub cannot be reached; allow the "
        "network once, or give a local folder"
    )


@pytest.mark.parametrize("revision", [None, "main", "0123"])
def test_a_revision_must_be_pinned(tmp_path: Path, revision: str | None) -> None:
    assert "needs a pinned revision" in refusal("owner/tiny", tmp_path / "work", revision=revision)


def test_a_gated_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    for kind, expected in (
        (GatedRepoError, "is gated: accept its licence"),
        (RepositoryNotFoundError, "no public hub"),
    ):

        def refuse(*_: Any, kind: type[Exception] = kind, **__: Any) -> str:
            raise kind.__new__(kind)

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", refuse)
        assert expected in refusal("owner/tiny", tmp_path / "work", revision=REVISION)


def test_bad_input_ends_the_command_with_code_2_and_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(folder, model_type="gpt2")
    assert main(["ingest", "--model", str(folder), "--output", str(tmp_path / "out/ingest.json")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: config.json: the architecture 'gpt2' is not")
    assert not (tmp_path / "out").exists()


def test_a_chat_template_in_a_file_is_kept(folder: Path, tmp_path: Path) -> None:
    """Where newer checkpoints have it; the artifact carries it, too."""
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    model = run(folder, tmp_path / "work")
    assert Path(model.folder, "chat_template.jinja").read_text() == "{{ messages }}"
    assert "chat_template.jinja" in [file.name for file in model.files]
    (folder / "chat_template.jinja").write_bytes(b"na\xefve")
    assert "chat_template.jinja: not UTF-8 at byte 2" in refusal(folder, tmp_path / "other")
    (folder / "chat_template.jinja").write_bytes(bytes((1 << 20) + 1))
    assert "chat_template.jinja: found 1048577 bytes" in refusal(folder, tmp_path / "other")
