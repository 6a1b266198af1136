"""Makes tasks of density allocation for a model whose losses add up, so that the best allocation is known."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coldpress.compiler.density_allocation import Key, Magnitudes, RuleTask, Shares

RNG = np.random.default_rng(5)


def magnitudes_of(values: np.ndarray, bins: int = 4000) -> Magnitudes:
    """Returns a histogram of |values| whose bins are fine enough to stand for the values."""
    edges = np.append(np.linspace(0, np.abs(values).max() + 1e-6, bins), 3e38).astype(np.float32)
    counts = np.histogram(np.abs(values), edges)[0]
    return Magnitudes({"magnitude_histogram": counts.astype(np.uint64), "magnitude_edges": edges}, "here")


def task_of(density: float, num_units: dict[str, int], unit_bytes: dict[str, int], **known: Any) -> RuleTask:
    known["layers"] = tuple(range(known.pop("num_layers", 2)))
    values: dict[str, Any] = {"own": dict.fromkeys(num_units, density)}
    values |= {"magnitudes": None, "losses": None} | known
    return RuleTask(density=density, num_units=num_units, unit_bytes=unit_bytes, **values)


def used_bytes(task: RuleTask, shares: Shares) -> float:
    return sum(shares[key] * task.num_units[key[1]] * task.unit_bytes[key[1]] for key in task.keys)


class Separable:
    """The losses of a model whose parts add up: each part loses in proportion to the squares of skipped signals."""

    def __init__(self, signals: dict[Key, np.ndarray], worths: dict[Key, float]) -> None:
        self.signals, self.worths, self.asked, self.at_once = signals, worths, 0, 0

    def cost(self, key: Key, share: float) -> float:
        squares = np.sort(self.signals[key] ** 2, axis=1)
        return self.worths[key] * float(squares[:, : squares.shape[1] - round(share * squares.shape[1])].sum(1).mean())

    def on_validation(self, shares: Shares) -> float:
        return sum(self.cost(key, share) for key, share in shares.items())

    def of(self, variants: Sequence[Shares]) -> list[float]:
        self.asked += len(variants)
        self.at_once = max(self.at_once, len(variants))
        return [self.on_validation(shares) for shares in variants]


def separable(density: float, units: int, tokens: int = 400) -> tuple[RuleTask, Separable]:
    sizes = {"mlp_in": units, "mlp_mid": units}
    keys = [(layer, family) for layer in range(2) for family in sizes]
    signals = {key: RNG.laplace(size=(tokens, units)) for key in keys}
    losses = Separable(signals, dict(zip(keys, (1.0, 0.1, 0.3, 0.02), strict=True)))
    curves = {key: magnitudes_of(signal) for key, signal in signals.items()}
    given: dict[str, Any] = {"magnitudes": curves.__getitem__, "losses": lambda: losses}
    return task_of(density, sizes, {"mlp_in": 36, "mlp_mid": 18}, **given), losses
