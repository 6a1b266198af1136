"""Runs passes for the search on as much validation text as each question needs: few tokens, explore_tokens, or all."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coldpress.compiler.activity.calibration_pass import stream_of
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.quality.passes import Passes, remove_grams, rounding_of
from coldpress.compiler.quality.trace import few_tokens
from coldpress.compiler.rounding._matrix import Rounding
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.steps import Steps
from coldpress.schemas.corpus import Split


@dataclass(frozen=True)
class TextPasses:
    """Passes, each begun when it is first needed. Tokens are int [num_blocks, T]."""

    config: AllocateConfig
    inputs: AllocationInputs
    steps: Steps

    @cached_property
    def few(self) -> Passes:
        return self._passes(self.few_tokens)

    @cached_property
    def asked(self) -> Passes:
        return self._passes(self.asked_tokens)

    @cached_property
    def every(self) -> Passes:
        return self.asked.extended(self.all_tokens, self._workspace(self.all_tokens))

    def on(self, tokens: np.ndarray) -> Passes:
        return self.asked if tokens.size == self.asked_tokens.size else self.every

    @property
    def few_tokens(self) -> np.ndarray:
        return few_tokens(self.all_tokens)

    @property
    def asked_tokens(self) -> np.ndarray:
        return self.all_tokens[: max(1, self.config.explore_tokens // self.all_tokens.shape[1])]

    @cached_property
    def all_tokens(self) -> np.ndarray:
        return self._split("validation")

    @property
    def calibration_tokens(self) -> np.ndarray:
        return self._split("calibration")

    @cached_property
    def stream(self) -> LayerStream:
        return stream_of(self.config, self.inputs.model, self.inputs.threads)[0]

    @cached_property
    def rounding(self) -> Rounding:
        given = self.inputs
        assert given.corpus is not None
        return rounding_of(self.config, given.model, given.corpus, given.activations, given.work, given.threads)

    def clean(self) -> None:
        if "rounding" in vars(self) and self.rounding.gram is not None:
            remove_grams(self.inputs.model, self.inputs.work)

    def _split(self, name: Split) -> np.ndarray:
        assert self.inputs.corpus is not None
        return load_arrays(self.inputs.corpus.split(name).arrays, "tokens")["tokens"]

    def _passes(self, tokens: np.ndarray) -> Passes:
        whole, work = self.stream.last_hidden(tokens), self._workspace(tokens)
        return Passes("allocate", self.stream, tokens, whole, work, self.steps, self.rounding)

    def _workspace(self, tokens: np.ndarray) -> Workspace:
        work = self.inputs.work
        return Workspace(work.folder / "quality-{}x{}".format(*tokens.shape), work.fingerprint)
