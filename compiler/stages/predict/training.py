"""Trains one layer's activation predictor: fc2 · relu(fc1 · x) against the layer's activation bits.

The loss is binary cross-entropy with both classes in balance (LLM in a flash 3.1, B). A predictor starts from the input
directions that its gates use most: the best linear map of its rank for the inputs that occur, ignoring the ReLU. The
calibration text has three parts: tokens to fit on, to choose by and to judge on. In a mixture of experts, a token has
scores only for the units of its own experts; loss, thresholds and quality ignore the others. Densities are still shares
of all units, as everywhere (schemas/families: `used_share`). Only torch and numpy, one thread, no files.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from coldpress.compiler.activity.predictor_network import NetworkWeights, rows_of, scores
from coldpress.schemas.families import FormatName
from coldpress.schemas.predictors import Point

EVALUATIONS = 6
LEARNING_RATE = 0.1
"""Adam's first step size times sqrt(hidden_size): relative to the usual size of such a layer's weights."""
OVERSAMPLING, POWER_ITERATIONS = 32, 2
"""More columns and rounds change no predictor's quality (docs/experiments/selectors.md)."""
RIDGE = 1e-3
"""Added to the inputs' covariance, relative to its mean diagonal: directions that hardly occur get no weight."""


@dataclass(frozen=True)
class Examples:
    inputs: torch.Tensor
    """float32 [num_tokens, hidden_size]."""
    active: torch.Tensor
    """uint8 [num_tokens, n]: all units, or those of each token's experts, one expert after another."""
    experts: torch.Tensor | None = None
    """bool [num_tokens, E]: the experts that each token uses, equally many for each token; None without experts."""

    @property
    def used_share(self) -> float:
        """The share of all units that `active` covers."""
        return 1.0 if self.experts is None else int(self.experts[0].sum()) / self.experts.shape[1]

    @property
    def density(self) -> float:
        return _share(self.active) * self.used_share

    def scores(self, weights: NetworkWeights) -> torch.Tensor:
        return scores(weights, self.inputs, self.experts)


def _share(active: torch.Tensor) -> float:
    return int(np.count_nonzero(active.numpy())) / active.numel()


def _often(active: torch.Tensor) -> torch.Tensor:
    """Returns each unit's share of active tokens, float64; numpy sums bytes without copying them to 8 bytes each."""
    return torch.from_numpy(active.numpy().sum(axis=0, dtype=np.int64)).double() / len(active)


def split(
    inputs: np.ndarray, bits: np.ndarray, held_out_share: float, experts: np.ndarray | None = None
) -> tuple[Examples, Examples, Examples]:
    """Returns the parts to fit on, to choose by and to judge on, in the order of the text; the last two share the
    tokens that are held out, a share `held_out_share`. `inputs` are float16 [num_tokens, hidden_size], `bits` uint8
    [num_units, ceil(num_tokens / 8)], packed along tokens, `experts` bool [num_tokens, E], equally many for each
    token."""
    num_tokens = len(inputs)
    active = _unpacked(bits, num_tokens).T if experts is None else _labels(bits, torch.from_numpy(experts))
    held_out = max(2, round(num_tokens * held_out_share))
    edges = [0, num_tokens - held_out, num_tokens - held_out // 2, num_tokens]
    parts = [
        Examples(
            torch.tensor(inputs[start:stop].astype(np.float32)),
            torch.tensor(np.ascontiguousarray(active[start:stop])),
            None if experts is None else torch.from_numpy(experts[start:stop]),
        )
        for start, stop in itertools.pairwise(edges)
    ]
    return parts[0], parts[1], parts[2]


def _unpacked(bits: np.ndarray, num_tokens: int) -> np.ndarray:
    return np.unpackbits(bits, axis=1, count=num_tokens, bitorder="little")


def _labels(bits: np.ndarray, experts: torch.Tensor) -> np.ndarray:
    """Returns `Part.active` of all tokens; unpacks one expert at a time."""
    num_tokens, count = experts.shape
    found = np.empty((num_tokens, int(experts[0].sum()), len(bits) // count), np.uint8)
    for units, tokens, places in rows_of(experts, len(bits)):
        found[tokens, places] = _unpacked(bits[units], num_tokens).T[tokens]
    return found.reshape(num_tokens, -1)


def main_directions(part: Examples, gate: torch.Tensor, count: int) -> torch.Tensor:
    """Returns input directions by falling share in `gate` · x, float32 [at most count, hidden_size], each mostly
    positive: the singular vectors of the gate, float32 [num_units, hidden_size], for inputs of the covariance that
    `part` has. The first r rows span the best linear predictor of rank r."""
    inputs = part.inputs
    covariance = inputs.T @ inputs / len(inputs)
    covariance.diagonal().add_(RIDGE * float(covariance.diagonal().mean()) + torch.finfo(torch.float32).tiny)
    root = torch.linalg.cholesky(covariance)
    basis = _leading_basis(gate, root, count)
    seen = gate @ (root @ basis)
    _, turned = torch.linalg.eigh(seen.T @ seen)
    vectors = (basis @ turned).flip(1)[:, :count]
    directions = torch.linalg.solve_triangular(root.T, vectors, upper=True).T
    flipped = (inputs @ directions.T).mean(dim=0) < 0
    return torch.where(flipped[:, None], -directions, directions).contiguous()


def _leading_basis(gate: torch.Tensor, root: torch.Tensor, count: int) -> torch.Tensor:
    """Returns orthonormal columns that nearly span the first `count` right singular vectors of gate · root: by power
    iteration on a random subspace (Halko, Martinsson and Tropp 2011, Algorithm 4.4), or all columns if the subspace
    would have half of them."""
    size, width = len(root), count + OVERSAMPLING
    if 2 * width >= size:
        return torch.eye(size)
    basis = torch.randn(size, width, generator=torch.Generator().manual_seed(0))
    for _ in range(POWER_ITERATIONS):
        basis, _ = torch.linalg.qr(root.T @ (gate.T @ (gate @ (root @ basis))))
    return basis


def initial(rank: int, directions: torch.Tensor, part: Examples, gate: torch.Tensor) -> NetworkWeights:
    """Returns the linear predictor to start from; ranks beyond hidden_size repeat the first directions negated."""
    rows = directions[:rank]
    if rank > len(directions):
        rows = torch.cat([rows, -directions[: rank - len(directions)]])
    covered = part.inputs.T @ (part.inputs @ rows.T) / len(part.inputs)  # covariance · rows.T
    return NetworkWeights(rows.clone(), gate @ covered)


def random_gate(num_units: int, hidden_size: int, seed: int) -> torch.Tensor:
    """Stands in for a gate where activity is no sign of a matrix's output, float32 [num_units, hidden_size]."""
    return torch.randn(num_units, hidden_size, generator=torch.Generator().manual_seed(seed)) / math.sqrt(hidden_size)


def train(
    start: NetworkWeights,
    fitted: Examples,
    chosen_by: Examples,
    steps: int,
    batch_tokens: int,
    target_recall: float,
    seed: int,
    format_name: FormatName,
    dtype: torch.dtype = torch.float32,
) -> NetworkWeights:
    """Runs Adam from `start` with a cosine schedule; returns the weights that, as stored in `format_name`, predict
    least of `chosen_by` at `target_recall`. It ends after `steps` updates, or two evaluations in a row without a gain.
    An update computes in `dtype`; weights, Adam's state and the scores that decide are float32."""
    fc1, fc2 = start.fc1.clone(), start.fc2.clone()
    optimizer = torch.optim.Adam([fc1, fc2])
    rate, weight = LEARNING_RATE / math.sqrt(fc1.shape[1]), _positive_weight(fitted)
    batches = _Batches(len(fitted.inputs), batch_tokens, seed)
    best, lowest, stale = start.rounded(format_name), math.inf, 0
    for step in range(steps):
        _set_gradients(fc1, fc2, fitted, batches.take(), weight, dtype)
        optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.step()
        if (step + 1) % max(1, steps // EVALUATIONS) == 0:
            weights = NetworkWeights(fc1, fc2).rounded(format_name)
            density = quality(weights, choose_threshold(weights, chosen_by, target_recall), chosen_by).predicted_density
            best, stale = (weights, 0) if density < lowest else (best, stale + 1)
            lowest = min(lowest, density)
            if stale == 2:
                break
    return best


def _positive_weight(part: Examples) -> float:
    """Returns the weight of active units that balances the two classes; bounded if one of them hardly occurs."""
    density = _share(part.active)
    return min(1e4, max(1e-4, (1 - density) / max(density, 1e-9)))


class _Batches:
    """Token indices in random order; every token occurs once before any repeats."""

    def __init__(self, num_tokens: int, batch_tokens: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._num_tokens, self._size = num_tokens, min(num_tokens, batch_tokens)
        self._order, self._position = torch.empty(0, dtype=torch.int64), 0

    def take(self) -> torch.Tensor:
        if self._position + self._size > len(self._order):
            self._order, self._position = torch.randperm(self._num_tokens, generator=self._generator), 0
        self._position += self._size
        return self._order[self._position - self._size : self._position]


def _set_gradients(
    fc1: torch.Tensor, fc2: torch.Tensor, part: Examples, batch: torch.Tensor, weight: float, dtype: torch.dtype
) -> None:
    """Sets gradients of the mean balanced cross-entropy by hand: autograd's passes over [tokens, units] cost twice as
    much. d loss / d score = sigmoid(score) where a unit is not active, -weight · sigmoid(-score) where it is: in this
    form no digits cancel, which bfloat16 could not afford."""
    inputs, active = part.inputs[batch].to(dtype), part.active[batch].to(dtype)
    low = fc2.to(dtype)
    inner = torch.relu_(inputs @ fc1.to(dtype).T)
    if part.experts is None:
        error = _error(inner @ low.T, active, weight)
        fc2.grad, back = (error.T @ inner).float() / error.numel(), error @ low
    else:
        fc2.grad, back = torch.zeros_like(fc2), torch.zeros_like(inner)
        each = active.unflatten(1, (int(part.experts[0].sum()), -1))
        for units, tokens, places in rows_of(part.experts[batch], len(fc2)):
            own = inner[tokens]
            error = _error(own @ low[units].T, each[tokens, places], weight)
            fc2.grad[units] = (error.T @ own).float() / active.numel()
            back[tokens] += error @ low[units]  # each token once
    fc1.grad = (back.mul_(inner > 0).T @ inputs).float() / active.numel()


def _error(found: torch.Tensor, active: torch.Tensor, weight: float) -> torch.Tensor:
    """Returns d loss / d score, times the number of scores; overwrites both `found` and `active`."""
    return found.mul_(1 - 2 * active).sigmoid_().mul_(active.mul_(-1 - weight).add_(1))


def skewness(part: Examples) -> float:
    """Returns the power of units' own frequency to predict whether they are active: 0 none, 1 full (PowerInfer 5.1).

    One minus the mean entropy of the units' activity, relative to that of units with equal frequencies. A unit that is
    always or never active needs no predictor. An expert's units count on the tokens that use it.
    """
    frequency, weights = _frequency(part)
    entropy = torch.special.entr(frequency) + torch.special.entr(1 - frequency)
    total = weights.sum()
    mean = (weights * frequency).sum() / total
    even = torch.special.entr(mean) + torch.special.entr(1 - mean)
    return min(1.0, max(0.0, 1 - float((weights * entropy).sum() / total / even))) if even > 0 else 1.0


def _frequency(part: Examples) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (each unit's share of active tokens among those that may use it, the number of those), float64
    [num_units]; skips experts that no token uses."""
    if part.experts is None:
        frequency = _often(part.active)
        return frequency, torch.full_like(frequency, len(part.active))
    num_units = round(part.active.shape[1] / part.used_share)
    each = part.active.unflatten(1, (int(part.experts[0].sum()), -1))
    rows = list(rows_of(part.experts, num_units))
    frequency = torch.cat([_often(each[tokens, places]) for _, tokens, places in rows])
    uses = torch.tensor([float(len(tokens)) for _, tokens, _ in rows], dtype=torch.float64)
    return frequency, uses.repeat_interleave(each.shape[2])


def limit_threshold(weights: NetworkWeights, part: Examples, density: float) -> float:
    """Returns the smallest threshold at which at most `density` of all units are predicted."""
    found = part.scores(weights).flatten()
    kept = math.floor(min(1.0, density / part.used_share) * len(found))
    if kept == len(found):
        return float(found.min())
    # just above the highest score left out, so that equal scores are left out, too
    left_out = torch.kthvalue(found, len(found) - kept).values
    return float(torch.nextafter(left_out, torch.tensor(math.inf)))


def choose_threshold(weights: NetworkWeights, part: Examples, target_recall: float) -> float:
    """Returns the largest threshold with at least `target_recall`; one above every score without any active unit."""
    found = part.scores(weights)
    positive = found[part.active.bool()]
    if not len(positive):
        return float(torch.nextafter(found.max(), torch.tensor(math.inf)))
    # 1e-9: (1 - 0.9) * 10 is just below 1 in floating point
    missed = math.floor((1 - target_recall) * len(positive) + 1e-9)
    return float(torch.kthvalue(positive, min(len(positive), missed + 1)).values)


def quality(weights: NetworkWeights, threshold: float, part: Examples) -> Point:
    """Measures predictions on `part`; recall is 1 if nothing is active, precision 1 if nothing is predicted."""
    predicted, active = part.scores(weights) >= threshold, part.active.bool()
    hits, num_predicted, num_active = int((predicted & active).sum()), int(predicted.sum()), int(active.sum())
    return Point(
        threshold=threshold,
        recall=hits / num_active if num_active else 1.0,
        precision=hits / num_predicted if num_predicted else 1.0,
        predicted_density=num_predicted / predicted.numel() * part.used_share,
    )
