"""Signals for a model that was not measured, by kind, and what formats cost language models in use, by size.

reference.json holds what stage `explore` measured on a Llama-like model with SwiGLU and on its twin with ReLU (7.3M
parameters each). A quote takes the signals alone: on language models in use, formats and selectors lose many times as
much. A signal of unit u is x = s_u · f(z): z is a Gaussian that persists from token to token (a first-order
autoregression), f(z) = sign(z) |z|^p has heavy tails where p > 1, and s_u is log-normal over units. Units with exact
zeros are active where z exceeds a bound of their own. Selectors that price reads are measured with the prices of a 7B's
units, since quotes are asked for such models. `python -m benchmarks.shared.reference` measures the file again.
"""

import functools
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from pydantic import Field

from coldpress.compiler.activity.layer_counts import countable_families
from coldpress.compiler.activity.unit_statistics import NORMS
from coldpress.compiler.candidates import AUTO, formats_for, misfit
from coldpress.compiler.quality.variants import SAMPLE, head_formats, sample_bytes
from coldpress.schemas.base import Record, Share
from coldpress.schemas.curves import Curve, FormatLoss, HeadLoss, KvCacheLoss, Loss, Unexplored
from coldpress.schemas.families import BLOCKS, FormatName, Signal, activity_of, dense_family, num_experts, num_units
from coldpress.schemas.model import ModelSpec

FILE = Path(__file__).with_name("reference.json")
SAME_SIGNAL: Mapping[Signal, Signal] = {"expert_inputs": "mlp_input"}
"""Signals of mixtures that have another name in the measured models."""
SEED = 1


class SignalStatistics(Record):
    log_scale_std: float = Field(ge=0)
    """Standard deviation over units of the logarithm of their root mean square."""
    power: float = Field(ge=1)
    """Exponent p of f(z): the one with the signal's kurtosis, after each unit is divided by its root mean square."""
    correlation: float = Field(ge=0, lt=1)
    """Correlation between consecutive tokens of the signal, divided as for `power`."""
    density: Share
    """Share of values that are not zero."""
    bound_std: float = Field(ge=0)
    """Standard deviation over units of the bound that z has to exceed; 0 where nothing is zero."""


class Kind(Record):
    num_parameters: int
    num_tokens: int
    block_tokens: int
    curves: tuple[Curve, ...]
    formats: tuple[FormatLoss, ...]
    kv_caches: tuple[KvCacheLoss, ...]
    unexplored: tuple[Unexplored, ...]
    signals: dict[Signal, SignalStatistics]


class MixLoss(Loss):
    """The smallest formats by matrix that keep max_ppl_ratio."""

    bits: float
    """Bits of a weight, over the layers' matrices."""


class RealModel(Record):
    name: str
    num_parameters: int
    num_tokens: int
    formats: tuple[FormatLoss, ...]
    kv_caches: tuple[KvCacheLoss, ...]
    heads: tuple[HeadLoss, ...] = ()
    mix: MixLoss | None = None

    def losses(self, spec: ModelSpec) -> dict[str, tuple[Loss, ...]]:
        """Returns the expected losses of layers' and head formats, by field of `Curves`. Formats by matrix are unknown
        before a build: two formats with as many bits stand for them, the larger in the first layers."""
        if self.mix is None or dense_family(spec) != BLOCKS or spec.is_mixture:
            return {"formats": self.formats, "heads": ()}
        known = self.mix.model_dump(exclude={"bits"})
        mixed = FormatLoss(format=_with_bits(self.mix.bits, spec), family=BLOCKS, **known)
        # measured with other selectors' units; those of dense runs lose no more
        blocks = (loss.model_copy(update={"family": BLOCKS}) for loss in self.formats)
        fitting = head_formats(spec)
        return {
            "formats": (*self.formats, *blocks, mixed),
            "heads": tuple(loss for loss in self.heads if loss.format in fitting),
        }

    @property
    def in_words(self) -> str:
        """Name and size, such as `SmolLM2-135M (135M parameters)`."""
        return f"{self.name} ({self.num_parameters / 1e6:,.0f}M parameters)"


class Reference(Record):
    command: str
    date: str
    smooth: Kind
    """An MLP with a gate whose activation is never exactly zero."""
    exact_zeros: Kind
    """The same with ReLU."""
    real: tuple[RealModel, ...]
    """The smallest first."""


@functools.cache
def reference() -> Reference:
    return Reference.model_validate_json(FILE.read_bytes())


def kind_of(spec: ModelSpec) -> Kind | None:
    """Returns the figures of the model's kind; None if no such model was measured (smooth, without a gate)."""
    if spec.exact_zeros:
        return reference().exact_zeros
    return reference().smooth if spec.gated_mlp else None


def real_like(num_parameters: int) -> RealModel:
    """Returns the measured language model of this size: the largest that is not larger, else the smallest, since a
    smaller model mostly loses more."""
    found = reference().real
    return next((one for one in reversed(found) if one.num_parameters <= num_parameters), found[0])


def _with_bits(bits: float, spec: ModelSpec) -> tuple[FormatName, ...]:
    """Returns two formats' mix over layers, of `bits` per weight in the mean, or the nearest to that."""
    fitting = sorted((name for name in formats_for(AUTO) if not misfit(name, spec)), key=bits_of)
    larger = next((name for name in fitting if bits_of(name) >= bits), fitting[-1])
    smaller = next((name for name in reversed(fitting) if bits_of(name) <= bits), fitting[0])
    step = bits_of(larger) - bits_of(smaller)
    count = math.ceil(spec.num_hidden_layers * max(0.0, bits - bits_of(smaller)) / step) if step else 0
    return (larger,) * count + (smaller,) * (spec.num_hidden_layers - count)


def bits_of(name: FormatName) -> float:
    return 8 * sample_bytes(name) / SAMPLE


def drawn_trace(spec: ModelSpec, kind: Kind, layers: tuple[int, ...], num_tokens: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a trace (schemas/curves.py) with the kind's statistics; units' norms are all equal."""
    random, found = np.random.default_rng(SEED), dict[str, np.ndarray]()
    families = countable_families(spec)
    for layer in layers:
        experts = _picked(spec, num_tokens, random)
        for family in families:
            found[f"{layer}.{family}.{NORMS}"] = np.ones(num_units(family, spec), np.float32)
            signal, units = activity_of(family, spec), num_units(family, spec)
            known = kind.signals.get(SAME_SIGNAL.get(signal, signal))
            if f"{layer}.{signal}" in found or known is None:
                continue
            values = drawn(known, num_tokens, units, random)
            if num_experts(family, spec) > 1:
                values *= np.repeat(experts, units // spec.num_experts, axis=1)
            found[f"{layer}.{signal}"] = values.astype(np.float16)
    return found


def drawn(known: SignalStatistics, num_tokens: int, units: int, random: np.random.Generator) -> np.ndarray:
    """Returns a signal with these statistics, float32 [num_tokens, units], nearly stationary from the first token."""
    z = random.standard_normal((num_tokens, units), np.float32)
    # f flattens correlation a little; tests hold the result to the statistics
    fresh = math.sqrt(1 - known.correlation**2)
    for token in range(1, num_tokens):
        z[token] = known.correlation * z[token - 1] + fresh * z[token]
    scale = np.exp(known.log_scale_std * random.standard_normal(units, np.float32))
    values = np.sign(z) * np.abs(z) ** np.float32(known.power) * scale
    if known.density < 1:
        values = np.where(z > _bounds(known, units, random), np.abs(values), np.float32(0))
    return values


def _bounds(known: SignalStatistics, units: int, random: np.random.Generator) -> np.ndarray:
    """Returns the bound of each unit's z: P(z > b) over units and tokens is the density."""
    from scipy.special import ndtri

    middle = -float(ndtri(known.density)) * math.sqrt(1 + known.bound_std**2)
    return (middle + known.bound_std * random.standard_normal(units)).astype(np.float32)


def _picked(spec: ModelSpec, num_tokens: int, random: np.random.Generator) -> np.ndarray:
    """Returns the experts that each token uses, bool [num_tokens, num_experts], equally likely."""
    order = np.argsort(random.random((num_tokens, spec.num_experts)), axis=1)
    return order < spec.num_experts_per_tok
