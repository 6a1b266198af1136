"""Files that are missing, links or of another size, unsafe names, and text that is no manifest are refused."""

import errno
import json
import os
import shutil
import tracemalloc
from functools import partial

import pytest

from coldpress.runtime.artifact import errors, strict_json
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import artifact_folder, open_artifact
from coldpress.runtime.artifact.safe_files import open_file, open_folder, read_exactly
from coldpress.schemas.sealed import KEY, seal
from tests.support.artifacts import (
    change_manifest,
    refuse,
)
from tests.support.usage import processor_s


def test_the_folder_of_a_build_is_its_artifact(relu_artifact, tmp_path):
    """A build links its artifact's manifest; an artifact's own manifest comes first, and a checkpoint is named."""
    shutil.copytree(relu_artifact.path, tmp_path / "one.coldpress")
    (tmp_path / "manifest.json").symlink_to(tmp_path / "one.coldpress" / "manifest.json")
    assert open_artifact(tmp_path).path == str(tmp_path / "one.coldpress")
    shutil.copytree(relu_artifact.path, tmp_path / "one.coldpress" / "other.coldpress")
    assert artifact_folder(tmp_path / "one.coldpress") == tmp_path / "one.coldpress"
    shutil.copytree(relu_artifact.path, tmp_path / "two.coldpress")
    with pytest.raises(errors.FileKindError, match=r"one of 'one\.coldpress', 'two\.coldpress', expected one artifact"):
        open_artifact(tmp_path)
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(
        errors.FileKindError, match=f"that of a checkpoint.*; build it first: coldpress build {checkpoint}"
    ):
        open_artifact(checkpoint)


def test_no_more_is_read_than_was_asked_for(tmp_path):
    """What the kernel reads ahead would be in DRAM, outside the budget."""
    (tmp_path / "file").write_bytes(bytes(8 << 20))
    opened = open_file(open_folder(str(tmp_path)), "file")
    os.fsync(opened)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    portion, kib = memoryview(bytearray(4096)), 1 << 10
    if is_in_page_cache(opened, 0):
        os.close(opened)
        pytest.skip("this file system is memory")
    for _ in range(50):  # emptying the page cache may leave pages of the file behind; reading ahead always shows
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        for start in range(0, 64 * kib, len(portion)):
            read_exactly(opened, "file", portion, start)
        places = (0, 60 * kib, 64 * kib, 128 * kib, 1024 * kib, 4096 * kib)
        found = [is_in_page_cache(opened, place) for place in places]
        if not any(found[2:]):
            break
    os.close(opened)
    assert found == [True, True, False, False, False, False]


def is_in_page_cache(opened, place):
    try:
        return os.preadv(opened, [bytearray(1)], place, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False


def test_a_path_that_is_no_artifact_is_refused(tmp_path):
    refuse(tmp_path / "none", errors.FileKindError, "the artifact is missing")
    (tmp_path / "file").write_text("x")
    refuse(tmp_path / "file", errors.FileKindError, "expected a folder")
    refuse(tmp_path, errors.FileKindError, "manifest.json", "missing")


@pytest.mark.parametrize("name", ["flash.img", "resident.safetensors", "tables.safetensors", "manifest.json"])
def test_a_missing_file_is_refused(path, name):
    (path / name).unlink()
    refuse(path, errors.FileKindError, name, "missing")


@pytest.mark.parametrize("name", ["flash.img", "resident.safetensors", "manifest.json"])
def test_links_are_refused(path, name):
    (path / name).rename(path.parent / name)
    (path / name).symlink_to(path.parent / name)
    refuse(path, errors.FileKindError, name, "a link")
    (path / name).unlink()
    (path / name).hardlink_to(path.parent / name)
    refuse(path, errors.FileKindError, name, "a hard link, one of 2 names")


def test_a_linked_folder_is_refused(path):
    outside = path.parent / "outside"
    outside.mkdir()
    (outside / "tokenizer.json").write_text("{}")
    shutil.copytree(outside, path / "tokenizer")
    change_manifest(path, lambda manifest: None, relist=True)
    open_artifact(path)
    shutil.rmtree(path / "tokenizer")
    (path / "tokenizer").symlink_to(outside)
    refuse(path, errors.FileKindError, "tokenizer/tokenizer.json")


def test_a_pipe_or_folder_in_place_of_a_file_is_refused_at_once(path):
    (path / "flash.img").unlink()
    os.mkfifo(path / "flash.img")
    refuse(path, errors.FileKindError, "flash.img", "regular file")
    (path / "flash.img").unlink()
    (path / "flash.img").mkdir()
    refuse(path, errors.FileKindError, "flash.img", "regular file")


REFUSALS = [
    (errno.EIO, "Input/output error"),
    (errno.EACCES, "Permission denied"),
    (errno.EMFILE, "Too many open files"),
]


@pytest.mark.parametrize(("number", "said"), REFUSALS)
@pytest.mark.parametrize("name", ["manifest.json", "flash.img", "tokenizer"])
def test_what_the_system_refuses_to_open_is_no_damage(path, monkeypatch, number, said, name):
    """Neither of the folder, of a file in it, nor of a folder of it."""
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "tokenizer.json").write_text("{}")
    change_manifest(path, lambda manifest: None, relist=True)
    real = os.open

    def refusing(opened, *rest, **more):
        if os.path.basename(opened) == name:
            raise OSError(number, said, opened)
        return real(opened, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    refuse(path, errors.DeviceError, f"{name}", f"opening it is failing ({said}), expected data; ", "then try again")
    monkeypatch.setattr(os, "open", lambda opened, *rest, **more: refusing(name))
    refuse(path, errors.DeviceError, f"{path}: opening it is failing ({said})")


@pytest.mark.parametrize(("function", "step"), [("fstat", "opening it"), ("pread", "a read"), ("preadv", "a read")])
def test_what_the_system_refuses_of_an_open_file_is_no_damage(path, monkeypatch, function, step):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, function, fail)
        with pytest.raises(errors.DeviceError) as caught:
            open_artifact(path)
    assert f": {step} is failing (Input/output error)" in str(caught.value)
    assert "damaged" not in str(caught.value)


def test_a_folder_that_cannot_be_listed_is_told(path, monkeypatch):
    """What is in it might not belong there."""
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "tokenizer.json").write_text("{}")
    change_manifest(path, lambda manifest: None, relist=True)
    artifact, real = open_artifact(path), os.open

    def refusing(opened, *rest, **more):
        if opened == "tokenizer":
            raise OSError(errno.EACCES, "Permission denied", opened)
        return real(opened, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(errors.DeviceError, match=r"listing the folder 'tokenizer' is failing \(Permission denied\)"):
        verify_artifact(artifact)


@pytest.mark.parametrize("name", ["flash.img", "resident.safetensors", "tables.safetensors"])
@pytest.mark.parametrize("change", [-1, 1, -4096])
def test_another_size_is_refused(path, name, change):
    size = (path / name).stat().st_size
    os.truncate(path / name, size + change)
    refuse(path, errors.FileSizeError, name, f"{size + change} bytes", f"{size}, as the manifest says")


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/passwd",
        "a/../../b",
        "a//b",
        "./a",
        "a\\b",
        "C:x",
        "",
        ".hidden",
        "a/.git",
        "trailing.",
        "CON",
        "nul.txt",
        "a\0b",
        "a\nb",
        "ä",
        "a/b/c/d/e",
        "x" * 200,
        "FLASH.IMG",
        "manifest.json",
    ],
)
def test_unsafe_names_are_refused(path, name):
    entry = {"path": name, "size_bytes": 0, "sha256": "0" * 64}
    change_manifest(path, lambda manifest: manifest["files"].append(entry))
    refuse(path, errors.FileNameError, "manifest.json: files[")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not JSON"),
        (b"[1, 2", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": ' + b"9" * 5000 + b"}", "integer"),
        (b'{"a": 9007199254740992}', "9007199254740992"),
        (b'{"a": "\\ud800"}', "surrogates"),
        (b"[" * 100 + b"]" * 100, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * (17 << 20), "17825792 bytes"),
    ],
)
def test_text_that_is_not_strict_json_is_refused(path, text, words):
    (path / "manifest.json").write_bytes(text)
    kind = errors.FileSizeError if len(text) > 16 << 20 else errors.JsonError
    refuse(path, kind, "manifest.json", words)


def test_a_key_that_stands_twice_is_found_in_linear_time():
    """Counting each name among all would take 1,600 times as long for forty times as many."""

    def read(number):
        keys = ", ".join(f'"{key}": 0' for key in [*range(number), number - 1])
        with pytest.raises(errors.JsonError, match=f"the key '{number - 1}' twice"):
            strict_json.parse(b"{" + keys.encode() + b"}", partial(errors.JsonError, "a.json", "the text"))

    assert processor_s(lambda: read(80_000)) < 400 * processor_s(lambda: read(2_000))


def many(manifest, place, text):
    """The text of a manifest in which the empty list or object at `place` holds `text`."""
    written = json.dumps(manifest | {place: "HERE"}, indent=1)
    return seal(written.replace('"HERE"', text))


@pytest.mark.parametrize(
    ("place", "text", "kind", "words"),
    [
        ("resident", "[" + "0," * 3_000_000 + "0]", errors.JsonError, "about 3000"),
        ("resident", "[" + "0," * 400_000 + "0]", errors.SchemaError, "resident.0 is 0"),
        ("resident", "[" + "{}," * 200_000 + "{}]", errors.SchemaError, "resident.0.role is {}"),
        ("resident", "[" + '"",' * 3_000_000 + '""]', errors.JsonError, "strings, expected at most 524288 values"),
        ("inputs", "{" + ",".join(f'"{i}":""' for i in range(80_000)) + "}", errors.JsonError, "80000 members"),
        ("inputs", "[" * 16_000_000, errors.JsonError, "values, expected at most"),
        ("inputs", "[" * 40 + "]" * 40, errors.JsonError, "nested too deeply"),
    ],
    ids=["zeros", "fewer-zeros", "objects", "strings", "members", "brackets", "depth"],
)
def test_a_small_file_cannot_take_much_time_or_memory(path, place, text, kind, words):
    """3,000,000 zeros took 65 s and 4.7 GB: an error was made for each, and the first one shown."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest[KEY]
    written = many(manifest, place, text)
    (path / "manifest.json").write_text(written)
    tracemalloc.start()
    try:
        refuse(path, kind, words)
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


def test_plans_are_counted_before_they_are_checked(path):
    """8,000 of them took `inspect` 51 s."""
    change_manifest(path, lambda found: found.update(plans=[found["plans"][0] | {"name": str(i)} for i in range(65)]))
    refuse(path, errors.SchemaError, "plans is [", "at most 64 items")


def test_an_error_shows_little_of_what_strangers_wrote(path):
    name = "\x1b[2J\nerror: all is well" + "x" * 5000
    change_manifest(path, lambda manifest: manifest.update({name: 1}))
    with pytest.raises(errors.SchemaError) as caught:
        open_artifact(path)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 600
    assert r"\x1b[2J\nerror: all is well" in text


@pytest.mark.parametrize("value", [b"[]", b"3", b"{}", b'{"format": {"major": 1.0, "minor": 0, "name": "coldpress"}}'])
def test_json_that_is_no_manifest_is_refused(path, value):
    (path / "manifest.json").write_bytes(value)
    refuse(path, errors.SchemaError, "manifest.json: format")
