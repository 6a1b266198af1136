"""What a decoded token takes on a device: flash, request by request, while memory is computed with.

Flash time is counted where reads are made (runtime/store.py), by the device profile's law. Memory time is bytes over
DRAM bandwidth: computing reads every weight that it uses once, and each unit that is read and kept is copied from the
read buffer to its slot, which reads and writes it (LLM in a flash 3: I/O, memory management, computing). A request's
units are computed with and copied while the rest of it is read, so that it takes the longer of the two; the weights
that are resident are computed with between requests, since what a layer asks for depends on them.
"""

from runtime.artifact.contents import layout_bytes, resident_tensors
from schemas.device import DeviceProfile
from schemas.layout import Plan
from schemas.manifest import Manifest
from schemas.model import ModelSpec

LOOKUP_TABLES = ("embed_tokens.weight", "embed_positions.weight")
"""Of these a token reads one row, unless the embedding is the head as well."""
COPY_PASSES = 2


def looked_up_roles(spec: ModelSpec) -> tuple[str, ...]:
    """The tables of which a token reads one row."""
    return LOOKUP_TABLES[spec.tie_word_embeddings :]


def computed_bytes(manifest: Manifest, plan: Plan) -> int:
    """Bytes of DRAM that a token's computing reads besides units: resident weights, predictors, half the KV cache."""
    tensors = resident_tensors(manifest)
    looked_up = layout_bytes({role: tensors[role] for role in looked_up_roles(manifest.model) if role in tensors})
    return plan.resident_bytes - looked_up + plan.predictor_bytes + plan.kv_cache_bytes // 2


def fetch_seconds(device: DeviceProfile, flash_s: float, active_bytes: int, kept_bytes: int) -> float:
    """What one request for units takes, in seconds: reading, or computing and copying.

    Args:
        device: Its bandwidth counts.
        flash_s: Of its reads.
        active_bytes: Bytes of the units that are used, whether those were in DRAM or not.
        kept_bytes: Bytes of those that were read and are kept.
    """
    return max(flash_s, (active_bytes + COPY_PASSES * kept_bytes) / device.dram_bytes_per_s.value)


def dram_seconds(
    device: DeviceProfile, computed_per_token: int, num_tokens: int, active_bytes: int = 0, kept_bytes: int = 0
) -> float:
    """Memory time of decoded tokens in seconds.

    Args:
        device: Its bandwidth counts.
        computed_per_token: From `computed_bytes`.
        num_tokens: Decoded tokens.
        active_bytes: As that of `fetch_seconds`, of all requests.
        kept_bytes: Alike.
    """
    moved = num_tokens * computed_per_token + active_bytes + COPY_PASSES * kept_bytes
    return moved / device.dram_bytes_per_s.value
