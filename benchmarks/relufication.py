"""Measures the cost of a ReLU in a model trained with SiLU, and the zeros that it gives (LLM in a flash, appendix C).

The build's own stage makes the models: it trains on calibration text, and validation text decides which state is kept;
perplexity and zeros are of test text. They are compared with the source, the source with another activation and no
training, and the model of the same shape that was trained with ReLU from the start, where there is one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.distillation import SPLITS
from benchmarks.harness import Benchmark, Cell, Row, main, option
from benchmarks.shared.cases import MODELS, Case, case_of
from coldpress.compiler.activity.forward import Hooks, LayerStream
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest, relufy
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.relufy import RelufyConfig
from coldpress.schemas.model import Model

RELU_SIBLINGS = {"prose7m": "prose7m-relu", "tinystories656k": "tinystories656k-relu"}
"""Model -> the model of the same shape and text that was trained with ReLU."""
SIBLING = "trained with ReLU"
UNTRAINED = ", untrained"


def scores(model: Model, tokens: np.ndarray) -> Row:
    """Returns the perplexity of `tokens`, and the share of exact zeros in every layer's activation."""
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


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m",), smoke=("stories260k",), full=tuple(RELU_SIBLINGS), choices=MODELS, help="models that get a ReLU"
    )
    activations: tuple[str, ...] = option(
        ("relu",), full=("relu", "relu2", "fatrelu"), choices=("relu", "relu2", "fatrelu"), help="activations"
    )
    penalties: tuple[float, ...] = option((0.0, 1.0), smoke=(1.0,), help="weights of the penalty on activations")
    steps: int = option(16, smoke=1, full=RelufyConfig().relufy_steps, help="updates of the weights")
    batch_blocks: int = option(RelufyConfig().distill_blocks, smoke=1, help="blocks of 256 tokens per update")
    validation_blocks: int = option(RelufyConfig().validation_blocks, smoke=1, help="blocks of validation text")
    test_blocks: int = option(16, smoke=2, full=64, help="blocks of 256 tokens of test text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].model": "model",
        "rows[].variant": "source; an activation, trained or untrained; trained with ReLU: another model of this shape",
        "rows[].penalty": "weight of the penalty on activations",
        "rows[].ppl": "perplexity on test text",
        "rows[].ppl_ratio": "perplexity over the source's",
        "rows[].zeros": "share of the MLP's activations that are exactly zero, mean over layers",
        "rows[].zeros_by_layer": "share of the MLP's activations that are exactly zero, for each layer",
        "rows[].steps": "updates after which the weights were kept; 0 without training",
    }
    needs_data = True
    full_minutes = 300

    def cells(self) -> Iterator[Cell]:
        options = self.options
        for model in options.models:
            yield {"model": model, "variant": "source", "penalty": 0.0}
            for activation in options.activations:
                for penalty in options.penalties:
                    yield {"model": model, "variant": activation, "penalty": penalty}
                yield {"model": model, "variant": activation + UNTRAINED, "penalty": 0.0}
            if model in RELU_SIBLINGS:
                yield {"model": model, "variant": SIBLING, "penalty": 0.0}

    def measure(self, cell: Cell) -> Iterator[Row]:
        case, source = self.once(cell["model"], lambda: self._case(cell["model"]))
        model, steps = self._model(case, cell["variant"], cell["penalty"])
        found = source if model is case.model else scores(model, case.splits["test"])
        yield {**found, "ppl_ratio": found["ppl"] / source["ppl"], "steps": steps}

    def _case(self, name: str) -> tuple[Case, Row]:
        case = case_of(name, self.folder / name, {**SPLITS, "test": ("test", slice(0, self.options.test_blocks))})
        return case, scores(case.model, case.splits["test"])

    def _model(self, case: Case, variant: str, penalty: float) -> tuple[Model, int]:
        """Returns the model of a variant, and the number of updates that it has had."""
        work = Workspace(case.folder / f"{variant}-{penalty:g}", "benchmark")
        if variant == "source":
            return case.model, 0
        if variant == SIBLING:  # has the same tokenizer
            source = case.source.with_name(RELU_SIBLINGS[case.name])
            return ingest.run(IngestConfig(model=str(source)), work), 0
        config = self._config(variant.removesuffix(UNTRAINED), penalty)
        if variant.endswith(UNTRAINED):  # a rate near zero keeps the weights that training begins with
            still = config.model_copy(update={"relufy_steps": 1, "relufy_rate": 1e-30})
            return relufy.run(still, case.model, case.corpus(), work, 1), 0
        student = relufy.run(config, case.model, case.corpus(), work, 1)
        assert student.relufication is not None
        return student, min(student.relufication.curve, key=lambda point: point.validation_loss).step

    def _config(self, activation: Any, penalty: float) -> RelufyConfig:
        options = self.options
        return RelufyConfig(
            relufy=activation,
            relufy_penalty=penalty,
            relufy_steps=options.steps,
            distill_blocks=options.batch_blocks,
            validation_blocks=options.validation_blocks,
            compute_device="cpu",
        )


if __name__ == "__main__":
    main("relufication")
