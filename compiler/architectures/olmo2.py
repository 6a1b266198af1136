"""OLMo 2: Llama with an RMS norm on the outputs of attention and MLP, and on all heads of q together, and of k."""

from typing import Any

from coldpress.compiler.architectures import _common


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {"attention_bias"}
    MODULES = _common.llama_modules("Olmo2")

    def own(self, config: Any) -> dict[str, Any]:
        return {"norm_placement": "after", "qk_norm": "width"}

    def qk_norm(self, config: Any) -> bool:
        return True
