"""Builds that share results through Snakemake's cache, as builds on two machines do."""

import re
import shutil
from pathlib import Path

import pytest

from coldpress.compiler.io import load_record, sha256_of
from coldpress.compiler.workflow import inputs, settings
from coldpress.schemas.placement import Placement
from tests.support.stages import DEFAULT
from tests.support.workflow import Workflow

HERE = {"ingest", "device", "preflight", "package", "verify", "publish", "report"}
"""Stages that run on every machine: they read or write what is no declared file, or measure the machine."""


def made(said: str) -> set[str]:
    """The stages whose results snakemake moved into the cache, so whose jobs ran; others it links from there."""
    paths = [Path(found) for found in re.findall(r"^Moving output file (\S+)\.json to cache", said, re.MULTILINE)]
    return {path.parent.name if re.fullmatch(r"[\d-]+", path.name) else path.name for path in paths}


def cached(build: Workflow, **config: object) -> str:
    """Builds with the cache; returns what snakemake said."""
    done = build.run("--cache", **config)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): sha256_of(file) for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("SNAKEMAKE_OUTPUT_CACHE", str(folder))
    return folder


def elsewhere(build: Workflow, folder: Path) -> Workflow:
    """The same build in another folder, of a copy of the checkpoint and the corpus in another place."""
    model, corpus = (Path(str(build.config[key])) for key in ("model", "corpus"))
    shutil.copytree(model, folder / "far" / "away" / model.name)
    shutil.copy(corpus, folder / corpus.name)
    return build.at(folder / "there", model=folder / "far" / "away" / model.name, corpus=folder / corpus.name)


@pytest.mark.slow
def test_a_second_machine_takes_results_from_the_cache(built: Workflow, cache: Path, tmp_path: Path) -> None:
    one = built.at(tmp_path / "one")
    assert made(cached(one)) == set(DEFAULT) - HERE
    assert contents(one.artifact) == contents(built.artifact)
    two, shared = elsewhere(built, tmp_path / "two"), contents(cache)
    assert made(cached(two)) == set()
    assert contents(two.artifact) == contents(built.artifact)
    assert contents(cache) == shared, "nothing is written into what the cache has"
    for build in (one, two):
        assert "Nothing to be done" in cached(build)
    changes = {"order": "frequency"}
    assert made(cached(two, **changes)) == set(built.planned(**changes)) - HERE - {"all"}, "as without a cache"
    assert contents(cache).items() > shared.items()


@pytest.mark.slow
def test_the_remedy_for_a_damaged_result_names_the_cache(built: Workflow, cache: Path, tmp_path: Path) -> None:
    one, two = built.at(tmp_path / "one", method="dense"), built.at(tmp_path / "two", method="dense")
    cached(one)
    arrays = load_record(one.device / "place.json", Placement).arrays
    Path(arrays.array_file).write_bytes(b"damaged")
    done = two.run("--cache", order="frequency")
    assert done.returncode == 2
    sentence = done.stderr.splitlines()[-1]
    entry = str((one.device / "place.json").readlink()).removesuffix("record.json")
    remedy = f"delete {two.device / 'place.json'} and, in the cache, {entry}*, then build again"
    assert sentence.endswith(remedy), sentence
    (two.device / "place.json").unlink()
    for path in cache.glob(f"{Path(entry).name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert {"place", "order"} <= made(cached(two, order="frequency"))


def corpus_of(folder: Path, model: Path, **texts: str) -> object:
    """The part of the cache's key for a corpus in `folder`."""
    folder.mkdir(parents=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    given = {"model": str(model), "corpus": str(folder), "build_dir": str(folder.parent)}
    config = settings.resolve(given)
    return inputs.corpus(config, inputs.corpus_files(config))


def test_a_corpus_is_known_by_names_and_contents_not_by_its_place(workflow: Workflow, tmp_path: Path) -> None:
    """Snakemake's key has the files' contents in any order, so names that are exchanged must change the key."""
    model = Path(str(workflow.config["model"]))
    texts = {"a": "first of two", "b": "other of two", "c": "third"}
    found = corpus_of(tmp_path / "1" / "text", model, **texts)
    assert corpus_of(tmp_path / "2" / "deeper" / "text", model, **texts) == found
    assert corpus_of(tmp_path / "3" / "text", model, **{**texts, "a": texts["b"], "b": texts["a"]}) != found
    assert corpus_of(tmp_path / "4" / "text", model, **{**texts, "a": texts["c"], "c": texts["a"]}) != found
    assert corpus_of(tmp_path / "5" / "texts", model, **texts) != found
