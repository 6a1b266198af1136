"""Calls llama.cpp as a library (extra `llama`) for a text's token ids, and for the logits of token ids, also of a file
without a tokenizer.

llama.cpp's structures are opaque here: `_Structure` is larger than each of them, and only its first member is ever set,
the size of the context. This works on x86-64 and aarch64, where a call passes such a structure whole or by its address.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class _Structure(ctypes.Structure):
    _fields_ = (("first", ctypes.c_uint32), ("others", ctypes.c_uint8 * 1020))


class LlamaLibrary:
    """One model with one context, on one thread."""

    def __init__(self, file: Path | str, context_length: int, vocab_size: int) -> None:
        """Loads a GGUF file.

        Args:
            file: Its path.
            context_length: Size of the context in tokens.
            vocab_size: Size of the model's vocabulary.

        Raises:
            ModuleNotFoundError: without the extra `llama`.
            ValueError: if llama.cpp does not load the file.
        """
        import xllamacpp

        self._library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))
        handle, self._vocab_size = ctypes.c_void_p, vocab_size
        quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, handle)
        self._quiet = quiet(lambda level, text, data: None)  # an attribute, since llama.cpp goes on calling it
        self._function("llama_log_set", None, quiet, handle)(self._quiet, None)
        self._function("llama_backend_init", None)()
        load = self._function("llama_model_load_from_file", handle, ctypes.c_char_p, _Structure)
        self._model = load(str(file).encode(), self._function("llama_model_default_params", _Structure)())
        if not self._model:
            raise ValueError(f"{file}: llama.cpp does not load it")
        settings = self._function("llama_context_default_params", _Structure)()
        settings.first = context_length
        self._context = self._function("llama_init_from_model", handle, handle, _Structure)(self._model, settings)
        self._function("llama_set_n_threads", None, handle, ctypes.c_int32, ctypes.c_int32)(self._context, 1, 1)
        self._decode = self._function("llama_decode", ctypes.c_int32, handle, _Structure)
        self._batch = self._function("llama_batch_get_one", _Structure, ctypes.POINTER(ctypes.c_int32), ctypes.c_int32)
        self._logits = self._function("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), handle, ctypes.c_int32)

    def next_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Appends tokens to the context; returns the logits after the last one, float32 [vocab_size]."""
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        status = self._decode(self._context, self._batch(tokens, len(ids)))
        if status:
            raise RuntimeError(f"llama_decode ended with {status}")
        return np.ctypeslib.as_array(self._logits(self._context, -1), (self._vocab_size,)).copy()

    def tokenize(self, text: str) -> list[int]:
        """Returns the token ids of a text, in which special tokens count, with those that are added around it."""
        vocabulary = self._function("llama_model_get_vocab", ctypes.c_void_p, ctypes.c_void_p)(self._model)
        number, flag, data = ctypes.c_int32, ctypes.c_bool, text.encode()
        room = len(data) + 16
        ids = (number * room)()
        kinds = (ctypes.c_void_p, ctypes.c_char_p, number, ctypes.POINTER(number), number, flag, flag)
        count = self._function("llama_tokenize", number, *kinds)(vocabulary, data, len(data), ids, room, True, True)
        if count < 0:
            raise RuntimeError(f"llama_tokenize found {-count} tokens in {len(data)} bytes")
        return ids[:count]

    def begin(self) -> None:
        """Clears the context."""
        memory = self._function("llama_get_memory", ctypes.c_void_p, ctypes.c_void_p)(self._context)
        self._function("llama_memory_clear", None, ctypes.c_void_p, ctypes.c_bool)(memory, True)

    def generate(self, prompt: Sequence[int], num_tokens: int, ends: Sequence[int] = ()) -> list[int]:
        """Returns the greedy continuation, at most `num_tokens` long, up to and with the first token of `ends`."""
        self.begin()
        logits, found = self.next_logits(prompt), list[int]()
        while True:
            found.append(int(logits.argmax()))
            if len(found) == num_tokens or found[-1] in ends:
                return found
            logits = self.next_logits(found[-1:])

    def close(self) -> None:
        """Frees the context and the model."""
        self._function("llama_free", None, ctypes.c_void_p)(self._context)
        self._function("llama_model_free", None, ctypes.c_void_p)(self._model)

    def _function(self, name: str, result: object, *arguments: object):
        function = getattr(self._library, name)
        function.restype, function.argtypes = result, arguments
        return function
