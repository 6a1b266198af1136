"""What `auto` gives beside a dense run in the same DRAM: flash traffic, simulated speed and perplexity.

`python -m benchmarks.auto [--device pixel6] [--models demo prose7m …] [--method auto]`. Each model is built from
scratch; the dense run is the one that the build itself works out (compiler/dense_run.py): same weights, format and
DRAM, its own buffers. The last line is {rows: {model: {method, flash bytes, reads, tokens/s and perplexity of both,
gain}}, worst_gain, demo_gain}; a gain is simulated tokens/s over the dense run's, and null where none fits or the demo
was left out.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.end_to_end import settings
from benchmarks.shared.report import finish, show
from coldpress.compiler.io import load_record
from coldpress.schemas.metrics import Metrics
from tests.support.pipeline import build

MODELS = ("demo", "prose7m", "prose7m-relu", "stories260k", "tinystories656k", "tinystories656k-relu")


def measure(model: str, device: str, method: str, folder: Path) -> dict[str, object]:
    """Builds one model; its figures and those of the dense run, per token."""
    config = settings(model, device) | {"method": method}
    if model == "demo":
        del config["dram_budget"]  # the profile's own
    found = load_record(build(folder, **config) / "metrics.json", Metrics)
    dense = found.dense
    return {
        "method": found.method,
        "flash_bytes": found.flash_bytes_per_token,
        "dense_flash_bytes": dense and dense.flash_bytes_per_token,
        "reads": found.reads_per_token,
        "dense_reads": dense and dense.reads_per_token,
        "tokens_per_s": found.modelled_tokens_per_s,
        "dense_tokens_per_s": dense and dense.tokens_per_s,
        "ppl": found.ppl_artifact,
        "dense_ppl": found.ppl_dense,
        "ppl_source": found.ppl_source,
        "gain": found.gain_over_dense,
    }


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="pixel6")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = {
            model: measure(model, arguments.device, arguments.method, Path(folder) / model)
            for model in arguments.models
        }
    columns = list(next(iter(rows.values())))
    title = f"{arguments.method} beside dense in the same DRAM, {arguments.device}"
    show(title, ["model", *columns], ([model, *row.values()] for model, row in rows.items()))
    gains = [row["gain"] for row in rows.values() if isinstance(row["gain"], float)]
    demo = rows["demo"]["gain"] if "demo" in rows else None
    finish({"rows": rows, "worst_gain": min(gains, default=None), "demo_gain": demo})


if __name__ == "__main__":
    main()
