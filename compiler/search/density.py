"""Divides a density among families and layers by the rule that `density_allocation` names. Only rules that measure
losses run the model, on the first blocks of the calibration and validation texts."""

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from coldpress.compiler.activity.calibration_pass import ComputeConfig, stream_of
from coldpress.compiler.activity.choice import Choice
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.unit_statistics import UnitStatistics, all_statistics
from coldpress.compiler.activity.variants import Variant, compare, last_hidden
from coldpress.compiler.density_allocation import Key, Magnitudes, Rule, RuleTask, Shares
from coldpress.compiler.io import Workspace, digest, load_arrays
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.activations import Activations
from coldpress.schemas.base import PositiveCount
from coldpress.schemas.config import Key as ConfigKey
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curves
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.drafter import Drafter
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import layers_of, mlp_shares, num_units, used_share
from coldpress.schemas.layout import CacheName
from coldpress.schemas.model import Model, ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

LOG = logging.getLogger(__name__)
UNIFORM = "uniform"
ALLOCATION_TOKENS = 512
Fit = Callable[[Key, float], Mapping[str, np.ndarray]]
"""(layer and family, density) -> the selector's arrays."""


@dataclass
class _Text:
    name: str
    tokens: np.ndarray
    """int [num_blocks, T]."""
    whole: "Tensor | None" = None
    """Hidden states after the last layer, [num_blocks, T, hidden_size]; None until they are needed."""


class MeasuredLosses:
    def __init__(
        self,
        stream: LayerStream,
        selector: Selector[Any],
        fit: Fit,
        calibration: np.ndarray,
        validation: np.ndarray,
        work: Workspace,
    ) -> None:
        """Prepares to measure Kullback-Leibler divergences of next-token distributions, in nats per token; runs nothing
        yet (compiler/stages/verify/divergence.py measures the artifact's). `calibration` is the text of `of`,
        `validation` that of `on_validation`: int [num_blocks, T]."""
        self._stream, self._selector, self._fit, self._work = stream, selector, fit, work
        self._calibration, self._validation = _Text("calibration", calibration), _Text("validation", validation)

    def of(self, variants: Sequence[Shares]) -> list[float]:
        """Returns each variant's divergence; layers before a variant's first difference run once for all."""
        return self._answered(self._calibration, variants)

    def on_validation(self, shares: Shares) -> float:
        return self._answered(self._validation, [shares])[0]

    def _answered(self, text: _Text, variants: Sequence[Shares]) -> list[float]:
        """Returns divergences, and keeps them under a digest of the question: other budgets ask in the same folder."""
        question = (json.dumps(sorted([*key, share] for key, share in variant.items())) for variant in variants)
        key = f"losses-{digest(text.name, *question)[:16]}"
        kept = self._work.once(key, lambda: {"nats": self._measured(text, variants)})
        return load_arrays(kept)["nats"].tolist()

    def _measured(self, text: _Text, variants: Sequence[Shares]) -> np.ndarray:
        """Returns the divergence of each variant, float64 [num_variants]."""
        # variants share most of their densities, so each is fitted once
        asked = dict.fromkeys((key, share) for variant in variants for key, share in variant.items())
        fitted = {(key, share): self._fit(key, share) for key, share in asked}
        families = tuple(dict.fromkeys(family for _, family in variants[0]))

        def choice(variant: Shares) -> Choice:
            arrays = {key: fitted[key, share] for key, share in variant.items()}
            return Choice(self._selector, arrays, self._stream.spec)

        running = [
            Variant(choice(variant), families, _first_difference(variants[0], variant) if number else 0)
            for number, variant in enumerate(variants)
        ]
        if text.whole is None:
            text.whole = self._stream.last_hidden(text.tokens)
        hidden = last_hidden(self._stream, text.tokens, running)
        return compare(self._stream, text.tokens, text.whole, hidden).kld_sums.sum(axis=1) / text.tokens.size


def _first_difference(one: Shares, other: Shares) -> int:
    """Returns the first layer that differs; 0 if none does."""
    return min((key[0] for key, share in other.items() if share != one[key]), default=0)


class AllocationConfig(ComputeConfig):
    density_allocation: Annotated[str, ConfigKey(plugins="coldpress.compiler.density_allocation")] = Field(
        default="greedy",
        description="how the density is divided among families and layers, where it is a choice; greedy passes "
        f"{ALLOCATION_TOKENS} tokens through a model of 32 layers 74 times at half density (hours on two cores at "
        "7B), dip 22 times, global_threshold and uniform never",
    )
    allocation_tokens: PositiveCount = Field(
        default=ALLOCATION_TOKENS,
        description="calibration tokens that the loss of densities is measured on; whole blocks",
    )


@dataclass(frozen=True)
class AllocationInputs:
    model: Model
    activations: Activations
    device: DeviceProfile
    work: Workspace
    corpus: Corpus | None
    threads: int
    curves: Curves | None = None
    """None where the method was given."""
    num_plans: int = 1
    """Plans of the artifact: its tables have the selector's arrays of each."""
    caches: tuple[CacheName, ...] = ()
    """Cache policies that the plans may get; empty: the one that is asked for."""
    drafter: Drafter | None = None


@dataclass(frozen=True)
class Method:
    selector: Selector[Any]
    options: Any
    unit_bytes: Mapping[str, int]
    """By family, in the order of the selector's families; of the coarsest format."""
    read_units: Mapping[tuple[int, str], np.ndarray]

    def statistics(self, inputs: AllocationInputs, resident_share: float = 0.0) -> dict[Key, UnitStatistics]:
        """Returns the statistics that the selector is fitted to, if DRAM holds `resident_share` of all units."""
        return all_statistics(inputs.model, inputs.activations, self.unit_bytes, self.read_units, resident_share)


def allocated(
    config: AllocationConfig, inputs: AllocationInputs, method: Method, density: float
) -> dict[str, tuple[float, ...]]:
    """Returns the density of every layer per family, at which a token uses `density` of the MLP's weights, and of
    attention's weights on flash. A density of 1 is not divided.

    A rule divides the MLP's density among the MLP's families, then attention's among attention's, each while the rest
    of the model uses all its units. If the selector's own options divide the density, no rule overrides that choice.
    For a mixture of experts, rules divide the units of a token's experts: `density` is a share of those, and the
    returned densities are shares of all experts' units.

    Raises:
        ColdpressError: if the selector cannot reach the density, or the rule needs something that is missing.
    """
    name, known, spec = config.density_allocation, _RuleInputs(config, inputs, method), inputs.model.spec
    own = method.selector.divide(density, spec, method.options)
    if density >= 1 or _options_divide(method, density, spec):
        LOG.info("allocate: density_allocation=%s has nothing to divide: options or a density of 1 decide", name)
        name = UNIFORM
    rule, held = load("coldpress.compiler.density_allocation", Rule, name), mlp_shares(own, spec)
    mlp = {family: share for family, share in own.items() if held[family]}
    attention = {family: share for family, share in own.items() if not held[family]}
    shares: dict[Key, float] = {}
    if mlp:
        shares |= rule.densities(known.task(method.selector.flash_density(density, spec, method.options), mlp))
    if attention:
        shares |= rule.densities(known.task(density, attention))
    found: dict[str, dict[int, float]] = {family: {} for family in method.unit_bytes}
    for (layer, family), share in shares.items():
        found[family][layer] = used_share(family, spec) * share
    return {family: over_layers(family, spec, having) for family, having in found.items()}


def _options_divide(method: Method, density: float, spec: ModelSpec) -> bool:
    selector = method.selector
    plain = selector.divide(density, spec, selector.OPTIONS())
    own = selector.divide(density, spec, method.options)
    return any(plain.get(family, share) != share for family, share in own.items())


class _RuleInputs:
    def __init__(self, config: AllocationConfig, inputs: AllocationInputs, method: Method) -> None:
        self._config, self._inputs, self._method = config, inputs, method

    def task(self, density: float, own: Mapping[str, float]) -> RuleTask:
        spec = self._inputs.model.spec
        return RuleTask(
            density=density,
            layers=layers_of(next(iter(own)), spec),
            num_units={family: round(used_share(family, spec) * num_units(family, spec)) for family in own},
            unit_bytes={family: self._method.unit_bytes[family] for family in own},
            own=own,
            magnitudes=self.magnitudes,
            losses=lambda: self.losses,
        )

    @functools.cached_property
    def statistics(self) -> dict[Key, UnitStatistics]:
        return self._method.statistics(self._inputs)

    @functools.cache  # noqa: B019 - the object lives only while its rule runs
    def magnitudes(self, key: Key) -> Magnitudes:
        used = used_share(key[1], self._inputs.model.spec)
        return Magnitudes(self.statistics[key], f"layer {key[0]}, family {key[1]}", used)

    @functools.cached_property
    def losses(self) -> MeasuredLosses:
        """Measures the model's losses under the selector; raises ColdpressError if there is no text."""
        inputs, selector = self._inputs, self._method.selector
        if inputs.corpus is None:
            raise ColdpressError(
                f"density_allocation={self._config.density_allocation} measures what densities cost on text, and no "
                "corpus was given; give --corpus, or use density_allocation=uniform"
            )

        def fit(key: Key, share: float) -> Mapping[str, np.ndarray]:
            units, used = num_units(key[1], inputs.model.spec), used_share(key[1], inputs.model.spec)
            return selector.fit(units, used * share, self.statistics[key], self._method.options)

        blocks = [load_arrays(inputs.corpus.split(name).arrays)["tokens"] for name in ("calibration", "validation")]
        count = max(1, self._config.allocation_tokens // blocks[0].shape[1])
        stream, _ = stream_of(self._config, inputs.model, inputs.threads)
        return MeasuredLosses(stream, selector, fit, blocks[0][:count], blocks[1][:count], inputs.work)


def over_layers(family: str, spec: ModelSpec, having: Mapping[int, float]) -> tuple[float, ...]:
    """Returns the density of every layer; a layer without units of the family counts as one that uses all."""
    whole = used_share(family, spec)
    return tuple(having.get(layer, whole) for layer in range(spec.num_hidden_layers))
