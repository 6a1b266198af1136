"""What a run keeps beside weights, KV cache, buffers and slots, as a part of the DRAM budget (FORMAT.md, section 7).

Counted from shapes alone, so that who plans (the compiler), who checks and who runs an artifact give one figure. Tables
and slot maps are counted to the byte; of a unit a cache policy keeps at most what is counted, whichever it is; objects
and what a decoded token works with are bounds of what was measured (tests/runtime/test_bookkeeping.py holds all of it
against a run's memory). A prefill, or a pass of several tokens, works with more while it lasts, and gives it back.
"""

from collections.abc import Iterable

from coldpress.schemas.layout import Section, SelectorArray
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.model import ModelSpec

CHECKSUM_BYTES = 4
"""Of a page of flash.img."""
PLACE_BYTES = 8
"""Of a unit of a section: order and position (runtime/store/slots.py)."""
SLOT_BYTES = 12
"""Of a unit of a layer: rank, slot, and the number of a slot that is free."""
POLICY_BYTES = 18
"""Of a unit of a layer: the most that a policy of runtime/cache keeps of it."""
PART_BYTES = 12 << 10
"""Of a family of a layer: objects of manifest, plan, arrays and policy."""
LAYER_BYTES = 8 << 10
"""Of a layer: objects of its resident tensors."""
RUN_BYTES = 128 << 10
"""Of a run: objects that there are once, and what the heap rounds up."""
TOKEN_UNIT_BYTES = 64
"""Of a unit of the largest family: signal, scores, ids and read plan of a token's request."""
TOKEN_HIDDEN_BYTES = 32
"""Of a value of a hidden state: states, queries and norms of a token."""
TOKEN_VOCABULARY_BYTES = 48
"""Of a token of the vocabulary: logits, and probabilities in 64 bits of those that are drawn from."""


def bookkeeping_bytes(manifest: Manifest) -> int:
    """Bytes of it in a run of an artifact."""
    flash = manifest.flash
    arrays = [array for plan in manifest.plans for array in plan.arrays]
    return counted_bytes(manifest.model, flash.sections, flash.size_bytes // flash.page_bytes, arrays)


def counted_bytes(spec: ModelSpec, sections: Iterable[Section], num_pages: int, arrays: Iterable[SelectorArray]) -> int:
    """Bytes of it.

    Args:
        spec: The model's shape.
        sections: All of flash.img, whose layers are the model's.
        num_pages: Of flash.img.
        arrays: What selectors keep in the tables, of all plans.
    """
    sections = tuple(sections)
    placed = sum(section.num_units for section in sections)
    parts = sum(len(section.layers) for section in sections)
    units = sum(section.num_units * len(section.layers) for section in sections)
    tables = CHECKSUM_BYTES * num_pages + PLACE_BYTES * placed + sum(array.num_bytes for array in arrays)
    objects = RUN_BYTES + LAYER_BYTES * spec.num_hidden_layers + PART_BYTES * parts
    return tables + (SLOT_BYTES + POLICY_BYTES) * units + objects + token_bytes(spec, sections)


def token_bytes(spec: ModelSpec, sections: Iterable[Section]) -> int:
    """What a decoded token works with, in bytes; free for other uses before the first token."""
    largest = max((section.num_units for section in sections), default=0)
    units = TOKEN_UNIT_BYTES * largest
    return units + TOKEN_HIDDEN_BYTES * spec.hidden_size + TOKEN_VOCABULARY_BYTES * spec.vocab_size
