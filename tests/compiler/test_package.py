"""package: the bytes are where the layout says, the same for the same records, and visible whole or not at all."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from coldpress.compiler import publishing
from coldpress.compiler.io import load_arrays, replacing, save_arrays
from coldpress.compiler.stages.package import flash, hashing
from coldpress.compiler.stages.package import mapped as _mapped
from coldpress.compiler.stages.package.hashing import HashingFile
from coldpress.compiler.stages.package.mapped import MappedArray
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import units_whole_bytes
from coldpress.runtime.generate.session import Session
from coldpress.schemas.errors import ArtifactError, ColdpressError, DoesNotFitError
from coldpress.schemas.manifest import FLASH_FILE, MANIFEST_FILE
from tests.support.records import Build, contents
from tests.support.tiny import tiny_spec

POLYNOMIAL = 0x82F63B78


def crc32c(data: bytes) -> int:
    """CRC32C bit by bit, by its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ POLYNOMIAL * (crc & 1)
    return crc ^ 0xFFFFFFFF


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize(
    ("method", "layers_per_group"), [("dense", 1), ("relu", 1), ("predictor", 1), ("topk", 1), ("topk", 2), ("relu", 3)]
)
def test_units_lie_in_flash_order_with_zeros_behind(tmp_path, method, layers_per_group, monkeypatch):
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 4096)  # units lie across blocks
    spec = tiny_spec(num_hidden_layers=5)
    build = Build(tmp_path, method=method, format_name="int4_group32", spec=spec, layers_per_group=layers_per_group)
    build.package()
    image = np.fromfile(build.artifact / FLASH_FILE, np.uint8)
    assert image.size == build.layout.flash_bytes
    used = np.zeros(image.size, bool)
    orders = {(entry.layer, entry.family): entry.arrays for part in build.order for entry in part.entries}
    for section in build.layout.sections:
        layers = (layer for part in build.quantized for layer in part.layers if layer.layer in section.layers)
        codes = np.stack([load_arrays(layer.arrays)[f"units.{section.family}"] for layer in layers], axis=1)
        order = load_arrays(orders[section.first_layer, section.family])["order"]
        rows = slice(section.offset_bytes, section.offset_bytes + section.length_bytes)
        assert np.array_equal(image[rows].reshape(section.num_units, -1, section.unit_bytes), codes[order])
        used[rows] = True
    (table,) = build.layout.tables
    rows = slice(table.offset_bytes, table.offset_bytes + table.length_bytes)
    codes = load_arrays(build.quantized[0].shared)["embed_tokens.weight"]
    assert np.array_equal(image[rows].reshape(table.num_rows, table.row_bytes), codes)
    used[rows] = True
    assert not image[~used].any()


@pytest.mark.parametrize("block_bytes", [65536, 8 << 20])
def test_page_checksums_and_file_digests_are_of_what_lies_on_disk(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(hashing, "BLOCK_BYTES", block_bytes)
    build = Build(tmp_path, page_bytes=512)
    package = build.package()
    manifest = json.loads((build.artifact / MANIFEST_FILE).read_text())
    image = (build.artifact / FLASH_FILE).read_bytes()
    found = load_file(build.artifact / "tables.safetensors")["page_crc32c"]
    assert found.size == len(image) // 512
    pages = [0, 1, 20, found.size - 1]
    assert [int(found[page]) for page in pages] == [crc32c(image[page * 512 : (page + 1) * 512]) for page in pages]
    listed = {entry["path"]: entry["sha256"] for entry in manifest["files"]}
    on_disk = contents(build.artifact)
    assert package.manifest_sha256 == on_disk.pop(MANIFEST_FILE)
    assert listed == on_disk
    sizes = [path.stat().st_size for path in build.artifact.rglob("*") if path.is_file()]
    assert package.artifact_bytes == sum(sizes)


def test_the_reader_finds_every_tensor(tmp_path):
    build = Build(tmp_path, method="predictor")
    build.package()
    artifact = open_artifact(build.artifact)
    arrays = load_arrays(build.quantized[0].shared)
    for layer in build.quantized[0].layers:
        arrays |= {f"layers.{layer.layer}.{name}": array for name, array in load_arrays(layer.arrays).items()}
    on_flash = "embed_tokens.weight"
    assert set(artifact.resident) == {name for name in arrays if ".units." not in name and name != on_flash}
    for role, array in artifact.resident.items():
        assert np.array_equal(array.reshape(arrays[role].shape), arrays[role]), role
    for layer in build.predictors.layers:
        expected = load_arrays(layer.arrays)
        found = artifact.predictors[layer.layer]
        assert np.array_equal(found.fc1, expected["fc1"])
        assert np.array_equal(found.fc2, expected["fc2"])
        assert found.threshold == 0.25
    placed = load_arrays(build.placement.arrays)
    for part in build.plans.largest_plan.parts:
        rank = artifact.rank(part.layer, part.family)
        pinned = np.flatnonzero(placed[f"{part.layer}.{part.family}"] == 0)
        assert np.array_equal(rank, placed[f"rank.{part.layer}.{part.family}"])
        assert sorted(rank[: part.num_pinned]) == pinned.tolist()
    assert artifact.manifest.plans == build.plans.plans
    assert artifact.manifest.source.license == "MIT"


def resident_bytes_of(path: Path) -> int:
    """What of a mapped file counts as this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if line.endswith(str(path))]
    found = (next(line for line in lines[start:] if line.startswith("Rss:")) for start in starts)
    return sum(1024 * int(line.split()[1]) for line in found)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc/self/smaps")
def test_memory_does_not_grow_with_the_section(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(_mapped, "RELEASE_BYTES", 1 << 20)
    units = np.random.default_rng(0).integers(0, 256, (1024, 8192), np.uint8)
    source = save_arrays(tmp_path / "codes.safetensors", {"units": units})
    peaks: list[int] = []
    file = HashingFile(tmp_path / "image", lambda _: peaks.append(resident_bytes_of(Path(source.array_file))))
    order = np.random.default_rng(1).permutation(len(units)).astype(np.int32)
    mapped = MappedArray(source, "units")
    flash._append_units(file, (mapped,), order)
    file.write(mapped.values, mapped.copied)
    file.finish()
    file.close()
    assert np.array_equal(np.fromfile(tmp_path / "image", np.uint8), np.concatenate([units[order], units]).ravel())
    assert len(peaks) == 16
    assert max(peaks) <= 1 << 21  # of 8 MiB; the kernel maps up to 2 MiB of its page cache at once


def test_a_second_run_succeeds_with_the_same_identity_and_repairs_damage(tmp_path):
    build = Build(tmp_path)
    first = build.package()
    before = contents(build.artifact)
    (build.artifact / FLASH_FILE).write_bytes(b"damaged")
    assert build.package() == first
    assert contents(build.artifact) == before
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("exchange", [True, False])
def test_another_build_replaces_the_artifact(tmp_path, monkeypatch, exchange):
    build = Build(tmp_path)
    build.package()
    if not exchange:
        monkeypatch.setattr(publishing, "_exchange", lambda first, second: False)
    other = Build(tmp_path / "other", format_name="int4_group32")
    result = other.package()
    shutil.rmtree(other.artifact)
    other.folder = tmp_path
    assert other.package() == result.model_copy(update={"folder": str(build.artifact)})
    assert open_artifact(build.artifact).manifest.families[0].format == "int4_group32"
    assert hidden(tmp_path) == []


def test_a_failed_run_leaves_the_old_artifact_and_nothing_else(tmp_path, monkeypatch):
    build = Build(tmp_path)
    build.package()
    before = contents(build.artifact)

    def full(descriptor, data, place):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DoesNotFitError, match=r"no space left for tiny\.coldpress .* bytes; free some"):
        build.package()
    assert contents(build.artifact) == before
    assert hidden(tmp_path) == []


def test_too_little_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    build = Build(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000))
    with pytest.raises(DoesNotFitError, match=r"tiny\.coldpress needs \d+ bytes of disk, 5000 are free"):
        build.package()
    assert not build.artifact.exists()


def test_what_is_no_artifact_is_not_replaced(tmp_path):
    build = Build(tmp_path)
    build.artifact.mkdir()
    (build.artifact / "thesis.txt").write_text("years of work")
    with pytest.raises(ColdpressError, match=r"exists and is no artifact"):
        build.package()
    assert (build.artifact / "thesis.txt").read_text() == "years of work"
    shutil.rmtree(build.artifact)
    build.artifact.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ColdpressError, match=r"exists and is no artifact"):
        build.package()


def test_leftovers_of_killed_runs_go_and_those_of_running_ones_stay(tmp_path):
    build = Build(tmp_path)
    dead, alive = tmp_path / ".tiny.coldpress.1.tmp", tmp_path / ".tiny.coldpress.2.tmp"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "flash.img").write_bytes(b"half")
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    build.package()
    os.close(lock)
    assert hidden(tmp_path) == [alive.name]
    assert build.artifact.is_dir()


def killed_at(build: Build, step: int) -> bool:
    """Runs `package` in a child that kills itself at its `step`-th change of the disk; False if it got through."""
    child = os.fork()
    if child == 0:
        try:
            _arm(step)
            build.package()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _arm(step: int) -> None:
    count = iter(range(step))

    def counted(function):
        def call(*arguments, **named):
            if next(count, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return call

    for name in ("pwrite", "truncate", "fsync", "mkdir", "rename", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    publishing._exchange = counted(publishing._exchange)


@pytest.mark.slow
def test_killed_at_any_step_the_visible_artifact_is_whole(tmp_path):
    old, new = Build(tmp_path / "old"), Build(tmp_path / "new", format_name="int4_group32")
    old.package()
    new.package()
    whole = [contents(old.artifact), contents(new.artifact)]
    shutil.rmtree(new.artifact)
    for present in (False, True):
        step, got_through = 0, False
        while not got_through:
            if present:
                shutil.rmtree(new.artifact, ignore_errors=True)
                shutil.copytree(old.artifact, new.artifact)
            elif new.artifact.exists():
                shutil.rmtree(new.artifact)
            got_through = not killed_at(new, step)
            if new.artifact.exists():
                assert contents(new.artifact) in whole[0 if present else 1 :], step
            else:
                assert not present
            step += 5 if step > 6 else 2
        assert step > 20  # the kills did hit the writing
    new.package()
    assert contents(new.artifact) == whole[1]
    assert hidden(new.folder) == []


def watch_the_disk(monkeypatch) -> list[tuple[str, str]]:
    """What is synced and renamed from now on, in order: ("fsync", path) and ("rename", new path)."""
    seen: list[tuple[str, str]] = []
    fsync, rename, replace, exchange = os.fsync, os.rename, os.replace, publishing._exchange

    def synced(descriptor):
        seen.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def named(function):
        def call(source, target, **more):
            seen.append(("rename", str(target)))
            return function(source, target, **more)

        return call

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", named(rename))
    monkeypatch.setattr(os, "replace", named(replace))
    monkeypatch.setattr(publishing, "_exchange", named(exchange))
    return seen


@pytest.mark.parametrize("present", [False, True])
def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, present):
    """Every file, then every folder after what is in it, then the name, then the folder that holds the name."""
    build = Build(tmp_path)
    if present:
        build.package()
    seen = watch_the_disk(monkeypatch)
    build.package()
    named = seen.index(("rename", str(build.artifact)))
    synced = [path for kind, path in seen[:named] if kind == "fsync"]
    top = next(path for path in synced if path.endswith(".tmp"))
    on_disk = {str(Path(top) / path.relative_to(build.artifact)) for path in build.artifact.rglob("*")} | {top}
    assert set(synced) == on_disk
    for path in on_disk - {top}:
        assert synced.index(path) < synced.index(str(Path(path).parent))
    assert seen[named + 1] == ("fsync", str(tmp_path))


def test_a_moved_artifact_is_on_the_disk_in_both_folders(tmp_path, monkeypatch):
    build = Build(tmp_path, name="package/artifact")
    build.package()
    seen = watch_the_disk(monkeypatch)
    publishing.move(build.artifact, tmp_path / "final.coldpress")
    assert seen[0] == ("rename", str(tmp_path / "final.coldpress"))
    assert set(seen[1:]) == {("fsync", str(tmp_path)), ("fsync", str(tmp_path / "package"))}


def test_a_record_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    seen = watch_the_disk(monkeypatch)
    with replacing(tmp_path / "record.json") as temporary:
        temporary.write_text("{}")
    assert seen == [
        ("fsync", str(temporary)),
        ("rename", str(tmp_path / "record.json")),
        ("fsync", str(tmp_path)),
    ]


def test_a_manifest_that_the_reader_refuses_is_not_published(tmp_path):
    build = Build(tmp_path)
    sections = build.plans.plans[0].parts
    parts = (sections[0].model_copy(update={"cache_slots": 10**6}), *sections[1:])
    plan = build.plans.plans[0].model_copy(update={"parts": parts})
    with pytest.raises(ArtifactError, match=r"plans\[0\]\.parts\[0\]"):
        build.package(plans=build.plans.model_copy(update={"plans": (plan,)}))
    assert not build.artifact.exists()


def test_only_licences_that_ingest_took_are_shipped(tmp_path):
    """A checkpoint's folder may hold links to any file of its builder."""
    build = Build(tmp_path)
    (tmp_path / "secret").write_text("a key\n")
    (tmp_path / "model" / "LICENSE (1)").symlink_to(tmp_path / "secret")
    (tmp_path / "model" / "LICENSE_2").symlink_to(tmp_path / "secret")
    build.package()
    shipped = [path for path in build.artifact.rglob("*") if path.is_file()]
    assert sorted(path.name for path in shipped if path.name.startswith("LICENSE")) == ["LICENSE"]
    assert not [path for path in shipped if b"a key" in path.read_bytes()]


def test_a_licence_that_has_changed_since_ingest_is_refused(tmp_path):
    build = Build(tmp_path)
    (tmp_path / "model" / "LICENSE").write_text("Do nothing with it.\n")
    with pytest.raises(
        ColdpressError, match=r"model/LICENSE: the sha256 begins .* changed after its stage ended; delete "
    ):
        build.package()


def test_the_manifest_names_by_content_what_the_artifact_was_made_from(tmp_path):
    build = Build(tmp_path)
    build.package()
    inputs = json.loads((build.artifact / MANIFEST_FILE).read_text())["inputs"]
    tokens = {
        f"{part.split}_tokens": hashlib.sha256(load_arrays(part.arrays)["tokens"].astype("<i4").tobytes()).hexdigest()
        for part in build.corpus.splits
    }
    assert len(set(tokens.values())) == 3
    assert inputs | tokens == inputs
    assert inputs["weights"] == build.model.weights_sha256
    assert inputs["text"] == build.corpus.text_sha256
    assert set(inputs) == {*tokens, "weights", "text", "settings"}


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [True, False])
def test_a_draft_model_is_a_part_of_the_artifact_if_a_plan_needs_it(tmp_path, drafts):
    small = Build(tmp_path / "small", method="dense", spec=tiny_spec(num_hidden_layers=2), budget_share=2.0)
    build = Build(tmp_path / "model", method="dense", spec=tiny_spec(num_hidden_layers=11))
    (plan,) = build.plans.plans
    needed = units_whole_bytes(open_artifact(small.package().folder).manifest, small.plans.plans[0])
    own = {"draft": "model", "draft_tokens": 2, "draft_bytes": needed}
    own |= {"dram_budget_bytes": plan.dram_budget_bytes + needed}
    plans = build.plans.model_copy(update={"plans": (plan.model_copy(update=own if drafts else {}),)})
    written = build.package(plans=plans, draft_package=small.record)
    listed = {entry.path: entry.sha256 for entry in open_artifact(written.folder).manifest.files}
    inside = {path.removeprefix("draft/") for path in listed if path.startswith("draft/")}
    assert inside == ({*contents(small.artifact)} if drafts else set())
    if drafts:
        assert {path: listed[f"draft/{path}"] for path in inside} == contents(small.artifact)
        assert verify_artifact(open_artifact(written.folder)) < written.artifact_bytes
        with Session(written.folder, plan=plans.plans[0]) as session:
            assert any(token.drafted for token in session.generate([1, 2, 3], 8, ignore_eos=True).tokens)


def test_tokenizer_licence_card_and_provenance(tmp_path):
    build = Build(tmp_path)
    build.package()
    assert (build.artifact / "tokenizer" / "tokenizer.json").read_bytes() == (
        tmp_path / "model" / "tokenizer.json"
    ).read_bytes()
    assert (build.artifact / "LICENSE").read_text() == "Do with it what you like.\n"
    card = (build.artifact / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: coldpress\n")
    assert 'license: "MIT"' in card
    assert "| mlp_in | 25.0 % | 25.0 % | 25.0 % |" in card
    assert "base_model" not in card
    provenance = json.loads((build.artifact / "provenance" / "build.json").read_text())
    assert provenance["inputs"] == json.loads((build.artifact / MANIFEST_FILE).read_text())["inputs"]
    assert provenance["order"][0] == {
        "layer": 0,
        "num_layers": 1,
        "family": "mlp_in",
        "heuristic": "test",
        "adjacent_coactivation": 0.5,
    }
