"""Measures normal quality, on which the default gates of `publish` rest: small real models, format by format.

Every model is built dense, sparse, and at densities down to ruin, in each format, with the gates off; labels keep the
builds of one model apart. `verify` gives the figures. The jobs of a build are forked from a process that has imported
the libraries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Benchmark, Cell, Row, main, option
from benchmarks.shared import builds
from benchmarks.shared.builds import build, settings
from coldpress.compiler.io import load_record
from coldpress.schemas.metrics import Verification

FORMATS = ("fp16", "int8_group32", "int4_group32")
BUDGETS = {
    "stories260k": "98%",
    "tinystories656k": "90%",
    "tinystories656k-relu": "90%",
    "tinystories-opt-0.9m": "95%",
    "prose7m": "80%",
    "prose7m-relu": "80%",
}
MODELS = {
    model: (corpus, BUDGETS.get(model, budget))
    for model, (corpus, budget) in builds.MODELS.items()
    if model != "tinystories-mixtral-8x"
}
"""Model -> (corpus in the data folder, DRAM budget that holds what must be resident)."""
EXACT_ZEROS = ("relu-demo", "tinystories656k-relu", "tinystories-opt-0.9m", "prose7m-relu")
"""Models whose activations fix their density, so only the others are driven to ruin."""
OFF = dict.fromkeys(("max_ppl_ratio", "min_top1_agreement", "max_logit_error"), "off")


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("stories260k", "tinystories656k-relu"),
        smoke=("stories260k",),
        full=tuple(MODELS),
        choices=MODELS,
        help="models to build",
    )
    formats: tuple[str, ...] = option(FORMATS, smoke=FORMATS[2:], choices=FORMATS, help="formats of the weights")
    densities: tuple[float, ...] = option(
        (0.3,), smoke=(), full=(0.5, 0.3, 0.1), help="densities of top-k for models without exact zeros"
    )
    short: bool = option(True, full=False, help="calibrate and score on less text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].model": "model",
        "rows[].label": "selector with its density, and format, of the build",
        "rows[].ppl_ratio": "perplexity of the artifact over the checkpoint's",
        "rows[].top1_agreement": "share of test tokens whose likeliest successor is the checkpoint's",
        "rows[].max_logit_error": "largest change of a dense logit by packing, over the largest logit",
    }
    needs_data = True
    full_minutes = 30

    def cells(self) -> Iterator[Cell]:
        return ({"model": model, "label": label} for model in self.options.models for label in self._ways(model))

    def measure(self, cell: Cell) -> Iterator[Row]:
        model, label = cell["model"], cell["label"]
        config: dict[str, Any] = settings(model, short=self.options.short) | {"dram_budget": MODELS[model][1]}
        config |= {"order": "structural", "label": label, **OFF, **self._ways(model)[label]}
        if model != "relu-demo":
            config["context_length"] = 256
        found = load_record(build(self.folder / model, "--until", "verify", **config) / "verify.json", Verification)
        yield {
            "ppl_ratio": found.ppl_artifact / found.ppl_source,
            "top1_agreement": found.top1_agreement,
            "max_logit_error": found.max_logit_error,
        }

    def _ways(self, model: str) -> dict[str, dict[str, object]]:
        """Returns label -> settings of each build of a model."""
        ways: dict[str, dict[str, object]] = {"dense": {"method": "dense"}}
        if model in EXACT_ZEROS:
            ways |= {method: {"method": method} for method in ("relu", "predictor")}
        else:
            ways |= {f"topk-{share}": {"method": "topk", "density": share} for share in self.options.densities}
        return {
            f"{name}-{form}": {**chosen, "format": form}
            for name, chosen in ways.items()
            for form in self.options.formats
        }


if __name__ == "__main__":
    main("gates")
