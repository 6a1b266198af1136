"""Makes the traces of benchmarks.cache_policies: units that tokens use, in real models and planted at a 7B's size.

A trace has a text from which placement and order are made, one on which parameters are chosen, and one that is
reported. Units lie in the order of Ripple's Algorithm 1.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.evaluation.evaluate import Sparse, masks_of
from benchmarks.shared.cases import Case, case_of
from benchmarks.shared.real_models import MODELS as REAL_MODELS
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.stages.order import ripple
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.families import num_units
from tests.support.planted import TOPIC_STRENGTH, planted_frequencies, thresholds
from tests.support.statistics import task_of

UNIT_BYTES = {"up_down": 2 * 4096 * 18 // 32, "mlp_in": 2 * 14336 * 18 // 32, "mlp_mid": 4096 * 18 // 32}
"""Family -> bytes of a 7B's unit in int4_group32; models here have fewer units, counted at that size."""
NEURON_BYTES = 3 * 4096 * 18 // 32
CONTEXT_TOKENS = 256
HALF = 0.5


class Real(NamedTuple):
    """The selector of a real model, its families and density."""

    method: str
    families: tuple[str, ...]
    density: float
    """Used share of the units, in a mixture of the picked experts' units; 1 where the signal decides."""


TOPK = Real("topk", ("mlp_in", "mlp_mid"), HALF)
MIXTURE = Real("topk", ("mlp_in", "mlp_mid"), 0.8)
RELU = Real("relu", ("up_down",), 1.0)
REAL = {
    "prose7m-relu": RELU,
    "prose7m": TOPK,
    "stories260k": TOPK,
    "tinystories656k": TOPK,
    "tinystories656k-relu": RELU,
    "tinystories-opt-0.9m": RELU,
    "tinystories-mixtral-8x": MIXTURE,
    **dict.fromkeys(REAL_MODELS, TOPK),
}
DENSITIES = (0.1, 0.7)
AT_DENSITIES = {f"{model} at {share:.0%}": TOPK._replace(density=share) for model in REAL_MODELS for share in DENSITIES}
"""Language models at other densities than a half."""
PLANTED = {"planted-3%": 0.03, "planted-10%": 0.1, "planted-50%": 0.5}
PLANTED_UNITS, NUM_TOPICS = 14336, 64
SPLITS = {"calibration": ("fit", slice(0, 8)), "validation": ("fit", slice(8, 12)), "test": ("test", slice(0, 4))}
"""Split -> (text, slice of its blocks of CONTEXT_TOKENS)."""


@dataclass(frozen=True)
class Trace:
    """The uses of one family of one layer."""

    case: str
    unit_bytes: int
    order: np.ndarray
    """Unit at each place on flash, int32 [num_units]."""
    rank: np.ndarray
    """Ids by falling frequency, [num_units]."""
    used: dict[str, np.ndarray]
    """Split -> bool [T, num_units], contexts of CONTEXT_TOKENS one after another."""


def traces_of(case: str, folder: Path, num_layers: int) -> Iterator[Trace]:
    """Yields traces: of evenly spread layers of a real model, or of planted layers with different draws."""
    if case in PLANTED:
        for layer in range(num_layers):
            yield _trace(case, NEURON_BYTES, planted(PLANTED[case], layer))
        return
    known = case_of(case.partition(" at ")[0], folder, SPLITS)
    layers = np.linspace(0, known.model.spec.num_hidden_layers - 1, num_layers).round().astype(int)
    for (_, family), masks in used_in(known, set(layers.tolist()), (REAL | AT_DENSITIES)[case]).items():
        yield _trace(case, UNIT_BYTES[family], masks)


def _trace(case: str, unit_bytes: int, masks: dict[str, np.ndarray]) -> Trace:
    active = masks["calibration"].T
    order = ripple.Plugin().arrange(task_of(active, unit_bytes=unit_bytes)).order
    rank = np.argsort(-active.sum(axis=1), kind="stable")
    return Trace(case, unit_bytes, order, rank, masks)


def used_in(case: Case, layers: Collection[int], real: Real) -> dict[tuple[int, str], dict[str, np.ndarray]]:
    """Returns the units that the selector picks on each split, bool [T, num_units], in some layers."""
    method, families, density = real
    selector, spec = load("coldpress.runtime.sparsity", Selector, method), case.model.spec
    density *= spec.num_experts_per_tok / spec.num_experts
    arrays = {
        (layer, family): selector.fit(num_units(family, spec), density, {}, selector.OPTIONS())
        for family in families
        for layer in range(spec.num_hidden_layers)
    }
    stream, found = LayerStream(case.model, 1), dict[tuple[int, str], dict[str, np.ndarray]]()
    for split, tokens in case.splits.items():
        for key, mask in masks_of(stream, tokens, Sparse(selector, families, arrays)).items():
            if key[0] in layers:
                found.setdefault(key, {})[split] = mask
    return found


class Drawn(NamedTuple):
    """A text that uses planted units."""

    num_tokens: int
    document_tokens: int = 128
    """Tokens that keep to one topic, but for strays."""
    stray_share: float = 0.2


DRAWN = {name: Drawn((part.stop - part.start) * CONTEXT_TOKENS) for name, (_, part) in SPLITS.items()}


def planted(density: float, layer: int, texts: Mapping[str, Drawn] = DRAWN) -> dict[str, np.ndarray]:
    """Draws units with a home topic and a planted frequency (tests/support/planted.py), and documents of one topic."""
    rng = np.random.default_rng([7, layer])
    homes = rng.integers(NUM_TOPICS, size=PLANTED_UNITS)
    theta = thresholds(rng.permutation(planted_frequencies(PLANTED_UNITS, density)), NUM_TOPICS)
    found = {}
    for split, text in texts.items():
        topics = np.repeat(rng.integers(NUM_TOPICS, size=text.num_tokens // text.document_tokens), text.document_tokens)
        strays = rng.random(text.num_tokens) < text.stray_share
        topics[strays] = rng.integers(NUM_TOPICS, size=int(strays.sum()))
        found[split] = np.array(
            [TOPIC_STRENGTH * (homes == topic) + rng.standard_normal(PLANTED_UNITS) > theta for topic in topics]
        )
    return found
