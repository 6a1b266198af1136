"""Downloads a model before the first job, and checks a hub model against this machine before that.

The Snakefile calls it when a run starts: here the user sees how far it is, and a job on a cluster needs no network.
"""

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from coldpress.compiler.checkpoint.hub import cache_folder, listed, snapshot
from coldpress.compiler.checkpoint.packages import fetch
from coldpress.compiler.checkpoint.shapes import read_shapes
from coldpress.compiler.needs import Inputs
from coldpress.compiler.stages.preflight import Download, PreflightConfig, check_download, check_shapes
from coldpress.compiler.workflow.last_words import NOTE
from coldpress.compiler.workflow.progress import repeating
from coldpress.compiler.workflow.settings import CONFIG_FILE, BuildConfig, of_all_stages
from coldpress.runtime.quantities import show_bytes

TOLD_S = 10
"""Seconds between two lines about a download."""


def download(config: BuildConfig, inputs: Inputs, ingested: Path, threads: int | None) -> None:
    """Downloads what the model lacks, and says how far it is; raises ColdpressError if it does not come or fit."""
    model = config.model
    if model.packages is not None:
        fetch(model.packages, _tell)
    if model.revision is None:
        check_folder(config, inputs)
        return
    if ingested.exists():
        return
    text = check_before_download(config, inputs, ingested, threads)
    if text:
        _tell(text)
    with _watched(model.source, listed(model.source, model.revision).missing_bytes):
        snapshot(model.source, model.revision, offline=False)


def _watched(hub_id: str, missing_bytes: int) -> AbstractContextManager[None]:
    def arrived() -> int:
        return sum(path.stat().st_size for path in cache_folder(hub_id).glob("blobs/*") if path.exists())

    before = arrived()
    return repeating(
        TOLD_S, lambda: _tell(f"{show_bytes(arrived() - before)} of {show_bytes(missing_bytes)} have arrived")
    )


def _tell(line: str) -> None:
    print(f"{NOTE}{line}", file=sys.stderr, flush=True)


def check_folder(config: BuildConfig, inputs: Inputs) -> None:
    """Refuses, before any job, what a folder's config.json alone decides: raises DoesNotFitError if the DRAM budget is
    too small, ColdpressError if the context is longer than the model holds."""
    file = Path(config.model.source) / CONFIG_FILE
    if config["preflight"] != "off" and file.is_file():
        check_shapes(_preflight(config, inputs), read_shapes(file), config.device)


def _preflight(config: BuildConfig, inputs: Inputs) -> PreflightConfig:
    return PreflightConfig(
        preflight=config["preflight"],
        folder=str(config.folder),
        settings=of_all_stages(config),
        inputs=inputs,
        shards=config["calibration_shards"],
    )


def check_before_download(config: BuildConfig, inputs: Inputs, ingested: Path, threads: int | None) -> str:
    """Refuses what would fail after a download with a ColdpressError; returns a sentence about the download, none for a
    folder, a model that was already ingested, and with preflight=off. `threads` is None where jobs run on other
    machines."""
    model = config.model
    if model.revision is None or ingested.exists() or config["preflight"] == "off":
        return ""
    found = listed(model.source, model.revision)
    shapes = read_shapes(snapshot(model.source, model.revision, offline=False, patterns=[CONFIG_FILE]) / CONFIG_FILE)
    lacking = Download(found.missing_bytes, cache_folder(model.source).parent)
    check_download(_preflight(config, inputs), shapes, config.device, lacking, threads)
    license_text = model.license or found.license or "no licence that its card names"
    return (
        f"{model.name} ({model.source} at {model.revision}, {license_text}): {show_bytes(found.weight_bytes)} of "
        f"weights, of all its files {show_bytes(found.missing_bytes)} are to be downloaded"
    )
