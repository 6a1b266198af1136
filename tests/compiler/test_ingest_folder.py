"""ingest: the one sentence that each folder gets whose files, configuration or tokenizer are bad."""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from coldpress.compiler.checkpoint.hub import checkpoint_paths
from coldpress.schemas.errors import CheckpointError
from tests.support.checkpoints import INDEX, WEIGHTS, edit, edit_config, refusal, run
from tests.support.models import write_model
from tests.support.usage import processor_s

# --- the folder


def test_there_is_no_such_model(tmp_path: Path) -> None:
    assert "no folder ./nothing" in refusal("./nothing", tmp_path / "work")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file and no GGUF, expected the folder"):
        run(tmp_path / "file", tmp_path / "work")


def test_only_pickles(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin: it is no file of torch 1.6 or newer" in refusal(folder, tmp_path / "work")
    (folder / "pytorch_model.bin").rename(folder / "rust_model.bin")
    assert "found the pickle file rust_model.bin, which is never loaded" in refusal(folder, tmp_path / "work")


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [("model.Q4_0.gguf", "holds the GGUF file"), ("adapter_config.json", "holds a LoRA adapter")],
)
@pytest.mark.parametrize("missing", ["config.json", WEIGHTS])
def test_a_folder_of_something_else(folder: Path, tmp_path: Path, missing: str, name: str, expected: str) -> None:
    (folder / missing).unlink()
    (folder / name).touch()
    assert expected in refusal(folder, tmp_path / "work")


def test_weights_under_another_name(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).rename(folder / "consolidated.safetensors")
    assert "found consolidated.safetensors" in refusal(folder, tmp_path / "work")


def test_a_link_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).rename(tmp_path / "elsewhere.safetensors")
    (folder / WEIGHTS).symlink_to(tmp_path / "elsewhere.safetensors")
    assert "model.safetensors is a link that leads out of" in refusal(folder, tmp_path / "work")


def test_only_what_is_read_is_an_input_of_the_build(tmp_path: Path) -> None:
    """Snakemake would take the braces of a name for a wildcard."""
    read = ["LICENSE", "NOTICE.md", "README.md", "chat_template.jinja", "config.json", INDEX, "shard.safetensors"]
    others = ("a{b}.json", "LICENSE{x}", "model-{n}.safetensors", "notes.txt", "vocab.json", "pytorch_model.bin")
    for name in (*read, "tokenizer.json", *others):
        (tmp_path / name).touch()
    assert checkpoint_paths(tmp_path) == [tmp_path / name for name in (*read, "tokenizer.json")]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / INDEX).unlink()
    (tmp_path / "shard.safetensors").unlink()
    instead = [*read[:-2], "pytorch_model.bin", "vocab.json"]
    assert checkpoint_paths(tmp_path) == [tmp_path / name for name in instead], "for compiler/checkpoint/conversion.py"


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
    monkeypatch.setattr("coldpress.compiler.stages.ingest.scan", lambda *_: pytest.fail("weights were read"))
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


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_licence_that_its_owner_keeps_private(folder: Path, tmp_path: Path, mode: int) -> None:
    """As a second name of a key would be: the artifact's copy could be read by all."""
    (tmp_path / "key").write_text("a key\n")
    (tmp_path / "key").chmod(mode)
    (folder / "config.json").chmod(0o644)
    (folder / "LICENSE").hardlink_to(tmp_path / "key")
    assert f"the licence file LICENSE has the mode {mode:o} and is hidden from readers" in refusal(
        folder, tmp_path / "w"
    )


def test_a_checkpoint_that_is_private_as_a_whole(folder: Path, tmp_path: Path) -> None:
    (folder / "LICENSE").write_text("the licence\n")
    for path in folder.iterdir():
        path.chmod(0o600)
    assert [file.name for file in run(folder, tmp_path / "work").license_files] == ["LICENSE"]


SOME_PLACE = [*(f"/proc/self/{name}" for name in ("environ", "maps")), "/dev/zero", "/dev/fd/0", "nothing", "../key"]


@pytest.mark.parametrize("target", SOME_PLACE)
@pytest.mark.parametrize("name", ["LICENSE", "NOTICE.txt", "README.md", "generation_config.json", "tokenizer.json"])
def test_a_link_to_some_place(folder: Path, tmp_path: Path, name: str, target: str) -> None:
    (tmp_path / "key").write_text("license: a-key\n")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)
    assert re.search(f"{name} is (a link that leads out of|missing in) the checkpoint", refusal(folder, tmp_path / "w"))


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "config.json", "tokenizer.json", WEIGHTS])
def test_a_pipe_in_a_file_s_place(folder: Path, tmp_path: Path, name: str) -> None:
    """Which nobody writes to: opening it would wait for ever."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert f"{name} is missing in the checkpoint" in refusal(folder, tmp_path / "work")


# --- generation_config.json and tokenizer_config.json


@pytest.mark.parametrize("value", ["[[1]]", '{"a": 1}', "1.5", '"2"', "true", "[" + "1, " * 64 + "1]", "[-1]"])
def test_an_end_of_text_that_is_no_token_id(folder: Path, tmp_path: Path, value: str) -> None:
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    text = refusal(folder, tmp_path / "work")
    assert text.startswith("generation_config.json: eos_token_id is ")
    assert text.endswith("expected a token id or a list of them")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"bos_token": "\\ud800"}', "strings without lone surrogates"),
        ('{"\\udfff": 1}', "strings without lone surrogates"),
        ("[" * 900 + "]" * 900, "nested too deeply, expected at most 64 levels"),
        ('{"chat_template": ' + "[" * 900 + "]" * 900 + "}", "nested too deeply"),
        ('{"model_max_length": ' + "9" * 5000 + "}", "the integer '9999"),
    ],
)
@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_settings_that_are_no_strict_json(folder: Path, tmp_path: Path, name: str, text: str, expected: str) -> None:
    (folder / name).write_text(text)
    found = refusal(folder, tmp_path / "work")
    assert found.startswith(name)
    assert expected in found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_many_keys_are_read_in_linear_time(folder: Path, tmp_path: Path, name: str) -> None:
    """A look at all keys for each would take 1,600 times as long for forty times as many."""
    if name.endswith("index.json"):
        (folder / WEIGHTS).unlink()

    def read(number: int) -> None:
        text = json.dumps({f"{key:06d}": 0 for key in range(number)})
        (folder / name).write_text(text[:-1] + f', "{number - 1:06d}": 1}}')
        assert f"the key '{number - 1:06d}' twice" in refusal(folder, tmp_path / "work")

    assert processor_s(lambda: read(80_000)) < 400 * processor_s(lambda: read(2_000))


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
        ("{}", "the architecture None is not supported; supported are arcee, bamboo, deepseek_v2, falcon"),
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
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}},
            "auto_map names the checkpoint's own code",
        ),
        (
            {"auto_map": {"AutoModel": "owner/repo--modeling.LlamaModel", "x": ["y"]}},
            "auto_map names the checkpoint's own code",
        ),
        ({"_attn_implementation_internal": "owner/kernel"}, "the key _attn_implementation_internal may load code"),
        ({"trust_remote_code": True}, "the key trust_remote_code may load code"),
        ({"quantization_config": {"bits": 4}}, "quantized already"),
        ({"model_type": "llama" * 200}, "(1002 characters) is not supported"),
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
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type is 'dynamic', expected one of default",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "transformers refuses its values"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "rope_parameters.factor is -1"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta is 0"),
        ({"rope_parameters": {"full_attention": {}}}, "the rotary setting 'full_attention' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported for models of type llama"),
    ],
)
def test_values_that_are_not_believed(folder: Path, tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    edit_config(folder, **values)
    assert expected in refusal(folder, tmp_path / "work")


def test_a_missing_number_is_the_class_s_default(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    edit(folder / "config.json", lambda config: config.pop("vocab_size"))
    text = refusal(folder, tmp_path / "work")
    assert "embed_tokens.weight has the shape [384, 64], expected [32000, 64] by config.json" in text
    assert "vocab_size is missing; transformers' default, 32000, is taken" in caplog.text


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
    mixed = run(folder, tmp_path / "work").spec
    assert [mixed.window_of(layer) for layer in range(2)] == [None, 32]
    edit_config(folder, layer_types=["chunked_attention", "full_attention"])
    assert "layers of chunked_attention are not supported" in refusal(folder, tmp_path / "other")
    edit_config(folder, layer_types=None, max_window_layers=0)
    uniform = run(folder, tmp_path / "work").spec
    assert (uniform.sliding_window, uniform.layer_types) == (32, ())
    edit_config(folder, max_window_layers=2)
    assert run(folder, tmp_path / "work").spec.sliding_window is None


# --- the tokenizer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "tokenizer.json: not a tokenizer"),
        ('{"model": {"type": "BPE"}, "model": {}}', "tokenizer.json is an object with the key 'model' twice"),
        ("[" * 100_000, "tokenizer.json is nested too deeply"),
        ("", "tokenizer.json is not JSON"),
    ],
)
def test_a_tokenizer_that_is_none(folder: Path, tmp_path: Path, text: str, expected: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    assert expected in refusal(folder, tmp_path / "work")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "part"),
    [
        (
            "normalizer",
            {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "o"}, "content": "oo"}] * 40,
            },
        ),
        (
            "post_processor",
            {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 1000,
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [0] * 100_000, "tokens": ["<s>"] * 100_000}},
            },
        ),
    ],
)
def test_a_tokenizer_that_grows_without_end(folder: Path, tmp_path: Path, place: str, part: dict[str, Any]) -> None:
    edit(folder / "tokenizer.json", lambda tokenizer: tokenizer.update({place: part}))
    text = refusal(folder, tmp_path / "work")
    assert re.search("^tokenizer.json: it fails on .* takes too much time or memory", text)


def test_a_vocabulary_larger_than_the_embeddings(folder: Path, tmp_path: Path) -> None:
    edit(folder / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update({"extra": 384}))
    assert "its largest token id is 384, expected ids from 0 to 383" in refusal(folder, tmp_path / "work")
