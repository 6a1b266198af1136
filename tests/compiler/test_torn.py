"""Whatever a crash leaves on the disk of publishing and of records (tests/support/torn.py), no reader takes it for more
than it is, and the next run ends with the same bytes.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler import publishing
from coldpress.compiler.io import Workspace, load_arrays, load_record, save_arrays, save_record
from coldpress.compiler.job import Job, run_job
from coldpress.compiler.stages import publish
from coldpress.compiler.stages.publish import PublishConfig
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.schemas.errors import ArtifactError, ColdpressError
from coldpress.schemas.quantized import Quantized
from tests.support import torn
from tests.support.records import Build, tiny_verification
from tests.support.torn import State, below, restore, states, watch

MAX_RUNS = 12
"""States from which the next run is tried, of the hundreds that are looked at."""
REPORTS = ("metrics.json", "report.html", "export.json", "final.gguf")
FINAL, PACKAGED = "final.coldpress", "package/artifact"


def spread(found: list[State]) -> list[State]:
    """Some of many, from the first to the last."""
    return [found[int(place)] for place in np.unique(np.linspace(0, len(found) - 1, MAX_RUNS).astype(int))]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Build, Build]:
    """Two that differ; their artifacts are packaged where `restored` puts them."""
    top = tmp_path_factory.mktemp("torn")
    return (
        Build(top / "old", format_name="int4_group32", name=f"../out/{PACKAGED}"),
        Build(top / "new", name=f"../out/{PACKAGED}"),
    )


@pytest.fixture(scope="module")
def artifacts(builds: tuple[Build, Build]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of each."""
    found = []
    for build in builds:
        build.package()
        found.append(below(torn.tree(build.artifact.parent), build.artifact.name))
    return found[0], found[1]


def out_of(build: Build) -> Path:
    return Path(os.path.normpath(build.folder / "../out"))


def beginning(**folders: dict[str, bytes]) -> State:
    """A folder of artifacts, by name."""
    state: State = {"package": None}
    for name, files in folders.items():
        path = {"final": FINAL, "packaged": PACKAGED}[name]
        state[path] = None
        for file, data in files.items():
            state |= {f"{path}/{parent}": None for parent in map(str, Path(file).parents) if parent != "."}
            state[f"{path}/{file}"] = data
    return state


def torn_states(
    build: Build, begin: State, action: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[State], State]:
    """(states that a crash of `action` may leave, what there is without one)."""
    restore(begin, out_of(build))
    found = list(states(watch(out_of(build), action, monkeypatch)))
    return found, torn.tree(out_of(build))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["nothing stands", "exchange", "two renames"])
def test_a_torn_package_is_the_old_artifact_or_the_new(builds, artifacts, monkeypatch, way):
    (_, new), (old_files, new_files) = builds, artifacts
    if way == "two renames":
        monkeypatch.setattr(publishing, "_exchange", lambda *_: False)
    whole = [{}, new_files] if way == "nothing stands" else [old_files, new_files]
    begin = beginning() if way == "nothing stands" else beginning(packaged=old_files)
    found, after = torn_states(new, begin, new.package, monkeypatch)
    for state in found:
        assert below(state, PACKAGED) in (whole if way != "two renames" else [*whole, {}])
    assert {frozenset(below(state, PACKAGED)) for state in found} >= set(map(frozenset, whole))
    for state in spread(found):
        restore(state, out_of(new))
        new.package()
        assert torn.tree(out_of(new)) == after


def published(build: Build, **gates: Any) -> Any:
    out = out_of(build)
    paths = {"artifact": out / FINAL, "metrics": out / REPORTS[0], "html": out / REPORTS[1]}
    exported = tuple(str(out / name) for name in REPORTS[2:])
    config = PublishConfig(**{name: str(path) for name, path in paths.items()}, exported=exported, **gates)
    return publish.run(config, build.record, tiny_verification(build.plans, build.record.manifest_sha256))


def refused(build: Build) -> None:
    with pytest.raises(ColdpressError, match="max_ppl_ratio"):
        published(build, max_ppl_ratio=1.02)


@pytest.mark.parametrize("way", ["nothing stands", "exchange", "two renames"])
def test_what_is_published_is_whole_and_has_no_other_report(builds, artifacts, monkeypatch, way):
    (_, new), (old_files, new_files) = builds, artifacts
    if way == "two renames":
        monkeypatch.setattr(publishing, "_exchange", lambda *_: False)
    begin = beginning(packaged=new_files)
    if way != "nothing stands":
        begin = beginning(packaged=new_files, final=old_files) | dict.fromkeys(REPORTS, b"of the old one")
    found, after = torn_states(new, begin, partial(published, new), monkeypatch)
    for state in found:
        stands = below(state, FINAL)
        assert stands in ([old_files, new_files, {}] if way == "two renames" else [below(begin, FINAL), new_files])
        assert stands != new_files or not [name for name in REPORTS if name in state]
        assert new_files in [below(state, place) for place in (PACKAGED, FINAL)]
    for state in spread(found):
        restore(state, out_of(new))
        published(new)
        assert torn.tree(out_of(new)) == after
    assert below(after, FINAL) == new_files


@pytest.mark.parametrize("same", [False, True])
def test_what_is_withdrawn_is_whole_somewhere_with_its_report(builds, artifacts, monkeypatch, same):
    """Of another artifact, and of the one that misses the gate."""
    (old, new), (old_files, new_files) = builds, artifacts
    stood = new_files if same else old_files
    aside = f"earlier/{(new if same else old).record.manifest_sha256[:12]}"
    begin = beginning(packaged=new_files, final=stood) | dict.fromkeys(REPORTS, b"of what stood there")
    found, after = torn_states(new, begin, partial(refused, new), monkeypatch)
    for state in found:
        assert below(state, FINAL) in (stood, {})
        assert new_files in [below(state, place) for place in (PACKAGED, FINAL)]
        assert stood in [below(state, place) for place in (PACKAGED, FINAL, f"{aside}/{FINAL}")]
        for name in REPORTS:
            places = [place for place in (name, f"{aside}/{name}") if place in state]
            assert places
            assert all(state[place] == b"of what stood there" for place in places)
    for state in spread(found):
        restore(state, out_of(new))
        refused(new)
        assert torn.tree(out_of(new)) == after
    assert FINAL not in after


@pytest.fixture(scope="module")
def jobs(builds: tuple[Build, Build]) -> tuple[Job, Job]:
    """`quantize` of both builds, into the same record."""
    made = []
    for build in builds:
        paths = {name: (build.folder / "jobs" / f"{name}.json",) for name in ("model", "sparsity")}
        for name, (path,) in paths.items():
            save_record(getattr(build, name), path)
        output = out_of(build).with_name("stage") / "quantized.json"
        made.append(Job(stage="quantize", settings={}, records=paths, output=output, layers=(0, 1), code="test"))
    return made[0], made[1]


def loaded(path: Path) -> list[tuple[str, bytes]] | None:
    """What a later stage gets of a record and its arrays; None where it is refused: what is damaged, or missing."""
    try:
        record = load_record(path, Quantized)
        arrays = [(layer.layer, load_arrays(layer.arrays)) for layer in record.layers]
    except ColdpressError:
        return None
    return [(f"{layer} {name}", array.tobytes()) for layer, found in arrays for name, array in sorted(found.items())]


@pytest.mark.parametrize("present", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_torn_record_is_the_old_one_the_new_one_or_refused(jobs, monkeypatch, present):
    old, new = jobs
    root = new.output.parent
    ends, whole = [], []
    for job in jobs:
        restore({}, root)
        run_job(job)
        ends.append(torn.tree(root))
        whole.append(loaded(job.output))
    assert whole[0] != whole[1]
    restore(ends[0] if present else {}, root)
    found = list(states(watch(root, partial(run_job, new), monkeypatch)))
    assert {"quantized.json" in state for state in found} == ({True} if present else {True, False})
    for state in found:
        restore(state, root)
        if present:  # the old record may stand beside the new arrays, and is refused
            assert loaded(new.output) in [*whole, None]
        else:
            assert loaded(new.output) == (whole[1] if new.output.exists() else None)
    for state in spread(found):
        for job, after in zip(jobs, ends, strict=True):
            restore(state, root)
            run_job(job)
            assert torn.tree(root) == after
    assert old.output == new.output


def test_rows_that_carry_checksums_are_those_of_their_fingerprint(tmp_path, monkeypatch):
    """Nothing else says which run a file of rows is of: its content is not read."""

    def rows(name: str) -> np.ndarray:
        return np.full(100, ord(name), np.uint8)

    def stage(name: str) -> bytes:
        work = Workspace(tmp_path / "stage", name)
        if not work.has("rows"):
            save_arrays(work.begin("rows"), {"rows": rows(name)})
            work.finish_checked_rows("rows")
        return work.path("rows").read_bytes()

    expected = {name: stage(name) for name in "ab"}
    for state in states(watch(tmp_path, lambda: stage("a"), monkeypatch)):
        for name, data in expected.items():
            restore(state, tmp_path)
            assert stage(name) == data


def nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("without", "faulty"),
    [
        ("any sync", lambda patched: patched.setattr(torn.Recording, "note_sync", nothing)),
        ("sync of folders", lambda patched: patched.setattr(publishing, "sync_folder", nothing)),
    ],
)
def test_the_model_sees_what_is_not_synced(builds, artifacts, monkeypatch, without, faulty):
    """So that these tests can fail; and the reader refuses what is torn."""
    (_, new), (old_files, new_files) = builds, artifacts
    faulty(monkeypatch)
    found, _ = torn_states(new, beginning(packaged=old_files), new.package, monkeypatch)
    wrong = [state for state in found if below(state, PACKAGED) not in (old_files, new_files)]
    assert wrong, without
    for state in spread(wrong):
        restore(state, out_of(new))
        with pytest.raises(ArtifactError):
            verify_artifact(open_artifact(out_of(new) / PACKAGED))


def test_the_model_sees_a_record_that_goes_before_its_arrays(jobs, monkeypatch):
    """Without syncs a record may stand without its arrays, or cut; the readers say so, and the next run mends it."""
    _, new = jobs
    restore({}, new.output.parent)
    monkeypatch.setattr(torn.Recording, "note_sync", nothing)
    found = list(states(watch(new.output.parent, partial(run_job, new), monkeypatch)))
    results = []
    for state in found:
        restore(state, new.output.parent)
        results.append(loaded(new.output) if new.output.exists() else "absent")
    assert None in results
    assert len({str(result) for result in results}) == 3
