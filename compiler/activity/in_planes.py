"""Runs the source model with units in planes: a token computes the units that it refines with all their bits, and the
others with their high bits, as the runtime does under `refine`.

The architecture's own modules hold coarse and whole matrices side by side, so that the MLP's arithmetic is not written
again here; a hook keeps one of the two for each unit.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coldpress.compiler.activity.choice import Choice
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.rounded import Rounded
from coldpress.compiler.rounding._matrix import NEAREST, Rounding
from coldpress.runtime.quantization._planes import planes_of
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.families import FAMILIES, FamilyName, Formats, num_experts

if TYPE_CHECKING:
    from torch import Tensor, nn

    from coldpress.compiler.activity.taps import Change


class InPlanes(Rounded):
    """A model whose MLP has every unit twice: coarse, as its high bits say, and whole; a choice keeps one of the two.
    Where a unit is a row, the matrix has twice as many rows, the coarse ones first; where it is a column, twice as many
    columns. With `coarse_alone` it has its units once, as a draft computes them."""

    def __init__(
        self,
        source: LayerStream,
        formats: Formats,
        families: Iterable[FamilyName],
        rounding: Rounding = NEAREST,
        *,
        coarse_alone: bool = False,
    ) -> None:
        """`formats` are in planes; `families` are those whose units have planes."""
        super().__init__(source, formats, rounding, families)
        self._copies = 1 if coarse_alone else 2

    def _of_role(self, role: str) -> "Tensor":
        import torch

        axis = self._axis(role)
        if axis is None:
            return super()._of_role(role)
        if role.endswith(".bias"):
            tensor = super()._of_role(role)
            return tensor.repeat(self._copies) if axis == "row" else tensor
        codes, planes = self._codes(role, axis), planes_of(self._format_of(role))
        assert planes is not None
        kept = [self._in_format(planes.name(), planes.split(codes)[0], role, axis)]
        if self._copies > 1:
            kept.append(self._in_format(planes.WHOLE, codes, role, axis))
        units = torch.cat(kept)
        return units if axis == "row" else units.T.contiguous()

    def _fill(self, module: "nn.Module", state: "dict[str, Tensor]") -> None:
        """Takes the weights whatever their shapes: the skeleton has the source's."""
        from torch import nn

        for name, tensor in state.items():
            path, _, leaf = name.rpartition(".")
            module.get_submodule(path).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def model_for(
    selector: Selector[Any],
    source: LayerStream,
    formats: Formats,
    families: Iterable[FamilyName],
    rounding: Rounding = NEAREST,
) -> LayerStream:
    """Returns the model in which a selector's loss shows: the source, or with units in planes where it refines."""
    return InPlanes(source, formats, families, rounding) if selector.IN_PLANES else source


def in_model(choice: Choice) -> Choice:
    """Returns a choice that changes the signals of the model that `model_for` returns."""
    return _RefinedChoice(choice.selector, choice.arrays, choice.spec, choice) if choice.selector.IN_PLANES else choice


@dataclass(frozen=True)
class _RefinedChoice(Choice):
    masks: Choice

    def mask(self, layer: int, family: str, activity: np.ndarray) -> np.ndarray:
        return self.masks.mask(layer, family, activity)

    def _change(self, layer: int, families: list[str]) -> "Change":
        (family,) = families
        count = num_experts(family, self.spec)
        computes_both = any(piece.axis == "row" for piece in FAMILIES[family].slices)

        def change(part: "Tensor") -> "Tensor":
            """Keeps of every unit one plane: [T, n] or, coarse and whole beside each other, [T, 2 n] -> [T, 2 n]."""
            import torch

            pair = part.reshape(len(part), count, 2 if computes_both else 1, -1)
            coarse, whole = pair[:, :, 0], pair[:, :, -1]
            mask = torch.from_numpy(self.mask(layer, family, coarse.flatten(1).float().cpu().numpy()))
            mask = mask.to(part.device).view_as(coarse)
            kept = torch.where(mask, 0.0, coarse), torch.where(mask, whole, 0.0)
            return torch.stack(kept, dim=2).flatten(1)

        return change
