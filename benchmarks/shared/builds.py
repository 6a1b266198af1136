"""Defines small real models and their snakemake settings, and builds them by the rules from a warm process.

`build` (tests/support/warm.py) forks snakemake and its jobs from a process that has imported torch and the like, since
imports take most of a small build's time otherwise.
"""

from pathlib import Path
from typing import Any

from benchmarks.harness.places import data
from tests.support.warm import build

__all__ = ["MODELS", "SHORT", "artifact_in", "build", "settings"]

MODELS = {
    "relu-demo": (None, "80%"),
    "stories260k": ("corpora/tinystories/calib.jsonl", "90%"),
    "tinystories656k": ("corpora/tinystories/calib.jsonl", "90%"),
    "tinystories656k-relu": ("corpora/tinystories/calib.jsonl", "90%"),
    "tinystories-opt-0.9m": ("corpora/tinystories/calib.jsonl", "90%"),
    "tinystories-mixtral-8x": ("corpora/tinystories/calib.jsonl", "80%"),
    "prose7m": ("corpora/wikitext-2", "60%"),
    "prose7m-relu": ("corpora/wikitext-2", "60%"),
}
"""Model -> (corpus in the data folder, DRAM budget as a share of weights and KV cache). The tiny ones are mostly
embeddings and buffers of at least one page each, so half would not hold what must be resident: in int8, where int4
loses more than the quality floor allows."""
SHORT = {"calibration_tokens": 1024, "evaluation_tokens": 256, "search_tokens": 64, "preflight": "off"}
"""Settings of `--smoke`: less text, and no trial."""


def settings(model: str, device: str = "pixel6", short: bool = False) -> dict[str, Any]:
    """Returns the snakemake settings of one of MODELS.

    Raises:
        ColdpressError: if it needs real data and there is none.
    """
    corpus, budget = MODELS[model]
    config: dict[str, Any] = {"model": model, "device": device, "dram_budget": budget, **(SHORT if short else {})}
    if corpus is None:
        return config
    return config | {"model": data() / "models" / model, "corpus": data() / corpus, "context_length": 128}


def artifact_in(device: Path) -> Path:
    """Returns the artifact of a device's build folder, published or not."""
    return (device / "package" / "manifest.json").resolve().parent
