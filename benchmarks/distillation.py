"""What self-distillation wins back of what top-k on all linear layers costs (ActiveFlow, Tables 3 and 5).

`python -m benchmarks.distillation [--models prose7m …] [--variants distilled …] [--trained 0.7 …] [--steps N]`.
The build's own stage distills; calibration text is trained on, validation text decides what is kept, test text is what
is scored. Every student is scored at all sparsities, and dense. Variants: `distilled` (KL, straight through), `no STE`,
`no KL` (the text's own tokens only), `int4` (rounded in the loop, scored as int4, beside the source as int4) and
`control` (the steps of `no KL` without masks: what more training on this text does by itself). The last line is
{gap_recovered: {model: {sparsity: share}}, rows: [{model, variant, trained, sparsity, ppl}]}; a gap is what perplexity
loses between dense and sparse, and the share is of students at the sparsity that they were trained for.
"""

import argparse
import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evaluation.evaluate import Sparse, evaluate
from benchmarks.quantization import matrices_of
from benchmarks.shared.cases import MODELS, Case, Parts, Replaced, case_of
from benchmarks.shared.report import finish, show
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.io import Workspace, save_arrays
from coldpress.compiler.stages import distill, quantize
from coldpress.compiler.stages.distill import DistillConfig
from coldpress.compiler.stages.distill._recipe import Recipe
from coldpress.compiler.stages.quantize import QuantizeConfig
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.families import num_units
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Sparsity
from tests.support.statistics import sparsity_of

SPARSITIES = (0.5, 0.6, 0.7, 0.8)
FAMILIES = ("attn_in", "attn_out", "mlp_in", "mlp_mid")
SPLITS: Parts = {
    "calibration": ("fit", slice(0, -16)),
    "validation": ("fit", slice(-16, None)),
    "test": ("test", slice(0, 64)),
}
"""All there is of text to learn from."""
VARIANTS: Mapping[str, dict[str, Any]] = {
    "distilled": {},
    "no STE": {"straight_through": False},
    "no KL": {"cross_entropy": 1.0},
    "int4": {"rounded": True},
    "control": {"cross_entropy": 1.0},
}
"""Row -> options of the recipe `self`."""
INT4 = "int4_group32"


def sparse_at(case: Case, sparsity: float) -> Sparsity:
    """Top-k on the inputs of all linear layers."""
    spec, selector = case.model.spec, load("coldpress.runtime.sparsity", Selector, "topk")
    options = {"attention": True}
    per_layer = (1 - sparsity,) * spec.num_hidden_layers
    arrays = {
        f"{layer}.{family}.{name}": array
        for family in FAMILIES
        for layer in range(spec.num_hidden_layers)
        for name, array in selector.fit(
            num_units(family, spec), 1 - sparsity, {}, options_of(selector, options)
        ).items()
    }
    saved = save_arrays(case.folder / f"topk-{sparsity}.safetensors", arrays)
    asked = sparsity_of("topk", dict.fromkeys(FAMILIES, per_layer))
    return asked.model_copy(update={"options": options, "arrays": saved, "format": INT4})


def scores(case: Case, model: Model, rounded: bool) -> dict[float, float]:
    """Sparsity -> perplexity on test text, 0 being dense."""
    stream = LayerStream(model, case.stream.threads)
    if rounded:
        stream = Replaced(model, _rounded(case, model), case.stream.threads)
    nll, count = stream.nll(case.splits["test"])
    found = {0.0: math.exp(nll / count)}
    selector = load("coldpress.runtime.sparsity", Selector, "topk")
    for sparsity in SPARSITIES:
        per_layer = range(model.spec.num_hidden_layers)
        arrays = {
            (layer, family): selector.fit(num_units(family, model.spec), 1 - sparsity, {}, selector.OPTIONS())
            for layer in per_layer
            for family in FAMILIES
        }
        found[sparsity] = evaluate(stream, case.splits["test"], Sparse(selector, FAMILIES, arrays)).ppl
    return found


def _rounded(case: Case, model: Model) -> dict[str, np.ndarray]:
    """Every matrix of the layers as int4 codes say it, by role."""
    sparsity = sparse_at(case, SPARSITIES[0])
    with tempfile.TemporaryDirectory(dir=case.folder) as folder:
        work = Workspace(Path(folder) / "quantize", "benchmark")
        layers = tuple(range(model.spec.num_hidden_layers))
        made = quantize.run(QuantizeConfig(), model, sparsity, layers, work)
        return dict(pair for layer in made.layers for pair in matrices_of(layer, sparsity, model))


def trained(case: Case, variant: str, sparsity: float, config: DistillConfig) -> Model:
    """The student of a variant."""
    work = Workspace(case.folder / f"{variant}-{sparsity}", "benchmark")
    asked = sparse_at(case, sparsity)
    config = config.model_copy(update={"options": VARIANTS[variant]})
    if variant != "control":
        return distill.run(config, case.model, case.corpus(), asked, work, case.stream.threads)
    return _unmasked(case, asked, config, work)


def _unmasked(case: Case, asked: Sparsity, config: DistillConfig, work: Workspace) -> Model:
    """What the stage does, with no masks; all of it is kept, since its KL to the dense model can only grow."""
    from coldpress.compiler.stages.distill._task import Task
    from coldpress.compiler.training.course import Course
    from coldpress.compiler.training.loop import train
    from coldpress.compiler.training.source import Source
    from coldpress.compiler.training.state import States

    recipe, source = load("coldpress.compiler.stages.distill", Recipe, "self"), Source.of(case.model)
    options = recipe.OPTIONS(**VARIANTS["control"])
    lesson = recipe.prepare(Task(source, asked, (), config.seed, "cpu", False), options)
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
    states.save = lambda progress, parameters, _: last.extend(value.detach().clone() for value in parameters)
    train(course, lesson, case.splits["calibration"], case.splits["validation"], states)
    names = dict(
        zip((name for name, _ in lesson.student.named_parameters()), last[-len(lesson.parameters) :], strict=True)
    )
    return source.write(names.__getitem__, work.folder / "source")


def rows_of(
    case: Case, variants: list[str], sparsities: list[float], config: DistillConfig
) -> Iterator[dict[str, Any]]:
    """The source's rows, then those of each student."""
    for variant, rounded in (("source", False), ("source as int4", True)):
        if not rounded or "int4" in variants:
            yield from _rows(case, variant, None, case.model, rounded)
    for variant in variants:
        for sparsity in sparsities:
            student = trained(case, variant, sparsity, config)
            yield from _rows(case, variant, sparsity, student, variant == "int4")


def _rows(case: Case, variant: str, at: float | None, model: Model, rounded: bool) -> Iterator[dict[str, Any]]:
    for sparsity, ppl in scores(case, model, rounded).items():
        row = {"model": case.name, "variant": variant, "trained": at, "sparsity": sparsity, "ppl": ppl}
        print(json.dumps(row), flush=True)
        yield row


def recovered(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Model -> sparsity -> share of the gap to dense that a student of that sparsity closes."""
    cells = {(row["model"], row["variant"], row["trained"], row["sparsity"]): row["ppl"] for row in rows}
    found: dict[str, dict[str, float]] = {}
    for (model, variant, at, sparsity), ppl in cells.items():
        if variant == "distilled" and at == sparsity:
            dense, sparse = cells[model, "source", None, 0.0], cells[model, "source", None, sparsity]
            found.setdefault(model, {})[f"{sparsity:g}"] = (sparse - ppl) / (sparse - dense)
    return found


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["prose7m", "tinystories656k"], choices=list(MODELS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--trained", nargs="+", type=float, default=list(SPARSITIES), choices=SPARSITIES)
    parser.add_argument("--steps", type=int, default=60, metavar="N")
    parser.add_argument("--learning-rate", type=float, default=DistillConfig().learning_rate, metavar="X")
    parser.add_argument("--dense-share", type=float, default=DistillConfig().distill_dense_share, metavar="X")
    parser.add_argument("--kept-gain", type=float, default=DistillConfig().distill_kept_gain, metavar="X")
    parser.add_argument("--verbose", action="store_true", help="tell every evaluation")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING)
    config = DistillConfig(
        distill_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        compute_device="cpu",
        distill_dense_share=arguments.dense_share,
        distill_kept_gain=arguments.kept_gain,
    )
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(case_of(name, Path(folder), SPLITS), arguments.variants, arguments.trained, config)
    cells = {(row["model"], row["variant"], row["trained"], row["sparsity"]): row["ppl"] for row in rows}
    found = dict.fromkeys((row["model"], row["variant"], row["trained"]) for row in rows)
    table = [[*map(str, key), *(cells[(*key, at)] for at in (0.0, *SPARSITIES))] for key in found]
    show("perplexity on test text, by sparsity", ["model", "variant", "trained", "dense", *map(str, SPARSITIES)], table)
    finish({"gap_recovered": recovered(rows), "rows": rows})


if __name__ == "__main__":
    main()
