"""Measures how much self-distillation wins back of the loss by top-k on all linear layers (ActiveFlow, Tables 3 and 5).

The build's own stage distills: it trains on calibration text, and validation text decides which student is kept; test
text is scored. Every student is scored dense and at all sparsities. Variants: `distilled` (KL, straight through), `no
STE`, `no KL` (the text's tokens only), `int4` (rounded in the loop, scored as int4, beside the source as int4) and
`control` (the steps of `no KL` without masks: the effect of more training on this text by itself). A gap is the
perplexity lost between dense and sparse.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.evaluation.evaluate import Sparse, evaluate
from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.cases import MODELS, Case, Parts, case_of
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.rounded import Rounded
from coldpress.compiler.io import Workspace, save_arrays
from coldpress.compiler.stages import distill
from coldpress.compiler.stages.distill import DistillConfig, Recipe
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.families import num_units
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.sparsity import Sparsity
from tests.support.statistics import sparsity_of

SPARSITIES = (0.5, 0.6, 0.7, 0.8)
FAMILIES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
SPLITS: Parts = {
    "calibration": ("fit", slice(0, -16)),
    "validation": ("fit", slice(-16, None)),
    "test": ("test", slice(0, 64)),
}
"""All blocks of the text to fit on train but the last 16, which decide."""
VARIANTS: Mapping[str, dict[str, Any]] = {
    "distilled": {},
    "no STE": {"straight_through": False},
    "no KL": {"cross_entropy": 1.0},
    "int4": {"rounded": True},
    "control": {"cross_entropy": 1.0},
}
"""Variant -> options of the recipe `self`."""
SOURCE, SOURCE_INT4 = "source", "source as int4"
ROUNDED = ("int4", SOURCE_INT4)
INT4 = "int4_group32"
OPTIONS = {"attention": True}


def topk_at(spec: ModelSpec, sparsity: float) -> Sparse:
    """Fits top-k to the inputs of all linear layers."""
    selector = load("coldpress.runtime.sparsity", Selector, "topk")
    arrays = {
        (layer, family): selector.fit(num_units(family, spec), 1 - sparsity, {}, options_of(selector, OPTIONS))
        for layer in range(spec.num_hidden_layers)
        for family in FAMILIES
    }
    return Sparse(selector, FAMILIES, arrays)


def sparse_at(case: Case, sparsity: float) -> Sparsity:
    """Returns `topk_at` as a record."""
    found, spec = topk_at(case.model.spec, sparsity), case.model.spec
    arrays = {f"{key[0]}.{key[1]}.{name}": array for key, part in found.arrays.items() for name, array in part.items()}
    saved = save_arrays(case.folder / f"topk-{sparsity}.safetensors", arrays)
    asked = sparsity_of("topk", dict.fromkeys(FAMILIES, (1 - sparsity,) * spec.num_hidden_layers))
    return asked.model_copy(update={"options": OPTIONS, "arrays": saved, "format": INT4})


def scores(case: Case, model: Model, rounded: bool) -> dict[float, float]:
    """Returns sparsity -> perplexity on test text; 0 is dense."""
    threads, tokens = case.stream.threads, case.splits["test"]
    stream = LayerStream(model, threads)
    if rounded:
        stream = Rounded(stream, INT4, families=FAMILIES)
    nll, count = stream.nll(tokens)
    found = {0.0: math.exp(nll / count)}
    return found | {one: evaluate(stream, tokens, topk_at(model.spec, one)).ppl for one in SPARSITIES}


def trained(case: Case, variant: str, sparsity: float, config: DistillConfig) -> Model:
    """Trains and returns the student of a variant."""
    work = Workspace(case.folder / f"{variant}-{sparsity}", "benchmark")
    asked = sparse_at(case, sparsity)
    config = config.model_copy(update={"options": VARIANTS[variant]})
    if variant != "control":
        return distill.run(config, case.model, case.corpus(), asked, work, case.stream.threads)
    return _unmasked(case, asked, config, work)


def _unmasked(case: Case, asked: Sparsity, config: DistillConfig, work: Workspace) -> Model:
    """Trains as the stage does, without masks, and keeps the last state: its KL to the dense model can only grow."""
    from coldpress.compiler.shared_settings import Course
    from coldpress.compiler.stages.distill import DistillationTask
    from coldpress.compiler.training.loop import States, train
    from coldpress.compiler.training.source import Source

    recipe, source = load("coldpress.compiler.stages.distill", Recipe, "self"), Source.of(case.model)
    options = recipe.OPTIONS(**VARIANTS["control"])
    lesson = recipe.prepare(DistillationTask(source, asked, (), config.seed, "cpu", False), options)
    last: list[Any] = []
    course = Course(
        stage="distill",
        key="recipe",
        recipe="self",
        without="distill=false",
        rate_key="learning_rate",
        learning_rate=config.learning_rate,
        steps=config.distill_steps,
        shared=config.model_copy(update={"distill_evaluations": 1, "distill_patience": config.distill_steps}),
        threads=case.stream.threads,
    )
    states = States(work)
    states.save = lambda progress, parameters, optimizer: last.extend(value.detach().clone() for value in parameters)
    train(course, lesson, case.splits["calibration"], case.splits["validation"], states)
    names = dict(
        zip((name for name, _ in lesson.student.named_parameters()), last[-len(lesson.parameters) :], strict=True)
    )
    return source.write(names.__getitem__, work.folder / "source")


def recovered(rows: Rows) -> dict[str, dict[str, float]]:
    """Returns model -> sparsity -> the share of the gap to dense that a student trained at that sparsity closes."""
    cells = {(row["model"], row["variant"], row["trained"], row["sparsity"]): row["ppl"] for row in rows}
    found: dict[str, dict[str, float]] = {}
    for (model, variant, at, sparsity), ppl in cells.items():
        if variant == "distilled" and at == sparsity:
            dense, sparse = cells[model, SOURCE, None, 0.0], cells[model, SOURCE, None, sparsity]
            found.setdefault(model, {})[f"{sparsity:g}"] = (sparse - ppl) / (sparse - dense)
    return found


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m",), smoke=("stories260k",), full=("prose7m", "tinystories656k"), choices=MODELS, help="models"
    )
    variants: tuple[str, ...] = option(
        ("distilled",), smoke=("int4", "control"), full=tuple(VARIANTS), choices=VARIANTS, help="students"
    )
    trained: tuple[float, ...] = option(
        (0.7,), full=SPARSITIES, choices=SPARSITIES, help="sparsities that students are trained for"
    )
    steps: int = option(12, smoke=1, full=60, help="updates of the weights")
    batch_blocks: int = option(DistillConfig().distill_blocks, smoke=1, help="blocks of 256 tokens per update")
    validation_blocks: int = option(DistillConfig().validation_blocks, smoke=1, help="blocks of validation text")
    test_blocks: int = option(8, smoke=1, full=64, help="blocks of 256 tokens of test text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].model": "model",
        "rows[].variant": "variant of the student, or source: the model before training",
        "rows[].trained?": "sparsity that the student was trained for; null for the source",
        "rows[].sparsity": "sparsity at which the row is scored; 0: dense",
        "rows[].ppl": "perplexity on test text",
        "gap_recovered.*.0.*?": "share of the gap that `distilled` closes at the sparsity it trained for, by model",
    }
    needs_data = True
    full_minutes = 600

    def cells(self) -> Iterator[Cell]:
        options = self.options
        for model in options.models:
            yield {"model": model, "variant": SOURCE, "trained": None}
            if "int4" in options.variants:
                yield {"model": model, "variant": SOURCE_INT4, "trained": None}
            for variant in options.variants:
                for sparsity in options.trained:
                    yield {"model": model, "variant": variant, "trained": sparsity}

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per sparsity."""
        name, variant, at = cell["model"], cell["variant"], cell["trained"]
        splits = {**SPLITS, "test": ("test", slice(0, self.options.test_blocks))}
        case = self.once(name, lambda: case_of(name, self.folder / name, splits))
        model = case.model if at is None else trained(case, variant, at, self._config())
        for sparsity, ppl in scores(case, model, variant in ROUNDED).items():
            yield {"sparsity": sparsity, "ppl": ppl}

    def figures(self, rows: Rows) -> Figures:
        return {"gap_recovered": recovered(rows)}

    def _config(self) -> DistillConfig:
        options = self.options
        return DistillConfig(
            distill_steps=options.steps,
            compute_device="cpu",
            distill_blocks=options.batch_blocks,
            validation_blocks=options.validation_blocks,
        )


if __name__ == "__main__":
    main("distillation")
