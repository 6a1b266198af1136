"""What a ReLU costs a model that was trained with SiLU, and how much of it is zero then (LLM in a flash, appendix C).

`python -m benchmarks.relufication [--models prose7m …] [--steps N] [--penalties 0 1] [--activations relu …]
[--rank R]`. The build's own stage makes the models: calibration text is trained on, validation text decides what is
kept, perplexity and zeros are of test text. Beside them stand the source, the source with another activation and no
training, and the model of the same shape that was trained with ReLU from the start, where there is one. The last line
is {rows: [{model, variant, penalty, ppl, ppl_ratio, zeros, zeros_by_layer, steps}]}; `zeros` is the share of the
activation that is exactly zero, on average over layers.
"""

import argparse
import logging
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.distillation import SPLITS
from benchmarks.shared.cases import Case, case_of
from benchmarks.shared.report import finish, show
from coldpress.compiler.activity.forward import Hooks, LayerStream
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest, relufy
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.relufy import RelufyConfig
from coldpress.schemas.model import Model

RELU_SIBLINGS = {"prose7m": "prose7m-relu", "tinystories656k": "tinystories656k-relu"}
"""Models of the same shape and text that were trained with ReLU."""


def scores(model: Model, tokens: np.ndarray) -> dict[str, Any]:
    """Perplexity of `tokens`, and the share of every layer's activation that is exactly zero."""
    zeros = np.zeros((model.spec.num_hidden_layers, len(tokens)))

    def hooks(layer: int) -> Any:
        def of_block(block: int) -> Hooks:
            def see(values: Any) -> None:
                zeros[layer, block] = (values == 0).double().mean().item()

            return {"mlp_activation": see}

        return of_block

    nll, count = LayerStream(model).nll(tokens, hooks)
    by_layer = zeros.mean(axis=1)
    return {"ppl": math.exp(nll / count), "zeros": float(by_layer.mean()), "zeros_by_layer": by_layer.tolist()}


def rows_of(case: Case, activations: list[str], penalties: list[float], base: RelufyConfig) -> Iterator[dict[str, Any]]:
    """The source, its sibling, and every student."""
    tokens = case.splits["test"]
    source = scores(case.model, tokens)
    yield {"variant": "source", "penalty": 0.0, "steps": 0, **source}
    for activation in activations:
        for penalty in penalties:
            config = base.model_copy(update={"activation": activation, "penalty": penalty})
            work = Workspace(case.folder / f"{activation}-{penalty:g}", "benchmark")
            student = relufy.run(config, case.model, case.corpus(), work, 1)
            assert student.relufication is not None
            last = min(student.relufication.curve, key=lambda point: point.validation_loss).step
            yield {"variant": activation, "penalty": penalty, "steps": last, **scores(student, tokens)}
        # a rate of nearly nothing: the weights that training begins with
        still = base.model_copy(update={"activation": activation, "steps": 1, "learning_rate": 1e-30})
        work = Workspace(case.folder / f"{activation}-untrained", "benchmark")
        untrained = relufy.run(still, case.model, case.corpus(), work, 1)
        yield {"variant": f"{activation}, untrained", "penalty": 0.0, "steps": 0, **scores(untrained, tokens)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(RELU_SIBLINGS))
    parser.add_argument("--activations", nargs="+", default=["relu", "relu2", "fatrelu"])
    parser.add_argument("--penalties", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--threshold", type=float, default=RelufyConfig().relufy_threshold, help="of fatrelu")
    parser.add_argument("--steps", type=int, default=RelufyConfig().relufy_steps)
    parser.add_argument(
        "--rank", type=int, default=RelufyConfig().relufy_rank, help="of adapters; 0: all weights learn"
    )
    parser.add_argument("--rate", type=float, default=RelufyConfig().relufy_rate)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    base = RelufyConfig(
        relufy_threshold=arguments.threshold,
        relufy_rank=arguments.rank,
        relufy_steps=arguments.steps,
        relufy_rate=arguments.rate,
        compute_device="cpu",
    )
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            case = case_of(name, Path(folder), SPLITS)
            found = list(rows_of(case, arguments.activations, arguments.penalties, base))
            if name in RELU_SIBLINGS:
                source = case.source.with_name(RELU_SIBLINGS[name])  # of the same tokenizer
                sibling = ingest.run(IngestConfig(model=str(source)), Workspace(Path(folder) / "sibling", "benchmark"))
                trained = scores(sibling, case.splits["test"])
                found.append({"variant": "trained with ReLU", "penalty": 0.0, "steps": 0, **trained})
            rows += [{"model": name, "ppl_ratio": row["ppl"] / found[0]["ppl"], **row} for row in found]
    columns = ("model", "variant", "penalty", "steps", "ppl", "ppl_ratio", "zeros")
    show("perplexity and exact zeros", columns, [[row[column] for column in columns] for row in rows])
    finish({"rows": rows})


if __name__ == "__main__":
    main()
