"""Reads activation counts and traces from the packed bits: for all tokens, for the first ones, and for the rest.

A family that is always used (density 1) needs no bits: every token counts all its units.
"""

from dataclasses import dataclass

import numpy as np

from coldpress.compiler.activity.counted import counted
from coldpress.compiler.activity.packed_bits import population
from coldpress.compiler.io import load_arrays
from coldpress.schemas.activations import Activations, LayerStatistics
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FamilyName, num_units
from coldpress.schemas.model import ModelSpec
from coldpress.schemas.sparsity import Sparsity

Counts = dict[tuple[int, FamilyName], np.ndarray]
"""int64 [num_units] per layer and family."""
TAIL_SHARE = 0.25
"""Share of the tokens that is held out: placements are compared on tokens that they were not made from."""
MAX_LAYERS = 4
MAX_WINDOWS, WINDOW_TOKENS, WARM_TOKENS = 8, 32, 64
"""Limits of a replay: evenly spaced layers, and evenly spaced windows of the held-out tokens, because text directly
after the tokens already seen is very similar to them. The tokens before each window only fill the cache."""


def all_counts(spec: ModelSpec, activations: Activations, sparsity: Sparsity) -> Counts:
    """Returns counts over all tokens (Eq. 1).

    Raises:
        ColdpressError: if a family has no counts.
    """
    found: Counts = {}
    for entry in activations.layers:
        for family in sparsity.families:
            if _always_used(sparsity, entry, family):
                found[entry.layer, family] = np.full(num_units(family, spec), activations.num_tokens, np.int64)
            else:
                found[entry.layer, family] = _array(activations, entry.layer, family, "counts").astype(np.int64)
    return found


def head_counts(spec: ModelSpec, activations: Activations, sparsity: Sparsity, num_tokens: int) -> Counts:
    """Returns counts over the first `num_tokens` tokens."""
    found: Counts = {}
    for entry in activations.layers:
        for family in sparsity.families:
            if _always_used(sparsity, entry, family):
                found[entry.layer, family] = np.full(num_units(family, spec), num_tokens, np.int64)
                continue
            bits = _array(activations, entry.layer, family, "bits")[:, : -(-num_tokens // 8)].copy()
            if num_tokens % 8:
                bits[:, -1] &= (1 << num_tokens % 8) - 1
            found[entry.layer, family] = population(bits)
    return found


@dataclass(frozen=True)
class Window:
    """Consecutive tokens to replay: `start` to `measured` only fill the cache, `measured` to `stop` are counted."""

    start: int
    measured: int
    stop: int


def split_tokens(num_tokens: int) -> tuple[int, tuple[Window, ...]]:
    """Returns the number of tokens that placements are made from, and the windows that they are compared on.

    Raises:
        ColdpressError: if there are fewer than two.
    """
    if num_tokens < 2:
        raise ColdpressError(
            f"{num_tokens} calibration tokens: expected at least 2 to choose what is pinned on tokens that the "
            "placement was not made from; raise calibration_tokens or set pinned_share"
        )
    head = num_tokens - max(1, int(num_tokens * TAIL_SHARE))
    num_windows = max(1, min(MAX_WINDOWS, (num_tokens - head) // WINDOW_TOKENS))
    starts = np.linspace(head, max(head, num_tokens - WINDOW_TOKENS), num_windows).astype(int).tolist()
    ends = [min(num_tokens, start + WINDOW_TOKENS) for start in starts]
    before = [0, *ends]
    return head, tuple(
        Window(max(done, start - WARM_TOKENS), start, end)
        for done, start, end in zip(before, starts, ends, strict=False)
    )


@dataclass(frozen=True)
class Context:
    """The units of one family of one layer that the tokens of a window use."""

    ids: tuple[np.ndarray, ...]
    """Unit ids of each token, int64 ascending."""
    num_warm: int
    """The number of first tokens that only fill the cache."""


@dataclass(frozen=True)
class Trace:
    """All windows of one family of one layer."""

    layer: int
    family: FamilyName
    contexts: tuple[Context, ...]

    @property
    def num_measured(self) -> int:
        """The number of tokens that are counted."""
        return sum(len(context.ids) - context.num_warm for context in self.contexts)


def traces_of(
    spec: ModelSpec, activations: Activations, sparsity: Sparsity, windows: tuple[Window, ...]
) -> tuple[Trace, ...]:
    """Returns the traces of all families of the sampled layers, ordered by layer."""
    layers = activations.layers
    picked = np.unique(np.linspace(0, len(layers) - 1, min(MAX_LAYERS, len(layers))).round().astype(int))
    found: list[Trace] = []
    for entry in (layers[number] for number in picked.tolist()):
        for family in sparsity.families:
            bits = None if _always_used(sparsity, entry, family) else _array(activations, entry.layer, family, "bits")
            contexts = tuple(_context(part, bits, num_units(family, spec)) for part in windows)
            found.append(Trace(entry.layer, family, contexts))
    return tuple(found)


def _context(part: Window, bits: np.ndarray | None, num_units: int) -> Context:
    """Unpacks a window from packed bits; None: every token uses all units."""
    if bits is None:
        return Context((np.arange(num_units),) * (part.stop - part.start), part.measured - part.start)
    first = part.start // 8
    active = np.unpackbits(bits[:, first : -(-part.stop // 8)], axis=1, bitorder="little")
    ids = tuple(np.flatnonzero(active[:, token - 8 * first]) for token in range(part.start, part.stop))
    return Context(ids, part.measured - part.start)


def _always_used(sparsity: Sparsity, entry: LayerStatistics, family: FamilyName) -> bool:
    return sparsity.density(family, entry.layer) >= 1


def _array(activations: Activations, layer: int, family: FamilyName, name: str) -> np.ndarray:
    return load_arrays(counted(activations, layer, family).arrays, name)[name]
