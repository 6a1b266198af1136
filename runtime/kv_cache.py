"""What the keys and values of past tokens take, in bytes."""

from schemas.model import ModelSpec

KV_VALUE_BYTES = 2
"""Keys and values are kept in fp16."""


def kv_cache_bytes(spec: ModelSpec, context_length: int) -> int:
    """Bytes of the keys and values of `context_length` tokens in all layers."""
    return 2 * KV_VALUE_BYTES * spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim * context_length
