"""Puts density where it saves most of the model's loss, step by step from the whole model to the wanted density.

At each step every family of every layer is pruned a little further, alone, in the model as pruned so far, and the
divergence from the whole model is measured with the build's own selector. The rise of the divergence, divided by the
sum of squares removed, is the worth of a square there. Then every part drops the squares whose worth per byte is below
one common price, which is set to reach the next density. TEAL's Algorithm 1 is greedy, too, but uses the error of a
block's output, which ignores the effect of a layer on later ones. Measuring in the pruned model, rather than in the
whole one, matters: errors of early layers change what later ones select.

Validation text decides between the result and the selector's own division.
"""

import logging
import math
import statistics

from coldpress.compiler.density_allocation import Key, Rule, RuleTask, Shares

LOG = logging.getLogger(__name__)
STEP = 0.8
"""Ratio of densities between steps, and between a part pruned alone and the same part before."""
MOST_PARTS = 16
"""Most parts per family; with more layers, neighbours are measured in groups, so that time grows linearly with layers,
not with their square."""
FURTHEST = 2.0
"""Largest factor by which a share may change in a step: worths hold only near the measured model."""
WORTH_RANGE = math.log(100.0)
"""Largest distance of a worth from the median, as a logarithm: a difference of two losses can be arbitrarily noisy."""


class Plugin(Rule):
    def num_variants(self, num_layers: int, num_families: int) -> int:
        return 1 + num_families * -(-num_layers // _group_size(num_layers))

    def densities(self, task: RuleTask) -> Shares:
        own = task.whole_units(task.same(task.own))
        losses, now, worths = task.losses(), dict.fromkeys(task.keys, 1.0), None
        num_steps = math.ceil(math.log(task.density) / math.log(STEP))
        for step in range(1, num_steps + 1):
            measured = _worths(task, now)
            worths = measured if worths is None else {key: (worths[key] + value) / 2 for key, value in measured.items()}
            now = at_one_price(task, now, worths, task.density ** (step / num_steps))
            LOG.info("allocate: greedy is at a density of %.3f", task.mean(now))
        found = task.whole_units(now)
        judged = [losses.on_validation(shares) for shares in (found, own)]
        LOG.info("allocate: greedy diverges by %.5f nats a token, the selector's own division by %.5f", *judged)
        return found if judged[0] < judged[1] else own


def parts_of(task: RuleTask) -> list[list[Key]]:
    """Returns the parts that are pruned together: a family in one layer or in a few neighbours."""
    size, count = _group_size(len(task.layers)), len(task.layers)
    return [
        [(layer, family) for layer in task.layers[first : first + size]]
        for first in range(0, count, size)
        for family in task.num_units
    ]


def _group_size(num_layers: int) -> int:
    return -(-num_layers // MOST_PARTS)


def _worths(task: RuleTask, now: Shares) -> dict[Key, float]:
    """Returns the logarithm of a square's worth in nats, for each part, in the model as pruned so far."""
    parts = parts_of(task)
    lowered = [{key: _lowered(now[key], task.num_units[key[1]]) for key in part} for part in parts]
    before, *after = task.losses().of([now, *({**now, **change} for change in lowered)])
    removed = [sum(task.squares_between(key, share, now[key]) for key, share in change.items()) for change in lowered]
    known = [
        math.log(max(loss - before, 0.0) / squares) if loss > before and squares > 0 else -math.inf
        for loss, squares in zip(after, removed, strict=True)
    ]
    finite = [value for value in known if value > -math.inf]
    middle = statistics.median(finite) if finite else 0.0
    bounded = (min(max(value, middle - WORTH_RANGE), middle + WORTH_RANGE) for value in known)
    return {key: value for part, value in zip(parts, bounded, strict=True) for key in part}


def _lowered(share: float, num_units: int) -> float:
    return max(min(STEP * share, share - 1 / num_units), 1 / num_units)


def at_one_price(task: RuleTask, now: Shares, worths: Shares, density: float) -> dict[Key, float]:
    """Lowers the shares `now` to the mean `density`; where limits allow, the next square of every part then has the
    same worth per byte. `worths` are logarithms of what a square is worth."""

    def shares_at(log_price: float) -> dict[Key, float]:
        found = {}
        for key in task.keys:
            level = math.exp((log_price + math.log(task.unit_bytes[key[1]]) - worths[key]) / 2)
            least = max(now[key] / FURTHEST, 1 / task.num_units[key[1]])
            found[key] = min(max(task.magnitudes(key).share_above(level), least), min(1.0, now[key] * FURTHEST))
        return found

    low, high = -200.0, 200.0
    for _ in range(60):
        price = (low + high) / 2
        low, high = (price, high) if task.mean(shares_at(price)) > density else (low, price)
    return shares_at(high)
