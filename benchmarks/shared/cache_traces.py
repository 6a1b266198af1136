"""What tokens use of layers, for benchmarks.cache_policies: of real models, and planted at a 7B's size.

A trace has a text that placement and order are made from, one that parameters are chosen on, and one that is reported.
Units lie as Ripple's Algorithm 1 puts them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from benchmarks.evaluation.evaluate import Sparse, evaluate
from benchmarks.shared.cases import case_of
from coldpress.compiler.activity.choice import of_experts
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.stages.order import ripple
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector, used_experts
from coldpress.schemas.families import num_experts, num_units
from tests.support.planted import TOPIC_STRENGTH, planted_frequencies, thresholds
from tests.support.statistics import task_of

UNIT_BYTES = {"up_down": 2 * 4096 * 18 // 32, "mlp_in": 2 * 14336 * 18 // 32, "mlp_mid": 4096 * 18 // 32}
"""A 7B's in int4_group32; a model here has fewer units, of that size each."""
NEURON_BYTES = 3 * 4096 * 18 // 32
CONTEXT_TOKENS = 256
HALF = 0.5


class Real(NamedTuple):
    """How a real model is made sparse."""

    method: str
    families: tuple[str, ...]
    density: float
    """Share of the units, in a mixture of those of the experts that the router picks; 1 where the signal decides."""


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
}
PLANTED = {"planted-3%": 0.03, "planted-10%": 0.1, "planted-50%": 0.5}
PLANTED_UNITS, NUM_TOPICS, DOCUMENT_TOKENS, STRAY_SHARE = 14336, 64, 128, 0.2
SPLITS = {"calibration": ("fit", slice(0, 8)), "validation": ("fit", slice(8, 12)), "test": ("test", slice(0, 4))}
"""Text, and which of its blocks of CONTEXT_TOKENS."""


@dataclass(frozen=True)
class Trace:
    """One family of one layer."""

    case: str
    unit_bytes: int
    order: np.ndarray
    """int32 [num_units], the unit at each place on flash."""
    rank: np.ndarray
    """[num_units], ids by falling frequency."""
    used: dict[str, np.ndarray]
    """Split -> bool [T, num_units], contexts of CONTEXT_TOKENS one after another."""


def traces_of(case: str, folder: Path, num_layers: int) -> Iterator[Trace]:
    """Of a real model, layers evenly spread; of a planted one, layers that differ by what was drawn."""
    if case in PLANTED:
        for layer in range(num_layers):
            yield _trace(case, NEURON_BYTES, planted(PLANTED[case], layer))
        return
    for (_, family), masks in _real(case, folder, num_layers).items():
        yield _trace(case, UNIT_BYTES[family], masks)


def _trace(case: str, unit_bytes: int, masks: dict[str, np.ndarray]) -> Trace:
    active = masks["calibration"].T
    order = ripple.Plugin().arrange(task_of(active, unit_bytes=unit_bytes)).order
    rank = np.argsort(-active.sum(axis=1), kind="stable")
    return Trace(case, unit_bytes, order, rank, masks)


def _real(case: str, folder: Path, num_layers: int) -> dict[tuple[int, str], dict[str, np.ndarray]]:
    """What the selector picks on each split, of some layers."""
    method, families, density = REAL[case]
    selector = load("coldpress.runtime.sparsity", Selector, method)
    known = case_of(case, folder, SPLITS)
    stream, spec = LayerStream(known.model, 1), known.model.spec
    density *= spec.num_experts_per_tok / spec.num_experts
    layers = np.unique(np.linspace(0, spec.num_hidden_layers - 1, num_layers).round().astype(int)).tolist()
    arrays = {
        (layer, family): {
            **selector.fit(num_units(family, spec), density, {}, selector.OPTIONS()),
            "key": (layer, family),
        }
        for family in families
        for layer in range(spec.num_hidden_layers)
    }
    found: dict[tuple[int, str], dict[str, np.ndarray]] = {}
    for split, tokens in known.splits.items():
        masks: dict[tuple[int, str], list[np.ndarray]] = {}

        class Noting(type(selector)):
            """The selector; it notes its choices."""

            def select_many(
                self, activity: np.ndarray, arrays: Any, masks: dict[Any, list[np.ndarray]] = masks
            ) -> np.ndarray:
                mask = super().select_many(activity, arrays)
                experts = num_experts(arrays["key"][1], spec)
                if experts > 1:
                    mask &= of_experts(used_experts(activity, experts), mask.shape[1])
                masks.setdefault(arrays["key"], []).append(mask)
                return mask

        evaluate(stream, tokens, Sparse(cast(Any, Noting)(), families, arrays))
        for key, parts in masks.items():
            if key[0] in layers:
                found.setdefault(key, {})[split] = np.concatenate(parts)
    return found


def planted(density: float, layer: int) -> dict[str, np.ndarray]:
    """Units with a home topic and a planted frequency, as tests/support/planted.py has them; documents of a topic."""
    rng = np.random.default_rng([7, layer])
    homes = rng.integers(NUM_TOPICS, size=PLANTED_UNITS)
    theta = thresholds(rng.permutation(planted_frequencies(PLANTED_UNITS, density)), NUM_TOPICS)
    sizes = {name: (part.stop - part.start) * CONTEXT_TOKENS for name, (_, part) in SPLITS.items()}
    found = {}
    for split, num_tokens in sizes.items():
        topics = np.repeat(rng.integers(NUM_TOPICS, size=num_tokens // DOCUMENT_TOKENS), DOCUMENT_TOKENS)
        strays = rng.random(num_tokens) < STRAY_SHARE
        topics[strays] = rng.integers(NUM_TOPICS, size=int(strays.sum()))
        found[split] = np.array(
            [TOPIC_STRENGTH * (homes == topic) + rng.standard_normal(PLANTED_UNITS) > theta for topic in topics]
        )
    return found
