"""Counts the bookkeeping of a run: its DRAM besides weights, KV cache, buffers and slots (FORMAT.md, section 7).

It is counted from shapes alone, so that compiler, checks and runtime get the same figure. Tables and slot maps are
counted to the byte. Cache policies take at most the bytes counted per unit. Objects and the working memory of a decoded
token are upper bounds of measurements (tests/runtime/test_bookkeeping.py checks all figures against a run's memory). A
prefill, or a pass of several tokens, needs more working memory while it lasts, and frees it.
"""

from collections.abc import Collection, Iterable

from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.extents import span_bytes
from coldpress.runtime.plugins import load_class
from coldpress.runtime.unit_numbers import number_type
from coldpress.schemas.layout import RowTable, Section, SelectorArray
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.model import ModelSpec

CHECKSUM_BYTES = 4
"""Per page of flash.img."""
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
    flash = manifest.flash
    arrays = [array for plan in manifest.plans for array in plan.arrays]
    caches = {plan.cache for plan in manifest.plans}
    image = flash.sections, flash.tables, flash.size_bytes, flash.page_bytes
    return counted_bytes(manifest.model, *image, arrays, caches)


def counted_bytes(
    spec: ModelSpec,
    sections: Iterable[Section],
    tables: Iterable[RowTable],
    flash_bytes: int,
    page_bytes: int,
    arrays: Iterable[SelectorArray],
    caches: Collection[str],
) -> int:
    """Returns the bytes of bookkeeping, counted from shapes, with the arrays and caches of all plans, and the buffer of
    one row of each table."""
    sections = tuple(sections)
    parts = sum(len(section.layers) for section in sections)
    known = CHECKSUM_BYTES * (flash_bytes // page_bytes) + sum(array.num_bytes for array in arrays)
    objects = RUN_BYTES + LAYER_BYTES * spec.num_hidden_layers + PART_BYTES * parts
    of_units = sum(unit_bytes(section, caches) for section in sections)
    rows = sum(span_bytes(table.row_bytes, page_bytes) for table in tables)
    return known + of_units + objects + rows + token_bytes(spec, sections)


def unit_bytes(section: Section, caches: Collection[str]) -> int:
    """Returns the bytes about the units of a section: the neuron tables (PowerInfer 5.2) and the caches' notes. Order
    and position once, rank, slot and cache policy for each layer. A full cache lists no free slots."""
    num_units, num_layers = section.num_units, len(section.layers)
    a_number = number_type(num_units).itemsize
    policies = (load_class("coldpress.runtime.cache", CachePolicy, cache) for cache in caches)
    policy = max((cache.kept_bytes(num_units) for cache in policies), default=0)
    return 2 * a_number * num_units * (1 + num_layers) + policy * num_layers


def token_bytes(spec: ModelSpec, sections: Iterable[Section]) -> int:
    """Returns the bytes of a decoded token's working memory; they are free for other uses before the first token."""
    largest = max((section.num_units for section in sections), default=0)
    units = TOKEN_UNIT_BYTES * largest
    return units + TOKEN_HIDDEN_BYTES * spec.hidden_size + TOKEN_VOCABULARY_BYTES * spec.vocab_size
