"""One decoder for every supported architecture, driven by the manifest's ModelSpec. numpy and the kernels, no torch.

`prefill` is dense: layer after layer, the units streamed from flash in sequential blocks, each block used for a
whole chunk of tokens. `decode` is sparse: for each layer and family the selector picks units and the store brings them
(design, section 5), for one token or for several at once, which share the reads. Both run the same layers; they differ
in where the bytes of units come from: `_prefill_layer` and `_decode_layer`, which is the loop that runtime/README.md
tells. Shape letters: T tokens, N hidden_size, V vocab_size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.decoder.arithmetic import layer_norm, rms_norm, rotary_tables
from coldpress.runtime.decoder.attention import Attention
from coldpress.runtime.decoder.blocks import SlotBlock, StreamedBlock, Sublayer, Units, units_of
from coldpress.runtime.decoder.experts import Experts
from coldpress.runtime.decoder.matrix import Resident
from coldpress.runtime.decoder.mlp import Mlp
from coldpress.runtime.decoder.selection import Selection, union
from coldpress.runtime.decoder.tokens import KvCache, Span, Tokens, new_cache
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.kernels.activations import ActivationFormat
from coldpress.runtime.plan.kv_cache import kv_cache_bytes
from coldpress.runtime.plan.memory import give_back_heap
from coldpress.runtime.sparsity import Residency
from coldpress.runtime.store.facts import Key
from coldpress.runtime.store.store import Store
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.families import FAMILIES, FamilyName
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.model import ModelSpec, block_norms

PREFILL_CHUNK_TOKENS = 256
"""Tokens that share one pass over the flash; bounds the prefill's activations, whatever the prompt's length."""


@dataclass(frozen=True)
class _Norm:
    """A norm with its tensors; bias None is RMSNorm's."""

    weight: np.ndarray
    bias: np.ndarray | None
    eps: float

    def apply(self, x_TN: np.ndarray) -> np.ndarray:
        if self.bias is None:
            return rms_norm(x_TN, self.weight, self.eps)
        return layer_norm(x_TN, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class PromptChunk:
    """Consecutive tokens of one of several prompts."""

    prompt: int
    start: int
    stop: int


@dataclass(frozen=True)
class _Layer:
    number: int
    mlp: Mlp | Experts
    sublayers: tuple[tuple[_Norm, Sublayer], ...]
    """Attention, then the MLP, each with its norm."""


class Decoder:
    """A model with a KV cache for each of its sequences: one, or the several of a batch."""

    def __init__(
        self,
        artifact: Artifact,
        store: Store,
        selection: Selection,
        activations: ActivationFormat = "fp32",
    ) -> None:
        """Takes the resident tensors; `begin` must come before the first token.

        Args:
            artifact: The open artifact.
            store: Its units, under the plan to run with.
            selection: The selector of every layer and family, for decoding.
            activations: What a decoded token's vectors are rounded to in products with quantized rows.

        Raises:
            ArtifactError: if a file is damaged, or the families do not make a layer.
        """
        self.spec: ModelSpec = artifact.manifest.model
        self._store, self._selection = store, selection
        self._units: dict[str, Units] = {
            entry.family: units_of(entry, self.spec, activations) for entry in artifact.manifest.families
        }
        resident = Resident(artifact.resident, artifact.manifest.resident, activations)
        self._embedding = resident.matrix("embed_tokens")
        self._head = self._embedding if self.spec.tie_word_embeddings else resident.matrix("lm_head")
        self._positions = resident.matrix("embed_positions") if self.spec.position == "learned" else None
        self._inv_freq = resident.vector("rotary.inv_freq") if self.spec.position == "rotary" else None
        self._norm = self._make_norm("norm", resident)
        self._layers = [self._make_layer(layer, resident) for layer in range(self.spec.num_hidden_layers)]
        self._kv_cache: KvCacheFormat = store.plan.kv_cache
        self._caches: list[KvCache] = [self._new_cache(0)]

    def _new_cache(self, context_length: int) -> KvCache:
        return new_cache(self.spec, context_length, self._kv_cache)

    def _make_layer(self, layer: int, resident: Resident) -> _Layer:
        attention = Attention(layer, self.spec, tuple(self._units), resident)
        mlp = (Experts if self.spec.is_mixture else Mlp)(layer, self.spec, tuple(self._units), resident)
        norms = (self._make_norm(f"layers.{layer}.{name}", resident) for name in block_norms(self.spec))
        return _Layer(layer, mlp, tuple(zip(norms, (attention, mlp), strict=True)))

    def _make_norm(self, name: str, resident: Resident) -> _Norm:
        bias = None if self.spec.norm == "rms_norm" else resident.vector(f"{name}.bias")
        weight = resident.vector(f"{name}.weight")
        return _Norm(weight + 1 if self.spec.norm == "layer_norm_1p" else weight, bias, self.spec.norm_eps)

    @property
    def length(self) -> int:
        """Tokens in the KV cache of the first sequence."""
        return self._caches[0].length

    def begin(self, context_length: int) -> None:
        """Starts a new sequence of at most `context_length` tokens; its KV cache is allocated here.

        Raises:
            DoesNotFitError: if the plan's budget counts on fewer tokens.
        """
        self.begin_batch([context_length])

    def begin_batch(self, context_lengths: Sequence[int]) -> None:
        """Starts new sequences, numbered from 0, of at most so many tokens each, at least one sequence.

        Raises:
            DoesNotFitError: if the plan's budget counts on fewer tokens.
        """
        self._check_room(context_lengths)
        if [cache.context_length for cache in self._caches] != list(context_lengths):
            self._caches.clear()  # frees the old caches before the new ones are allocated
            self._caches += [self._new_cache(length) for length in context_lengths]
        for cache in self._caches:
            cache.length = 0
        self._store.reset()

    def renew(self, sequence: int, context_length: int) -> None:
        """Starts another sequence of at most `context_length` tokens in the place of one that has ended.

        Raises:
            DoesNotFitError: if the plan's budget counts on fewer tokens.
        """
        lengths = [cache.context_length for cache in self._caches]
        self._check_room([*lengths[:sequence], context_length, *lengths[sequence + 1 :]])
        self._caches[sequence] = self._new_cache(context_length)

    def end_batch(self) -> None:
        """Gives back the KV caches of all sequences."""
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
        """What the keys and values of so many tokens take."""
        return kv_cache_bytes(self.spec, num_tokens, self._kv_cache)

    def check_context(self, context_length: int) -> None:
        """Refuses a longer sequence than the plan counts on.

        Raises:
            DoesNotFitError: saying so.
        """
        plan = self._store.plan
        if context_length > plan.context_length:
            raise DoesNotFitError(
                f"the prompt and the new tokens make {context_length} tokens, the {plan.title} has a "
                f"KV cache for {plan.context_length}; ask for fewer tokens, or build for a longer context_length"
            )

    def end(self, sequence: int) -> None:
        """Gives back the KV cache of a sequence, to which nothing can be appended any more."""
        self._caches[sequence] = self._new_cache(0)

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Appends `tokens` densely; their logits.

        Args:
            tokens: int [T], at least one.

        Returns:
            float32 [T, V].

        Raises:
            ColdpressError: if a token is no id of the vocabulary, or the context is full.
        """
        chunks = [self._head.apply(hidden_TN) for _, hidden_TN in self._prefill_chunks([tokens], [0])]
        return np.concatenate(chunks)

    def prefill_last(self, tokens: np.ndarray, sequence: int = 0) -> np.ndarray:
        """Appends `tokens` densely; the logits of the last one only, float32 [V]. Raises as `prefill`."""
        return self.prefill_each([tokens], [sequence])[0]

    def prefill_each(self, prompts: Sequence[np.ndarray], sequences: Sequence[int]) -> np.ndarray:
        """Appends a prompt to each of several sequences densely. Prompts that fit into one chunk of tokens share a pass
        over flash; each has the logits that it has alone, to the bit.

        Args:
            prompts: int [T] each, at least one token.
            sequences: Their B sequences, distinct.

        Returns:
            Logits of each prompt's last token, float32 [B, V].

        Raises:
            ColdpressError: as `prefill`.
        """
        last_BN = np.empty((len(prompts), self.spec.hidden_size), np.float32)
        for pieces, hidden_TN in self._prefill_chunks(prompts, sequences):
            ends = np.cumsum([piece.stop - piece.start for piece in pieces]) - 1
            last_BN[[piece.prompt for piece in pieces]] = hidden_TN[ends]  # a later chunk of the prompt replaces it
        give_back_heap()  # of activations: a decoded token needs far less room
        return self._head.apply(last_BN)

    def decode(self, token: int) -> np.ndarray:
        """Appends one token through the selector and the store; its logits, float32 [V]. Raises as `prefill`."""
        return self.decode_many(np.array([token]))[0]

    def decode_many(self, tokens: np.ndarray, num_kept: int | None = None) -> np.ndarray:
        """Appends T tokens in one causal pass.

        Each token computes with the units that the selector picks for it alone; units that several use are read once.
        Logits are those of one token after the other: bit for bit where everything is in DRAM, else up to the rounding
        of sums, whose terms come in the order in which units arrive.

        Args:
            tokens: int [T], at least one and at most FEW_TOKENS.
            num_kept: For drafts, and then `accept` has to follow: the cache admits the units of the first so many
                tokens only. None where all tokens stand.

        Returns:
            float32 [T, V].

        Raises:
            ColdpressError: as `prefill`; or if there are more tokens, or several under a selector that sees what is in
                DRAM, which would pick other units for them than one after the other.
        """
        self._check_together(len(tokens))
        spans = [Span(self._caches[0], len(tokens))]
        hidden_TN = self._forward(tokens, spans, self._decode_layer, num_kept=num_kept)
        if num_kept is None:
            self._store.end_tokens(len(tokens))
        return self._head.apply(hidden_TN)

    def decode_each(self, tokens: np.ndarray, sequences: Sequence[int]) -> np.ndarray:
        """Appends one token to each of several sequences, in one pass through the layers. Units that several tokens use
        are read once, and each token has the logits that it has alone, as in `decode_many`.

        Args:
            tokens: int [B], at least one and at most FEW_TOKENS.
            sequences: Their B sequences, distinct.

        Returns:
            float32 [B, V].

        Raises:
            ColdpressError: as `decode_many`.
        """
        self._check_together(len(tokens))
        spans = [Span(self._caches[sequence], 1) for sequence in sequences]
        hidden_BN = self._forward(tokens, spans, self._decode_layer)
        self._store.end_tokens(len(tokens))
        return self._head.apply(hidden_BN)

    def accept(self, num_standing: int, num_tokens: int) -> None:
        """Ends a pass of `num_tokens` with drafts: the first `num_standing` stand, the others are taken back."""
        self._store.end_tokens(num_standing)
        self.roll_back(self.length - num_tokens + num_standing)

    def roll_back(self, length: int) -> None:
        """Takes back the tokens behind the first `length`; the next ones replace them."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}, the KV cache has {self.length} tokens")
        self._caches[0].length = length

    @property
    def sees_residency(self) -> bool:
        """Whether the choice of units depends on what is in DRAM."""
        return self._selection.sees_residency

    def check_many(self) -> None:
        """Refuses several tokens at once where that would change their units; see `Selection.check_many`."""
        self._selection.check_many()

    def _check_together(self, num_tokens: int) -> None:
        if not 1 <= num_tokens <= FEW_TOKENS:
            raise ColdpressError(f"{num_tokens} tokens are to be decoded at once, expected 1 to {FEW_TOKENS}")
        if num_tokens > 1:
            self.check_many()

    def _prefill_chunks(
        self, prompts: Sequence[np.ndarray], sequences: Sequence[int]
    ) -> Iterator[tuple[list["PromptChunk"], np.ndarray]]:
        """The chunks of prompts that share a pass, and its hidden states, float32 [T, N]."""
        if not all(map(len, prompts)):
            raise ColdpressError("the prompt has no tokens, expected at least one; give a prompt")
        for pieces in packed(list(map(len, prompts))):
            tokens = np.concatenate([prompts[piece.prompt][piece.start : piece.stop] for piece in pieces])
            spans = [Span(self._caches[sequences[piece.prompt]], piece.stop - piece.start) for piece in pieces]
            stops = np.cumsum([span.num_tokens for span in spans]).tolist()
            parts = [slice(stop - span.num_tokens, stop) for stop, span in zip(stops, spans, strict=True)]
            yield pieces, self._forward(tokens, spans, self._prefill_layer, parts)

    def _forward(
        self,
        tokens: np.ndarray,
        spans: Sequence[Span],
        through: Callable[[_Layer, np.ndarray, Tokens], np.ndarray],
        parts: Sequence[slice] = (),
        num_kept: int | None = None,
    ) -> np.ndarray:
        """The hidden states of `tokens` after the last norm, one span after the other: float32 [T, N].

        Args:
            tokens: int [T].
            spans: The sequences that they are of.
            through: Takes hidden states through a layer.
            parts: Token ranges that must give the same bits alone and together (more than FEW_TOKENS tokens only).
            num_kept: See `decode_many`.
        """
        self.check_tokens(tokens)
        self._check_space(spans)
        positions = np.concatenate([span.cache.length + np.arange(span.num_tokens) for span in spans])
        x_TN = self._embedding.rows(tokens)
        if self._positions is not None:
            x_TN = x_TN + self._positions.rows(positions + self.spec.position_offset)
        rotary = None
        if self._inv_freq is not None:
            rotary = rotary_tables(positions, self._inv_freq, self.spec.rotary_scaling)
        together = Tokens(spans, rotary, parts, num_kept)
        for layer in self._layers:
            x_TN = through(layer, x_TN, together)
        for span in spans:
            span.cache.length += span.num_tokens
        return self._norm.apply(x_TN)

    def _decode_layer(self, layer: _Layer, x_TN: np.ndarray, tokens: Tokens) -> np.ndarray:
        """The loop: the selector picks units, the store brings them, and the kernels compute with them."""
        inputs: dict[FamilyName, np.ndarray] = {}
        for norm, sublayer in layer.sublayers:
            h_TN = self._into(norm, x_TN)
            work = sublayer.begin(h_TN, tokens)
            for key in sublayer.requests:
                signal, residency = work.signal(key), self._store.residency(key)
                chosen = self._selection.select(key, signal, residency, work.experts)
                ids, used_TU = union(chosen, residency.present.size)
                # what is in memory comes first, and the kernels run while the rest is read
                for batch in self._store.submit(key, ids, _kept(ids, used_TU, tokens.num_kept)):
                    used_TK = None if used_TU is None else used_TU[:, batch.ids]
                    work.add(key, SlotBlock(batch.ids, batch.slots, batch.rows, self._units[key[1]], used_TK))
                inputs[key[1]] = h_TN
            x_TN = x_TN + self._out_of(norm, work.result())
        if self._store.ahead.enabled:  # only now: this layer's own units came first
            self._store.ahead.layer_done(layer.number, inputs, self._choose)
        return x_TN

    def _prefill_layer(self, layer: _Layer, x_TN: np.ndarray, tokens: Tokens) -> np.ndarray:
        """The dense pass: all units, in flash order, whichever experts they belong to."""
        for norm, sublayer in layer.sublayers:
            work = sublayer.begin(self._into(norm, x_TN), tokens)
            for key in sublayer.requests:
                work.signal(key)
                for ids, codes in self._store.stream(key):
                    work.add(key, StreamedBlock(ids, codes, self._units[key[1]], tokens.parts))
            x_TN = x_TN + self._out_of(norm, work.result())
        return x_TN

    def _into(self, norm: _Norm, x_TN: np.ndarray) -> np.ndarray:
        """What a sublayer reads: the hidden states, normed where the norm is before it."""
        return norm.apply(x_TN) if self.spec.norm_placement == "before" else x_TN

    def _out_of(self, norm: _Norm, y_TN: np.ndarray) -> np.ndarray:
        """What is added to the hidden states: a sublayer's result, normed where the norm is behind it (OLMo 2)."""
        return y_TN if self.spec.norm_placement == "before" else norm.apply(y_TN)

    def _choose(self, key: Key, signal_TN: np.ndarray, residency: Residency) -> tuple[list[np.ndarray], np.ndarray]:
        """What a layer would choose for another layer's input; see `coldpress.runtime.store.ahead.Choose`."""
        layer, family = key
        mlp, experts_TE = self._layers[layer].mlp, None
        if isinstance(mlp, Experts) and FAMILIES[family].signal == "mlp_input":
            signal_TN, experts_TE = mlp.input_signal(family, signal_TN)
        return self._selection.select(key, signal_TN, residency, experts_TE), signal_TN

    def check_tokens(self, tokens: np.ndarray) -> None:
        """Refuses what is no id of the vocabulary.

        Raises:
            ColdpressError: naming the first one.
        """
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


def _kept(ids: np.ndarray, used_TU: np.ndarray | None, num_kept: int | None) -> np.ndarray | None:
    """The units of `ids` that the first `num_kept` tokens use; None for all."""
    if num_kept is None or used_TU is None:
        return None
    return ids[used_TU[:num_kept, ids].any(axis=0)]


def packed(lengths: Sequence[int]) -> Iterator[list[PromptChunk]]:
    """Packs prompts of so many tokens into passes: each is cut into chunks as if alone, and short chunks share one."""
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
