"""Every architecture × selector × format: compiled by the stages, run, and held against the evaluation.

Models are tiny, random, and of the ReLU family where the selector needs exact zeros. Each artifact decodes test text
token by token, and benchmarks/evaluation/evaluate.py runs the same text through transformers' modules with the
artifact's codes, arrays and cache (tests/support/product.py). Errors are shares of the largest logit.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from coldpress.runtime import plugins
from coldpress.schemas.errors import ColdpressError
from tests.support.models import MODEL_TYPES
from tests.support.product import Case, Source, compiled, difference, has_attention, source_of

METHODS, FORMATS = plugins.names("coldpress.runtime.sparsity"), plugins.names("coldpress.runtime.quantization")


@dataclass(frozen=True)
class Options:
    architectures: tuple[str, ...] = option(
        tuple(MODEL_TYPES), smoke=("llama",), choices=MODEL_TYPES, help="architectures"
    )
    methods: tuple[str, ...] = option(tuple(METHODS), smoke=("dense", "topk"), choices=METHODS, help="selectors")
    formats: tuple[str, ...] = option(
        ("int4_group32",), smoke=("int8_group32",), full=tuple(FORMATS), choices=FORMATS, help="formats"
    )


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].architecture": "architecture",
        "rows[].method": "selector",
        "rows[].format": "format",
        "rows[].attention": "whether the inputs of attention's matrices are chosen, too",
        "rows[].relu": "whether the model has exact zeros",
        "rows[].equal": "whether the difference is what rounding makes",
        "rows[].median?": "median over tokens of a token's largest difference",
        "rows[].mean?": "mean difference",
        "rows[].left_out?": "the most that a logit moves by what the selector leaves out",
        "rows[].error?": "why the artifact could not be made",
        "artifacts": "artifacts asked for",
        "failed": "those that are not equal, or could not be made",
        "worst?": "the largest median",
    }
    full_minutes = 8

    def cells(self) -> Iterator[Cell]:
        for architecture in self.options.architectures:
            methods = sorted(self.options.methods, key=lambda method: Case(architecture, method, "").relu)
            for method in methods:
                yield from (
                    {"architecture": architecture, "method": method, "attention": attention}
                    for attention in ([False, True] if has_attention(method) else [False])
                )

    def measure(self, cell: Cell) -> Iterator[Row]:
        """A row per format."""
        import torch

        torch.set_num_threads(1)
        for form in self.options.formats:
            case = Case(cell["architecture"], cell["method"], form, cell["attention"])
            model = f"{case.architecture}-{case.relu}"
            source = self.once(model, lambda case=case, model=model: self._source(model, case))
            yield {"format": form, "relu": case.relu} | self._compared(case, source)

    def _source(self, model: str, case: Case) -> Source:
        return source_of(self.folder / model, case.architecture, case.relu)

    def _compared(self, case: Case, source: Source) -> Row:
        """The figures of one artifact, or why it could not be made."""
        scratch = self.folder / "scratch"
        try:
            found = difference(compiled(source, case, scratch / "build"), source, scratch / "codes")
        except ColdpressError as error:
            return {"equal": False, "error": str(error)}
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return {"equal": found.equal, "median": found.median, "mean": found.mean, "left_out": found.left_out}

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


if __name__ == "__main__":
    main("product")
