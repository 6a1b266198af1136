"""Density where it saves most of the model's loss: a step at a time from the whole model to the asked density.

At each step every family of every layer is pruned a little further, alone, in a model that is pruned already as far as
the steps before say, and the divergence from the whole model is measured with the build's own selector. What it rises
by, over the squares that went, is what a square is worth there. Then all lose what is worth less than one price per
byte, which is what makes the next density. TEAL's Algorithm 1 is greedy, too, by the error of a block's output; that
knows nothing of what a layer does to those behind it. Measuring where the model stands, rather than in the whole model,
matters: errors of early layers change what later ones select.

Validation text decides between the result and the division that the selector has by itself.
"""

import logging
import math
import statistics

from coldpress.compiler.stages.allocate._task import Key, Rule, Shares, Task

LOG = logging.getLogger(__name__)
STEP = 0.8
"""Density of a step over that of the step before, and of what is pruned alone over what it was."""
MOST_PARTS = 16
"""Of a family; layers beyond that are measured in groups of neighbours, so that time grows with layers, not their
square."""
FURTHEST = 2.0
"""Factor by which a share may move within a step: worths are known where the model stands."""
WORTH_RANGE = math.log(100.0)
"""How far a worth is believed to lie from the median, as a logarithm: a difference of two losses may be anything."""


class Plugin(Rule):
    """By measured loss, step by step."""

    def num_variants(self, num_layers: int, num_families: int) -> int:
        """Of the model that run at once."""
        return 1 + num_families * -(-num_layers // _group_size(num_layers))

    def densities(self, task: Task) -> Shares:
        """Density of each family in each layer."""
        own = task.whole_units(task.same(task.own(task.density)))
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


def parts_of(task: Task) -> list[list[Key]]:
    """What is pruned together: a family of a layer, or of a few neighbours."""
    size = _group_size(task.num_layers)
    return [
        [(layer, family) for layer in range(first, min(first + size, task.num_layers))]
        for first in range(0, task.num_layers, size)
        for family in task.num_units
    ]


def _group_size(num_layers: int) -> int:
    return -(-num_layers // MOST_PARTS)


def _worths(task: Task, now: Shares) -> dict[Key, float]:
    """Logarithm of what a square is worth in each part, in nats, where the model stands."""
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
    """By a step, by one unit at least, to one unit at most."""
    return max(min(STEP * share, share - 1 / num_units), 1 / num_units)


def at_one_price(task: Task, now: Shares, worths: Shares, density: float) -> dict[Key, float]:
    """Shares whose mean is `density` and whose next squares are all worth the same per byte, as far as they may move.

    Args:
        task: Says bytes and magnitudes.
        now: Shares that have a higher mean.
        worths: Logarithm of what a square is worth.
        density: Of all bytes.
    """

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
