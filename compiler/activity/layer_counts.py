"""Counts the signals of one layer, block by block of calibration text, in any order and by any thread.

Receives signals through hooks of the forward pass (compiler/activity/forward.py); returns the arrays that
schemas/activations.py describes, the same for any number of threads. If a selector chooses units, it also masks the
signals, so that later layers see what the pruned layers produce (ActiveFlow 4.1, DIP 3.2).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from coldpress.compiler.activity.array_rows import RowReader, RowWriter
from coldpress.compiler.activity.expert_counts import ExpertCounts
from coldpress.compiler.activity.forward import OF_ANY_LAYER, Hooks
from coldpress.compiler.activity.packed_bits import joined, population
from coldpress.compiler.activity.signals import magnitude_edges, magnitude_histogram, pack_nonzero, shared_top
from coldpress.compiler.architectures import Architecture
from coldpress.runtime.plugins import load
from coldpress.schemas.families import BLOCKS, FAMILIES, FamilyName, Signal, activity_of
from coldpress.schemas.gram import INPUT_OF
from coldpress.schemas.model import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from coldpress.compiler.activity.choice import Choice
    from coldpress.compiler.activity.taps import Change

TOP_DENSITIES = (0.1, 0.2, 0.3, 0.5)
"""Densities at which the precision of the previous layer's largest inputs is measured."""

INNER_SIGNALS = ("mlp_activation", "mlp_inner")
"""Signals that are exactly zero where a ReLU is; so is `mlp_up` if up passes a ReLU, too."""


@dataclass(frozen=True)
class ActivityRule:
    """The meaning of "active": picked by a selector; or, in families with exact zeros, not zero; or still unknown."""

    exact: frozenset[str]
    choice: "Choice | None" = None

    def counted(self, family: str) -> bool:
        return self.choice is not None or family in self.exact


def countable_families(spec: ModelSpec) -> tuple[FamilyName, ...]:
    """Returns the families that some selector of this model may choose from: those whose signal its layers have. Of
    blocks every token uses all."""
    taps = load("coldpress.compiler.architectures", Architecture, spec.model_type).MODULES.taps
    return tuple(name for name in FAMILIES if activity_of(name, spec) in taps and name != BLOCKS)


def leaders(families: Iterable[FamilyName], spec: ModelSpec) -> dict[FamilyName, tuple[FamilyName, ...]]:
    """Returns the first family of each signal -> all families with that signal. Unless a selector chooses units, these
    have equal statistics, which are gathered and stored once."""
    found: dict[Signal, list[FamilyName]] = {}
    for family in families:
        found.setdefault(activity_of(family, spec), []).append(family)
    return {names[0]: tuple(names) for names in found.values()}


def exact_families(families: Iterable[str], spec: ModelSpec) -> frozenset[str]:
    if not spec.exact_zeros:
        return frozenset()
    signals = (*INNER_SIGNALS, "mlp_up") if spec.activated_up else INNER_SIGNALS
    return frozenset(family for family in families if FAMILIES[family].activity in signals)


def multiplied_signals(layer: int, spec: ModelSpec) -> tuple[Signal, ...]:
    """Signals that matrices of a layer multiply; of a mixture's layer without experts, those that it shows."""
    signals: dict[Signal, None] = dict.fromkeys(INPUT_OF.values())
    return tuple(signal for signal in signals if not spec.is_dense(layer) or signal in OF_ANY_LAYER)


@dataclass(frozen=True)
class CalibrationText:
    """Calibration blocks: `tokens` int32 and `tasks` int16, both [num_blocks, T]; a task of -1 is none."""

    tokens: np.ndarray
    tasks: np.ndarray | None = None
    num_tasks: int = 0


def top_selected(hidden_size: int) -> list[int]:
    """Returns the number of channels for each of `TOP_DENSITIES`. Repeats runtime/sparsity/topk.py, which is not
    imported: calibration would then depend on the build's method."""
    return [min(hidden_size, max(1, round(density * hidden_size))) for density in TOP_DENSITIES]


@dataclass
class _Seen:
    histogram: np.ndarray
    bits: np.ndarray | None = None
    """uint8 [num_units, ceil(T / 8)]."""
    task_counts: dict[int, np.ndarray] = field(default_factory=dict)
    """Task -> each unit's active tokens in it, int64 [num_units]."""


def keys_of(signal: "Tensor") -> np.ndarray:
    """Returns the bits of floats, as unsigned integers of their size."""
    import torch

    kind = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}[signal.element_size()]
    return signal.cpu().contiguous().view(kind[0]).numpy().view(kind[1])


class LayerCounts:
    """Counts of one layer over all blocks; several threads may count blocks in any order."""

    def __init__(
        self,
        layer: int,
        text: CalibrationText,
        families: Mapping[str, Signal],
        activity: ActivityRule,
        inputs: RowWriter | None,
        previous: RowReader | None,
        experts: ExpertCounts | None = None,
        squared: tuple[Signal, ...] = (),
    ) -> None:
        """`families`: each with the signal that has one entry for each of its units; `experts` counts those of a layer
        that has experts; the mean squares of the signals `squared` are taken."""
        self.families, self.experts = families, experts
        self._layer, self._text, self._activity, self._inputs, self._previous = layer, text, activity, inputs, previous
        num_blocks = len(text.tokens)
        self._seen: dict[str, list[_Seen | None]] = {family: [None] * num_blocks for family in families}
        self.squares: dict[Signal, list[np.ndarray]] = {signal: [np.empty(0)] * num_blocks for signal in squared}
        self.similarity = np.zeros(num_blocks)
        self.shared = np.zeros((num_blocks, len(TOP_DENSITIES)), np.int64)

    def hooks(self, start: int, count: int) -> Hooks:
        """Returns hooks that count, and mask, the signals of `count` blocks from `start` on; on a processor, of one."""
        found: dict[Signal, Change] = {"mlp_input": self._see([], start, count)}
        for signal in self.families.values():
            # a unit whose activation is 0 adds nothing: masking it there equals leaving out its slices
            found[signal] = self._see([name for name, own in self.families.items() if own == signal], start, count)
        see = found["mlp_input"]

        def on_input(part: "Tensor") -> "Tensor | None":
            self.keep_inputs(start, part)
            return see(part)

        found["mlp_input"] = on_input
        if (experts := self.experts) is not None:

            def on_logits(logits: "Tensor") -> None:
                for block, part in enumerate(logits.chunk(count), start):
                    experts.count(block, part)

            found["router_logits"] = on_logits
        for signal in self.squares:
            found[signal] = self._squaring(signal, found.get(signal), start, count)
        return found

    def _squaring(self, signal: Signal, then: "Change | None", start: int, count: int) -> "Change":
        def change(part: "Tensor") -> "Tensor | None":
            for number, block in enumerate(part.chunk(count), start):
                self.square(number, signal, block)
            return then(part) if then else None

        return change

    def _see(self, families: list[str], start: int, count: int) -> "Change":
        def change(part: "Tensor") -> "Tensor | None":
            import torch

            left = None
            for family in families:
                signals = (part if left is None else left).chunk(count)
                masks = [self.count(block, family, signal) for block, signal in enumerate(signals, start)]
                chosen = [torch.from_numpy(mask) for mask in masks if mask is not None]
                if chosen:
                    left = torch.where(torch.cat(chosen).to(part.device), part if left is None else left, 0.0)
            return left

        return change

    def keep_inputs(self, start: int, part: "Tensor") -> None:
        """Stores the MLP inputs of the blocks from `start` on, and compares them with those of the layer before."""
        import torch

        if self._inputs is None:
            return
        largest = float(np.finfo(np.float16).max)
        block_tokens = self._text.tokens.shape[1]
        values = part.float().clamp(-largest, largest).half().cpu().reshape(-1, block_tokens, part.shape[-1])
        for block, rows in enumerate(values, start):
            self._inputs.write("mlp_inputs", block * block_tokens, rows.numpy())
            if self._previous is None:
                continue
            before = torch.empty_like(rows)
            self._previous.read("mlp_inputs", block * block_tokens, before.numpy())
            if self.experts is not None:
                self.experts.guess(block, before)
            cosines = torch.nn.functional.cosine_similarity(rows.float(), before.float(), dim=1)
            self.similarity[block] = cosines.double().mean().item()
            self.shared[block] = shared_top(keys_of(rows), keys_of(before), top_selected(rows.shape[1]))

    def square(self, block: int, signal: Signal, values: "Tensor") -> None:
        """Takes the mean square of each entry of one block's signal, [T, n]; sums are float64."""
        x = values.float().cpu().numpy()
        sums = np.einsum("tn,tn->n", x, x, dtype=np.float64)
        self.squares[signal][block] = (sums / len(x)).astype(np.float32)

    def mean_squares(self) -> dict[str, np.ndarray]:
        return {signal: np.stack(blocks) for signal, blocks in self.squares.items()}

    def count(self, block: int, family: str, signal: "Tensor") -> np.ndarray | None:
        """Counts one block's signal [T, num_units]; where a selector chooses, returns its units, bool."""
        keys = keys_of(signal)
        seen = _Seen(magnitude_histogram(keys))
        self._seen[family][block] = seen
        mask = None
        if self._activity.choice:
            mask = self._activity.choice.mask(self._layer, family, signal.float().cpu().numpy())
            seen.bits = pack_nonzero(mask.view(np.uint8))
        elif self._activity.counted(family):
            seen.bits = pack_nonzero(keys)
        if seen.bits is not None and self._text.tasks is not None:
            tasks = self._text.tasks[block]
            for task in np.unique(tasks[tasks >= 0]).tolist():
                seen.task_counts[task] = population(seen.bits & np.packbits(tasks == task, bitorder="little"))
        return mask

    def arrays(self, family: str) -> dict[str, np.ndarray]:
        seen = [found for found in self._seen[family] if found is not None]
        arrays = {
            "magnitude_edges": magnitude_edges(),
            "magnitude_histogram": np.sum([block.histogram for block in seen], axis=0).astype(np.uint64),
        }
        bits = [block.bits for block in seen if block.bits is not None]
        if not bits:
            return arrays
        block_tokens = self._text.tokens.shape[1]
        contexts = np.stack([population(block) for block in bits])
        arrays["bits"] = joined(bits, [block_tokens] * len(bits))
        arrays["counts"] = contexts.sum(axis=0)
        arrays["context_counts"] = contexts.astype(np.uint16 if block_tokens < 1 << 16 else np.uint32)
        if self._text.tasks is not None:
            arrays["task_counts"] = np.zeros((self._text.num_tasks, contexts.shape[1]), np.int64)
            for block in seen:
                for task, counts in block.task_counts.items():
                    arrays["task_counts"][task] += counts
        return arrays
