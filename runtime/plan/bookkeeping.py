"""Counts the bookkeeping of a run: its DRAM besides weights, KV cache, buffers and slots (FORMAT.md, section 7).

It is counted from shapes alone, so that compiler, checks and runtime get the same figure. Tables and slot maps are
counted to the byte. Cache policies take at most the bytes counted per unit. Objects and the working memory of a decoded
token are upper bounds of measurements (tests/runtime/test_bookkeeping.py checks all figures against a run's memory). A
prefill, or a pass of several tokens, needs more working memory while it lasts, and frees it.
"""

from collections.abc import Iterable

from coldpress.schemas.layout import Section, SelectorArray
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.model import ModelSpec

CHECKSUM_BYTES = 4
"""Per page of flash.img."""
PLACE_BYTES = 8
"""Per unit of a section: order and position (runtime/store/slots.py)."""
SLOT_BYTES = 12
"""Per unit of a layer: its rank, its slot, and one entry of the list of free slots."""
POLICY_BYTES = 18
"""Per unit of a layer: the most that a policy of runtime/cache stores about it."""
PART_BYTES = 12 << 10
"""Per family of a layer: objects of manifest, plan, arrays and policy."""
LAYER_BYTES = 8 << 10
"""Per layer: objects of its resident tensors."""
RUN_BYTES = 128 << 10
"""Per run: objects that exist once, and what the heap rounds up."""
TOKEN_UNIT_BYTES = 64
"""Per unit of the largest family: signal, scores, ids and read plan of a token's request."""
TOKEN_HIDDEN_BYTES = 32
"""Per value of a hidden state: states, queries and norms of a token."""
TOKEN_VOCABULARY_BYTES = 48
"""Per token of the vocabulary: logits, and float64 probabilities of the candidates of a draw."""


def bookkeeping_bytes(manifest: Manifest) -> int:
    """Returns the bytes of bookkeeping in a run of an artifact."""
    flash = manifest.flash
    arrays = [array for plan in manifest.plans for array in plan.arrays]
    return counted_bytes(manifest.model, flash.sections, flash.size_bytes // flash.page_bytes, arrays)


def counted_bytes(spec: ModelSpec, sections: Iterable[Section], num_pages: int, arrays: Iterable[SelectorArray]) -> int:
    """Returns the bytes of bookkeeping, counted from shapes.

    Args:
        spec: The model's shape.
        sections: All sections of flash.img.
        num_pages: The number of pages of flash.img.
        arrays: The selector arrays in the tables, of all plans.
    """
    sections = tuple(sections)
    placed = sum(section.num_units for section in sections)
    parts = sum(len(section.layers) for section in sections)
    units = sum(section.num_units * len(section.layers) for section in sections)
    tables = CHECKSUM_BYTES * num_pages + PLACE_BYTES * placed + sum(array.num_bytes for array in arrays)
    objects = RUN_BYTES + LAYER_BYTES * spec.num_hidden_layers + PART_BYTES * parts
    return tables + (SLOT_BYTES + POLICY_BYTES) * units + objects + token_bytes(spec, sections)


def token_bytes(spec: ModelSpec, sections: Iterable[Section]) -> int:
    """Returns the bytes of a decoded token's working memory; they are free for other uses before the first token."""
    largest = max((section.num_units for section in sections), default=0)
    units = TOKEN_UNIT_BYTES * largest
    return units + TOKEN_HIDDEN_BYTES * spec.hidden_size + TOKEN_VOCABULARY_BYTES * spec.vocab_size
