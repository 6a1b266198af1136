"""What a decoded token takes on a device: flash, request by request, and then memory: nothing overlaps yet.

Flash time is counted where reads are made (runtime/store.py), by the device profile's law. Memory time is bytes over
DRAM bandwidth: computing reads every weight that it uses once, and each unit that was missed is copied from the read
buffer to its slot, which reads and writes it (LLM in a flash 3: I/O, memory management, computing).
"""

from runtime.artifact.contents import layout_bytes, resident_tensors
from schemas.layout import Plan
from schemas.manifest import Manifest

LOOKUP_TABLES = ("embed_tokens.weight", "embed_positions.weight")
"""Of these a token reads one row, unless the embedding is the head as well."""
COPY_PASSES = 2


def computed_bytes(manifest: Manifest, plan: Plan) -> int:
    """Bytes of DRAM that a token's computing reads besides units: resident weights, predictors, half the KV cache."""
    tables = LOOKUP_TABLES[manifest.model.tie_word_embeddings :]
    tensors = resident_tensors(manifest)
    looked_up = layout_bytes({role: tensors[role] for role in tables if role in tensors})
    return plan.resident_bytes - looked_up + plan.predictor_bytes + plan.kv_cache_bytes // 2


def dram_seconds(manifest: Manifest, plan: Plan, num_tokens: int, active_bytes: int, missed_bytes: int) -> float:
    """Memory time of decoded tokens in seconds.

    Args:
        manifest: Says what is resident, and the device's bandwidth.
        plan: What the tokens ran under.
        num_tokens: Decoded tokens.
        active_bytes: Bytes of the units that they used, whether those were in DRAM or not.
        missed_bytes: Bytes of those that had to be read.
    """
    moved = num_tokens * computed_bytes(manifest, plan) + active_bytes + COPY_PASSES * missed_bytes
    return moved / manifest.device.dram_bytes_per_s.value
