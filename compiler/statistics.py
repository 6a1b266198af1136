"""Activation statistics of a model on calibration text, one layer at a time: shared by calibrate and recalibrate.

Hidden states of all tokens are carried from layer to layer; per layer and family the signals are counted: which units
are active on which token, how often, and a histogram of magnitudes fine enough to give the threshold of any density
later (TEAL). Activity is a signal that is not zero, or the top k of a chosen density, and then the pass goes on with
what is left (ActiveFlow 4.1, DIP 3.2). Every layer's results are kept, so that an interrupted run resumes.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from compiler._io import Workspace, load_arrays
from compiler.forward import LayerStream, MlpHooks
from runtime.sparsity import topk
from schemas.activations import FamilyStatistics, LayerStatistics
from schemas.base import ArrayFile
from schemas.families import FamilyName, num_units

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

CHUNK_ROWS = 1024
OCTAVE_BINS = 32
FIRST_OCTAVE, LAST_OCTAVE = -24, 16
"""Magnitudes from 2**-24 to 2**16 are told apart; the first bin is all below, zeros included, the last all above."""
FLOAT_BIAS, MANTISSA_BITS = 127, 23
BIN_SHIFT = MANTISSA_BITS - OCTAVE_BINS.bit_length() + 1
FIRST_BIN = (FIRST_OCTAVE + FLOAT_BIAS) * OCTAVE_BINS
NUM_BINS = (LAST_OCTAVE - FIRST_OCTAVE) * OCTAVE_BINS + 2

Densities = Mapping[FamilyName, tuple[float, ...]]
"""Per family, the share of units to use in each layer."""


@dataclass(frozen=True)
class Activity:
    """What counts as active: signals that are not zero, the top k of `densities`, or (neither) nothing yet."""

    exact_zeros: bool
    densities: Densities | None = None


def magnitude_edges() -> np.ndarray:
    """Bounds of the histogram's bins, float32 [num_bins + 1]: 32 equal steps per power of two, zero and the largest."""
    inner = (np.arange(NUM_BINS - 1, dtype=np.uint32) + np.uint32(FIRST_BIN)) << np.uint32(BIN_SHIFT)
    return np.concatenate(([np.float32(0)], inner.view(np.float32), [np.finfo(np.float32).max])).astype(np.float32)


def magnitude_histogram(signal: np.ndarray) -> np.ndarray:
    """Counts of |signal| in the bins of `magnitude_edges`, int64 [num_bins]; a float's leading bits are its bin."""
    bits = np.ascontiguousarray(signal, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    bins = (bits >> np.uint32(BIN_SHIFT)).astype(np.int64) - (FIRST_BIN - 1)
    return np.bincount(np.clip(bins, 0, NUM_BINS - 1).ravel(), minlength=NUM_BINS)


def collect(
    stream: LayerStream, tokens: np.ndarray, families: tuple[FamilyName, ...], activity: Activity, work: Workspace
) -> tuple[LayerStatistics, ...]:
    """Statistics of every layer, in order.

    Args:
        stream: The model.
        tokens: Calibration blocks, int32 [num_blocks, block_tokens].
        families: What to count.
        activity: What counts as active.
        work: Keeps the arrays, and between layers the hidden states.
    """
    found: list[LayerStatistics] = []
    for layer in range(stream.spec.num_hidden_layers):
        previous = found[-1].inputs if found else None
        one = _Layer(stream, tokens, families, activity, work, layer, previous)
        found.append(one.statistics())
        (work.folder / f"{_hidden_key(layer)}.safetensors").unlink(missing_ok=True)
        log.info("layer %d/%d", layer + 1, stream.spec.num_hidden_layers)
    return tuple(found)


def _hidden_key(layer: int) -> str:
    return f"hidden.{layer:03d}"


class _Block:
    """Takes down, and masks, one block's MLP in one layer."""

    def __init__(self, layer: int, families: tuple[FamilyName, ...], activity: Activity) -> None:
        self._layer, self._families, self._activity = layer, families, activity
        self.inputs = np.empty(0)
        self.seen: dict[FamilyName, _Seen] = {}

    def hooks(self) -> MlpHooks:
        return MlpHooks(on_input=self._on_input, on_activation=self._on_activation, on_inner=self._on_inner)

    def _on_input(self, part: "Tensor") -> "Tensor | None":
        largest = np.finfo(np.float16).max
        self.inputs = np.clip(part.cpu().numpy(), -largest, largest).astype(np.float16)
        return self._see(part, "mlp_in")

    def _on_activation(self, part: "Tensor") -> "Tensor | None":
        # without its activation a unit gives nothing: masking it here is what leaving out its up and down does
        return self._see(part, "up_down")

    def _on_inner(self, part: "Tensor") -> "Tensor | None":
        return self._see(part, "neuron") if "neuron" in self._families else self._see(part, "mlp_mid")

    def _see(self, part: "Tensor", family: FamilyName) -> "Tensor | None":
        """Counts a family's signal [T, num_units]; gives what is left of it where a density is chosen."""
        import torch

        if family not in self._families:
            return None
        signal = part.cpu().numpy()
        histogram = magnitude_histogram(signal)
        if self._activity.densities:
            active = top_units(signal, self._activity.densities[family][self._layer])
            self.seen[family] = _Seen(histogram, _pack(active), active.sum(axis=0, dtype=np.int64))
            return torch.where(torch.from_numpy(active).to(part.device), part, 0.0)
        if self._activity.exact_zeros:
            active = signal != 0
            self.seen[family] = _Seen(histogram, _pack(active), active.sum(axis=0, dtype=np.int64))
        else:
            self.seen[family] = _Seen(histogram, None, None)
        return None


@dataclass(frozen=True)
class _Seen:
    """What one block showed of one family."""

    histogram: np.ndarray
    bits: np.ndarray | None
    """uint8 [num_units, ceil(T / 8)]."""
    counts: np.ndarray | None


def _pack(active: np.ndarray) -> np.ndarray:
    return np.packbits(active.T, axis=1, bitorder="little")


def top_units(signal: np.ndarray, density: float) -> np.ndarray:
    """Which units of each token the selector `topk` takes, bool as `signal` float32 [T, num_units]."""
    parameters = topk.fit(signal.shape[1], density, {})
    cached = np.zeros(signal.shape[1], bool)
    active = np.zeros(signal.shape, bool)
    for row, token in zip(active, signal, strict=True):
        row[topk.select(token, parameters, cached)] = True
    return active


class _Layer:
    """One layer's arrays: computed at most once, and only if some of them are not there from an earlier run."""

    def __init__(
        self,
        stream: LayerStream,
        tokens: np.ndarray,
        families: tuple[FamilyName, ...],
        activity: Activity,
        work: Workspace,
        layer: int,
        previous: ArrayFile | None,
    ) -> None:
        self._stream, self._tokens, self._families, self._activity = stream, tokens, families, activity
        self._work, self._layer, self._previous = work, layer, previous

    def statistics(self) -> LayerStatistics:
        """The layer's record, its arrays in files."""
        families = []
        for family in self._families:
            arrays = self._work.once(f"{self._layer:03d}.{family}", self._arrays_of(family))
            counts = load_arrays(arrays).get("counts")
            units = num_units(family, self._stream.spec)
            density = None if counts is None else float(counts.sum() / (units * self._tokens.size))
            families.append(FamilyStatistics(family=family, num_units=units, density=density, arrays=arrays))
        inputs = self._work.once(f"{self._layer:03d}.inputs", lambda: self._results["inputs"])
        similarity = load_arrays(inputs, "input_similarity")["input_similarity"]
        return LayerStatistics(
            layer=self._layer,
            families=tuple(families),
            inputs=inputs,
            input_similarity=float(similarity[0]) if similarity.size else None,
        )

    def _arrays_of(self, family: FamilyName) -> Callable[[], Mapping[str, np.ndarray]]:
        return lambda: self._results[family]

    @cached_property
    def _results(self) -> dict[str, dict[str, np.ndarray]]:
        """Runs the layer over all blocks; the next hidden states are saved before anything that hangs on them."""
        blocks = [_Block(self._layer, self._families, self._activity) for _ in self._tokens]
        following = self._stream.run_layer(self._layer, self._hidden(), lambda block: blocks[block].hooks())
        if self._layer + 1 < self._stream.spec.num_hidden_layers:
            self._work.once(_hidden_key(self._layer + 1), lambda: {"hidden": following.numpy()})
        inputs = np.concatenate([block.inputs for block in blocks])
        found: dict[str, dict[str, np.ndarray]] = {
            family: _merged([block.seen[family] for block in blocks], self._tokens.shape[1])
            for family in self._families
        }
        return found | {"inputs": {"mlp_inputs": inputs, "input_similarity": _similarity(self._previous, inputs)}}

    def _hidden(self) -> "Tensor":
        """Hidden states before the layer: from the file that the layer before it left, else from the start."""
        import torch

        if self._layer == 0:
            return self._stream.embed(self._tokens)
        saved = self._work.once(_hidden_key(self._layer), self._from_the_start)
        return torch.from_numpy(load_arrays(saved, "hidden")["hidden"]).clone()

    def _from_the_start(self) -> dict[str, np.ndarray]:
        """All layers before this one again: only where somebody has removed a file."""
        hidden = self._stream.embed(self._tokens)
        for layer in range(self._layer):
            blocks = [_Block(layer, self._families, self._activity) for _ in self._tokens]
            hidden = self._stream.run_layer(layer, hidden, lambda block, blocks=blocks: blocks[block].hooks())
        return {"hidden": hidden.numpy()}


def _merged(blocks: list[_Seen], block_tokens: int) -> dict[str, np.ndarray]:
    """A family's arrays over all blocks."""
    arrays = {
        "magnitude_edges": magnitude_edges(),
        "magnitude_histogram": np.sum([block.histogram for block in blocks], axis=0).astype(np.uint64),
    }
    bits = [block.bits for block in blocks if block.bits is not None]
    counts = [block.counts for block in blocks if block.counts is not None]
    if bits:
        arrays["bits"] = _joined(bits, block_tokens)
        arrays["counts"] = np.sum(counts, axis=0, dtype=np.int64)
    return arrays


def _joined(blocks: list[np.ndarray], block_tokens: int) -> np.ndarray:
    """Packed blocks uint8 [num_units, ceil(block_tokens / 8)] one after another, without the padding between them."""
    if block_tokens % 8 == 0:
        return np.concatenate(blocks, axis=1)
    units = len(blocks[0])
    joined = np.empty((units, -(-len(blocks) * block_tokens // 8)), np.uint8)
    for start in range(0, units, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        active = [np.unpackbits(block[rows], axis=1, count=block_tokens, bitorder="little") for block in blocks]
        joined[rows] = np.packbits(np.concatenate(active, axis=1), axis=1, bitorder="little")
    return joined


def _similarity(previous: ArrayFile | None, inputs: np.ndarray) -> np.ndarray:
    """Mean cosine between this layer's MLP inputs and the previous layer's (ActiveFlow 2.2), float64 [1]; or [0]."""
    if previous is None:
        return np.empty(0)
    before = load_arrays(previous, "mlp_inputs")["mlp_inputs"]
    total = 0.0
    for start in range(0, len(inputs), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        one, two = inputs[rows].astype(np.float64), before[rows].astype(np.float64)
        norms = np.sqrt((one * one).sum(axis=1) * (two * two).sum(axis=1))
        total += float(((one * two).sum(axis=1) / np.maximum(norms, np.finfo(np.float64).tiny)).sum())
    return np.array([total / len(inputs)])
