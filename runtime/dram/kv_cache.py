"""Lists the formats of the KV cache, and counts their bytes.

`fp16` rounds each value to half precision. `int8` stores the values of a head in groups of 32 that share a float16
scale, the blocks of `int8_group32`; llama.cpp calls it a q8_0 cache (`--cache-type-k q8_0`). With heads of whole groups
it takes 17/32 of the bytes. It is refused where fp16 takes no more, as with heads that fill half a group.
"""

from typing import get_args

from coldpress.runtime.quantization import fp16, int8_group32
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.model import ModelSpec

KV_CACHE_FORMATS: tuple[KvCacheFormat, ...] = get_args(KvCacheFormat)
DEFAULT_KV_CACHE: KvCacheFormat = "fp16"
STORED = {"fp16": fp16.Plugin(), "int8": int8_group32.Plugin()}


def formats_of(spec: ModelSpec) -> tuple[KvCacheFormat, ...]:
    sizes = {name: codec.nbytes(spec.head_dim) for name, codec in STORED.items()}
    plain = sizes[DEFAULT_KV_CACHE]
    return (DEFAULT_KV_CACHE, *(name for name in KV_CACHE_FORMATS if sizes[name] < plain))


def head_bytes(head_dim: int, kind: KvCacheFormat) -> int:
    """Returns the bytes of the key, or of the value, of one head of one token. Raises `ColdpressError` if fp16 takes no
    more bytes than `kind`."""
    found, plain = (STORED[name].nbytes(head_dim) for name in (kind, DEFAULT_KV_CACHE))
    if kind != DEFAULT_KV_CACHE and found >= plain:
        raise ColdpressError(
            f"a KV cache in {kind} takes {found} bytes for the {head_dim} values of a head of this model, expected "
            f"fewer than the {plain} that {DEFAULT_KV_CACHE} takes; use {DEFAULT_KV_CACHE}"
        )
    return found


def kv_cache_bytes(spec: ModelSpec, context_length: int, kind: KvCacheFormat = DEFAULT_KV_CACHE) -> int:
    """Returns the bytes of all layers' keys and values; latents are both. Raises as `head_bytes`."""
    heads = spec.num_hidden_layers * spec.num_key_value_heads * (1 if spec.is_latent else 2)
    return heads * head_bytes(spec.head_dim, kind) * context_length
