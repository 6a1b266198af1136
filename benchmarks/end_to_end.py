"""The whole pipeline on every small real model: artifact size, DRAM, flash traffic, quality, speed.

`python -m benchmarks.end_to_end [--device pixel6] [--models demo prose7m …]`. Each model is built from scratch
with the defaults that suit it, under a DRAM budget that is a share of its dense footprint. The last line is
{model: {artifact_bytes, resident_bytes, budget_bytes, flash_bytes_per_token, reads_per_token, hit_rate, ppl_source,
ppl_artifact, tokens_per_s}}; tokens_per_s is of this machine, reading from its disk with O_DIRECT.
"""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.shared.report import finish, show
from tests.support.data import find_data_folder
from tests.support.pipeline import build

KEYS = (
    "artifact_bytes",
    "resident_bytes",
    "budget_bytes",
    "flash_bytes_per_token",
    "reads_per_token",
    "hit_rate",
    "ppl_source",
    "ppl_artifact",
    "tokens_per_s",
)
# model: (corpus in the data folder, DRAM budget as a share of weights and KV cache). The tiny ones are mostly
# embeddings and buffers of at least one page each, so half of them would not hold what must be resident.
MODELS = {
    "demo": (None, "60%"),
    "stories260k": ("corpora/tinystories/calib.jsonl", "90%"),
    "tinystories656k": ("corpora/tinystories/calib.jsonl", "80%"),
    "tinystories656k-relu": ("corpora/tinystories/calib.jsonl", "80%"),
    "tinystories-opt-0.9m": ("corpora/tinystories/calib.jsonl", "90%"),
    "tinystories-mixtral-8x": ("corpora/tinystories/calib.jsonl", "80%"),
    "prose7m": ("corpora/wikitext-2", "60%"),
    "prose7m-relu": ("corpora/wikitext-2", "60%"),
}


def settings(model: str, device: str) -> dict[str, object]:
    """What to say to snakemake for one of MODELS."""
    corpus, budget = MODELS[model]
    config: dict[str, object] = {"model": model, "device": device, "dram_budget": budget}
    if corpus is None:
        return config
    data = find_data_folder()
    if data is None:
        raise SystemExit("no real test data: set COLDPRESS_TEST_DATA to its folder, or pass --models demo")
    return config | {"model": data / "models" / model, "corpus": data / corpus, "context_length": 128}


def measure(model: str, device: str, folder: Path) -> dict[str, float]:
    """Builds one model and returns its figures; the keys are KEYS."""
    metrics = json.loads((build(folder, **settings(model, device)) / "metrics.json").read_text())
    return {key: metrics[key] for key in KEYS}


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="pixel6")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        figures = {model: measure(model, arguments.device, Path(folder) / model) for model in arguments.models}
    show(
        f"end to end, {arguments.device}", ["model", *KEYS], ([model, *row.values()] for model, row in figures.items())
    )
    finish(figures)


if __name__ == "__main__":
    main()
