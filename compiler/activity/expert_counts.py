"""Records which experts the tokens of a layer use, block by block of calibration text, and sums up all layers.

Arrays of a layer (schemas/activations.py): `used`, `guessed`, `task_counts`. A guess is what the layer's router chooses
from the MLP input of the layer before, as a runtime that preloads could.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from coldpress.compiler.activity import expert_statistics
from coldpress.compiler.activity.packed_bits import joined, population, unpacked
from coldpress.compiler.activity.routing import router_matrix, router_of
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.schemas.activations import Activations, ExpertUses, FamilyStatistics, LayerStatistics
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.experts import ExpertCurve
from coldpress.schemas.families import BLOCKS, num_units, used_share
from coldpress.schemas.model import Model, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

SHOWN_SHARES = (0.125, 0.25, 0.5, 0.75)
"""Shares of the experts in DRAM whose misses the log names."""


class ExpertCounts:
    """The experts of one layer; several threads may count blocks in any order."""

    def __init__(self, model: Model, layer: int, num_blocks: int) -> None:
        import torch

        self._router = router_of(model, layer)
        weight, bias = router_matrix(model, layer)
        self._weight, self._bias = torch.from_numpy(weight), None if bias is None else torch.from_numpy(bias)
        self._guesses: list[np.ndarray | None] = [None] * num_blocks
        self._used: list[np.ndarray | None] = [None] * num_blocks
        self._guessed: list[int | None] = [None] * num_blocks

    def guess(self, block: int, inputs: "Tensor") -> None:
        """Chooses experts from a block's MLP inputs of the layer before, [T, hidden_size]."""
        import torch

        logits = torch.nn.functional.linear(inputs.float(), self._weight, self._bias)
        self._guesses[block] = self._chosen(logits)

    def count(self, block: int, logits: "Tensor") -> None:
        """Records a block's experts, from its router's own logits, [T, num_experts]."""
        used, guess = self._chosen(logits), self._guesses[block]
        self._used[block] = used
        self._guessed[block] = None if guess is None else int(np.count_nonzero(used & guess))
        self._guesses[block] = None

    def _chosen(self, logits: "Tensor") -> np.ndarray:
        return self._router.choose(self._router.scores(logits.detach().float().cpu().numpy()))

    def arrays(self, tasks: np.ndarray | None, num_tasks: int) -> dict[str, np.ndarray]:
        """Returns the layer's arrays; `tasks` int [num_blocks, T] are those of the text."""
        blocks = [block for block in self._used if block is not None]
        used = np.concatenate(blocks)
        found: dict[str, np.ndarray] = {"used": np.packbits(used.T, axis=1, bitorder="little")}
        guessed = [count for count in self._guessed if count is not None]
        if guessed:
            found["guessed"] = np.array(guessed, np.int64)
        if tasks is not None:
            found["task_counts"] = expert_statistics.task_counts(used, tasks.ravel(), num_tasks)
        return found


def merged(files: Sequence[ArrayFile], tokens: Sequence[int]) -> dict[str, np.ndarray]:
    arrays = [load_arrays(file) for file in files]
    found = {"used": joined([part["used"] for part in arrays], tokens)}
    if "guessed" in arrays[0]:
        found["guessed"] = np.concatenate([part["guessed"] for part in arrays])
    if "task_counts" in arrays[0]:
        found["task_counts"] = np.sum([part["task_counts"] for part in arrays], axis=0)
    return found


def uses_of(arrays: ArrayFile) -> ExpertUses:
    found = load_arrays(arrays)
    uses = int(population(found["used"]).sum())
    share = int(found["guessed"].sum()) / uses if "guessed" in found else None
    return ExpertUses(num_experts=len(found["used"]), predictability=share, arrays=arrays)


def used_experts(uses: ExpertUses, num_tokens: int) -> np.ndarray:
    """Returns which experts each token uses, bool [num_tokens, num_experts]."""
    return unpacked(load_arrays(uses.arrays, "used")["used"], num_tokens).T


def with_blocks(activations: Activations, spec: ModelSpec, work: Workspace) -> Activations:
    """Adds bits and counts of blocks of neurons: a token uses all blocks of its experts, which were counted."""
    each = num_units(BLOCKS, spec) // spec.num_experts

    def with_own(layer: LayerStatistics) -> LayerStatistics:
        uses = layer.experts
        if uses is None:
            return layer

        def make() -> dict[str, np.ndarray]:
            bits = np.repeat(load_arrays(uses.arrays, "used")["used"], each, axis=0)
            return {"bits": bits, "counts": population(bits)}

        shape = {"num_units": each * spec.num_experts, "density": used_share(BLOCKS, spec)}
        found = FamilyStatistics(family=BLOCKS, arrays=work.once(f"{layer.layer}.{BLOCKS}", make), **shape)
        return layer.model_copy(update={"families": (*layer.families, found)})

    return activations.model_copy(update={"layers": tuple(map(with_own, activations.layers))})


def curve_of(layers: Sequence[LayerStatistics], num_tokens: int, block_tokens: int) -> ExpertCurve | None:
    """Returns the means over all layers with experts; None if there are none. One layer is in memory at a time."""
    having = [layer.experts for layer in layers if layer.experts is not None]
    if not having:
        return None
    lru, static, again, chosen = [], [], [], 1
    for uses in having:
        used = used_experts(uses, num_tokens)
        chosen = int(used[0].sum())
        lru.append(expert_statistics.lru_misses(used))
        static.append(1 - expert_statistics.static_coverage(used))
        again.append(expert_statistics.persistence(used, block_tokens))
    predicted = [uses.predictability for uses in having if uses.predictability is not None]
    return ExpertCurve(
        num_experts_per_tok=chosen,
        lru_misses=_shares(np.mean(lru, axis=0)),
        static_misses=_shares(np.mean(static, axis=0)),
        persistence=float(np.mean(again)),
        predictability=float(np.mean(predicted)) if predicted else None,
    )


def _shares(values: np.ndarray) -> tuple[float, ...]:
    """Returns values without the sums' rounding errors beyond 0 and 1."""
    return tuple(np.clip(values, 0.0, 1.0).tolist())


def in_words(curve: ExpertCurve) -> str:
    count = len(curve.lru_misses)
    parts = []
    for share in SHOWN_SHARES:
        held = max(1, round(share * count))
        hottest, recent = (1 - misses[held - 1] for misses in (curve.static_misses, curve.lru_misses))
        parts.append(f"{hottest:.0%} and {recent:.0%} with {share:.1%} of them")
    again = f"{curve.persistence:.0%} of a token's experts served the token before it"
    ahead = "" if curve.predictability is None else f", {curve.predictability:.0%} are known a layer before"
    return f"experts in DRAM, the hottest ones and the last used ones, serve {', '.join(parts)}; {again}{ahead}"
