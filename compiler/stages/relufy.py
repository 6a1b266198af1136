"""relufy: gives a model an activation with exact zeros and trains it to match its former self (LLM in a flash, C).

SiLU or GELU becomes ReLU (Mirzadeh et al. 2023), squared ReLU, or FATReLU, which is zero below a threshold. Model in,
model out, before calibration, so that all later stages see a ReLU model. All weights train; for a model too large for
that, adapters on all matrices of its layers do. The loss is the KL divergence from the source's logits. Calibration
blocks are trained on; validation blocks decide when training ends and which weights win. A penalty, L1 on the
activation (ProSparse, Song et al. 2024), makes more of it zero. Off by default.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from coldpress.compiler.activity.forward import choose_device
from coldpress.compiler.architectures import _common
from coldpress.compiler.io import Workspace
from coldpress.compiler.shared_settings import Course, DeviceSetting, TrainingSetting
from coldpress.compiler.training import adapters
from coldpress.compiler.training.memory import PROCESS_BYTES, Size, check_memory, check_one_mlp
from coldpress.runtime.plugins import load
from coldpress.schemas.base import Count, PositiveCount
from coldpress.schemas.config import Key
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model, ModelSpec
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from torch import Tensor, nn

    from coldpress.compiler.needs import Build
    from coldpress.compiler.training.loop import Lesson
    from coldpress.compiler.training.source import Source

OFF = "off"
USUAL_RANK = 32
"""Rank of adapters that an error message suggests (DIP 4)."""
FATRELU_THRESHOLD = 0.1
"""Value below which relufy=fatrelu gives zero."""


class RelufyConfig(DeviceSetting, TrainingSetting):
    """Settings of `relufy`."""

    relufy: Annotated[Literal["off", "relu", "relu2", "fatrelu"], Key()] = Field(
        default=OFF,
        description="replace the activation by one with exact zeros, and distill from the original before calibration",
    )
    relufy_penalty: Annotated[float, Key()] = Field(
        default=0.0,
        ge=0,
        description="nats added to the loss for every 1 of the activation's mean magnitude, so that more of it is zero",
    )
    relufy_rank: Annotated[Count, Key()] = Field(
        default=0,
        description="rank of adapters that learn in relufication while the weights stay, for a model too large to be "
        "trained whole; 0: all weights learn",
    )
    relufy_steps: Annotated[PositiveCount, Key()] = Field(
        default=200, description="updates of the weights in relufication; more for less lost quality"
    )
    relufy_rate: Annotated[float, Key()] = Field(
        default=1e-3, gt=0, description="AdamW's first step size in relufication; lower where the loss is not finite"
    )


def run(config: RelufyConfig, model: Model, corpus: Corpus, work: Workspace, threads: int) -> Model:
    """Trains the model with its new activation; writes weights and configuration into a folder of their own.

    Raises:
        DoesNotFitError: if training needs more memory than is free.
        ColdpressError: if the model has exact zeros already, the device does not exist, or the loss is not finite.
    """
    spec = relufied(model.spec, config.relufy)
    device = choose_device(config.compute_device)
    course = Course(
        stage="relufy",
        key="relufy",
        recipe=config.relufy,
        without="relufy=off",
        rate_key="relufy_rate",
        learning_rate=config.relufy_rate,
        steps=config.relufy_steps,
        shared=config,
        threads=threads if device == "cpu" else 1,
    )
    size = Size.of(model, corpus, course.threads)
    others = "" if config.relufy_rank else f"relufy_rank={USUAL_RANK}, "
    check_memory(course, ram_bytes(size, config.relufy_rank), size, device, others)
    from coldpress.compiler.training.loop import learned
    from coldpress.compiler.training.source import Source

    source = Source.of(model)
    student = Source.of(model.model_copy(update={"spec": spec}), _changes(model, spec))
    lesson = (
        _adapted(source, student, config, size, device) if config.relufy_rank else _whole(source, student, size, device)
    )
    if config.relufy_penalty:
        lesson = replace(lesson, watched=_penalty(config.relufy_penalty, lesson.student, student.modules))
    written, found = learned(course, lesson, student, corpus, work)
    return written.model_copy(update={"relufication": found})


def needs(build: "Build") -> StageNeeds:
    """Returns the needs of training: two models in float32, or with adapters one model as it is stored."""
    size, rank = build.training_size, build.settings["relufy"]["relufy_rank"]
    return StageNeeds(stage="relufy", ram_bytes=ram_bytes(size, rank), disk_bytes=disk_bytes(size, rank))


def relufied(spec: ModelSpec, activation: str) -> ModelSpec:
    """Returns the spec with another activation; for `off` the spec itself. Raises ColdpressError if the model has exact
    zeros already, or is a mixture of experts."""
    if activation == OFF:
        return spec
    check_one_mlp(spec, f"relufy={activation}", "relufy=off")
    if spec.exact_zeros:
        raise ColdpressError(
            f"relufy={activation} was asked for, but the activation of this model is {spec.hidden_act}, which has "
            "exact zeros already; build with relufy=off"
        )
    changes = {"hidden_act": activation, "activation_threshold": FATRELU_THRESHOLD if activation == "fatrelu" else 0.0}
    return ModelSpec.model_validate({**spec.model_dump(), **changes})


def ram_bytes(size: Size, rank: int) -> int:
    """Returns the most memory that relufication holds, on the machine or on the accelerator that computes."""
    return PROCESS_BYTES + (adapters.ram_bytes(size, size.matrices, rank) if rank else size.two_models_bytes)


def disk_bytes(size: Size, rank: int) -> int:
    return size.disk_bytes(adapters.state_bytes(size, size.matrices, rank) if rank else size.two_models_state_bytes)


def _changes(model: Model, spec: ModelSpec) -> dict[str, Any]:
    """Returns the changed keys of config.json; FATReLU is a ReLU with a key that transformers does not know."""
    modules = load("coldpress.compiler.architectures", _common.Architecture, model.spec.model_type).MODULES
    if spec.hidden_act == "fatrelu":
        return {modules.activation_key: "relu", _common.THRESHOLD_KEY: spec.activation_threshold}
    return {modules.activation_key: spec.hidden_act}


def _whole(source: "Source", student: "Source", size: Size, device: str) -> "Lesson":
    from coldpress.compiler.training.loop import Lesson
    from coldpress.compiler.training.source import recompute_layers

    teacher, learning = source.build(device).requires_grad_(False), student.build(device)
    if size.recompute:
        recompute_layers(learning, student.modules)
    return Lesson(teacher, learning, list(learning.parameters()), learning.get_parameter)


def _adapted(source: "Source", student: "Source", config: RelufyConfig, size: Size, device: str) -> "Lesson":
    """Builds one model; as the teacher it runs with the source's activation and without adapters."""
    from coldpress.compiler.training.loop import Lesson
    from coldpress.compiler.training.source import recompute_layers

    found = adapters.Adapters.of(source, device, size.matrices, config.relufy_rank, 2 * config.relufy_rank, config.seed)
    choose = _with_either(found.model, student)
    recompute_layers(found.model, student.modules)

    def teach(begins: bool) -> None:
        found.turn(on=not begins)
        choose(begins)

    teach(False)
    return Lesson(found.model, found.model, found.parameters, found.weight, teach)


def _with_either(model: "nn.Module", student: "Source") -> Callable[[bool], None]:
    """Gives each layer the student's activation beside its own; returns a function that chooses which one runs."""
    import torch

    from coldpress.compiler.training.source import layers_of

    class Either(torch.nn.Module):
        def __init__(self, own: "nn.Module", other: "nn.Module") -> None:
            super().__init__()
            self.own, self.other, self.has_own = own, other, True

        def forward(self, x: "Tensor") -> "Tensor":
            return self.own(x) if self.has_own else self.other(x)

    path, found = student.modules.taps["mlp_activation"].path, list[Either]()
    others = layers_of(_common.causal_lm(student.modules, student.config, student.model.spec), student.modules)
    for layer, other in zip(layers_of(model, student.modules), others, strict=True):
        found.append(Either(layer.get_submodule(path), other.get_submodule(path)))
        layer.set_submodule(path, found[-1])

    def choose(own: bool) -> None:
        for activation in found:
            activation.has_own = own

    return choose


def _penalty(
    factor: float, student: "nn.Module", modules: _common.Modules
) -> "Callable[[], AbstractContextManager[list[Tensor]]]":
    """Returns a context for one forward pass in this thread, which yields the list that collects each layer's penalty:
    in sum the activation's mean magnitude over tokens, units and layers, times a factor."""
    from coldpress.compiler.activity import taps
    from coldpress.compiler.training.source import layers_of

    layers, running = list(layers_of(student, modules)), threading.local()

    def see(values: "Tensor") -> None:
        added: list[Tensor] | None = getattr(running, "added", None)
        if added is not None:
            added.append(factor / len(layers) * values.abs().mean())

    for layer in layers:
        taps.attach(layer, modules, "mlp_activation", see)

    @contextmanager
    def watched() -> "Iterator[list[Tensor]]":
        running.added = []
        try:
            yield running.added
        finally:
            running.added = None

    return watched
