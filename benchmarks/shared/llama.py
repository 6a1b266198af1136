"""Runs llama.cpp, as the extra `llama` brings it, for benchmarks that compare with it."""

import importlib
import json
import urllib.request
from collections.abc import Sequence
from typing import Any


class LlamaCpp:
    """llama.cpp's own server in this process."""

    def __init__(self, file: str, context_length: int, num_threads: int = 1, mapped_alone: bool = False) -> None:
        """Loads a GGUF file; the extra `llama` is installed, since a benchmark names it.

        Args:
            file: Path of the GGUF file.
            context_length: Context length in tokens.
            num_threads: Threads, for prompts and for decoding.
            mapped_alone: Whether weights are only pages of the file, neither copied to another layout nor
                read ahead of the first token.
        """
        xllamacpp = importlib.import_module("xllamacpp")
        parameters = xllamacpp.CommonParams()
        parameters.model.path, parameters.n_ctx, parameters.n_parallel = file, context_length, 1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = num_threads
        parameters.verbosity, parameters.warmup = 0, not mapped_alone
        if mapped_alone:
            parameters.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
            parameters.no_extra_bufts, parameters.fit_params, parameters.cache_ram_mib = True, False, 0
        self._server = xllamacpp.Server(parameters)

    def _ask(self, path: str, question: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._server.listening_address}/{path}",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    def tokenize(self, text: str) -> list[int]:
        """Returns the tokens of a prompt, with the special ones that llama.cpp adds."""
        return self._ask("tokenize", {"content": text, "add_special": True, "parse_special": False})["tokens"]

    def follow(self, tokens: Sequence[int]) -> list[float]:
        """Returns the seconds of each token of a given text but the first; each is computed by itself."""
        limits = {"n_predict": 1, "cache_prompt": True, "temperature": 0}
        asked = [{"prompt": list(tokens[:stop]), **limits} for stop in range(1, len(tokens) + 1)]
        found = [self._ask("completion", question)["timings"] for question in asked]
        assert all(timings["prompt_n"] == 1 for timings in found), "tokens before are kept"
        return [timings["prompt_ms"] / 1000 for timings in found[1:]]

    def generate(self, prompt: Sequence[int], num_tokens: int, ignore_eos: bool = False) -> tuple[list[int], float]:
        """Returns (greedy continuation, tokens decoded per second)."""
        greedy = {"temperature": 0, "repeat_penalty": 1.0, "cache_prompt": False, "return_tokens": True}
        limits = {"n_predict": num_tokens, "ignore_eos": ignore_eos}
        found = self._ask("completion", {"prompt": list(prompt), **limits, **greedy})
        return found["tokens"], found["timings"]["predicted_per_second"]
