"""Every profile of the repository, found by its file: it loads, bears its name, and says where its figures are from."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coldpress.compiler.profiles import PROFILES, load_model, model_names
from coldpress.compiler.workflow import pins
from coldpress.compiler.workflow.settings import resolve
from coldpress.runtime import plugins
from coldpress.runtime.device_profiles.devices import device_names, read_device
from coldpress.schemas.device import DeviceProfile, flash_seconds
from tests.support.data import ROOT

SOURCES = (
    r"Ripple, ",
    r"ActiveFlow, ",
    r"LLM in a flash, ",
    r"PowerInfer, ",
    r"DIP, ",
    r"assumption: \w+",
    r"measured: \w+",
)
COMMIT = "a" * 40
EXPECTED_DEVICES = {
    *("pixel6", "oneplus12", "oneplus-ace3", "oneplus-ace2", "infinix-zero30"),
    *("iphone-a18", "macbook-m1-max", "pc-low", "pc-high", "host"),
}


def device(name: str) -> DeviceProfile:
    return read_device(PROFILES / "devices" / f"{name}.yaml")


def figures(value: Any) -> Iterator[dict[str, Any]]:
    """Every figure of a dumped profile."""
    if isinstance(value, dict):
        if set(value) == {"value", "source"}:
            yield value
        for inner in value.values():
            yield from figures(inner)


def test_the_devices_of_the_papers_are_there() -> None:
    assert set(device_names()) >= EXPECTED_DEVICES


@pytest.mark.parametrize("name", device_names())
def test_device(name: str) -> None:
    profile = device(name)
    assert profile.name == name
    found = list(figures(profile.model_dump(mode="json")))
    assert len(found) >= 8
    for figure in found:
        assert re.match("|".join(SOURCES), figure["source"]), figure


@pytest.mark.parametrize("name", device_names())
def test_device_is_plausible(name: str) -> None:
    """Storage is slower than DRAM, small reads are not faster than large ones, and the budget fits the memory."""
    profile = device(name)
    assert profile.dram_budget_bytes.value <= profile.dram_bytes.value
    assert profile.flash.bytes_per_s < profile.dram_bytes_per_s.value
    rates = [point.bytes_per_s for point in profile.flash.read_curve.value]
    assert rates == sorted(rates)
    # 1 GB in 4 KB reads takes longer than in one stream, unless the source knows one speed only
    assert flash_seconds(profile.flash, 250_000, 10**9) >= flash_seconds(profile.flash, 1, 10**9)


@pytest.mark.parametrize(
    ("name", "peak_bytes_per_s"),
    [
        ("pixel6", 4.2e9),
        ("oneplus12", 5.8e9),
        ("infinix-zero30", 3.6e9),
        ("iphone-a18", 1e9),
        ("macbook-m1-max", 6.1e9),
    ],
)
def test_peaks_are_the_papers(name: str, peak_bytes_per_s: float) -> None:
    assert device(name).flash.bytes_per_s == pytest.approx(peak_bytes_per_s, rel=1e-3)


@pytest.mark.parametrize("name", device_names())
def test_the_law_holds_on_every_point(name: str) -> None:
    """Each point in seconds by the law, with many requests' worth of reads at the point's depth: within 5 %."""
    flash = device(name).flash
    for point in flash.read_curve.value:
        depth = point.reads_in_flight or flash.queue_depth.value
        num_reads = 1000 * depth
        seconds = flash_seconds(flash.issuing(depth), num_reads, num_reads * point.read_bytes)
        assert num_reads * point.read_bytes / seconds == pytest.approx(point.bytes_per_s, rel=0.05), point


@pytest.mark.parametrize("name", ["pixel6", "oneplus12", "oneplus-ace3", "oneplus-ace2", "infinix-zero30"])
def test_ufs_is_linear_below_24_kb(name: str) -> None:
    """Ripple, Figure 4: below 24 KB bandwidth grows with the read size, because reads per second are the limit."""
    small = [point for point in device(name).flash.read_curve.value if point.read_bytes <= 24 * 1024]
    assert len(small) >= 2
    assert len({round(point.bytes_per_s / point.read_bytes) for point in small}) == 1


def test_ace2_has_half_of_the_oneplus12() -> None:
    """Ripple 6.4 and Figure 4."""
    assert device("oneplus-ace2").flash.bytes_per_s == device("oneplus12").flash.bytes_per_s / 2


@pytest.mark.parametrize("name", model_names())
def test_model(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every profile resolves with nothing but its name: a branch to a commit, packages to a file, else to a folder."""
    asked: list[tuple[str, str, str]] = []

    def commit_of(hub_id: str, revision: str, kind: str) -> str:
        asked.append((kind, hub_id, revision))
        return COMMIT

    monkeypatch.setattr(pins, "commit_of", commit_of)
    profile = load_model(name)
    assert profile.name == name
    assert profile.license
    assert profile.model_type in plugins.names("coldpress.compiler.architectures")
    if profile.source.startswith("./"):
        assert profile.revision is None
    else:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", profile.source)
        assert profile.revision, "a commit, or a branch"
    built = resolve({"model": name, "build_dir": str(tmp_path)})
    assert built["method"] == profile.settings.get("method", "auto")
    if profile.source.startswith("./"):
        assert (built.model.revision, (Path(built.model.source) / "config.json").is_file()) == (None, True)
    elif profile.packages is None:
        assert built.model.source == profile.source
        assert re.fullmatch("[0-9a-f]{40}", built.model.revision or "")
    else:
        assert (built.model.revision, Path(built.model.source).name) == (None, profile.packages.file)
        hub = resolve({"model": name, "build_dir": str(tmp_path), "revision": "main"})
        assert (hub.model.source, hub.model.revision, hub.model.packages) == (profile.source, COMMIT, None)
    assert built["corpus"] == "pydoc" or re.fullmatch("[0-9a-f]{40}", built["corpus_revision"])
    assert {hub_id for _, hub_id, _ in asked} <= {profile.source}, "corpora are pinned in the profiles"


def test_the_demo_profile_agrees_with_its_checkpoint() -> None:
    profile = load_model("relu-demo")
    config = json.loads((ROOT / profile.source / "config.json").read_text())
    assert config["num_hidden_layers"] == profile.num_hidden_layers
    assert config["hidden_act"] == profile.hidden_act
    assert config["model_type"] == profile.model_type
    assert int(profile.settings["context_length"]) <= config["max_position_embeddings"]


def test_snakemake_takes_no_device_or_model_for_its_own_profile() -> None:
    """Snakemake loads profiles/default by itself and any folder that is named; ours are files, never such folders."""
    folders = {path.parent.name for path in Path(PROFILES).rglob("profile.yaml")}
    assert folders == {"default", "slurm", "kubernetes"}
    assert not list(Path(PROFILES).rglob("config.yaml"))
