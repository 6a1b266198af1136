"""distill: repairs the damage of sparsity; the model learns from its own dense self under the masks of the build's
selector.

Model in, model out, so all later stages work on either. A recipe, a file of this package, says how it learns: `self`
trains all weights (ActiveFlow 5), `lora` trains adapters that are fused at the end (DIP 4). Calibration blocks are
trained on. Validation blocks decide when training ends, which weights win, and how far those move back towards the
source's, so that the student also works where it runs dense, as over a prompt. Off by default.
"""

import logging
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Generic

from pydantic import Field
from typing_extensions import TypeVar

from coldpress.compiler.activity.forward import choose_device
from coldpress.compiler.io import Workspace
from coldpress.compiler.shared_settings import Course, DeviceSetting, TrainingSetting
from coldpress.compiler.training.memory import PROCESS_BYTES, Size, check_memory, check_one_mlp
from coldpress.runtime.plugins import PluginBase, load, options_of
from coldpress.schemas.base import Options, PositiveCount, Record
from coldpress.schemas.config import Key, OptionsOf
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build
    from coldpress.compiler.stages.distill._masks import Mask
    from coldpress.compiler.training.loop import Lesson
    from coldpress.compiler.training.source import Source

LOG = logging.getLogger(__name__)
RECIPES = "coldpress.compiler.stages.distill"
OptionsT = TypeVar("OptionsT", bound=Record, default=Any)


@dataclass(frozen=True)
class DistillationTask:
    source: "Source"
    sparsity: Sparsity
    masks: "tuple[Mask, ...]"
    seed: int
    device: str
    recompute: bool
    """True if the backward pass recomputes each layer instead of storing its inner values."""


class Recipe(PluginBase, Generic[OptionsT]):
    """A way for a model to learn from its own dense self. The base class of all recipes."""

    @abstractmethod
    def ram_bytes(self, size: Size, options: OptionsT) -> int:
        """Returns the bytes of memory that training takes."""

    @abstractmethod
    def state_bytes(self, size: Size, options: OptionsT) -> int:
        """Returns the bytes of one state that an interrupted run leaves on disk."""

    @abstractmethod
    def prepare(self, task: DistillationTask, options: OptionsT) -> "Lesson":
        """Builds teacher and student, and says which parameters train."""


class DistillConfig(DeviceSetting, TrainingSetting):
    """Settings of `distill`."""

    recipe: Annotated[str, Key(plugins=RECIPES)] = Field(
        default="self", description="what learns; self: all weights, lora: adapters on what is pruned"
    )
    options: Annotated[Options, OptionsOf("recipe")] = Field(
        default={}, description="the recipe's own options, as JSON"
    )
    distill_steps: Annotated[PositiveCount, Key()] = Field(
        default=80, description="updates of the weights in distillation; more for less lost quality"
    )
    learning_rate: Annotated[float, Key()] = Field(
        default=5e-4, gt=0, description="AdamW's first step size in distillation; lower where the loss is not finite"
    )
    distill_dense_share: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="share of the blocks of an update that the student runs without masks, so that it stays good dense",
    )
    distill_kept_gain: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="smallest share of the gain on validation text to keep while weights are interpolated back to the "
        "source's, so that the student stays good dense; 1: no interpolation",
    )


def run(
    config: DistillConfig, model: Model, corpus: Corpus, sparsity: Sparsity, work: Workspace, threads: int
) -> Model:
    """Returns the distilled model, its weights where transformers can load them; the source if nothing is left out.

    Raises:
        UnknownNameError: if the recipe does not exist.
        DoesNotFitError: if training needs more memory than is free.
        ColdpressError: if the model is a mixture of experts, the device does not exist, or the loss is not finite.
    """
    check_one_mlp(model.spec, "distill=true", "distill=false")
    recipe = load(RECIPES, Recipe, config.recipe)
    options = options_of(recipe, config.options)
    from coldpress.compiler.stages.distill._masks import masks_of

    sparsity = sparsity.smallest  # the fewest units
    masks = masks_of(model.spec, sparsity)
    if not masks:
        LOG.info("distill: method %s leaves nothing out, so the model stays as it is", sparsity.method)
        return model
    device = choose_device(config.compute_device)
    course = Course(
        stage="distill",
        key="recipe",
        recipe=config.recipe,
        without="distill=false",
        rate_key="learning_rate",
        learning_rate=config.learning_rate,
        steps=config.distill_steps,
        shared=config,
        threads=threads if device == "cpu" else 1,
    )
    size = Size.of(model, corpus, course.threads, sparsity.families, sparsity.format)
    others = "" if config.recipe == "lora" else "recipe=lora, "
    check_memory(course, ram_bytes(size, config.recipe, config.options), size, device, others)
    from coldpress.compiler.training.loop import learned
    from coldpress.compiler.training.source import Source

    source = Source.of(model)
    lesson = recipe.prepare(DistillationTask(source, sparsity, masks, config.seed, device, size.recompute), options)
    lesson = replace(lesson, dense_share=config.distill_dense_share, kept_gain=config.distill_kept_gain)
    written, found = learned(course, lesson, source, corpus, work)
    return written.model_copy(update={"distillation": found})


def needs(build: "Build") -> StageNeeds:
    size, settings = build.training_size, build.settings["distill"]
    asked = settings["recipe"], settings.get("options", {})
    return StageNeeds(stage="distill", ram_bytes=ram_bytes(size, *asked), disk_bytes=disk_bytes(size, *asked))


def ram_bytes(size: Size, recipe: str, options: dict[str, Any]) -> int:
    """Returns the most memory that distilling holds, on the machine or on the accelerator that computes."""
    found = load(RECIPES, Recipe, recipe)
    return PROCESS_BYTES + found.ram_bytes(size, options_of(found, options))


def disk_bytes(size: Size, recipe: str, options: dict[str, Any]) -> int:
    found = load(RECIPES, Recipe, recipe)
    return size.disk_bytes(found.state_bytes(size, options_of(found, options)))
