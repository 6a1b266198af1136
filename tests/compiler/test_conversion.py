"""Older checkpoints: pickled weights, which run nothing, become safetensors, and a tokenizer in two files one."""

import json
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.checkpoint.source_tokenizer import SourceTokenizer, bos_of
from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.compiler.stages.tokenize.pydoc import documents
from tests.support.checkpoints import WEIGHTS, edit, refusal, run
from tests.support.data import data_folder
from tests.support.models import write_model

INDEX = "pytorch_model.bin.index.json"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own."""
    monkeypatch.setenv("COLDPRESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An OPT with safetensors."""
    return write_model(tmp_path / "opt", "opt", num_hidden_layers=2, dtype="float16")


def pickled(folder: Path, target: Path, num_shards: int = 1, **save: Any) -> Path:
    """Copies a checkpoint, its weights saved by torch in one file, or in several with an index."""
    import torch
    from safetensors.torch import load_file

    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = load_file(folder / WEIGHTS)
    if num_shards == 1:
        torch.save(tensors, target / "pytorch_model.bin", **save)
        return target
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"pytorch_model-{shard + 1:05d}-of-{num_shards:05d}.bin"
        names = list(tensors)[shard::num_shards]
        torch.save({name: tensors[name] for name in names}, target / file)
        weight_map |= dict.fromkeys(names, file)
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_same_model(folder: Path, tmp_path: Path, cache: Path, num_shards: int) -> None:
    expected = run(folder, tmp_path / "a")
    older = pickled(folder, tmp_path / "older", num_shards)
    before = sorted(path.name for path in older.iterdir())
    found = run(older, tmp_path / "b")
    assert found.name == "older"
    assert found.spec == expected.spec
    assert len([file for file in found.files if file.name.endswith(".safetensors")]) == num_shards
    for role in expected.tensors:
        assert np.array_equal(read_role(found, role), read_role(expected, role)), role
    assert sorted(path.name for path in older.iterdir()) == before, "the checkpoint's folder is left alone"
    (made,) = (cache / "converted").iterdir()
    first = made.stat().st_mtime_ns
    assert run(older, tmp_path / "c").weights_sha256 == found.weights_sha256
    assert [path.stat().st_mtime_ns for path in (cache / "converted").iterdir()] == [first], "once"


@pytest.mark.needs_data
def test_a_real_opt(tmp_path: Path) -> None:
    folder = data_folder() / "models" / "tinystories-opt-0.9m"
    expected, found = run(folder, tmp_path / "a"), run(pickled(folder, tmp_path / "older"), tmp_path / "b")
    assert all(np.array_equal(read_role(found, role), read_role(expected, role)) for role in expected.tensors)


def test_an_interrupted_conversion_goes_on(
    folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coldpress.compiler.checkpoint import conversion

    older, written = pickled(folder, tmp_path / "older", 3), []
    write = conversion._write

    def break_off(path: Path, tensors: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, tensors)

    monkeypatch.setattr(conversion, "_write", break_off)
    with pytest.raises(KeyboardInterrupt):
        run(older, tmp_path / "a")
    monkeypatch.setattr(conversion, "_write", lambda path, tensors: (written.append(path.name), write(path, tensors)))
    assert run(older, tmp_path / "b").num_parameters
    assert len(set(written)) == len(written) == 3


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def test_a_hostile_pickle_runs_nothing(folder: Path, tmp_path: Path) -> None:
    import torch

    older = pickled(folder, tmp_path / "older")
    torch.save({"model.decoder.embed_tokens.weight": Evil(tmp_path / "mark")}, older / "pytorch_model.bin")
    assert "it holds more than tensors, or is damaged, and is not loaded" in refusal(older, tmp_path / "work")
    assert not (tmp_path / "mark").exists()
    pickle.loads(pickle.dumps(Evil(tmp_path / "mark")))
    assert (tmp_path / "mark").exists(), "it would have run"


def damaged(older: Path, kind: str) -> None:
    """Puts something else than a pickle of tensors into pytorch_model.bin."""
    import torch

    file = older / "pytorch_model.bin"
    good = torch.zeros(4)
    if kind == "old":
        torch.save({"a": good}, file, _use_new_zipfile_serialization=False)
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif kind == "list":
        torch.save([good], file)
    elif kind == "text":
        torch.save({"a": "text"}, file)
    elif kind == "expanded":
        torch.save({"a": good[:1].expand(1 << 40)}, file)
    elif kind == "many":
        shared = torch.zeros(1 << 16)
        torch.save({f"{number}": shared for number in range(10)}, file)
    elif kind == "complex":
        torch.save({"a": good.to(torch.complex64)}, file)
    elif kind == "large":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", bytes(65 << 20))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("old", "it is no file of torch 1.6 or newer; write it again with `python -c"),
        ("cut", "it is no file of torch 1.6 or newer"),
        ("list", "it holds something else than tensors by name"),
        ("text", "it holds something else than tensors by name"),
        ("expanded", "tensor a is larger than what the file has of it"),
        ("many", "its tensors are more than twice as large as the file"),
        ("complex", "tensor a has the unknown type torch.complex64"),
        ("large", "bytes of pickle, expected at most 67108864"),
    ],
)
def test_what_is_no_pickle_of_tensors(folder: Path, tmp_path: Path, kind: str, expected: str) -> None:
    older = pickled(folder, tmp_path / "older")
    damaged(older, kind)
    assert f"pytorch_model.bin: {expected}" in refusal(older, tmp_path / "work").replace("found 68157440 ", "")


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        (None, "weight_map is missing or not a map of texts"),
        ({"a": "../up.bin"}, "it names 1 files, such as ../up.bin, expected 1 to 1024 of the form"),
        ({"a": "pytorch_model-00001-of-00009.bin"}, "pytorch_model-00001-of-00009.bin is missing in the checkpoint"),
    ],
)
def test_an_index_that_names_other_files(folder: Path, tmp_path: Path, weight_map: Any, expected: str) -> None:
    older = pickled(folder, tmp_path / "older", 2)
    (older / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert expected in refusal(older, tmp_path / "work")


def test_a_tensor_that_is_in_another_shard_than_the_index_says(folder: Path, tmp_path: Path) -> None:
    older = pickled(folder, tmp_path / "older", 2)
    other = "pytorch_model-00001-of-00002.bin"
    moved = next(name for name, file in json.loads((older / INDEX).read_text())["weight_map"].items() if file != other)
    edit(older / INDEX, lambda index: index["weight_map"].update({moved: other}))
    assert (
        f"tensor {moved} is in model-00002-of-00002.safetensors, but the index says model-00001-of-00002.safetensors"
    ) in refusal(older, tmp_path / "work")


def test_a_tensor_that_the_index_does_not_name(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older = pickled(folder, tmp_path / "older", 2)
    whole = run(older, tmp_path / "a")
    edit(older / INDEX, lambda index: index["weight_map"].popitem())
    found = run(older, tmp_path / "b")
    assert (found.tensors.keys(), found.weights_sha256) == (whole.tensors.keys(), whole.weights_sha256)
    assert "(1 such tensors); they are read, as transformers does" in caplog.text


# --- the tokenizer


@pytest.fixture
def in_two_files(folder: Path, tmp_path: Path) -> Path:
    """The OPT with a byte-level BPE in vocab.json and merges.txt, as on the hub."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        documents("calibration")[:40],
        trainers.BpeTrainer(vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    trained.model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False}
    token = {"__type": "AddedToken", "normalized": True}
    settings |= {"bos_token": "</s>", "unk_token": token | {"content": "</s>"}, "eos_token": "</s>"}
    settings |= {"pad_token": token | {"content": "<pad>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


TEXTS = [
    "A plain sentence.",
    "  two spaces\n\n\tand a tab",
    "naïve façade €12.50 😀",
    "</s>in the text<pad>",
    "",
    "def f(x):\n    return x",
]


@pytest.mark.slow
def test_the_tokenizer_in_two_files_is_transformers(in_two_files: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(in_two_files)
    model = run(in_two_files, tmp_path / "work")
    found = SourceTokenizer(Path(model.folder), model.spec.vocab_size)
    for text in (*TEXTS, *documents("test")[:5]):
        assert found.encode(text) == expected(text, add_special_tokens=False).input_ids, text[:40]
    assert bos_of(Path(model.folder), model.spec, found) == model.spec.bos_token_id


@pytest.mark.slow
def test_both_at_a_time(in_two_files: Path, tmp_path: Path) -> None:
    """As OPT lies on the hub."""
    older = pickled(in_two_files, tmp_path / "older")
    model = run(older, tmp_path / "work")
    names = {file.name for file in model.files}
    assert {"model.safetensors", "tokenizer.json"} <= names
    assert not names & {"vocab.json", "merges.txt", "pytorch_model.bin"}


def test_a_tokenizer_of_another_kind(in_two_files: Path, tmp_path: Path) -> None:
    edit(in_two_files / "tokenizer_config.json", lambda settings: settings.update(tokenizer_class="MarianTokenizer"))
    assert "its tokenizer_class is 'MarianTokenizer', expected GPT2Tokenizer" in refusal(in_two_files, tmp_path / "a")
    edit(in_two_files / "tokenizer_config.json", lambda settings: settings.update(tokenizer_class="GPT2Tokenizer"))
    (in_two_files / "merges.txt").write_text("#version: 0.2\nx y z\n")
    assert "vocab.json and merges.txt are no vocabulary" in refusal(in_two_files, tmp_path / "b")
