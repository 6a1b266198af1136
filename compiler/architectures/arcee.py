"""Arcee (AFM): Llama's attention and norms, an MLP of two matrices with relu(x)**2 between them."""

from typing import Any

from coldpress.compiler.architectures import _common


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {"head_dim", "attention_bias", "mlp_bias"}
    MODULES = _common.llama_modules("Arcee", gated=False, activation="relu2")

    def own(self, config: Any) -> dict[str, Any]:
        return {"gated_mlp": False}
