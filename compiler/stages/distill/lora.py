"""lora: adapters of low rank on the pruned matrices learn to repair sparsity's damage (DIP 4, Eq. 9; Hu et al. 2021).

W + A B replaces W before inputs are selected, so a token reads as many columns as without adapters; they are fused into
the weights at the end (compiler/training/adapters.py). The teacher is the same model with adapters and masks off. With
`rounded=true` the student runs with the fused matrices rounded to the build's format, and gradients pass straight
through the rounding.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from coldpress.compiler.stages.distill import DistillationTask, Recipe
from coldpress.compiler.training import adapters
from coldpress.compiler.training.memory import Size
from coldpress.schemas.base import PositiveCount, Record
from coldpress.schemas.families import FamilyName, slices
from coldpress.schemas.model import ModelSpec

if TYPE_CHECKING:
    from coldpress.compiler.training.loop import Lesson


class Options(Record):
    """Settings of the adapters."""

    lora_rank: PositiveCount = Field(default=32, description="rank of the adapters (DIP: 32)")
    lora_alpha: PositiveCount = Field(
        default=64, description="what adapters add is multiplied by lora_alpha / lora_rank"
    )
    rounded: bool = Field(
        default=False, description="true or false: whether the student runs with weights in the build's format"
    )


class Plugin(Recipe[Options]):
    OPTIONS = Options

    def ram_bytes(self, size: Size, options: Options) -> int:
        """Counts adapters, and codes of all layers if the student runs with rounded weights."""
        codes = size.code_bytes if options.rounded else 0
        return adapters.ram_bytes(size, _pruned(size.spec, size.families), options.lora_rank, codes)

    def state_bytes(self, size: Size, options: Options) -> int:
        return adapters.state_bytes(size, _pruned(size.spec, size.families), options.lora_rank)

    def prepare(self, task: DistillationTask, options: Options) -> "Lesson":
        from coldpress.compiler.stages.distill._masks import attach
        from coldpress.compiler.stages.distill._rounded_adapters import rounded_adapters
        from coldpress.compiler.stages.distill._rounding import stored_matrices
        from coldpress.compiler.training.loop import Lesson, Switch, as_it_is
        from coldpress.compiler.training.source import recompute_layers

        source, roles = task.source, _pruned(task.source.model.spec, task.sparsity.families)
        found = adapters.Adapters.of(source, task.device, roles, options.lora_rank, options.lora_alpha, task.seed)
        running = as_it_is
        if options.rounded:
            running = rounded_adapters(found.model, stored_matrices(source, task.sparsity), adapters.ADAPTER)
        recompute_layers(found.model, source.modules)
        switch = Switch()
        attach(found.model, source.modules, task.masks, switch)

        def teach(begins: bool) -> None:
            switch.on = not begins
            found.turn(on=not begins)

        return Lesson(
            teacher=found.model,
            student=found.model,
            parameters=found.parameters,
            weight=found.weight,
            teach=teach,
            running=running,
            masks=switch,
            at_share=found.at_share,
        )


def _pruned(spec: ModelSpec, families: Iterable[FamilyName]) -> list[str]:
    return sorted({piece.role for family in families for piece in slices(family, spec)})
