"""Compiles every architecture × selector × format by the stages, runs it, and compares it with the evaluation.

Models are tiny, random, and of the ReLU family where the selector needs exact zeros. Each artifact decodes test text
token by token, and benchmarks/evaluation/evaluate.py runs the same text through transformers' modules with the
artifact's codes, arrays and cache (tests/support/product.py). Errors are shares of the largest logit.
"""

import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from coldpress.runtime import plugins
from coldpress.schemas.errors import ColdpressError
from tests.support.models import MODEL_TYPES
from tests.support.product import Case, Source, compiled, difference, has_attention, has_zeros_for, source_of

METHODS, FORMATS = plugins.names("coldpress.runtime.sparsity"), plugins.names("coldpress.runtime.quantization")


@dataclass(frozen=True)
class Options:
    architectures: tuple[str, ...] = option(
        tuple(MODEL_TYPES), smoke=("llama",), choices=MODEL_TYPES, help="architectures to compile"
    )
    methods: tuple[str, ...] = option(tuple(METHODS), smoke=("dense", "topk"), choices=METHODS, help="selectors")
    formats: tuple[str, ...] = option(
        ("int4_group32",), smoke=("int8_group32",), full=tuple(FORMATS), choices=FORMATS, help="formats of the weights"
    )
    jobs: int = option(2, smoke=1, help="artifacts that are made at a time")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].architecture": "model_type of the tiny model",
        "rows[].method": "selector",
        "rows[].format": "format",
        "rows[].attention": "whether the inputs of attention's matrices are chosen, too",
        "rows[].relu": "whether the model's activation has exact zeros",
        "rows[].equal": "whether rounding explains the difference between runtime and evaluation",
        "rows[].median?": "largest difference of a token's logits, median over tokens, as a share of the largest logit",
        "rows[].mean?": "difference of a logit, mean over tokens and logits, as a share of the largest logit",
        "rows[].left_out?": "most that leaving out units moves a logit, as a share of the largest logit",
        "rows[].error?": "why the artifact could not be made",
        "artifacts": "number of artifacts that were asked for",
        "failed": "artifacts that are not equal or could not be made",
        "worst?": "largest median",
    }
    full_minutes = 8

    def cells(self) -> Iterator[Cell]:
        """Yields a cell per model."""
        for architecture in self.options.architectures:
            for relu in sorted({case.relu for case in self._cases(architecture)}):
                yield {"architecture": architecture, "relu": relu}

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per artifact; a pool does all work, forked before torch has threads."""
        with ProcessPoolExecutor(self.options.jobs, get_context("fork"), initializer=_begin) as pool:
            folder = self.folder / f"{cell['architecture']}-{cell['relu']}"
            source = pool.submit(source_of, folder, cell["architecture"], cell["relu"]).result()
            cases = [case for case in self._cases(cell["architecture"]) if case.relu == cell["relu"]]
            for case, found in zip(cases, pool.map(partial(compared, source), cases), strict=True):
                yield {"method": case.method, "attention": case.attention, "format": case.format} | found

    def _cases(self, architecture: str) -> Iterator[Case]:
        for method in (name for name in self.options.methods if has_zeros_for(architecture, name)):
            for attention, form in product((False, True) if has_attention(method) else (False,), self.options.formats):
                yield Case(architecture, method, form, attention)

    def figures(self, rows: Rows) -> Figures:
        return {
            "artifacts": len(rows),
            "failed": [
                " ".join((row["architecture"], row["method"], row["format"], "attention" * row["attention"])).strip()
                for row in rows
                if not row["equal"]
            ],
            "worst": max((row["median"] for row in rows if "median" in row), default=None),
        }


def _begin() -> None:
    """Prepares a process of the pool: one thread of torch, and a silent end if the benchmark is stopped."""
    import torch

    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def compared(source: Source, case: Case) -> Row:
    """Returns the figures of one artifact, or why it could not be made."""
    scratch = source.folder / f"{case.method}-{case.format}-{case.attention}"
    try:
        found = difference(compiled(source, case, scratch / "build"), source, scratch / "codes")
    except ColdpressError as error:
        return {"equal": False, "error": str(error)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {"equal": found.equal, "median": found.median, "mean": found.mean, "left_out": found.left_out}


if __name__ == "__main__":
    main("product")
