"""Each policy against the plain one-at-a-time definition of it, and against the paper's own example."""

import functools
import itertools
from collections import OrderedDict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cache import lfu, lru, s3fifo, static
from tests.benchmarks._belady import missed

NUM_UNITS = 60
requests = st.lists(st.sets(st.integers(0, NUM_UNITS - 1)), min_size=1, max_size=40)


def lru_reference(capacity, pinned, wanted):
    """(hits, admitted, evicted) per request, one id after another, ascending."""
    cache, log = OrderedDict(), []
    for ids in wanted:
        hits, admitted, evicted = [], [], []
        for unit in sorted(ids):
            if unit in pinned:
                hits.append(unit)
            elif unit in cache:
                cache.move_to_end(unit)
                hits.append(unit)
            else:
                old = [unit for unit in cache if unit not in ids]
                if len(cache) >= capacity and not old:
                    continue
                if len(cache) >= capacity:
                    del cache[old[0]]
                    evicted.append(old[0])
                cache[unit] = True
                admitted.append(unit)
        log.append((hits, admitted, evicted))
    return log


def lfu_reference(capacity, pinned, wanted):
    """The same for contextual LFU: missing units by falling count, each against the least used cached unit."""
    cache, uses, last, log = set(), [0] * NUM_UNITS, [0] * NUM_UNITS, []
    for now, ids in enumerate(wanted, 1):
        hits, admitted, evicted = [], [], []
        for unit in sorted(ids):
            uses[unit] += 1
            last[unit] = now
            if unit in pinned or unit in cache:
                hits.append(unit)
        for unit in sorted(set(ids) - set(hits), key=lambda unit: (-uses[unit], unit)):
            if len(cache) >= capacity:
                old = sorted(cache - set(ids), key=lambda unit: (uses[unit], last[unit], unit))
                if not old or uses[unit] < uses[old[0]]:
                    continue
                cache.remove(old[0])
                evicted.append(old[0])
            cache.add(unit)
            admitted.append(unit)
        log.append((hits, admitted, evicted))
    return log


def s3fifo_reference(capacity, pinned, wanted):
    """Algorithm 1 of the paper with plain queues, a victim at a time; units of the current request are passed over."""
    small, main, ghosts, uses, log = [], [], [], {}, []
    room = max(1, round(capacity / 10))

    def make_room(ids):
        """The unit that goes, or None."""
        while True:
            old_small, old_main = ([unit for unit in queue if unit not in ids] for queue in (small, main))
            if old_small and (len(small) > room or not old_main):
                unit = old_small[0]
                small.remove(unit)
                if uses[unit] >= 2:
                    main.append(unit)
                    uses[unit] = 0
                    continue
                ghosts.append(unit)
                return unit
            if not old_main:
                return None
            unit = old_main[0]
            main.remove(unit)
            if uses[unit] > 0:
                uses[unit] -= 1
                main.append(unit)
                continue
            return unit

    for ids in wanted:
        hits = [unit for unit in sorted(ids) if unit in pinned or unit in small or unit in main]
        for unit in hits:
            if unit in uses:
                uses[unit] = min(uses[unit] + 1, 3)
        missing = [unit for unit in sorted(ids) if unit not in hits]
        free = capacity - len(small) - len(main)
        evicted = []
        while len(evicted) < len(missing) - free and (gone := make_room(ids)) is not None:
            evicted.append(gone)
        admitted = missing[: free + len(evicted)]
        remembered = set(ghosts[-(capacity - room) :] if capacity > room else ())
        for queue, chosen in ((small, [u for u in admitted if u not in remembered]), (main, admitted)):
            queue += [unit for unit in chosen if unit not in small]
        for unit in admitted:
            uses[unit] = 0
            ghosts[:] = [None if ghost == unit else ghost for ghost in ghosts]
        log.append((hits, admitted, evicted))
    return log


def run(policy, capacity, pinned, wanted):
    cache, log = policy.Cache(NUM_UNITS, capacity, np.array(sorted(pinned), np.int32)), []
    for ids in wanted:
        ids = np.array(sorted(ids), np.int32)
        present = cache.touch(ids)
        admitted, evicted = cache.admit(ids[~present])
        log.append((ids[present].tolist(), admitted.tolist(), evicted.tolist()))
    return log


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(0, 30), pinned=st.sets(st.integers(0, NUM_UNITS - 1), max_size=6), wanted=requests)
def test_lru_in_batches_decides_as_lru_one_at_a_time(capacity, pinned, wanted):
    assert run(lru, capacity, pinned, wanted) == lru_reference(capacity, pinned, wanted)


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(0, 30), pinned=st.sets(st.integers(0, NUM_UNITS - 1), max_size=6), wanted=requests)
def test_lfu_in_batches_decides_as_lfu_one_at_a_time(capacity, pinned, wanted):
    assert run(lfu, capacity, pinned, wanted) == lfu_reference(capacity, pinned, wanted)


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(1, 30), pinned=st.sets(st.integers(0, NUM_UNITS - 1), max_size=6), wanted=requests)
def test_s3fifo_in_batches_decides_as_one_at_a_time(capacity, pinned, wanted):
    """Who goes for a request, not in which order."""
    found, expected = run(s3fifo, capacity, pinned, wanted), s3fifo_reference(capacity, pinned, wanted)
    assert [(hits, admitted, sorted(gone)) for hits, admitted, gone in found] == [
        (hits, admitted, sorted(gone)) for hits, admitted, gone in expected
    ]


def test_s3fifo_keeps_what_is_wanted_again_from_what_is_wanted_once():
    """A pass over many units, each once, leaves those that were wanted three times; LRU gives them all up."""
    left = {}
    for policy in (s3fifo, lru):
        cache = policy.Cache(NUM_UNITS, 10, np.empty(0, np.int32))
        often = np.arange(5)
        for ids in [often] * 3 + [np.array([unit]) for unit in range(10, 40)]:
            present = cache.touch(ids)
            cache.admit(ids[~present])
        left[policy] = int(cache.contains(often).sum())
    assert left == {s3fifo: 5, lru: 0}


def test_lfu_gives_the_hit_ratios_of_the_papers_example():
    """ActiveFlow Fig. 12: 8 channels, 4 cached; the tokens use {0, 1, 4, 6}, then {0, 4, 6, 7}."""
    cache = lfu.Cache(8, 4, np.empty(0, np.int32))
    cache.touch(np.array([0, 2, 3, 5]))
    cache.admit(np.array([0, 2, 3, 5]))
    cache.reset()  # a new sequence: all counts are zero
    first = cache.touch(np.array([0, 1, 4, 6]))
    assert first.mean() == 0.25
    cache.admit(np.array([1, 4, 6]))
    second = cache.touch(np.array([0, 4, 6, 7]))
    assert second.mean() == 0.75
    admitted, evicted = cache.admit(np.array([7]))
    assert (admitted.tolist(), evicted.tolist()) == ([7], [1])


def test_lfu_does_not_give_up_a_unit_that_is_used_more_often():
    cache = lfu.Cache(8, 1, np.empty(0, np.int32))
    for ids in ([3], [3], [4]):
        present = cache.touch(np.array(ids))
        admitted, evicted = cache.admit(np.array(ids)[~present])
    assert admitted.size == evicted.size == 0
    assert cache.contains(np.array([3]))[0]


def test_a_dense_request_keeps_what_it_can_instead_of_thrashing():
    """Plain LRU would never hit when every token wants everything and the cache holds half of it."""
    cache = lru.Cache(10, 5, np.empty(0, np.int32))
    everything = np.arange(10)
    for _ in range(3):
        present = cache.touch(everything)
        _, evicted = cache.admit(everything[~present])
        assert evicted.size == 0
    assert present.sum() == 5


def test_static_holds_its_pinned_units_only():
    cache = static.Cache(6, 4, np.array([1, 2]))
    assert cache.touch(np.array([0, 1, 2])).tolist() == [False, True, True]
    admitted, evicted = cache.admit(np.array([0]))
    assert admitted.size == evicted.size == 0


def fewest_misses(capacity, wanted):
    """Of all caches of that size, by trying every content after every request."""

    @functools.cache
    def from_here(number, kept):
        if number == len(wanted):
            return 0
        request = frozenset(wanted[number])
        candidates = sorted(kept | request)
        contents = itertools.chain(*(itertools.combinations(candidates, size) for size in range(capacity + 1)))
        return len(request - kept) + min(from_here(number + 1, frozenset(content)) for content in contents)

    return from_here(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(0, 3), wanted=st.lists(st.sets(st.integers(0, 5), max_size=4), min_size=1, max_size=6))
def test_the_benchmarks_bound_is_what_the_best_cache_misses(capacity, wanted):
    found = missed(6, capacity, [np.array(sorted(ids), np.int32) for ids in wanted])
    assert sum(ids.size for ids in found) == fewest_misses(capacity, wanted)


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(0, 20), wanted=requests)
def test_no_policy_misses_less_than_the_benchmarks_bound(capacity, wanted):
    least = sum(ids.size for ids in missed(NUM_UNITS, capacity, [np.array(sorted(ids), np.int32) for ids in wanted]))
    for policy in (lru, lfu, static):
        hits = sum(len(entry[0]) for entry in run(policy, capacity, set(), wanted))
        assert sum(map(len, wanted)) - hits >= least
