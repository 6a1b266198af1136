"""Provides activations to compare orders on: planted 7B layers, and the real models of shared/cache_traces.py.

Each source has a text to fit on, more of the same text, and another corpus (Ripple Fig. 15).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.harness.places import data
from benchmarks.shared.cache_traces import PLANTED, REAL, Drawn, planted, used_in
from benchmarks.shared.cases import CORPORA, Parts, blocks_of, case_of
from coldpress.compiler.checkpoint.private import private_folder
from coldpress.schemas.families import FamilyName
from coldpress.schemas.model import ModelSpec
from tests.support.statistics import model_of

AS_A_7B = ", units of a 7B"
SOURCES = (*PLANTED, *REAL)
TEXTS = {"fit": Drawn(8192), "same": Drawn(2048), "other": Drawn(2048, 32, 0.5)}
"""Texts of planted layers."""
SPLITS: Parts = {"fit": ("fit", slice(0, 32)), "same": ("fit", slice(32, 40))}
OTHER = {"wikitext-2": "tinystories", "tinystories": "wikitext-2"}
"""Corpus of a model -> the other corpus."""
SPEC_7B = model_of(1, 4096, 14336, head_dim=128).spec


@dataclass(frozen=True)
class Text:
    """Packed activations of a text, uint8 [num_units, num_tokens / 8]."""

    bits: np.ndarray
    num_tokens: int


@dataclass(frozen=True)
class Source:
    """The activations of one family of one layer."""

    model: str
    family: FamilyName
    density: str
    spec: ModelSpec
    fit: Text
    tests: dict[str, Text]


def sources_of(name: str, folder: Path) -> Sequence[Source]:
    """Returns sources: a planted layer, or each family that a real model's method may skip parts of, in its middle
    layer. The latter come twice, as they are and with units of a 7B's size, since a small layer is read within one
    latency."""
    if name in PLANTED:
        return [_source(name, "neuron", SPEC_7B, planted(PLANTED[name], 0, TEXTS))]
    case = case_of(name, folder, SPLITS)
    other = blocks_of(private_folder(case.model), data() / "corpora" / OTHER[CORPORA[name]])["test"][:8]
    case, spec = replace(case, splits={**case.splits, "other": other}), case.model.spec
    used = used_in(case, {spec.num_hidden_layers // 2}, REAL[name])
    found = [_source(name, family, spec, masks) for (_, family), masks in used.items()]
    wide = spec.model_copy(update={"hidden_size": 4096, "intermediate_size": 14336})
    return [*found, *(replace(one, model=one.model + AS_A_7B, spec=wide) for one in found)]


def _source(name: str, family: str, spec: ModelSpec, masks: Mapping[str, np.ndarray]) -> Source:
    texts = {split: Text(np.packbits(mask.T, axis=1, bitorder="little"), len(mask)) for split, mask in masks.items()}
    return Source(name, cast(FamilyName, family), f"{masks['fit'].mean():.0%}", spec, texts.pop("fit"), texts)
