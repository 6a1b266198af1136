"""Makes model and device records for tests: small ones, and layers of a 7B's shape."""

import json
from typing import Any

from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.model import ModelSpec


def small_spec(**changes: Any) -> ModelSpec:
    """Returns a gated ReLU model of 12 layers, 64 wide, 512 neurons per layer; `changes` replace fields."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "hidden_act": "relu",
        "gated_mlp": True,
        "norm": "rms_norm",
        "norm_eps": 1e-5,
        "position": "rotary",
        "rotary_dim": 16,
        "tie_word_embeddings": True,
    }
    return ModelSpec(**(values | changes))


def spec_7b(num_layers: int, vocab_size: int, hidden_act: str, **changes: Any) -> ModelSpec:
    """Returns a model with layers of Mistral 7B's shape and the given vocabulary size; `changes` replace fields."""
    return small_spec(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rotary_dim=128,
        vocab_size=vocab_size,
        hidden_act=hidden_act,
        **changes,
    )


def small_device(page_bytes: int = 4096) -> DeviceProfile:
    """Returns a device with round figures."""

    def figure(value: Any) -> dict[str, Any]:
        return {"value": value, "source": "assumption: round figures for tests"}

    curve = [{"read_bytes": 4096, "bytes_per_s": 8e7}, {"read_bytes": 1 << 20, "bytes_per_s": 1e9}]
    data = {
        "name": "test-device",
        "title": "A device of the tests",
        "dram_bytes": figure(1 << 30),
        "dram_budget_bytes": figure(1 << 29),
        "dram_bytes_per_s": figure(2e10),
        "num_cores": figure(4),
        "flash": {
            "page_bytes": figure(page_bytes),
            "queue_depth": figure(32),
            "latency_s": figure(1e-4),
            "read_curve": figure(curve),
        },
    }
    return DeviceProfile.model_validate_json(json.dumps(data))
