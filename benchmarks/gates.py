"""What quality is normal, from which the gates of `publish` have their defaults: small real models, format by format.

`python -m benchmarks.gates [--models stories260k …]`. Every model is built dense, sparse, and at densities down
to ruin, in each format, with the gates off; builds of one model stand side by side by their labels. The last line
is {model: {label: {ppl_ratio, top1_agreement, max_logit_error}}}.
"""

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.shared.report import finish, show
from tests.support.data import find_data_folder
from tests.support.pipeline import snakemake

FORMATS = ("fp16", "int8_group32", "int4_group32")
# model: (corpus in the data folder, DRAM budget that holds what must be resident)
MODELS = {
    "demo": ("", "80%"),
    "stories260k": ("corpora/tinystories/calib.jsonl", "90%"),
    "tinystories656k": ("corpora/tinystories/calib.jsonl", "80%"),
    "tinystories656k-relu": ("corpora/tinystories/calib.jsonl", "80%"),
    "tinystories-opt-0.9m": ("corpora/tinystories/calib.jsonl", "90%"),
    "prose7m": ("corpora/wikitext-2", "80%"),
    "prose7m-relu": ("corpora/wikitext-2", "80%"),
}
DENSITIES = (0.5, 0.3, 0.1)
OFF = dict.fromkeys(("max_ppl_ratio", "min_top1_agreement", "max_logit_error"), "off")


def cases(model: str) -> dict[str, dict[str, object]]:
    """Label -> settings. Exact zeros have the density they have, so only input pruning is driven to ruin."""
    exact_zeros = model == "demo" or "relu" in model or "opt" in model
    sparse: dict[str, dict[str, object]] = {"relu": {"method": "relu"}, "predictor": {"method": "predictor"}}
    if not exact_zeros:
        sparse = {f"topk-{density}": {"method": "topk", "density": density} for density in DENSITIES}
    return {
        f"{name}-{code}": {**settings, "format": code}
        for name, settings in ({"dense": {"method": "dense"}} | sparse).items()
        for code in FORMATS
    }


def measure(model: str, folder: Path) -> dict[str, dict[str, float]]:
    """Label -> figures of `verify`, of one model."""
    corpus, budget = MODELS[model]
    shared: dict[str, object] = {"model": model, "dram_budget": budget, "order": "structural", **OFF}
    data = find_data_folder()
    if corpus:
        if data is None:
            raise SystemExit("no real test data: set COLDPRESS_TEST_DATA to its folder, or pass --models demo")
        shared |= {"model": data / "models" / model, "corpus": data / corpus, "context_length": 256}
    found = {}
    for label, settings in cases(model).items():
        done = snakemake(folder, label=label, **shared, **settings)
        if done.returncode:
            raise SystemExit(f"{model} {label}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        verified = json.loads((folder / f"build/{model}/pixel6+{label}/verify.json").read_text())
        found[label] = {
            "ppl_ratio": verified["ppl_artifact"] / verified["ppl_source"],
            "top1_agreement": verified["top1_agreement"],
            "max_logit_error": verified["max_logit_error"],
        }
    return found


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        figures = {model: measure(model, Path(folder) / model) for model in arguments.models}
    rows = [[model, label, *row.values()] for model, labels in figures.items() for label, row in labels.items()]
    show("what quality is normal", ["model", "build", "ppl ratio", "top-1", "logit error"], rows)
    finish(figures)


if __name__ == "__main__":
    main()
