"""Evaluates a model when a selector leaves units out: the source's arithmetic, the runtime's choices.

Reads a model, token blocks and a fitted selector; returns perplexity and the used share of the MLP's weights. A
selector that decides for many tokens at once does so. One that sees residency, or whose signal is not per unit, chooses
token by token, as in the runtime. Every layer and family then has its own cache, which stays from block to block; the
first blocks are a warm-up and are not scored. In a mixture of experts it chooses among the units of the experts that
the router picks. Each layer may run over all tokens before the next one all the same: a cache depends only on the
choices in its own layer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.evaluation.reads import Reading, Reads, reads_of, requests_seconds
from coldpress.compiler.activity.choice import Arrays, of_experts
from coldpress.compiler.activity.forward import BlockHooks, Hooks, LayerStream
from coldpress.runtime.cache import CacheFacts, make
from coldpress.runtime.sparsity import Residency, Selector, used_experts
from coldpress.schemas.base import Options
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import (
    BLOCKS,
    Signal,
    activity_of,
    layers_of,
    mlp_shares,
    num_experts,
    num_units,
    resident_share,
    signal_of,
)
from coldpress.schemas.model import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from coldpress.compiler.activity.taps import Change


@dataclass(frozen=True)
class Sparse:
    """A selector, fitted for each of its families in every layer."""

    selector: Selector[Any]
    families: tuple[str, ...]
    arrays: Arrays
    """Fitted arrays by layer and family, a predictor's network among them."""
    oracle: bool = False
    """Whether the matrices that the choice reads count as left out, too (DIP, Table 1: GLU pruning)."""


@dataclass(frozen=True)
class CacheSettings:
    """The cache that a choice sees."""

    policy: str
    slots: Mapping[str, int]
    """Family -> units that each layer keeps."""
    options: Options = field(default_factory=dict)
    """Options of the policy."""
    requests: Mapping[tuple[int, str], Sequence[np.ndarray]] = field(default_factory=dict)
    """All future requests by layer and family, for a policy that looks ahead."""


@dataclass(frozen=True)
class Score:
    """Quality and costs of a model on text."""

    nll: float
    """Summed negative log-likelihood in nats."""
    num_predicted: int
    mlp_density: float
    """Mean share of the MLPs' weights, all matrices counted, that a token uses."""
    hits: int
    """Uses of units that the cache held, warm-up left out; 0 without a cache."""
    misses: int
    reads: int = 0
    """Reads from flash for scored tokens; these, `read_bytes` and the modelled `flash_s` are 0 without a `Reading`."""
    read_bytes: int = 0
    flash_s: float = 0.0
    request_s: float = 0.0
    """Modelled seconds of the requests: reading, overlapped with computing and with copying kept units; 0 without a
    device."""

    @property
    def ppl(self) -> float:
        """Returns the perplexity."""
        return math.exp(self.nll / self.num_predicted)


def evaluate(
    stream: LayerStream,
    tokens: np.ndarray,
    sparse: Sparse,
    cache: CacheSettings | None = None,
    warm_up_blocks: int = 0,
    reading: Reading | None = None,
) -> Score:
    """Scores int token ids [num_blocks, T] after the first `warm_up_blocks`; the first token of each block is given.

    `reading` says where units lie: a choice may then depend on it, reads are counted, and the units that they bring are
    used where `reading` says so.

    Raises:
        ColdpressError: if nothing is left to score, or blocks would run side by side although one cache sees them all.
    """
    if warm_up_blocks >= len(tokens):
        raise ColdpressError(f"{len(tokens)} blocks with a warm-up of {warm_up_blocks} leave none to score; give more")
    if cache is not None and stream.threads > 1:
        raise ColdpressError(f"a cache sees one block after another, found {stream.threads} threads; use one")
    masks = Masks(sparse, stream.spec, cache, warm_up_blocks, reading)
    nll = stream.block_nll(tokens, masks.layer)[warm_up_blocks:]
    scored = tokens[warm_up_blocks:]
    return Score(
        nll=float(sum(nll.tolist())),
        num_predicted=scored[:, 1:].size,
        mlp_density=mlp_density(sparse, stream.spec, masks.used_share(scored.size)),
        hits=sum(masks.hits.values()),
        misses=sum(masks.misses.values()),
        reads=sum(found.reads for found in masks.read.values()),
        read_bytes=sum(found.bytes for found in masks.read.values()),
        flash_s=math.fsum(found.seconds for found in masks.read.values()),
        request_s=math.fsum(found.request_s for found in masks.read.values()),
    )


def masks_of(stream: LayerStream, tokens: np.ndarray, sparse: Sparse) -> dict[tuple[int, str], np.ndarray]:
    """Returns which units each token uses, bool [num_blocks * T, num_units], by layer and family."""
    chosen: dict[tuple[int, str], dict[int, np.ndarray]] = {}
    stream.block_nll(tokens, Masks(sparse, stream.spec, chosen=chosen).layer)
    return {key: np.concatenate([found[block] for block in sorted(found)]) for key, found in chosen.items()}


def mlp_density(sparse: Sparse, spec: ModelSpec, used: Mapping[str, float]) -> float:
    """Returns the used share of the MLP's weights, from the used share of each family's units.

    Matrices that no family holds are used whole, those of an expert by the tokens that the router sends to it. For an
    oracle only the families count.
    """
    held = mlp_shares(used, spec)
    active = sum(held[family] * share for family, share in used.items())
    if sparse.oracle:
        return active / sum(held.values())
    return active + resident_share(used, spec) * spec.num_experts_per_tok / spec.num_experts


class _Read(NamedTuple):
    reads: int
    bytes: int
    seconds: float
    request_s: float


@dataclass
class Masks:
    """Applies a selector to the signals of every layer and counts what it uses."""

    sparse: Sparse
    spec: ModelSpec
    cache: CacheSettings | None = None
    warm_up_blocks: int = 0
    reading: Reading | None = None
    used: dict[tuple[int, str], dict[int, int]] = field(default_factory=dict)
    """Units that each block used, by layer and family; a dictionary, since blocks run in any order."""
    hits: dict[tuple[int, str], int] = field(default_factory=dict)
    misses: dict[tuple[int, str], int] = field(default_factory=dict)
    read: dict[tuple[int, str, int], _Read] = field(default_factory=dict)
    """Reads of each block, by layer, family and block."""
    chosen: dict[tuple[int, str], dict[int, np.ndarray]] | None = None
    """Units that each block used, by layer and family; None if nobody asks."""

    def layer(self, layer: int) -> BlockHooks:
        """Returns the hooks of a layer's blocks (compiler/activity/forward.py); its caches begin empty."""
        having = [family for family in self.sparse.families if layer in layers_of(family, self.spec)]
        chosen = {family: self._chooser(layer, family) for family in having}
        return lambda block: self._hooks(layer, block, chosen)

    def used_share(self, num_tokens: int) -> dict[str, float]:
        """Returns the mean share of each family's units that scored tokens use."""
        layers = {family: layers_of(family, self.spec) for family in self.sparse.families}
        return {
            family: sum(sum(self.used[layer, family].values()) for layer in having)
            / (len(having) * num_tokens * num_units(family, self.spec))
            for family, having in layers.items()
        }

    def _hooks(self, layer: int, block: int, chosen: Mapping[str, "_Chooser"]) -> Hooks:
        found: dict[Signal, Change] = {}
        seen: dict[str, np.ndarray] = {}
        for name, choose in chosen.items():
            signal, activity = signal_of(name, self.spec), activity_of(name, self.spec)
            if signal != activity:
                found[signal] = _keeping(seen, signal)

            def change(part: "Tensor", name: str = name, choose: "_Chooser" = choose) -> "Tensor":
                import torch

                rows = part.float().cpu().numpy()
                values = rows.reshape(-1, rows.shape[-1])
                experts = num_experts(name, self.spec)
                own = used_experts(values, experts) if experts > 1 else None
                mask = choose(block, seen.get(signal_of(name, self.spec), values), own)
                if self.chosen is not None:
                    self.chosen.setdefault((layer, name), {})[block] = mask
                if block >= self.warm_up_blocks:
                    self.used.setdefault((layer, name), {})[block] = int(np.count_nonzero(mask))
                if name == BLOCKS:  # which are all used, and have no entry each
                    return part
                return torch.where(torch.from_numpy(mask).reshape(part.shape).to(part.device), part, 0.0)

            found[activity] = change
        return found

    def _chooser(self, layer: int, family: str) -> "_Chooser":
        arrays, selector = self.sparse.arrays[layer, family], self.sparse.selector
        sees_places = selector.SEES_RESIDENCY and self.reading is not None
        if signal_of(family, self.spec) != activity_of(family, self.spec) or self.cache or sees_places:
            return self._one_by_one(layer, family, arrays)

        def choose(block: int, values: np.ndarray, own: np.ndarray | None) -> np.ndarray:
            mask = selector.select_many(values, arrays)
            mask = mask if own is None else mask & of_experts(own, mask.shape[1])
            return self._used(layer, family, block, mask, np.zeros_like(mask))

        return choose

    def _one_by_one(self, layer: int, family: str, arrays: Mapping[str, np.ndarray]) -> "_Chooser":
        units = num_units(family, self.spec)
        slots = self.cache.slots[family] if self.cache else 0
        position = np.arange(units, dtype=np.int32)
        if self.reading:
            position = self.reading.placed[layer, family].position
        requests = self.cache.requests.get((layer, family)) if self.cache else None
        known = CacheFacts(units, slots, np.zeros(0, np.int64), position, requests)
        policy = make(self.cache.policy, self.cache.options, known) if self.cache else make("static", {}, known)

        def choose(block: int, values: np.ndarray, own: np.ndarray | None) -> np.ndarray:
            mask = np.zeros((len(values), units), bool)
            here = np.empty_like(mask)
            each = [None] * len(values) if own is None else own
            for row, before, signal, experts in zip(mask, here, values, each, strict=True):
                before[:] = policy.present
                ids = self.sparse.selector.select_among(signal, arrays, Residency(before, position), experts)
                row[ids] = True
                present = policy.serve(ids)
                if block >= self.warm_up_blocks and self.cache:
                    hits = int(np.count_nonzero(present))
                    self.hits[layer, family] = self.hits.get((layer, family), 0) + hits
                    self.misses[layer, family] = self.misses.get((layer, family), 0) + ids.size - hits
            return self._used(layer, family, block, mask, here)

        return choose

    def _used(self, layer: int, family: str, block: int, mask: np.ndarray, here: np.ndarray) -> np.ndarray:
        """Returns the units that tokens use, bool [T, num_units], and counts the reads for them.

        Args:
            layer: Layer number.
            family: Family on flash.
            block: Number of the block.
            mask: bool [T, num_units], the units that the tokens choose.
            here: bool [T, num_units], the units that are in DRAM.
        """
        if self.reading is None:
            return mask
        missing, placed = mask & ~here, self.reading.placed[layer, family]
        found = reads_of(missing, placed, self.reading)
        used = mask | found.brought | here if self.reading.use_read_units else mask
        if block >= self.warm_up_blocks:
            self.read[layer, family, block] = _Read(
                int(found.num_reads.sum()),
                int(found.num_bytes.sum()),
                math.fsum(found.seconds),
                self._request_s(found, used, missing, used & ~here, placed.units.unit_bytes),
            )
        return used

    def _request_s(self, found: Reads, used: np.ndarray, missing: np.ndarray, read: np.ndarray, size: int) -> float:
        """Returns the seconds of all tokens' requests for a family with units of `size` bytes. A cache keeps all
        `missing` units; the units of `read` are used as they arrive."""
        if self.reading is None or self.reading.device is None:
            return 0.0
        active, missed, kept = (size * np.count_nonzero(units, axis=1) for units in (used, read, missing))
        kept = kept if self.cache else np.zeros_like(kept)
        return requests_seconds(self.reading.device, size * used.shape[1], found, active, missed, kept)


_Chooser = Callable[[int, np.ndarray, np.ndarray | None], np.ndarray]
"""(block, signals float32 [T, n], bool [T, E] with the experts that a router picked, or None without a router) -> bool
[T, num_units] with the units that each token uses."""


def _keeping(seen: dict[str, np.ndarray], signal: str) -> "Change":
    def keep(part: "Tensor") -> Any:
        rows = part.float().cpu().numpy()
        seen[signal] = rows.reshape(-1, rows.shape[-1])

    return keep
