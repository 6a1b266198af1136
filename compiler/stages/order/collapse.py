"""Orders units for the reads that really happen: local search on the collapsed-read cost of the units left on flash.

Algorithm 1 (order/ripple.py) joins pairs, so it counts a read as saved only where two units lie side by side, and it
spends its best places on hot units, which are pinned in DRAM anyway. This search uses the runtime's cost: two active
units with a gap between them cost the gap's bytes or one more read, whichever is cheaper (access collapse, Ripple 5.1).

Order and gap are chosen together. Where a device's reads and bytes add up, a byte is worth 1 / g reads with the
break-even gap g; where they overlap, the best gap g of an order about balances both, and a byte is worth as much. A
page of rounding comes on top where units are not whole pages. The search prices a gap accordingly.
It starts from Algorithm 1 over the plan's cache misses (order/misses.py) and looks only at misses: at the density of
top-k methods that is worth several times what the search gains on all activations (docs/experiments/order.md).

Units are moved beside units they are often active with. The cost of a token in reads is one for each active unit, less
what the active unit before it saves,

    saved(distance) = max(0, 1 - (distance - 1) * gap_cost)

so 1 for a neighbour and nothing from `reach` on, where a separate read costs no more than the gap. A segment is taken
out and put back at the cut beside one of its unit's friends where it saves most. All tokens are looked at together, 64
a word: with A_k the tokens whose nearest active unit to the left of a cut is the k-th, B_m the same to the right, and
U_j, V_j the unions of the first j of them, saved(k + m - 1) = saved(k) + saved(m) - 1 makes the sum over all
pairs that span the cut linear in reach:

    sum over k of saved(k) |A_k & V_(reach+1-k)| + sum over m of (saved(m) - 1) |B_m & U_(reach+1-m)|

Savings are integers (SCALE is one read), so sums are exact, and every move strictly lowers the cost.
"""

import numpy as np

from coldpress.compiler.compiled import compiled, population_count
from coldpress.compiler.stages.order import misses
from coldpress.compiler.stages.order._coactivation import to_words
from coldpress.compiler.stages.order._task import Arranged, Heuristic, Task

NUM_FRIENDS = 8
SCALE = 1 << 20
LAST_GAIN = 5e-4
"""A sweep that lowers the cost by a smaller share than this ends its phase (single units, then segments)."""
LONGEST_SEGMENT = 3
MAX_WORDS = 1 << 30
"""Words of activations that a search may look at: bounds its time to about a second, equally on every machine.
One sweep over 14,336 units takes about a quarter of it at 4,096 tokens and a reach of 8."""


class Plugin(Heuristic):
    def arrange(self, task: Task) -> Arranged:
        start = misses.Plugin().arrange(task).order
        return Arranged(refine(task, start, gap_cost(task, task.judge(start).gap_bytes)), "collapse")


def gap_cost(task: Task, gap_bytes: int) -> float:
    """Returns the cost of reading one unused unit, as a share of what two neighbours save, at most 1; `gap_bytes`: the
    best gap. Neighbours save a whole read, less the parts of other layers that lie between them in a group."""
    page_bytes = task.flash.page_bytes.value
    rounding = page_bytes if task.unit_bytes % page_bytes else 0
    between = task.stride_bytes - task.unit_bytes
    return min(1.0, task.stride_bytes / max(1, gap_bytes + rounding - between))


def refine(task: Task, start: np.ndarray, gap_cost: float) -> np.ndarray:
    """Improves `start`, whose pinned units lie last, for the units that the cache misses; int32 [num_units]."""
    units, missed = task.demand.left_on_flash, task.demand.missed
    if units.size < 3:
        return start
    friends = nearest_friends(missed.counts, missed.totals, units, min(NUM_FRIENDS, units.size - 1))
    place_of = np.empty(task.num_units, np.int64)
    place_of[units] = np.arange(units.size)
    order = place_of[start[: units.size]]
    visits = np.random.default_rng(task.seed).permutation(units.size)
    improve(to_words(missed.bits[units]), order, friends, gap_cost, visits)
    return task.with_pinned_last(units[order])


def nearest_friends(counts: np.ndarray, totals: np.ndarray, units: np.ndarray, num_friends: int) -> np.ndarray:
    """Returns for each of `units`, ascending, its most similar ones (Jaccard), int32 [m, num_friends], nearest first:
    indices into `units`, -1 where there are no more. Ties keep roughly the order of ids: the result is deterministic,
    and either friend would do. Of the co-activation counts [n, n] only [i, j] with i < j is read; `totals` are int64
    [n]."""
    friends = np.full((units.size, num_friends), -1, np.int32)
    likeness = np.zeros((units.size, num_friends), np.float32)
    _find(counts, totals, units, friends, likeness)
    return friends


@compiled
def _find(counts, totals, units, friends, likeness):
    last = friends.shape[1] - 1
    for x in range(units.size):
        i = units[x]
        for y in range(x + 1, units.size):
            j = units[y]
            both = np.float32(counts[i, j])
            either = np.float32(totals[i] + totals[j]) - both
            if both > likeness[x, last] * either:
                _insert(friends[x], likeness[x], y, both / either)
            if both > likeness[y, last] * either:
                _insert(friends[y], likeness[y], x, both / either)


@compiled
def _insert(friends, likeness, unit, value):
    place = friends.size - 1
    while place > 0 and likeness[place - 1] < value:
        friends[place], likeness[place] = friends[place - 1], likeness[place - 1]
        place -= 1
    friends[place], likeness[place] = unit, value


def gap_step(gap_cost: float) -> int:
    """Returns `gap_cost` in units of 1 / SCALE read, from 1 to SCALE: the loss per unit between two active units."""
    return min(SCALE, max(1, round(gap_cost * SCALE)))


def improve(words: np.ndarray, order: np.ndarray, friends: np.ndarray, gap_cost: float, visits: np.ndarray) -> float:
    """Improves `order` in place, unit ids by place, int64 [n]; returns the reads saved over all tokens. Single units
    are moved until that hardly helps any more, then segments of up to LONGEST_SEGMENT units.

    `words` are packed activations uint64 [n, num_words], `friends` candidates for a place beside, int32 [n, k], -1 for
    none, `gap_cost` is the cost of one unit read for nothing, in reads, and `visits` the order in which units are
    tried, a permutation, int64 [n].
    """
    step = gap_step(gap_cost)
    places = np.empty_like(order)
    places[order] = np.arange(order.size)
    cost = total_cost(words, order, step)
    saved = words_seen = 0
    words_per_cut = 2 * words.shape[1] * _reach(step, order.size)
    for longest in (1, LONGEST_SEGMENT):
        awake = np.ones(order.size, bool)
        while True:
            cuts = (2 * longest - 1) * int(awake.sum()) * (1 + 2 * friends.shape[1])
            words_seen += cuts * words_per_cut
            if words_seen > MAX_WORDS:
                return saved / SCALE
            gained, awake = _sweep(words, order, places, friends, step, longest, visits, awake)
            saved += gained
            if gained <= LAST_GAIN * (cost - saved):
                break
    return saved / SCALE


def total_cost(words: np.ndarray, order: np.ndarray, step: int) -> int:
    """Returns the cost of an order over all tokens, in 1 / SCALE reads."""
    active = int(np.bitwise_count(words).sum(dtype=np.int64))
    return SCALE * active - int(_saved_along(words, order, step))


@compiled
def _reach(step, num_units):
    return min(num_units, (SCALE + step - 1) // step)


@compiled
def _saved_along(words, order, step):
    """Sums over all tokens and places what each active unit saves because of the active unit before it."""
    num_words, reach = words.shape[1], _reach(step, order.size)
    left, total = np.empty(num_words, np.uint64), 0
    for place in range(order.size):
        row = words[order[place]]
        for w in range(num_words):  # to assign a slice, numba would compile a message for two seconds
            left[w] = row[w]
        for distance in range(1, min(reach, place) + 1):
            before, found = words[order[place - distance]], 0
            for w in range(num_words):
                found += population_count(left[w] & before[w])
                left[w] &= ~before[w]
            total += (SCALE - (distance - 1) * step) * found
    return total


@compiled
def _unions(words, order, start, length, cut, side, unions):
    """Fills in the unions of the 1, 2, ... nearest units to one side of a cut; returns how many there are. Cuts are
    places of the order without its segment [start, start + length)."""
    num_rows, place = 0, cut if side > 0 else cut - 1
    while num_rows < unions.shape[0] - 1 and 0 <= place < order.size - length:
        row = words[order[place if place < start else place + length]]
        for w in range(row.size):
            unions[num_rows + 1, w] = unions[num_rows, w] | row[w]
        num_rows += 1
        place += side
    return num_rows


@compiled
def _first_active(words, order, start, length, turned, firsts):
    """Finds the tokens on which each unit of a segment is the first active one; at [length] the tokens without any."""
    firsts[length, :] = ~np.uint64(0)
    for i in range(length):
        row = words[order[start + length - 1 - i] if turned else order[start + i]]
        for w in range(row.size):
            firsts[i, w] = row[w] & firsts[length, w]
            firsts[length, w] &= ~row[w]


@compiled
def _spanning(near, num_near, far, num_far, idle, length, step, offset, reach):
    """Returns one of the two sums over pairs that span a cut: the savings with the segment between, less without it.
    `offset` is taken from saved(k): 0 for one side, SCALE for the other."""
    total = 0
    for k in range(1, min(num_near, reach) + 1):
        before, after, b, a = 0, 0, min(num_far, reach + 1 - k), min(num_far, max(0, reach + 1 - k - length))
        for w in range(idle.size):
            nearest = near[k, w] & ~near[k - 1, w]
            before += population_count(nearest & far[b, w])
            after += population_count(nearest & far[a, w] & idle[w])
        saved = SCALE - (k - 1) * step - offset
        total += (saved - (length * step if offset == 0 else 0)) * after - saved * before
    return total


@compiled
def _beside(near, num_near, firsts, length, step, reach):
    """Returns what a segment and the units to one side of it save each other."""
    total = 0
    for k in range(1, num_near + 1):
        for i in range(min(length, reach + 1 - k)):
            found = 0
            for w in range(firsts.shape[1]):
                found += population_count(near[k, w] & ~near[k - 1, w] & firsts[i, w])
            total += (SCALE - (k - 1 + i) * step) * found
    return total


@compiled
def _saved_at(words, order, start, length, cut, from_left, from_right, left, right, step):
    """Returns what a segment saves at a cut, less what the units around the cut lose by being further apart."""
    reach = left.shape[0] - 1
    num_left = _unions(words, order, start, length, cut, -1, left)
    num_right = _unions(words, order, start, length, cut, 1, right)
    idle = from_left[length]
    total = _beside(left, num_left, from_left, length, step, reach)
    total += _beside(right, num_right, from_right, length, step, reach)
    total += _spanning(left, num_left, right, num_right, idle, length, step, 0, reach)
    return total + _spanning(right, num_right, left, num_left, idle, length, step, SCALE, reach)


@compiled
def _best_cut(words, order, places, friends, unit, start, length, head, left, right, step):
    """Returns (gain, cut, turned) of the best place beside a friend of `unit`, the segment's first unit or its last."""
    ahead = np.empty((length + 1, words.shape[1]), np.uint64)
    back = np.empty_like(ahead)
    _first_active(words, order, start, length, False, ahead)
    _first_active(words, order, start, length, True, back)
    now = _saved_at(words, order, start, length, start, ahead, back, left, right, step)
    best, best_cut, best_turned = now, -1, False
    for friend in friends[unit]:
        place = places[friend]
        if friend < 0 or start <= place < start + length:
            continue
        for behind in range(2):  # in front of the friend the unit comes last, behind it first
            cut = (place if place < start else place - length) + behind
            turned = length > 1 and (behind == 1) != head
            if cut == start and not turned:
                continue
            first, second = (back, ahead) if turned else (ahead, back)
            saved = _saved_at(words, order, start, length, cut, first, second, left, right, step)
            if saved > best:
                best, best_cut, best_turned = saved, cut, turned
    return best - now, best_cut, best_turned


@compiled
def _move(order, places, start, length, cut, turned):
    """Carries out a move and keeps `places`, the place of each unit, up to date."""
    segment = order[start : start + length].copy()
    if turned:
        segment = segment[::-1].copy()
    for place in range(start - 1, cut - 1, -1):
        order[place + length] = order[place]
    for place in range(start, cut):
        order[place] = order[place + length]
    for place in range(length):
        order[cut + place] = segment[place]
    for place in range(min(start, cut), max(start, cut) + length):
        places[order[place]] = place


@compiled
def _sweep(words, order, places, friends, step, longest, visits, awake):
    """Tries every awake unit once; returns the gain, and the units near a move, to be tried in the next sweep."""
    n = order.size
    rows = _reach(step, n) + 1
    left, right = np.zeros((rows, words.shape[1]), np.uint64), np.zeros((rows, words.shape[1]), np.uint64)
    woken, total = np.zeros(n, np.bool_), 0
    for unit in visits:
        if not awake[unit]:
            continue
        for variant in range(2 * longest - 1):
            length, head = 1 + (variant + 1) // 2, variant % 2 == 0
            start = places[unit] if head else places[unit] - length + 1
            if start < 0 or start + length > n:
                continue
            gain, cut, turned = _best_cut(words, order, places, friends, unit, start, length, head, left, right, step)
            if gain > 0:
                total += gain
                _move(order, places, start, length, cut, turned)
                for around in (start, cut):
                    woken[order[max(0, around - 3) : min(n, around + length + 3)]] = True
    return total, woken
