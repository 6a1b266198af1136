"""Reads the units that calibration tokens use, and says which tokens are held out: choices are compared on tokens that
they were not made from.

`place` and `plan` replay them. A family that is always used (density 1) needs no bits: every token uses all its units.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from coldpress.compiler.activity.choice import replayed_layers
from coldpress.compiler.activity.packed_bits import counted, num_before
from coldpress.compiler.io import load_arrays
from coldpress.schemas.activations import Activations
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FamilyName, num_units, unit_keys
from coldpress.schemas.model import ModelSpec
from coldpress.schemas.sparsity import Sparsity

MAX_WINDOWS, WINDOW_TOKENS, WARM_TOKENS = 8, 32, 64
"""Limits of a replay: evenly spaced windows of the held-out tokens, because text directly after the tokens already seen
is very similar to them. The tokens before each window only fill the cache."""


@dataclass(frozen=True)
class Window:
    """Consecutive tokens to replay: `start` to `measured` only fill the cache, `measured` to `stop` are counted."""

    start: int
    measured: int
    stop: int


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
        return sum(len(context.ids) - context.num_warm for context in self.contexts)


def split_tokens(num_tokens: int) -> tuple[int, tuple[Window, ...]]:
    """Returns the number of tokens to choose from, and the windows to compare on; raises ColdpressError below two."""
    if num_tokens < 2:
        raise ColdpressError(
            f"{num_tokens} calibration tokens: expected at least 2 to choose what is pinned on tokens that the "
            "placement was not made from; raise calibration_tokens or set pinned_share"
        )
    head = num_before(num_tokens)
    num_windows = max(1, min(MAX_WINDOWS, (num_tokens - head) // WINDOW_TOKENS))
    starts = np.linspace(head, max(head, num_tokens - WINDOW_TOKENS), num_windows).astype(int).tolist()
    ends = [min(num_tokens, start + WINDOW_TOKENS) for start in starts]
    before = [0, *ends]
    return head, tuple(
        Window(max(done, start - WARM_TOKENS), start, end)
        for done, start, end in zip(before, starts, ends, strict=False)
    )


def traces_of(
    spec: ModelSpec,
    activations: Activations,
    sparsity: Sparsity,
    windows: tuple[Window, ...],
    layers: Iterable[int] | None = None,
) -> tuple[Trace, ...]:
    """Returns the traces of all families of some layers, ordered by layer; None takes the layers that stand for all."""
    picked = replayed_layers(spec) if layers is None else tuple(layers)
    found: list[Trace] = []
    for layer, family in unit_keys(sparsity.families, spec):
        if layer in picked:
            bits = None if always_used(sparsity, layer, family) else activity(activations, layer, family, "bits")
            contexts = tuple(_context(part, bits, num_units(family, spec)) for part in windows)
            found.append(Trace(layer, family, contexts))
    return tuple(found)


def _context(part: Window, bits: np.ndarray | None, num_units: int) -> Context:
    """Unpacks a window from packed bits; None: every token uses all units."""
    if bits is None:
        return Context((np.arange(num_units),) * (part.stop - part.start), part.measured - part.start)
    first = part.start // 8
    active = np.unpackbits(bits[:, first : -(-part.stop // 8)], axis=1, bitorder="little")
    ids = tuple(np.flatnonzero(active[:, token - 8 * first]) for token in range(part.start, part.stop))
    return Context(ids, part.measured - part.start)


def always_used(sparsity: Sparsity, layer: int, family: FamilyName) -> bool:
    return sparsity.density(family, layer) >= 1


def activity(activations: Activations, layer: int, family: FamilyName, name: str) -> np.ndarray:
    """An array of a family's statistics (schemas/activations.py); raises ColdpressError if it was not counted."""
    return load_arrays(counted(activations, layer, family).arrays, name)[name]
