"""OLMo 2: Llama with an RMS norm on the outputs of attention and MLP, and on all heads of q together, and of k."""

from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.schemas.model import ModelSpec


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {"attention_bias"}
    MODULES = _common.llama_modules("Olmo2")

    def spec(self, config: Any) -> ModelSpec:
        return _common.llama_spec(self.MODULES, config, norm_placement="after", qk_norm="width")

    def qk_norm(self, config: Any) -> bool:
        return True
