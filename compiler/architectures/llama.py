"""Llama 1, 2 and 3, and everything saved as LlamaForCausalLM: GQA, optional biases, tied embeddings, rope variants."""

from coldpress.compiler.architectures import _common


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {"head_dim", "attention_bias", "mlp_bias"}
    MODULES = _common.llama_modules("Llama")
