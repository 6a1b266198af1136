"""Checks a hub model against this machine before the first byte of its weights is downloaded.

The Snakefile calls it when a run starts, before any job. The hub's index gives sizes, licence, and whether the commit
exists and this user may read it; config.json gives shapes; preflight's own sums give the needs of the build.
"""

import sys
from pathlib import Path

from coldpress.compiler.checkpoint.hub import cache_folder, listed, snapshot
from coldpress.compiler.checkpoint.shapes import read_shapes
from coldpress.compiler.needs import Inputs
from coldpress.compiler.stages.preflight import Download, PreflightConfig, check_download
from coldpress.compiler.workflow.settings import CONFIG_FILE, BuildConfig, of_all_stages
from coldpress.runtime.quantities import show_bytes


def announce(config: BuildConfig, inputs: Inputs, ingested: Path, threads: int | None) -> None:
    """Prints what will be downloaded, or refuses it; see `check_before_download`."""
    text = check_before_download(config, inputs, ingested, threads)
    if text:
        print(text, file=sys.stderr)


def check_before_download(config: BuildConfig, inputs: Inputs, ingested: Path, threads: int | None) -> str:
    """Refuses what would fail after a download; returns a sentence about the download.

    Asks nothing and returns no sentence for a folder, for a model that was already ingested, and with preflight=off.

    Args:
        config: The build's configuration.
        inputs: The stages' inputs, from the rules.
        ingested: The place of the record of `ingest`.
        threads: Cores of this machine; None where jobs run on others.

    Raises:
        ColdpressError: if the model is not available or does not fit; the text is one sentence.
    """
    model = config.model
    if model.revision is None or ingested.exists() or config["preflight"] == "off":
        return ""
    found = listed(model.source, model.revision)
    shapes = read_shapes(snapshot(model.source, model.revision, offline=False, patterns=[CONFIG_FILE]) / CONFIG_FILE)
    settings = PreflightConfig(
        preflight=config["preflight"],
        folder=str(config.folder),
        settings=of_all_stages(config),
        inputs=inputs,
        shards=config["calibration_shards"],
    )
    check_download(settings, shapes, config.device, Download(found.missing_bytes, cache_folder()), threads)
    license_text = model.license or found.license or "no licence that its card names"
    return (
        f"{model.name} ({model.source} at {model.revision}, {license_text}): {show_bytes(found.weight_bytes)} of "
        f"weights, of all its files {show_bytes(found.missing_bytes)} are to be downloaded"
    )
