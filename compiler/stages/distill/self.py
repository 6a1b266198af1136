"""self: all weights learn to be sparse from their own dense selves (ActiveFlow 5): KL on logits.

Teacher and student are two models in float32, so this is for models that fit several times into memory. With
`rounded=true` the student runs with matrices rounded to the build's format, and gradients pass straight through the
rounding, too; embeddings and head stay unrounded.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field

from coldpress.compiler.stages.distill import DistillationTask, Recipe
from coldpress.compiler.training.memory import Size
from coldpress.schemas.base import Record

if TYPE_CHECKING:
    from torch import Tensor

    from coldpress.compiler.training.loop import Lesson


class Options(Record):
    """Settings of the loss."""

    cross_entropy: float = Field(
        default=0.0, ge=0, le=1, description="share of the loss that is the text's own next tokens, not the teacher's"
    )
    straight_through: bool = Field(
        default=True, description="true or false: whether what is left out gets a gradient, too"
    )
    rounded: bool = Field(
        default=False, description="true or false: whether the student runs with weights in the build's format"
    )


class Plugin(Recipe[Options]):
    OPTIONS = Options

    def ram_bytes(self, size: Size, options: Options) -> int:
        """Returns the bytes of memory: two models, and with `rounded` the matrices as the format stores them."""
        return size.two_models_bytes + 4 * size.num_parameters * options.rounded

    def state_bytes(self, size: Size, options: Options) -> int:
        return size.two_models_state_bytes

    def prepare(self, task: DistillationTask, options: Options) -> "Lesson":
        import torch

        from coldpress.compiler.stages.distill._masks import attach
        from coldpress.compiler.stages.distill._rounding import rounded_weights, stored_matrices
        from coldpress.compiler.training.loop import Lesson, Switch, as_it_is
        from coldpress.compiler.training.source import recompute_layers

        teacher, student = (task.source.build(task.device) for _ in range(2))
        teacher.requires_grad_(False)
        if task.recompute:
            recompute_layers(student, task.source.modules)
        switch = Switch()
        attach(student, task.source.modules, task.masks, switch, options.straight_through)
        stored = stored_matrices(task.source, task.sparsity)

        def at_share(trained: Sequence["Tensor"], share: float) -> None:
            parameters = zip(student.parameters(), teacher.parameters(), trained, strict=True)
            with torch.no_grad():
                for parameter, begin, end in parameters:
                    parameter.copy_(torch.lerp(begin, end, share))

        return Lesson(
            teacher=teacher,
            student=student,
            parameters=list(student.parameters()),
            weight=student.get_parameter,
            cross_entropy=options.cross_entropy,
            running=partial(rounded_weights, student, stored) if options.rounded else as_it_is,
            masks=switch,
            at_share=at_share,
        )
