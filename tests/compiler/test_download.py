"""Before a download: what the hub's index and config.json tell is held against the machine; no weight is fetched."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from coldpress.compiler.checkpoint import hub
from coldpress.compiler.device import memory
from coldpress.compiler.stages import preflight
from coldpress.compiler.workflow.download import check_before_download, check_folder
from coldpress.compiler.workflow.settings import resolve
from coldpress.schemas.errors import ColdpressError
from tests.support.checkpoints import REVISION
from tests.support.dag import inputs_for
from tests.support.models import write_model

FILES = {
    "config.json": 700,
    "model-00001-of-00002.safetensors": 9_000_000_000,
    "model-00002-of-00002.safetensors": 5_000_000_000,
    "model.safetensors.index.json": 25_000,
    "tokenizer.json": 1_800_000,
    "README.md": 1000,
    "pytorch_model-00001-of-00002.bin": 9_900_000_000,
    "consolidated.safetensors": 14_000_000_000,
}
WANTED_BYTES = 14_000_000_000 + 700 + 25_000 + 1_800_000 + 1000


class Hub:
    """Stands in for the hub: its index, its answers, and what was fetched of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fetched, self.asked = folder, [], 0
        self.failure: Exception | None = None

    def answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            huggingface_hub.HfApi, "model_info", lambda _, hub_id, **more: self.model_info(hub_id, **more)
        )

    def model_info(self, hub_id: str, *, revision: str, files_metadata: bool, timeout: float) -> Any:
        self.asked += 1
        assert (hub_id, revision, files_metadata) == ("owner/tiny", REVISION, True)
        assert timeout <= 5
        if self.failure:
            raise self.failure
        siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in FILES.items()]
        return SimpleNamespace(siblings=siblings, card_data={"license": "mit"})

    def snapshot_download(
        self, hub_id: str, *, revision: str, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        assert not local_files_only
        self.fetched += allow_patterns
        return str(self.folder)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub with a model of 14 GB, of which only config.json exists."""
    folder = tmp_path / "hub"
    folder.mkdir()
    config = json.loads((write_model(tmp_path / "tiny", num_hidden_layers=2) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    found = Hub(folder)
    found.answer(monkeypatch)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(preflight, "_free_disk_bytes", lambda _: 1 << 40)
    return found


def check(tmp_path: Path, **keys: Any) -> str:
    config = resolve(
        {"model": "owner/tiny", "revision": REVISION, "corpus": "pydoc", "build_dir": str(tmp_path / "build"), **keys}
    )
    return check_before_download(config, inputs_for(config), config.folder / "ingest.json", 2)


def refusal(index: Hub, tmp_path: Path, **keys: Any) -> str:
    with pytest.raises(ColdpressError) as caught:
        check(tmp_path, **keys)
    assert "\n" not in str(caught.value)
    assert set(index.fetched) <= {"config.json"}, "nothing but the shapes"
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"dram_budget": "9000"}, "a DRAM budget of 9,000 bytes was asked for"),
        ({"context_length": 100_000}, "context_length=100000 was asked for, the model holds 256 tokens"),
        ({"dram_budget": "100%"}, None),
        ({"dram_budget": "9000", "preflight": "off"}, None),
    ],
)
def test_what_config_json_decides_is_refused_before_any_job(
    tmp_path: Path, keys: dict[str, Any], sentence: str | None
) -> None:
    """Of a folder as of the hub; without weights."""
    folder = write_model(tmp_path / "tiny", num_hidden_layers=2)
    (folder / "model.safetensors").unlink()
    config = resolve({"model": str(folder), "corpus": "pydoc", "build_dir": str(tmp_path / "build"), **keys})
    if sentence is None:
        check_folder(config, inputs_for(config))
        return
    with pytest.raises(ColdpressError, match=sentence):
        check_folder(config, inputs_for(config))


def test_what_will_come_is_said(index: Hub, tmp_path: Path) -> None:
    assert check(tmp_path) == (
        f"tiny (owner/tiny at {REVISION}, mit): 14 GB of weights, of all its files 14 GB are to be downloaded"
    )
    assert set(index.fetched) == {"config.json"}


def test_the_index_counts_what_would_be_fetched(index: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pickles, no weights in another spelling, and nothing that is there already."""
    found = hub.listed("owner/tiny", REVISION)
    assert (found.weight_bytes, found.missing_bytes, found.license) == (14_000_000_000, WANTED_BYTES, "mit")
    there = {"config.json", "model-00001-of-00002.safetensors"}
    cached = lambda _, name, revision: str(tmp_path / name) if name in there and revision == REVISION else None  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    assert hub.listed("owner/tiny", REVISION).missing_bytes == WANTED_BYTES - 9_000_000_700


def test_too_little_disk_for_the_download(index: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_free_disk_bytes", lambda _: WANTED_BYTES - 1)
    text = refusal(index, tmp_path)
    assert text.startswith(f"the model's download needs 14 GB on disk in {tmp_path}/cache, has 14 GB; free some, ")
    check(tmp_path, preflight="off")


def test_download_and_build_share_a_disk(index: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_free_disk_bytes", lambda _: WANTED_BYTES + 1_000_000)
    text = refusal(index, tmp_path)
    assert "MB on disk in" in text
    assert "has 1 MB once the model is downloaded (most of it," in text
    monkeypatch.setattr(preflight, "_disk_of", lambda folder: 1 if folder.parent.name == "build" else 2)
    assert check(tmp_path), "the download is on another disk"


def test_too_little_memory_and_too_small_a_budget(index: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a DRAM budget of 1,000 bytes was asked for" in refusal(index, tmp_path, dram_budget=1000)
    monkeypatch.setattr(memory, "free_dram_bytes", lambda: 300_000_000)
    assert "of memory" in refusal(index, tmp_path)
    config = resolve({"model": "owner/tiny", "revision": REVISION, "corpus": "pydoc"})
    assert check_before_download(config, inputs_for(config), config.folder / "ingest.json", None), (
        "jobs run on other machines"
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (GatedRepoError, f"owner/tiny at revision {REVISION} is gated: accept its licence on the hub and log in"),
        (RevisionNotFoundError, f"the hub model owner/tiny has no revision {REVISION}; check its name"),
        (RepositoryNotFoundError, "there is no public hub model owner/tiny; check its name, or log in"),
    ],
)
def test_a_model_that_cannot_be_had(
    index: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], expected: str
) -> None:
    index.failure = kind.__new__(kind)
    assert expected in refusal(index, tmp_path)
    assert index.asked == 1


def test_without_a_network_the_hub_is_asked_once_and_the_cache_then(
    tmp_path: Path, index: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface_hub itself would try for 23 seconds."""
    monkeypatch.undo()
    index.answer(monkeypatch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    index.failure = ConnectionError("no\nroute")
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(
        ColdpressError, match="is not in the local cache and the hub cannot be reached; check the network"
    ):
        hub.listed("owner/tiny", REVISION)
    with pytest.raises(
        ColdpressError, match="is not in the local cache and the hub cannot be reached; check the network"
    ):
        hub.snapshot("owner/tiny", REVISION, offline=False)
    assert index.asked == 2
    assert sum(waits) < 5


@pytest.mark.parametrize(
    ("offline", "failure"),
    [(True, None), (False, ConnectionError("no route")), (False, HfHubHTTPError.__new__(HfHubHTTPError))],
)
def test_what_is_cached_needs_no_hub(
    index: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool, failure: Exception | None
) -> None:
    snapshot = tmp_path / "cache/models--owner--tiny/snapshots" / REVISION
    snapshot.parent.mkdir(parents=True)
    (tmp_path / "tiny").rename(snapshot)
    monkeypatch.undo()
    index.failure = failure
    index.answer(monkeypatch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    found = hub.listed("owner/tiny", REVISION)
    assert (found.weight_bytes, found.missing_bytes) == ((snapshot / "model.safetensors").stat().st_size, 0)
    assert hub.snapshot("owner/tiny", REVISION, offline=False) == snapshot
    assert index.asked == (0 if offline else 2)


def test_nothing_is_asked_where_nothing_is_downloaded(index: Hub, tmp_path: Path) -> None:
    assert check(tmp_path)
    asked = index.asked
    folder = resolve({"model": str(tmp_path / "tiny"), "corpus": "pydoc"})
    assert check_before_download(folder, inputs_for(folder), folder.folder / "ingest.json", 2) == ""
    config = resolve(
        {"model": "owner/tiny", "revision": REVISION, "corpus": "pydoc", "build_dir": str(tmp_path / "build")}
    )
    asked = index.asked
    config.folder.mkdir(parents=True)
    (config.folder / "ingest.json").touch()
    assert check_before_download(config, inputs_for(config), config.folder / "ingest.json", 2) == ""
    assert index.asked == asked
