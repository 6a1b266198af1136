"""Every architecture × selector × format: compiled by the stages, run, and held against the evaluation.

`python -m benchmarks.product [--architectures llama …] [--methods relu …] [--formats fp16 …]`. Models are tiny,
random, and of the ReLU family where the selector needs exact zeros. Each artifact decodes test text token by token, and
benchmarks/evaluation/evaluate.py runs the same text through transformers' modules with the artifact's own codes, arrays
and cache (tests/support/product.py). The last line is {artifacts, failed, worst, rows: [{architecture, relu, method,
format, median, mean, left_out, equal}]}, errors as shares of the largest logit.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.shared.report import finish, show
from coldpress.runtime import plugins
from coldpress.schemas.errors import ColdpressError
from tests.support.models import MODEL_TYPES
from tests.support.product import Case, Source, compiled, difference, source_of

METHODS, FORMATS = plugins.names("coldpress.runtime.sparsity"), plugins.names("coldpress.runtime.quantization")


def rows_of(architecture: str, methods: list[str], formats: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    """One row per artifact; one that cannot be made says why."""
    sources: dict[bool, Source] = {}
    for case in (Case(architecture, method, form) for method in methods for form in formats):
        if case.relu not in sources:
            sources[case.relu] = source_of(folder / f"relu-{case.relu}", architecture, case.relu)
        row = {"architecture": architecture, "relu": case.relu, "method": case.method, "format": case.format}
        with tempfile.TemporaryDirectory() as scratch:
            try:
                artifact = compiled(sources[case.relu], case, Path(scratch) / "build")
                found = difference(artifact, sources[case.relu], Path(scratch) / "codes")
            except ColdpressError as error:
                yield row | {"equal": False, "error": str(error)}
                continue
        figures = {name: getattr(found, name) for name in ("median", "mean", "left_out")}
        yield row | figures | {"equal": found.equal}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", choices=MODEL_TYPES, default=list(MODEL_TYPES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    for architecture in arguments.architectures:
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(architecture, arguments.methods, arguments.formats, Path(folder))
        print(f"{architecture}: {len(rows)} artifacts after {time.monotonic() - started:.0f} s", file=sys.stderr)
    failed = [row for row in rows if not row["equal"]]
    made = [row for row in rows if "error" not in row]
    show(
        "largest difference of the runtime's logits from the evaluation's, over formats (share of the largest logit)",
        ["architecture", *arguments.methods],
        [[name, *(_worst(made, name, method) for method in arguments.methods)] for name in arguments.architectures],
    )
    finish(
        {
            "artifacts": len(rows),
            "failed": failed,
            "worst": max((row["median"] for row in made), default=None),
            "rows": rows,
        }
    )


def _worst(rows: list[dict[str, Any]], architecture: str, method: str) -> float | str:
    found = [row["median"] for row in rows if (row["architecture"], row["method"]) == (architecture, method)]
    return max(found, default="-")


if __name__ == "__main__":
    main()
