"""Each policy against the plain one-at-a-time definition of it, and against the paper's own example."""

import functools
import itertools
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldpress.runtime.store.slots import FreeSlots
from coldpress.schemas.errors import ColdpressError
from tests.support.caches import RUNNABLE, empty, missed

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


def run(policy, capacity, pinned, wanted, **options):
    """(hits, admitted, evicted) per request, and what leaves behind it, each a token of its own."""
    requests, log = as_ids(wanted), []
    cache = empty(policy, NUM_UNITS, capacity, pinned, requests=requests, **options)
    for ids in requests:
        present = cache.touch(ids)
        admitted, evicted = cache.admit(ids[~present])
        left = cache.end_tokens()
        log.append((ids[present].tolist(), admitted.tolist(), [*evicted.tolist(), *left.tolist()]))
    return log


def as_ids(wanted):
    return [np.array(sorted(ids), np.int32) for ids in wanted]


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(0, 30), pinned=st.sets(st.integers(0, NUM_UNITS - 1), max_size=6), wanted=requests)
def test_lru_in_batches_decides_as_lru_one_at_a_time(capacity, pinned, wanted):
    assert run("lru", capacity, pinned, wanted) == lru_reference(capacity, pinned, wanted)


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(0, 30), pinned=st.sets(st.integers(0, NUM_UNITS - 1), max_size=6), wanted=requests)
def test_lfu_in_batches_decides_as_lfu_one_at_a_time(capacity, pinned, wanted):
    assert run("lfu", capacity, pinned, wanted) == lfu_reference(capacity, pinned, wanted)


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(1, 30), pinned=st.sets(st.integers(0, NUM_UNITS - 1), max_size=6), wanted=requests)
def test_s3fifo_in_batches_decides_as_one_at_a_time(capacity, pinned, wanted):
    decides_as_s3fifo(capacity, pinned, wanted)


@pytest.mark.parametrize("capacity", [5, 12, 24, 40])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.4])
def test_s3fifo_decides_so_where_some_units_are_wanted_again_and_again(rng, capacity, share):
    """Requests that fill the main queue with units of many uses, so that they are passed more than once."""
    weights = 1 / np.arange(1, NUM_UNITS + 1)
    draws = [rng.gumbel(size=NUM_UNITS) + np.log(np.roll(weights, token // 40)) for token in range(150)]
    sizes = rng.integers(1, round(2 * share * NUM_UNITS), 150)
    wanted = [set(np.argsort(-draw)[:size].tolist()) for draw, size in zip(draws, sizes, strict=True)]
    decides_as_s3fifo(capacity, {3}, wanted)


def test_s3fifo_forgets_what_went_from_the_small_queue_for_want_of_a_main_one():
    new, newer = set(range(10, 30)), set(range(30, 49))
    decides_as_s3fifo(20, set(), [{0, 1}, {0, 1}, {0, 1}, new, {0}, newer])


def decides_as_s3fifo(capacity, pinned, wanted):
    """Who goes for a request, not in which order."""
    found, expected = run("s3fifo", capacity, pinned, wanted), s3fifo_reference(capacity, pinned, wanted)
    assert [(hits, admitted, sorted(gone)) for hits, admitted, gone in found] == [
        (hits, admitted, sorted(gone)) for hits, admitted, gone in expected
    ]


def test_s3fifo_keeps_what_is_wanted_again_from_what_is_wanted_once():
    """A pass over many units, each once, leaves those that were wanted three times; LRU gives them all up."""
    left = {}
    for policy in ("s3fifo", "lru"):
        cache = empty(policy, NUM_UNITS, 10)
        often = np.arange(5)
        for ids in [often] * 3 + [np.array([unit]) for unit in range(10, 40)]:
            present = cache.touch(ids)
            cache.admit(ids[~present])
        left[policy] = int(cache.contains(often).sum())
    assert left == {"s3fifo": 5, "lru": 0}


def test_lfu_gives_the_hit_ratios_of_the_papers_example():
    """ActiveFlow Fig. 12: 8 channels, 4 cached; the tokens use {0, 1, 4, 6}, then {0, 4, 6, 7}."""
    cache = empty("lfu", 8, 4)
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
    cache = empty("lfu", 8, 1)
    for ids in ([3], [3], [4]):
        present = cache.touch(np.array(ids))
        admitted, evicted = cache.admit(np.array(ids)[~present])
    assert admitted.size == evicted.size == 0
    assert cache.contains(np.array([3]))[0]


def test_a_dense_request_keeps_what_it_can_instead_of_thrashing():
    """Plain LRU would never hit when every token wants everything and the cache holds half of it."""
    cache = empty("lru", 10, 5)
    everything = np.arange(10)
    for _ in range(3):
        present = cache.touch(everything)
        _, evicted = cache.admit(everything[~present])
        assert evicted.size == 0
    assert present.sum() == 5


def test_static_holds_its_pinned_units_only():
    cache = empty("static", 6, 4, {1, 2})
    assert cache.touch(np.array([0, 1, 2])).tolist() == [False, True, True]
    admitted, evicted = cache.admit(np.array([0]))
    assert admitted.size == evicted.size == 0


def window_reference(length, capacity, pinned, wanted, counts):
    """The same for the window, token by token; a request's tokens are `counts` of them."""
    newest, log, now = {}, [], 0
    for ids, count in zip(wanted, counts, strict=False):
        hits = [unit for unit in sorted(ids) if unit in pinned or unit in newest]
        missing = [unit for unit in sorted(ids) if unit not in hits]
        evicted, old = [], {unit: token for unit, token in newest.items() if unit not in ids}
        while len(missing) > capacity - len(newest) + len(evicted) and old:
            oldest = min(old.values())  # the window shrinks by a token
            evicted += [unit for unit, token in old.items() if token == oldest]
            old = {unit: token for unit, token in old.items() if token > oldest}
        admitted = missing[: capacity - len(newest) + len(evicted)]
        now += count
        newest = {unit: token for unit, token in newest.items() if unit not in evicted}
        newest |= {unit: now for unit in ids if unit in newest or unit in admitted}
        evicted += [unit for unit, token in newest.items() if token <= now - length]
        newest = {unit: token for unit, token in newest.items() if token > now - length}
        log.append((hits, admitted, sorted(evicted)))
    return log


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(1, 6),
    capacity=st.integers(0, 40),
    pinned=st.sets(st.integers(0, NUM_UNITS - 1), max_size=6),
    wanted=requests,
    counts=st.lists(st.integers(1, 3), min_size=40, max_size=40),
)
def test_the_window_keeps_what_the_last_tokens_used(length, capacity, pinned, wanted, counts):
    cache, found = empty("window", NUM_UNITS, capacity, pinned, window_tokens=length), []
    for ids, count in zip(as_ids(wanted), counts, strict=False):
        present = cache.touch(ids)
        admitted, evicted = cache.admit(ids[~present])
        gone = sorted([*evicted.tolist(), *cache.end_tokens(count).tolist()])
        found.append((ids[present].tolist(), admitted.tolist(), gone))
    assert found == window_reference(length, capacity, pinned, wanted, counts)


def test_a_token_is_what_end_tokens_says_and_not_a_request():
    """Two requests of one token are one token's units; a window of one token drops both with the next token's."""
    cache = empty("window", 8, 8, window_tokens=1)
    for ids in ([0, 1], [1, 2]):
        present = cache.touch(np.array(ids))
        cache.admit(np.array(ids)[~present])
    assert cache.end_tokens().size == 0
    assert np.flatnonzero(cache.present).tolist() == [0, 1, 2]
    cache.touch(np.array([2]))
    assert sorted(cache.end_tokens().tolist()) == [0, 1]


def linked_reference(base, capacity, pinned, position, wanted, options):
    """(hits, ids handed on to the base) per request: runs unit by unit, from what a plain base then holds."""
    random, below, log = np.random.default_rng(0), empty(base, NUM_UNITS, capacity, pinned), []
    for ids in wanted:
        unit_at = {int(position[unit]): unit for unit in ids}
        hits, runs = [unit for unit in sorted(ids) if below.present[unit]], []
        for place in sorted(unit_at):
            if place - 1 in unit_at:
                runs[-1].append(unit_at[place])
            else:
                runs.append([unit_at[place]])
        missing = [unit for unit in sorted(ids) if unit not in hits]
        draws = random.random(len(runs)) if missing else [0] * len(runs)
        dear = {
            unit
            for run, drawn in zip(runs, draws, strict=True)
            if len(run) >= options["linked_run"] and drawn >= options["linked_admission"]
            for unit in run
        }
        usual = [unit for unit in missing if unit not in dear]
        room = capacity - (int(below.present.sum()) - len(pinned)) - len(usual)
        chosen = sorted(usual + [unit for unit in missing if unit in dear][: max(0, room)])
        below.touch(np.array(sorted(ids), np.int32))
        below.admit(np.array(chosen, np.int32))
        below.end_tokens()
        log.append((hits, below.present.tolist()))
    return log


@settings(max_examples=100, deadline=None)
@given(
    base=st.sampled_from(["lru", "lfu", "s3fifo", "window"]),
    capacity=st.integers(1, 30),
    pinned=st.sets(st.integers(0, NUM_UNITS - 1), max_size=6),
    wanted=requests,
    run=st.integers(2, 5),
    admission=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_linked_lets_runs_in_as_drawn_and_everything_else_as_its_base(base, capacity, pinned, wanted, run, admission):
    position = np.random.default_rng(5).permutation(NUM_UNITS)
    options = {"linked_over": base, "linked_run": run, "linked_admission": admission}
    cache, found = empty("linked", NUM_UNITS, capacity, pinned, position=position, **options), []
    for ids in as_ids(wanted):
        present = cache.serve(ids)
        found.append((ids[present].tolist(), cache.present.tolist()))
    assert found == linked_reference(base, capacity, pinned, position, wanted, options)


@pytest.mark.parametrize("base", ["linked", "belady", "static", "nothing"])
def test_linked_builds_upon_what_admits_and_does_not_look_ahead(base):
    with pytest.raises(ColdpressError, match=f"option linked_over of linked is '{base}', expected the policy"):
        empty("linked", 8, 4, linked_over=base)


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


def num_missed(policy, num_units, capacity, wanted):
    ids = as_ids(wanted)
    return sum(missing.size for missing in missed(empty(policy, num_units, capacity, requests=ids), ids))


@settings(max_examples=100, deadline=None)
@given(capacity=st.integers(0, 3), wanted=st.lists(st.sets(st.integers(0, 5), max_size=4), min_size=1, max_size=6))
def test_belady_misses_what_the_best_cache_misses(capacity, wanted):
    assert num_missed("belady", 6, capacity, wanted) == fewest_misses(capacity, wanted)


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(0, 20), wanted=requests)
def test_no_policy_misses_less_than_belady(capacity, wanted):
    least = num_missed("belady", NUM_UNITS, capacity, wanted)
    for policy in RUNNABLE:
        assert num_missed(policy, NUM_UNITS, capacity, wanted) >= least


def test_belady_is_refused_where_the_future_is_not_known():
    with pytest.raises(ColdpressError, match="'belady' has to know all requests to come, which a run does not"):
        empty("belady", 8, 4)


def test_belady_notices_another_future():
    cache = empty("belady", 8, 4, requests=as_ids([{1, 2}]))
    with pytest.raises(ValueError, match="request 0 has 3 units"):
        cache.touch(np.array([1, 2, 3]))


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name != "static"])
def test_a_cached_unit_that_is_pinned_gives_its_place_back(name):
    """Then as many other units as there is room for are held at once."""
    cache = empty(name, NUM_UNITS, 4)
    cache.serve(np.arange(4))
    cache.resize(4, np.array([1, 2]))
    assert cache.present[[1, 2]].all()
    cache.serve(np.arange(10, 14))
    assert cache.contains(np.array([1, 2, 10, 11, 12, 13])).all()


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in RUNNABLE), ("window", {"window_tokens": 40}), ("linked", {"linked_over": "s3fifo"})],
)
def test_numbers_that_run_out_change_no_decision(name, options):
    """Requests are numbered anew after 100, departures from S3-FIFO's small queue after 255."""
    one, other = (empty(name, NUM_UNITS, 25, [3, 4, 50], **options) for _ in range(2))
    inner = getattr(other, "_base", other)
    pinned = inner._last_request == inner._is_pinned
    inner._is_pinned = 101
    inner._last_request[pinned] = 101
    if hasattr(inner, "_left"):
        inner._left = inner._left.astype(np.uint8)
    random = np.random.default_rng(4)
    for _ in range(300):
        for _ in range(random.integers(1, 3)):
            ids = np.flatnonzero(random.random(NUM_UNITS) < 0.3 * random.random(NUM_UNITS)).astype(np.int32)
            present = one.touch(ids)
            assert other.touch(ids).tolist() == present.tolist()
            found, again = (cache.admit(ids[~present]) for cache in (one, other))
            assert [ids.tolist() for ids in found] == [ids.tolist() for ids in again]
        assert one.end_tokens().tolist() == other.end_tokens().tolist()
        assert one.present.tolist() == other.present.tolist()
    assert inner._request <= 100 < getattr(one, "_base", one)._request


def test_the_slot_given_back_last_is_filled_first():
    free = FreeSlots(3, np.dtype(np.uint16))
    assert free.take(2).tolist() == [3, 4]
    free.put(np.array([4, 0], np.uint16))
    free.put(np.array([2], np.uint16))
    assert free.take(2).tolist() == [2, 0]
    assert free.take(3).tolist() == [4, 5, 6]
