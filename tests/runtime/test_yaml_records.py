"""runtime/device_profiles/yaml_records.py: one sentence names every mistake; no file can break the reader."""

import os
from pathlib import Path

import pytest

from coldpress.runtime.device_profiles.yaml_records import MAX_FILE_BYTES, load_yaml
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError
from tests.support.data import ROOT

PIXEL6 = (ROOT / "profiles" / "devices" / "pixel6.yaml").read_text()


def refusal(path: Path) -> str:
    with pytest.raises(ColdpressError) as caught:
        load_yaml(path, DeviceProfile)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < len(str(path)) + 700
    return text.removeprefix(f"{path}: ")


def refused(folder: Path, text: str) -> str:
    (folder / "mine.yaml").write_text(text)
    return refusal(folder / "mine.yaml")


def changed(*changes: tuple[str, str]) -> str:
    """The profile of the Pixel 6 with parts of its text replaced."""
    text = PIXEL6
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def test_all_mistakes_are_told_with_the_nearest_key(tmp_path: Path) -> None:
    text = changed(
        ("dram_bytes_per_s:", "dram_byte_per_s:"),
        ("queue_depth:", "queue_dept:"),
        ("num_cores:\n", "things:\n"),
        ("value: 8_589_934_592", "value: 8 apples"),
        ("read_bytes: 4096", "read_bytes: 40960"),
    )
    assert refused(tmp_path, text).split("; ") == [
        "flash: unknown key 'queue_dept'",
        "did you mean 'queue_depth'?",
        "unknown key 'dram_byte_per_s'",
        "did you mean 'dram_bytes_per_s'?",
        "unknown key 'things'",
        "known are accelerator, compute, dram_budget_bytes, dram_bytes, dram_bytes_per_s, flash, name, notes, "
        "num_cores, title",
        "dram_bytes.value: expected bytes, or an amount of memory such as 8GB, found '8 apples'",
        "missing key 'num_cores'",
        "flash: read_curve needs ascending, distinct read sizes, found [40960, 24576, 65536, 1048576]",
    ]


def test_a_misspelt_key_of_a_point_and_of_a_figure_is_found(tmp_path: Path) -> None:
    text = changed(("{read_bytes: 4096", "{read_byts: 4096"), ("  source: ", "  sauce: "))
    assert refused(tmp_path, text) == (
        "dram_bytes: unknown key 'sauce'; did you mean 'source'?; "
        "flash.read_curve.value.0: unknown key 'read_byts'; did you mean 'read_bytes'?"
    )


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "value: 4_294_967_296",
            "value: 10GB",
            "dram_budget_bytes must be at most dram_bytes, 8589934592, found 10000",
        ),
        (
            "latency_s:\n    value: ",
            "latency_s:\n    value: 0.1 # ",
            "flash: latency_s must be from 0 to 0.05, found 0.1",
        ),
        (
            "name: pixel6",
            "name: My Phone",
            "name: expected small letters, digits and single hyphens between them, foun",
        ),
        ("name: pixel6", f"name: {'a' * 300}", "name: String should have at most 64 characters, found 'aaa"),
        (
            "value: 8_589_934_592",
            "value: {a: [1, 2]}",
            "dram_bytes.value: expected bytes, or an amount of memory such ",
        ),
        (
            "latency_s:\n    value: ",
            "latency_s:\n    value: .nan # ",
            "flash.latency_s.value: Input should be a finite",
        ),
    ],
)
def test_figures_that_cannot_be(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert refused(tmp_path, changed((old, new))).startswith(sentence)


def test_amounts_of_memory_have_units(tmp_path: Path) -> None:
    text = changed(("value: 8_589_934_592", "value: 8GiB"), ("value: 4_294_967_296", "value: 4 GB"))
    (tmp_path / "mine.yaml").write_text(text.replace("read_bytes: 65536", "read_bytes: 64KiB"))
    found = load_yaml(tmp_path / "mine.yaml", DeviceProfile)
    assert (found.dram_bytes.value, found.dram_budget_bytes.value) == (8 << 30, 4 * 10**9)
    assert [point.read_bytes for point in found.flash.read_curve.value] == [4096, 24576, 65536, 1 << 20]


NUMBER = "a number has 5000 characters, expected 64 at most"
HOSTILE = {
    "an alias that grows": ("a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]", "line 1: an anchor is set"),
    "a list in itself": ("&a [*a]", "line 1: an anchor is set"),
    "an alias of nothing": ("a: *b", "line 1: an alias is used"),
    "deep": ("[" * 1500, "line 1: the values are nested more than 32 deep"),
    "as deep as a file allows": ("[" * MAX_FILE_BYTES, "line 1: the values are nested more than 32 deep"),
    "a whole number": (f"a: {'9' * 5000}", NUMBER),
    "a fraction": (f"a: 0.{'9' * 4998}", NUMBER),
    "base sixty": (f"a: 11{':59' * 1666}", NUMBER),
    "an int by tag": ("!!int foo", "the tag tag:yaml.org,2002:int is given"),
    "an empty int by tag": ("!!int ''", "the tag tag:yaml.org,2002:int is given"),
    "a float by tag": ("!!float foo", "the tag tag:yaml.org,2002:float is given"),
    "a bool by tag": ("a: !!bool foo", "the tag tag:yaml.org,2002:bool is given"),
    "a date by tag": ("!!timestamp foo", "the tag tag:yaml.org,2002:timestamp is given"),
    "an object": (
        "!!python/object/apply:os.system [true]",
        "the tag tag:yaml.org,2002:python/object/apply:os.system is",
    ),
    "a date": ("2024-99-99", "expected keys with values, found '2024-99-99'"),
    "a key that is a list": ("? [a]\n: 1", "line 1: a key is a list or a mapping"),
    "a key twice": ("a: 1\na: 2", "line 2: key 'a' is given twice"),
    "long keys": (f"{'k' * 900}: 1\n", "unknown key 'kkkk"),
    "many keys": ("".join(f"k{number}: 1\n" for number in range(20_000)), "unknown key 'k19'; and others"),
    "too large": ("#" * (MAX_FILE_BYTES + 1), "the file has more than 262144 bytes"),
    "nothing": ("", "expected keys with values, found None"),
    "two documents": ("a: 1\n---\na: 1", "but found another document"),
    "no YAML": ("a: [", "not a YAML profile: line "),
    "a null byte": ("a\0b", "not a YAML profile: unacceptable character #x0000"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_ends_in_a_sentence(tmp_path: Path, name: str) -> None:
    text, sentence = HOSTILE[name]
    assert sentence in refused(tmp_path, text)


def test_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert refusal(tmp_path / "pipe.yaml") == "not a file, expected a profile in YAML"
    (tmp_path / "folder.yaml").mkdir()
    assert "cannot be read (Is a directory)" in refusal(tmp_path / "folder.yaml")
    assert refusal(Path("/dev/zero")) == "not a file, expected a profile in YAML"
    assert refusal(tmp_path / "none.yaml") == "no such profile"
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    assert "it is not UTF-8 at byte 3" in refusal(tmp_path / "latin.yaml")
    with pytest.raises(ColdpressError, match=r"the profile cannot be read \(File name too long\)"):
        load_yaml(tmp_path / f"{'x' * 300}.yaml", DeviceProfile)
