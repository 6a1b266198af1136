"""The differences between architectures: one file per architecture, named by Hugging Face's `model_type`.

A file has one class `Plugin`, which extends `Architecture`; most extend `Llama` (_common.py), which already has Llama's
arithmetic and names, and change a few of them.
"""

from coldpress.compiler.architectures._common import Architecture, Llama, Modules

__all__ = ["Architecture", "Llama", "Modules"]
