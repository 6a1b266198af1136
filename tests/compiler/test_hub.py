"""The real client of the hub against a stand-in on this machine: branches, gates, and downloads that break off."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from coldpress.compiler.checkpoint import hub
from coldpress.compiler.workflow.pins import LOCK_FILE, keep
from coldpress.compiler.workflow.settings import resolve
from coldpress.schemas.errors import ColdpressError
from tests.support.checkpoints import run
from tests.support.hub import Hub, Repository, serving
from tests.support.models import write_model

COMMIT, DATA_COMMIT = "1" * 40, "2" * 40
LARGE_BYTES, BREAKS_BYTES = 24 << 20, 15 << 20
CHUNK_BYTES = 10 << 20
"""The client writes what arrived in chunks of this size."""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model, a gated one, an OPT as it lies there, and a dataset."""
    folder = write_model(tmp_path / "tiny", num_hidden_layers=2)
    opt = write_model(tmp_path / "opt", "opt", num_hidden_layers=1)
    pickle_weights(opt)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("text\n")
    repositories = {
        "models/owner/tiny": Repository(folder, COMMIT, ("main", "v1")),
        "models/owner/gated": Repository(folder, COMMIT, is_gated=True),
        "models/facebook/opt-125m": Repository(opt, COMMIT),
        "datasets/owner/data": Repository(tmp_path / "data", DATA_COMMIT),
    }
    hub.commit_of.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("COLDPRESS_CACHE", str(tmp_path / "own"))
    with serving(repositories) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield found
    hub.commit_of.cache_clear()


def pickle_weights(folder: Path) -> None:
    """Saves the weights of a checkpoint as torch did, with what else such repositories hold."""
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / "flax_model.msgpack").write_bytes(b"\0" * 100)
    (folder / "modeling_opt.py").write_text("raise SystemExit\n")


def test_the_first_build_pins_a_branch_and_the_next_needs_no_hub(there: Hub, tmp_path: Path) -> None:
    config = {"model": "owner/tiny", "corpus": "owner/data", "build_dir": str(tmp_path / "build")}
    built = resolve(config)
    assert (built.model.revision, built["corpus_revision"]) == (COMMIT, DATA_COMMIT)
    assert [line.partition(", kept")[0] for line in keep(built.folder, built.pins)] == [
        f"model owner/tiny@main is commit {COMMIT}",
        f"dataset owner/data@main is commit {DATA_COMMIT}",
    ]
    hub.commit_of.cache_clear()
    there.close()
    again = resolve(config | {"locked": True})
    assert (again.model, again["corpus_revision"]) == (built.model, DATA_COMMIT)
    with pytest.raises(ColdpressError, match=r"locked=true, and no commit is pinned for v1 of the model owner/tiny"):
        resolve(config | {"locked": True, "revision": "v1"})
    with pytest.raises(ColdpressError, match=r"only the hub knows which commit of the model owner/tiny is v1"):
        resolve(config | {"revision": "v1"})
    assert (built.folder / LOCK_FILE).is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"model": "owner/gated"},
            r"there is no folder owner/gated; as a model of the hub: owner/gated at revision 1+ is gated",
        ),
        (
            {"model": "owner/other"},
            r"there is no folder owner/other; as a model of the hub: there is no public hub model",
        ),
        ({"model": "owner/tiny", "revision": "v2"}, r"the hub model owner/tiny has no revision v2; check its name"),
        ({"model": "owner/tiny", "corpus": "owner/none"}, r"there is no public hub dataset owner/none"),
    ],
)
def test_what_the_hub_does_not_give(there: Hub, tmp_path: Path, keys: dict[str, str], expected: str) -> None:
    with pytest.raises(ColdpressError, match=expected):
        resolve({"build_dir": str(tmp_path), **keys})


def test_a_gated_model_says_what_to_do(there: Hub) -> None:
    sentence = (
        f"owner/gated at revision {COMMIT} is gated: accept its licence on the hub and log in with `hf auth login`"
    )
    with pytest.raises(ColdpressError) as caught:
        hub.snapshot("owner/gated", COMMIT, offline=False)
    assert str(caught.value) == sentence


@pytest.mark.slow
def test_a_download_that_breaks_off_goes_on(there: Hub, tmp_path: Path) -> None:
    repository = there.repositories["models/owner/tiny"]
    weights = np.random.default_rng(0).bytes(LARGE_BYTES)
    (repository.folder / "model.safetensors").write_bytes(weights)
    repository.breaks["model.safetensors"] = BREAKS_BYTES
    folder = hub.snapshot("owner/tiny", COMMIT, offline=False)
    assert (folder / "model.safetensors").read_bytes() == weights
    asked = [range_ for method, _, range_ in there.asked_for("/model.safetensors") if method == "GET"]
    assert asked == [None, f"bytes={CHUNK_BYTES}-"]


def test_opt_as_it_lies_there(there: Hub, tmp_path: Path) -> None:
    """Its weights are pickled: they are fetched, since there are no others, and converted; nothing else comes."""
    built = resolve({"model": "opt-125m", "corpus": "pydoc", "build_dir": str(tmp_path / "build")})
    found = hub.listed(built.model.source, built.model.revision)
    repository = there.repositories["models/facebook/opt-125m"].folder
    assert found.weight_bytes == (repository / "pytorch_model.bin").stat().st_size
    model = run("facebook/opt-125m", tmp_path / "work", revision=COMMIT)
    assert (model.source, model.revision, model.spec.model_type) == ("facebook/opt-125m", COMMIT, "opt")
    assert there.asked_for("/pytorch_model.bin")
    assert not there.asked_for("/flax_model.msgpack")
    assert not there.asked_for("/modeling_opt.py")
    there.close()
    assert hub.snapshot("facebook/opt-125m", COMMIT, offline=True), "without the hub, too"


def test_pickles_stay_where_there_are_safetensors(there: Hub, tmp_path: Path) -> None:
    repository = there.repositories["models/owner/tiny"].folder
    shutil.copy(repository / "model.safetensors", repository / "pytorch_model.bin")
    hub.snapshot("owner/tiny", COMMIT, offline=False)
    assert not there.asked_for("/pytorch_model.bin")
