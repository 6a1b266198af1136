"""Defines a cell of a published table with our figure for it, and the models and devices of several papers."""

from dataclasses import dataclass
from typing import Any

from coldpress.runtime.device_profiles.devices import load_device
from coldpress.schemas.compute import Compute
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.model import Model
from tests.support.statistics import model_of


@dataclass(frozen=True)
class Cell:
    """A published figure and ours."""

    table: str
    cell: str
    unit: str
    published: float
    ours: float
    basis: str
    """Source of our figure. A figure that is fitted is fitted to another cell, which is named here."""
    tolerance: float = 0.1
    """Largest relative distance of ours from the published figure."""
    note: str = ""
    """Reason of the distance, where there is one."""

    @property
    def ratio(self) -> float:
        """Returns ours over the published figure."""
        return self.ours / self.published

    @property
    def within(self) -> bool:
        """Returns whether ours is within the tolerance."""
        return abs(self.ratio - 1) <= self.tolerance


def opt(num_layers: int, hidden_size: int, num_heads: int, **changes: Any) -> Model:
    """Returns a model of OPT's shape: two matrices per MLP, four times as wide, tied embeddings."""
    values: dict[str, Any] = {
        "model_type": "opt",
        "vocab_size": 50272,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "gated_mlp": False,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    }
    return model_of(num_layers, hidden_size, 4 * hidden_size, **values | changes)


def gated(
    num_layers: int, hidden_size: int, intermediate_size: int, vocab_size: int, num_heads: int, num_kv_heads: int
) -> Model:
    """Returns a model of Llama's shape: three matrices per MLP, and a head of its own."""
    return model_of(
        num_layers,
        hidden_size,
        intermediate_size,
        vocab_size=vocab_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        hidden_act="silu",
    )


OPT_350M, OPT_1_3B, OPT_6_7B = opt(24, 1024, 16), opt(24, 2048, 32), opt(32, 4096, 32)
FALCON_7B = opt(32, 4544, 71, num_key_value_heads=1, vocab_size=65024)
LLAMA_2_7B, MISTRAL_7B = gated(32, 4096, 11008, 32000, 32, 32), gated(32, 4096, 14336, 32000, 32, 8)
PHI_3_MEDIUM = gated(40, 5120, 17920, 32064, 40, 10)


def computing_at(
    device: str | DeviceProfile,
    format_name: str,
    bytes_per_s: float,
    source: str,
    copy_bytes_per_s: float | None = None,
) -> DeviceProfile:
    """Returns a device whose rate of computing comes from a published cell."""
    profile = load_device(device) if isinstance(device, str) else device
    rates = ({"format": format_name, "density": 1.0, "bytes_per_s": bytes_per_s},)
    copies = None if copy_bytes_per_s is None else {"value": copy_bytes_per_s, "source": source}
    compute = Compute.model_validate({"rates": {"value": rates, "source": source}, "copy_bytes_per_s": copies})
    return profile.model_copy(update={"compute": compute})
