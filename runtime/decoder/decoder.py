"""One decoder for every supported architecture, driven by the manifest's ModelSpec. numpy and the kernels, no torch.

`prefill` is dense: layer after layer, units stream from flash in sequential blocks, and each block serves all tokens of
a chunk that use its expert. `decode` is sparse: for each layer and family the selector picks units and the store brings
them (design, section 5), for one token or for several at once, which share the reads. Both run the same layers with
units from different sources (layer.py): `_streamed` and `_chosen`. Shape letters: T tokens, N hidden_size, V
vocab_size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coldpress.runtime import plugins
from coldpress.runtime.arithmetic import rotary_tables
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.decoder.blocks import Block, StreamedBlock, Units, chosen_blocks, units_of
from coldpress.runtime.decoder.layer import Layer, UnitSource
from coldpress.runtime.decoder.matrix import Resident, norm_of
from coldpress.runtime.decoder.selection import Selection, union
from coldpress.runtime.decoder.tokens import KvCache, Prior, Span, Tokens, new_cache
from coldpress.runtime.dram.kv_cache import kv_cache_bytes
from coldpress.runtime.dram.memory import give_back_heap
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.kernels.activations import ActivationFormat
from coldpress.runtime.kernels.attention import soft_cap
from coldpress.runtime.quantization import Format
from coldpress.runtime.routing import held_shares
from coldpress.runtime.sparsity import Residency
from coldpress.runtime.store.facts import Key, Purpose
from coldpress.runtime.store.store import Store
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.families import FAMILIES, FamilyName, UnitFormat, num_units
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.model import ModelSpec, RotaryKind

PREFILL_CHUNK_TOKENS = 256
"""Tokens that share one pass over flash; bounds the memory of the prefill's activations for prompts of any length."""


@dataclass(frozen=True)
class PromptChunk:
    prompt: int
    start: int
    stop: int


class Decoder:
    """A model with a KV cache for each of its sequences: one, or several in a batch."""

    def __init__(
        self, artifact: Artifact, store: Store, selection: Selection, activations: ActivationFormat = "fp32"
    ) -> None:
        """Takes the resident tensors; call `begin` before the first token.

        `activations` is the format that a decoded token's vectors are rounded to in products with quantized rows.
        Raises `ArtifactError` if a file is damaged, or a layer cannot be computed from the families.
        """
        self.spec: ModelSpec = artifact.manifest.model
        self._store, self.selection, self._activations = store, selection, activations
        """`selection` may change between tokens; the KV caches stay."""
        families = tuple(entry.family for entry in artifact.manifest.families)
        self._units = _units(artifact.manifest, activations)
        resident = Resident(artifact.resident, artifact.manifest.resident, activations)
        tables = artifact.manifest.flash.tables
        self._row_format = plugins.load("coldpress.runtime.quantization", Format, tables[0].format) if tables else None
        self._embedding = None if tables else resident.matrix("embed_tokens")
        head = resident.matrix(self.spec.head_role.removesuffix(".weight"))
        self._head = replace(head, bias=resident.optional_vector("lm_head.bias"))
        self._positions = resident.matrix("embed_positions") if self.spec.position == "learned" else None
        self._inv_freq: dict[RotaryKind, np.ndarray] = {
            kind: resident.vector(role) for kind, role in self.spec.frequencies.items()
        }
        self._norm = norm_of("norm", self.spec, resident)
        self.prefill_prior: Prior | None = None
        """Sees, and may replace, the scores by which routers choose experts in a prefill; None: they choose alone."""
        self._layers = [
            Layer.of(number, self.spec, families, resident) for number in range(self.spec.num_hidden_layers)
        ]
        self._kv_cache: KvCacheFormat = store.plan.kv_cache
        self._caches: list[KvCache] = [self._new_cache(0)]

    def _new_cache(self, context_length: int) -> KvCache:
        return new_cache(self.spec, context_length, self._kv_cache)

    @property
    def arithmetic(self) -> str:
        """Returns all that changes the bits of a prefill's sums under the present plan, as text."""
        return f"{self._activations} {self._store.blocks}"

    @property
    def length(self) -> int:
        """Tokens in the KV cache of the first sequence."""
        return self._caches[0].length

    def begin(self, context_length: int) -> None:
        """Starts a new sequence of at most `context_length` tokens. Raises as `begin_batch`."""
        self.begin_batch([context_length])

    def begin_batch(self, context_lengths: Sequence[int]) -> None:
        """Starts one sequence for each of `context_lengths`, numbered from 0, of at most that many tokens each. Raises
        `DoesNotFitError` if the plan's budget has room for fewer tokens."""
        self._check_room(context_lengths)
        if [cache.context_length for cache in self._caches] != list(context_lengths):
            self._caches.clear()  # frees the old caches before the new ones are allocated
            self._caches += [self._new_cache(length) for length in context_lengths]
        for cache in self._caches:
            cache.length = 0
        self._store.reset()

    def renew(self, sequence: int, context_length: int) -> None:
        """Replaces an ended sequence by a new one of at most `context_length` tokens. Raises as `begin_batch`."""
        lengths = [cache.context_length for cache in self._caches]
        self._check_room([*lengths[:sequence], context_length, *lengths[sequence + 1 :]])
        self._caches[sequence] = self._new_cache(context_length)

    def end_batch(self) -> None:
        self._caches[:] = [self._new_cache(0)]

    def _check_room(self, context_lengths: Sequence[int]) -> None:
        plan = self._store.plan
        self.check_context(max(context_lengths))
        needed = self.kv_cache_bytes(sum(context_lengths))
        if needed > plan.kv_cache_bytes:
            raise DoesNotFitError(
                f"the KV caches of {len(context_lengths)} sequences take {needed} bytes, the {plan.title} has "
                f"{plan.kv_cache_bytes} for them; ask for fewer sequences or tokens"
            )

    def kv_cache_bytes(self, num_tokens: int) -> int:
        return kv_cache_bytes(self.spec, num_tokens, self._kv_cache)

    def check_context(self, context_length: int) -> None:
        """Raises `DoesNotFitError` if `context_length` exceeds the plan's."""
        plan = self._store.plan
        if context_length > plan.context_length:
            raise DoesNotFitError(
                f"the prompt and the new tokens make {context_length} tokens, the {plan.title} has a "
                f"KV cache for {plan.context_length}; ask for fewer tokens, or build for a longer context_length"
            )

    def kv_cache(self, sequence: int) -> KvCache:
        return self._caches[sequence]

    def end(self, sequence: int) -> None:
        """Frees the KV cache of a sequence; no token can be appended to it afterwards."""
        self._caches[sequence] = self._new_cache(0)

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Appends `tokens` int [T], at least one, densely; returns their logits, float32 [T, V]. Raises
        `ColdpressError` if a token is outside the vocabulary, or the context is full."""
        chunks = [self._logits(hidden_TN) for _, hidden_TN in self._prefill_chunks([tokens], [0])]
        return np.concatenate(chunks)

    def prefill_last(self, tokens: np.ndarray, sequence: int = 0) -> np.ndarray:
        """Appends `tokens` densely and returns the last one's logits, float32 [V]. Raises as `prefill`."""
        return self.prefill_each([tokens], [sequence])[0]

    def prefill_each(
        self,
        prompts: Sequence[np.ndarray],
        sequences: Sequence[int],
        watched: Mapping[int, Callable[[int, np.ndarray], None]] | None = None,
        is_left: Callable[[int], bool] | None = None,
    ) -> np.ndarray:
        """Appends prompts to several sequences densely; returns the logits of their last tokens, float32 [B, V].

        Prompts that fit into one chunk of tokens share a pass over flash; each has the same logits as alone, bit for
        bit. Raises as `prefill`.

        Args:
            prompts: int [T] each, at least one token.
            sequences: The B sequences of the prompts, distinct.
            watched: Place of a prompt in `prompts` -> function that is called with the position of a token in that
                prompt, and the logits of this token and the next ones, float32 [n, V], n <= FEW_TOKENS; in order, until
                the prompt's last token.
            is_left: Asked before each pass with the place of a prompt in `prompts`: True, from then on, leaves out the
                rest of the prompt, whose sequence then lacks tokens and has meaningless logits.
        """
        last_BN = np.zeros((len(prompts), self.spec.hidden_size), np.float32)
        for pieces, hidden_TN in self._prefill_chunks(prompts, sequences, is_left):
            ends = np.cumsum([piece.stop - piece.start for piece in pieces]) - 1
            last_BN[[piece.prompt for piece in pieces]] = hidden_TN[ends]  # a later chunk of the prompt replaces it
            for piece, end in zip(pieces, ends.tolist(), strict=True):
                if watched and piece.prompt in watched:
                    self._tell(watched[piece.prompt], piece, hidden_TN[end + 1 - (piece.stop - piece.start) : end + 1])
        give_back_heap()  # the prefill's activations: a decoded token needs far less memory
        return self._logits(last_BN)

    def _tell(self, told: Callable[[int, np.ndarray], None], piece: "PromptChunk", hidden_TN: np.ndarray) -> None:
        """Tells the logits of a chunk of a prompt, few tokens at a time: a vocabulary's logits are large."""
        for start in range(0, len(hidden_TN), FEW_TOKENS):
            told(piece.start + start, self._logits(hidden_TN[start : start + FEW_TOKENS]))

    def decode(self, token: int) -> np.ndarray:
        """Appends one token sparsely and returns its logits, float32 [V]. Raises as `prefill`."""
        return self.decode_many(np.array([token]))[0]

    def decode_many(self, tokens: np.ndarray) -> np.ndarray:
        """Appends tokens int [T], 1 to PREFILL_CHUNK_TOKENS, to the first sequence in one causal pass; returns their
        logits, float32 [T, V].

        Each token uses only the units that the selector picks for it; units that several tokens use are read once. The
        logits equal those of decoding one token after the other: bit for bit for up to FEW_TOKENS if all units are in
        DRAM, otherwise up to rounding, because sums add units in the order of their arrival, and many tokens multiply
        matrices, whose inputs are never rounded to `activations`. Raises as `prefill`, and `ColdpressError` if there
        are too many tokens, or several that would use other units together than one after the other (`check_many`).
        """
        return self._decode([tokens], [0], None, PREFILL_CHUNK_TOKENS)

    def decode_each(
        self, tokens: Sequence[np.ndarray], sequences: Sequence[int], num_kept: Sequence[int] | None = None
    ) -> np.ndarray:
        """Appends tokens to each of several distinct sequences, in one pass; returns all logits, float32 [T, V], in the
        order of the sequences.

        Units that several tokens use are read once; each token has the same logits as alone. Raises as `decode_many`.

        Args:
            tokens: At least one token of each sequence, int; together at most FEW_TOKENS.
            num_kept: For drafts, whose caller must call `accept` next: of each sequence the cache admits only units of
                so many first tokens. None if no token is a draft.
        """
        return self._decode(tokens, sequences, num_kept, FEW_TOKENS)

    def _decode(
        self, tokens: Sequence[np.ndarray], sequences: Sequence[int], num_kept: Sequence[int] | None, most: int
    ) -> np.ndarray:
        counts = list(map(len, tokens))
        if not counts or not min(counts) or sum(counts) > most:
            raise ColdpressError(f"{sum(counts)} tokens are to be decoded at once, expected 1 to {most}")
        if max(counts) > 1:
            self.selection.check_many()
        if len(counts) > 1:
            self.selection.check_batch()
        spans = [Span(self._caches[number], count) for number, count in zip(sequences, counts, strict=True)]
        kept = None
        if num_kept is not None:
            kept = np.concatenate([np.arange(count) < n for count, n in zip(counts, num_kept, strict=True)])
        is_dense = self.selection.is_whole
        hidden_TN = self._forward(np.concatenate(tokens), spans, self._chosen, kept_T=kept, is_dense=is_dense)
        if num_kept is None:
            self._store.end_tokens(sum(counts))
        return self._logits(hidden_TN)

    def accept(self, num_standing: Sequence[int], counts: Sequence[int], sequences: Sequence[int] = (0,)) -> None:
        """Ends a pass with drafts: of the `counts` tokens of each sequence the first `num_standing` stay."""
        self._store.end_tokens(sum(num_standing))
        for number, stays, count in zip(sequences, num_standing, counts, strict=True):
            self.roll_back(self._caches[number].length - count + stays, number)

    def roll_back(self, length: int, sequence: int = 0) -> None:
        """Takes back all tokens after the first `length`; the next tokens overwrite them in the KV cache."""
        cache = self._caches[sequence]
        if not 0 <= length <= cache.length:
            raise ValueError(f"length is {length}, the KV cache has {cache.length} tokens")
        cache.length = length

    def _prefill_chunks(
        self, prompts: Sequence[np.ndarray], sequences: Sequence[int], is_left: Callable[[int], bool] | None = None
    ) -> Iterator[tuple[list["PromptChunk"], np.ndarray]]:
        """Runs the passes of several prompts; yields the chunks of each pass and its hidden states, float32 [T, N]."""
        if not all(map(len, prompts)):
            raise ColdpressError("the prompt has no tokens, expected at least one; give a prompt")
        for chunks in packed(list(map(len, prompts))):
            pieces = [piece for piece in chunks if is_left is None or not is_left(piece.prompt)]
            if not pieces:
                continue
            tokens = np.concatenate([prompts[piece.prompt][piece.start : piece.stop] for piece in pieces])
            spans = [Span(self._caches[sequences[piece.prompt]], piece.stop - piece.start) for piece in pieces]
            stops = np.cumsum([span.num_tokens for span in spans]).tolist()
            parts = [slice(stop - span.num_tokens, stop) for stop, span in zip(stops, spans, strict=True)]
            yield pieces, self._forward(tokens, spans, self._streamed, parts, is_dense=True)

    def _forward(
        self,
        tokens: np.ndarray,
        spans: Sequence[Span],
        units: UnitSource,
        parts: Sequence[slice] = (),
        kept_T: np.ndarray | None = None,
        is_dense: bool = False,
    ) -> np.ndarray:
        """Takes tokens int [T] through all layers; returns hidden states after the last norm, span by span, [T, N].
        `units` is `_chosen` or `_streamed`; `Tokens` describes the other arguments."""
        self.check_tokens(tokens)
        self._check_space(spans)
        positions = np.concatenate([span.cache.length + np.arange(span.num_tokens) for span in spans])
        decodes = units == self._chosen
        x_TN = self._embedded(tokens, Purpose.ROWS if decodes else Purpose.STREAM)
        if self.spec.embedding_multiplier != 1:
            x_TN = x_TN * np.float32(self.spec.embedding_multiplier)
        if self._positions is not None:
            x_TN = x_TN + self._positions.rows(positions + self.spec.position_offset)
        rotary = dict[RotaryKind, tuple[np.ndarray, np.ndarray]]()
        for kind, frequencies in self._inv_freq.items():
            rotary[kind] = rotary_tables(positions, frequencies, self.spec.rotary_scaling if kind == "main" else 1.0)
        prior = self._prior if decodes else self.prefill_prior
        together = Tokens(spans, rotary, parts, kept_T, is_dense, prior)
        for layer in self._layers:
            x_TN, inputs = layer.forward(x_TN, together, units)
            if decodes and self._store.preloader.enabled:  # only now: guessed reads must not delay the layer's own
                self._store.preloader.layer_done(layer.number, inputs, self._choose)
        for span in spans:  # only now: a pass that fails leaves the sequences as they were
            span.cache.length += span.num_tokens
        return self._norm.apply(x_TN)

    def _embedded(self, tokens: np.ndarray, purpose: Purpose) -> np.ndarray:
        if self._embedding is not None:
            return self._embedding.rows(tokens)
        assert self._row_format is not None
        return self._row_format.decode(self._store.read_rows(tokens, purpose), self.spec.hidden_size)

    def expect(self, token: int) -> None:
        """Begins to read what the pass of `token` needs first, if it lies on flash: its embedding."""
        self._store.expect_rows(np.array([token]))

    def _chosen(
        self, key: Key, signal_TN: np.ndarray, experts_TE: np.ndarray | None, tokens: Tokens
    ) -> Iterator[Block]:
        """Asks the selector for units, and the store for their bytes; see `UnitSource`."""
        residency = self._store.residency(key)
        ids, used_TU = union(self.selection.select(key, signal_TN, residency, experts_TE), residency.present.size)
        # units in memory come first, so the kernels run while the rest is read
        batches = self._store.submit(key, ids, _kept(ids, used_TU, tokens.kept_T))
        return chosen_blocks(batches, self._units[key], used_TU)

    def _streamed(
        self, key: Key, signal_TN: np.ndarray, experts_TE: np.ndarray | None, tokens: Tokens
    ) -> Iterator[Block]:
        """Yields all units in flash order, of experts those that any token uses; see `UnitSource`."""
        for ids, codes in self._store.stream(key, self._used(key, experts_TE)):
            yield StreamedBlock(ids, codes, self._units[key])

    def _used(self, key: Key, experts_TE: np.ndarray | None) -> np.ndarray | None:
        if experts_TE is None or (used_E := experts_TE.any(axis=0)).all():
            return None
        return np.flatnonzero(np.repeat(used_E, num_units(key[1], self.spec) // used_E.size)).astype(np.int32)

    def _logits(self, hidden_TN: np.ndarray) -> np.ndarray:
        """Returns logits float32 [T, V], from hidden states after the last norm."""
        logits_TV = self._head.apply(hidden_TN)
        if self.spec.logits_scaling != 1:
            logits_TV /= np.float32(self.spec.logits_scaling)
        return soft_cap(logits_TV, self.spec.logits_softcap)

    def _choose(self, key: Key, signal_TN: np.ndarray, residency: Residency) -> tuple[list[np.ndarray], np.ndarray]:
        """Chooses a layer's units from another layer's input; see `coldpress.runtime.store.preload.Choose`."""
        layer, family = key
        experts_TE = None
        if FAMILIES[family].signal == "mlp_input":
            is_dense = self.selection.is_whole
            signal_TN, experts_TE = self._layers[layer].mlp.input_signal(family, signal_TN, is_dense, self._prior)
        return self.selection.select(key, signal_TN, residency, experts_TE), signal_TN

    @property
    def _prior(self) -> Prior | None:
        """Returns the change of router scores while tokens are decoded; None if routers choose as trained."""
        return self._prefer_present if self.selection.routing is not None else None

    def _prefer_present(self, layer: int, scores_TE: np.ndarray) -> np.ndarray:
        routing = self.selection.routing
        assert routing is not None
        shares = [
            held_shares(self._store.residency(key).present, scores_TE.shape[1])
            for key in self._layers[layer].mlp.requests
        ]
        return routing.scores(scores_TE, np.mean(shares, axis=0), self.selection.routing_strengths[layer])

    def check_tokens(self, tokens: np.ndarray) -> None:
        """Raises `ColdpressError` naming the first id outside the vocabulary."""
        unknown = tokens[(tokens < 0) | (tokens >= self.spec.vocab_size)]
        if unknown.size:
            raise ColdpressError(
                f"token id {int(unknown[0])} is outside the vocabulary, expected 0 to {self.spec.vocab_size - 1}"
            )

    def _check_space(self, spans: Sequence[Span]) -> None:
        for span in spans:
            used, context_length = span.cache.length, span.cache.context_length
            if span.num_tokens > context_length - used:
                raise DoesNotFitError(
                    f"{span.num_tokens} more tokens do not fit the context: {used} of {context_length} are in use; "
                    "begin with a longer context"
                )


def _units(manifest: Manifest, activations: ActivationFormat) -> dict[Key, Units]:
    """Returns the layout of each layer's units; layers with one format share it."""
    slices_of = {entry.family: entry.slices for entry in manifest.families}
    shared: dict[tuple[FamilyName, UnitFormat], Units] = {}
    for (_, family), name in manifest.unit_formats.items():
        if (family, name) not in shared:
            shared[family, name] = units_of(name, slices_of[family], manifest.model, activations)
    return {(layer, family): shared[family, name] for (layer, family), name in manifest.unit_formats.items()}


def _kept(ids: np.ndarray, used_TU: np.ndarray | None, kept_T: np.ndarray | None) -> np.ndarray | None:
    if kept_T is None or used_TU is None or kept_T.all():
        return None
    return ids[used_TU[kept_T][:, ids].any(axis=0)]


def packed(lengths: Sequence[int]) -> Iterator[list[PromptChunk]]:
    """Packs prompts of the given lengths into passes: cuts each into chunks as if alone; short chunks share a pass."""
    pieces, num_tokens = list[PromptChunk](), 0
    for prompt, length in enumerate(lengths):
        for start in range(0, length, PREFILL_CHUNK_TOKENS):
            piece = PromptChunk(prompt, start, min(length, start + PREFILL_CHUNK_TOKENS))
            if num_tokens + piece.stop - start > PREFILL_CHUNK_TOKENS:
                yield pieces
                pieces, num_tokens = [], 0
            pieces.append(piece)
            num_tokens += piece.stop - start
    yield pieces
