"""ingest: what it finds in good checkpoints, and the one sentence that each bad one gets."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler import ingest
from compiler.__main__ import main
from compiler._io import Workspace, load_record
from compiler.checkpoint.tensors import read_role
from compiler.ingest import IngestConfig
from schemas.errors import CheckpointError
from schemas.model import Model
from tests.support.data import data_folder
from tests.support.models import DTYPES, encode, random_weights, write_model, write_safetensors, write_weights

REVISION = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def run(folder: Path | str, work: Path, **settings: Any) -> Model:
    return ingest.run(IngestConfig(model=str(folder), **settings), Workspace(work, "test"))


def refusal(folder: Path | str, work: Path, **settings: Any) -> str:
    """The text of the error: one sentence without paths of this machine."""
    with pytest.raises(CheckpointError) as caught:
        run(folder, work, **settings)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 420
    assert str(work.parent) not in text
    assert not (work / "source").exists()
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny", num_hidden_layers=2, relu=True)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny", num_hidden_layers=2, num_shards=3)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_config(folder: Path, **values: Any) -> None:
    edit(folder / "config.json", lambda config: config.update(values))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites a safetensors header in place; the data stays."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Rewrites model.safetensors with changed weights."""
    weights = random_weights(json.loads((folder / "config.json").read_text()))
    change(weights)
    write_weights(folder, weights)


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


def test_code_that_transformers_has_taken_over_is_left_alone(tmp_path: Path) -> None:
    """Phi-3's own repositories carry auto_map; the classes are those of transformers."""
    auto_map = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    folder = write_model(tmp_path / "tiny", "phi3", num_hidden_layers=1, overrides={"auto_map": auto_map})
    assert "auto_map" not in Path(run(folder, tmp_path / "work").folder, "config.json").read_text()


@pytest.mark.needs_data
@pytest.mark.parametrize(
    "name",
    ["stories260k", "tinystories656k", "tinystories656k-relu", "tinystories-opt-0.9m", "prose7m", "prose7m-relu"],
)
def test_real_checkpoints(name: str, tmp_path: Path) -> None:
    assert run(data_folder() / "models" / name, tmp_path / "work").num_parameters > 250_000


@pytest.mark.needs_data
def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    text = refusal(data_folder() / "models" / "tinystories-mixtral-8x", tmp_path / "work")
    assert text == (
        "config.json: the architecture 'mixtral' is not supported; supported are llama, mistral, opt, phi3, qwen2, "
        "qwen3"
    )


# --- the folder


def test_there_is_no_such_model(tmp_path: Path) -> None:
    assert "no folder ./nothing" in refusal("./nothing", tmp_path / "work")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file, expected the folder"):
        run(tmp_path / "file", tmp_path / "work")


def test_only_pickles(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert "found the pickle file pytorch_model.bin, which is never loaded" in refusal(folder, tmp_path / "work")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("config.json", "config.json is missing in tiny"),
        (WEIGHTS, "needs model.safetensors or model.safetensors.index.json with its shards, found none"),
        ("tokenizer.json", "tokenizer.json is missing"),
    ],
)
def test_a_missing_file(folder: Path, tmp_path: Path, name: str, expected: str) -> None:
    (folder / name).unlink()
    assert expected in refusal(folder, tmp_path / "work")


def test_weights_under_another_name(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).rename(folder / "consolidated.safetensors")
    assert "found consolidated.safetensors" in refusal(folder, tmp_path / "work")


def test_a_link_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).rename(tmp_path / "elsewhere.safetensors")
    (folder / WEIGHTS).symlink_to(tmp_path / "elsewhere.safetensors")
    assert "model.safetensors is a link that leads out of" in refusal(folder, tmp_path / "work")


# --- licences


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("LICENSE (1)", "the licence file 'LICENSE (1)' has a name that an artifact cannot have"),
        ("LICENSE.", "'LICENSE.' has a name that an artifact cannot have"),
        ("NOTICE-" + "x" * 100, "has a name that an artifact cannot have, expected up to 100 letters"),
        ("license", "LICENSE and license differ in letter case alone"),
    ],
)
def test_a_licence_with_a_name_that_no_artifact_may_have(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    """Decided before a weight is read: `package` is hours later."""
    monkeypatch.setattr("compiler.ingest.scan", lambda *_: pytest.fail("weights were read"))
    (folder / "LICENSE").write_text("the licence\n")
    (folder / name).write_text("more of it\n")
    assert expected in refusal(folder, tmp_path / "work")


def test_a_licence_of_too_many_bytes(folder: Path, tmp_path: Path) -> None:
    (folder / "LICENSE").write_bytes(bytes((1 << 20) + 1))
    assert "LICENSE: found 1048577 bytes, expected at most 1048576" in refusal(folder, tmp_path / "work")


@pytest.mark.parametrize("name", ["LICENSE", "LICENSE (1)", "licence.txt"])
def test_a_licence_that_links_out_of_the_checkpoint(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("a key\n")
    (folder / name).symlink_to(tmp_path / "secret")
    assert re.search(r"is a link that leads out of|has a name that", refusal(folder, tmp_path / "work"))


# --- config.json


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "config.json is not JSON"),
        ("[]", "found a JSON list, expected an object"),
        ('{"a": 1, "a": 2}', "an object with the key 'a' twice, expected distinct keys"),
        ('{"a": NaN}', "the number 'NaN', expected numbers that a double holds"),
        ('{"a": 1e999}', "the number '1e999', expected numbers that a double holds"),
        ('{"a": ' + "9" * 5000 + "}", "the integer '9999"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 900 + "]" * 900, "nested too deeply, expected at most 64 levels"),
        ('{"a": "\\ud800"}', "strings without lone surrogates"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "expected at most 1048576"),
        ("\ufeff{}", "not JSON"),
        ("{}", "the architecture None is not supported; supported are llama"),
    ],
)
def test_a_config_that_is_no_strict_json(folder: Path, tmp_path: Path, text: str, expected: str) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")
    assert expected in refusal(folder, tmp_path / "work")


def test_a_config_that_is_no_text(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')
    assert refusal(folder, tmp_path / "work").startswith(
        "config.json is not JSON ('utf-8' codec can't decode byte 0xff in position 7"
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}}, "auto_map names code"),
        ({"auto_map": {"AutoModel": "owner/repo--modeling.LlamaModel", "x": ["y"]}}, "auto_map names code"),
        ({"_attn_implementation_internal": "owner/kernel"}, "the key _attn_implementation_internal may load code"),
        ({"trust_remote_code": True}, "the key trust_remote_code may load code"),
        ({"quantization_config": {"bits": 4}}, "quantized already"),
        ({"model_type": "../llama"}, "'../llama' is not supported"),
        ({"model_type": "_common"}, "'_common' is not supported"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected a whole number from 1 to 999"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a number between 0 and 1"),
        ({"hidden_act": "mish"}, "the activation 'mish' is not supported; known: relu"),
        ({"hidden_act": 3}, "hidden_act is 3, expected a text"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3 key heads"),
        ({"num_attention_heads": 7}, "hidden_size 64 is no multiple of 7 attention heads"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is [1, '2'], expected a token id or a list of them"),
        ({"eos_token_id": 384}, "the special token id 384 is out of range, expected 0 to 383"),
        ({"bos_token_id": 100_000}, "the special token id 100000 is out of range"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type is 'dynamic', expected one of default",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "transformers refuses its values"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "rope_parameters.factor is -1"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta is 0"),
        ({"rope_parameters": {"mrope_section": [1]}}, "the rotary setting 'mrope_section' is not supported"),
        ({"rope_parameters": {"full_attention": {}}}, "the rotary setting 'full_attention' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported for models of type llama"),
    ],
)
def test_values_that_are_not_believed(folder: Path, tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    edit_config(folder, **values)
    assert expected in refusal(folder, tmp_path / "work")


def test_a_missing_number(folder: Path, tmp_path: Path) -> None:
    edit(folder / "config.json", lambda config: config.pop("vocab_size"))
    assert "vocab_size is missing" in refusal(folder, tmp_path / "work")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"do_layer_norm_before": False}, "OPT with do_layer_norm_before = False is not supported"),
        ({"word_embed_proj_dim": 32}, "OPT with word_embed_proj_dim = 32 is not supported, expected 64"),
        ({"_remove_final_layer_norm": True}, "OPT with _remove_final_layer_norm = True"),
    ],
)
def test_other_opts(tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    folder = write_model(tmp_path / "tiny", "opt", num_hidden_layers=1)
    edit_config(folder, **values)
    assert expected in refusal(folder, tmp_path / "work")


def test_layers_of_mixed_attention(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    folder = write_model(tmp_path / "tiny", "qwen2", num_hidden_layers=2, overrides=window)
    assert "layers of mixed attention (full_attention, sliding_attention)" in refusal(folder, tmp_path / "work")
    edit_config(folder, max_window_layers=0)
    assert run(folder, tmp_path / "work").spec.sliding_window == 32
    edit_config(folder, max_window_layers=2)
    assert run(folder, tmp_path / "work").spec.sliding_window is None


# --- headers


def set_offsets(name: str, start: int, stop: int) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(data_offsets=[start, stop])


NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda header: header[NORM].update(dtype="F4"), f"tensor {NORM}.dtype is 'F4', expected one of BOOL"),
        (lambda header: header[NORM].update(dtype="I32"), f"tensor {NORM} has the unsupported dtype I32, expected F32"),
        (lambda header: header[NORM].update(shape=[63]), "expected 252 bytes apart for F32 [63]"),
        (lambda header: header[NORM].update(shape=[2**32, 2**32]), "expected 73786976294838206464 bytes apart"),
        (lambda header: header[NORM].update(shape=[-64]), f"tensor {NORM}.shape is [-64], expected 0 to 8 counts"),
        (lambda header: header[NORM].update(shape=[64.0]), f"tensor {NORM}.shape is [64.0]"),
        (lambda header: header[NORM].update(shape=[8, 8]), "has the shape [8, 8], expected [64] by config.json"),
        (lambda header: header[NORM].update(extra=1), "expected an object of dtype, shape and data_offsets alone"),
        (set_offsets(NORM, 0, 256), "overlapping the one before it by"),
        (lambda header: header.update({"": header.pop(NORM)}), "a tensor's name is ''"),
        (lambda header: header.update({"../../etc/x": header.pop(NORM)}), "a tensor's name is '../../etc/x'"),
        (lambda header: header.update({"a\x00b": header.pop(NORM)}), "a tensor's name is 'a\\x00b'"),
        (lambda header: header.update({"x" * 600: header.pop(NORM)}), "a tensor's name is 'xxx"),
        (lambda header: header.update(extra=header.pop(NORM)), f"tensor {NORM} is missing in the checkpoint"),
        (
            lambda header: header.update(__metadata__={"a": 1}),
            "__metadata__ is {'a': 1}, expected an object of texts",
        ),
    ],
)
def test_a_header_that_lies(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], expected: str
) -> None:
    edit_header(folder / WEIGHTS, change)
    assert expected in refusal(folder, tmp_path / "work")


def test_a_hole(folder: Path, tmp_path: Path) -> None:
    coded = {"a": ("F32", (2,), bytes(8)), "b": ("F32", (2,), bytes(8)), "c": ("F32", (2,), bytes(8))}
    write_safetensors(folder / WEIGHTS, coded)
    edit_header(folder / WEIGHTS, lambda header: header.pop("b"))
    assert "tensor c is behind a hole of 8 bytes" in refusal(folder, tmp_path / "work")


def test_a_duplicate_tensor_name(folder: Path, tmp_path: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = b'"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}, '
    header = b"{" + entry + data[9 : 8 + length]
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    assert f"the header is an object with the key '{NORM}' twice" in refusal(folder, tmp_path / "work")


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, "the header length is 0, expected from 2 to"),
        (2**63, "the header length is 9223372036854775808, expected from 2 to"),
        (200_000_000, "the header length is 200000000, expected from 2 to"),
        (60_000_000, "the header length is 60000000, expected from 2 to"),
    ],
)
def test_a_header_length_that_lies(folder: Path, tmp_path: Path, length: int, expected: str) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", length) + data[8:])
    assert expected in refusal(folder, tmp_path / "work")


@pytest.mark.parametrize("cut", [1, 100_000])
def test_a_truncated_file(folder: Path, tmp_path: Path, cut: int) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - cut)
    assert re.search(
        r"the size is \d+ bytes, expected \d+, where the last tensor ends; copy or download the file",
        refusal(folder, tmp_path / "work"),
    )


def test_bytes_behind_the_last_tensor(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"hidden")
    size_bytes = (folder / WEIGHTS).stat().st_size
    expected = f"the size is {size_bytes} bytes, expected {size_bytes - 6}, where the last tensor ends"
    assert expected in refusal(folder, tmp_path / "work")


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 3) + b"[1]", struct.pack("<Q", 2) + b"\xff\xff"])
def test_no_safetensors_at_all(folder: Path, tmp_path: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    assert refusal(folder, tmp_path / "work").startswith("model.safetensors")


# --- tensors against the configuration


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"hidden_size": 128, "head_dim": 16},
            "model.embed_tokens.weight has the shape [384, 64], expected [384, 128]",
        ),
        ({"vocab_size": 400}, "model.embed_tokens.weight has the shape [384, 64], expected [400, 64]"),
        ({"intermediate_size": 96}, "mlp.gate_proj.weight has the shape [160, 64], expected [96, 64]"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.self_attn.q_proj.weight is missing"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.input_layernorm.weight has no place in a llama model"),
        ({"attention_bias": True}, "self_attn.q_proj.bias is missing"),
        ({"model_type": "qwen2"}, "self_attn.q_proj.bias is missing"),
        ({"tie_word_embeddings": True}, "lm_head.weight and model.embed_tokens.weight differ"),
    ],
)
def test_a_config_that_disagrees_with_the_tensors(
    folder: Path, tmp_path: Path, values: dict[str, Any], expected: str
) -> None:
    edit_config(folder, **values)
    assert expected in refusal(folder, tmp_path / "work")


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite(folder: Path, tmp_path: Path, dtype: str, value: float) -> None:
    weights = random_weights(json.loads((folder / "config.json").read_text()))
    weights["model.layers.1.mlp.up_proj.weight"][3, 5:22] = value
    coded = {name: (DTYPES[dtype], array.shape, encode(array, "float32")) for name, array in weights.items()}
    for name, array in weights.items():
        coded[name] = (DTYPES[dtype], array.shape, finite_or_not(array, dtype))
    write_safetensors(folder / WEIGHTS, coded)
    assert refusal(folder, tmp_path / "work") == (
        "model.safetensors: tensor model.layers.1.mlp.up_proj.weight holds 17 values that are NaN or infinite, "
        "expected none"
    )


def finite_or_not(values: np.ndarray, dtype: str) -> bytes:
    """As `encode`, without rounding, which would carry a NaN into the sign."""
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes() if dtype == "bfloat16" else encode(values, dtype)


# --- shards


def test_an_index_that_leaves_the_folder(sharded: Path, tmp_path: Path) -> None:
    for file in (
        "../model.safetensors",
        "/etc/x.safetensors",
        "a\\b.safetensors",
        "..safetensors",
        "sub/x.safetensors",
    ):
        edit(sharded / INDEX, lambda index, file=file: index["weight_map"].update({EMBED: file}))
        assert "is no plain safetensors name" in refusal(sharded, tmp_path / "work")


def test_an_index_that_names_a_link(sharded: Path, tmp_path: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "away.safetensors")
    shard.symlink_to(tmp_path / "away.safetensors")
    assert "model-00002-of-00003.safetensors is a link that leads out" in refusal(sharded, tmp_path / "work")


def test_a_missing_shard(sharded: Path, tmp_path: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing in the checkpoint" in refusal(sharded, tmp_path / "work")


def test_a_tensor_that_is_not_in_its_shard(sharded: Path, tmp_path: Path) -> None:
    edit(sharded / INDEX, lambda index: index["weight_map"].update({"extra": "model-00001-of-00003.safetensors"}))
    assert "model-00001-of-00003.safetensors: tensor extra is missing" in refusal(sharded, tmp_path / "work")


def test_a_tensor_in_two_shards(sharded: Path, tmp_path: Path) -> None:
    first, last = (sharded / f"model-0000{number}-of-00003.safetensors" for number in (1, 3))
    last.write_bytes(first.read_bytes())
    assert re.search(r"tensor model\.\S+ is in two shards", refusal(sharded, tmp_path / "work"))


def test_a_tensor_the_index_does_not_know(sharded: Path, tmp_path: Path) -> None:
    edit(sharded / INDEX, lambda index: index["weight_map"].pop(EMBED))
    assert f"tensor {EMBED} is in model-00001-of-00003.safetensors, but the index says None" in refusal(
        sharded, tmp_path / "work"
    )


def test_an_index_without_a_map(sharded: Path, tmp_path: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {"a": 1}}')
    assert "weight_map is missing or no map of texts" in refusal(sharded, tmp_path / "work")


# --- the tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "tokenizer.json: not a tokenizer"),
        ("[" * 100_000, "tokenizer.json: not a tokenizer"),
        ("", "tokenizer.json: not a tokenizer"),
    ],
)
def test_a_tokenizer_that_is_none(folder: Path, tmp_path: Path, text: str, expected: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    assert expected in refusal(folder, tmp_path / "work")


def test_a_vocabulary_larger_than_the_embeddings(folder: Path, tmp_path: Path) -> None:
    def add(tokenizer: dict[str, Any]) -> None:
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 384, "content": "<extra>"})

    edit(folder / "tokenizer.json", add)
    assert "its largest token id is 384, expected ids from 0 to 383" in refusal(folder, tmp_path / "work")


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
        f"owner/other at revision {REVISION} is not in the local cache and the hub is not reached; allow the network "
        "once, or give a local folder"
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

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        assert expected in refusal("owner/tiny", tmp_path / "work", revision=REVISION)


def test_bad_input_ends_the_command_with_code_2_and_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(folder, model_type="gpt2")
    assert main(["ingest", "--model", str(folder), "--output", str(tmp_path / "out/ingest.json")]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: config.json: the architecture 'gpt2' is not")
    assert not (tmp_path / "out").exists()
