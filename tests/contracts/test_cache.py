"""What every cache policy owes the store; a new file in runtime/cache is found and put through this by itself."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldpress.runtime import plugins
from coldpress.runtime.cache import CacheFacts, CachePolicy
from coldpress.runtime.cache import make as make_cache

POLICIES = plugins.names("coldpress.runtime.cache")
NUM_UNITS = 40


def make(name, capacity, pinned, requests):
    """`requests` are all that will be asked, for policies that look ahead."""
    position = np.random.default_rng(3).permutation(NUM_UNITS)
    return make_cache(name, {}, CacheFacts(NUM_UNITS, capacity, np.array(sorted(pinned), np.int32), position, requests))


def as_ids(wanted):
    return [np.array(sorted(ids), np.int32) for ids in wanted]


requests = st.lists(st.sets(st.integers(0, NUM_UNITS - 1)), min_size=1, max_size=30)
pins = st.sets(st.integers(0, NUM_UNITS - 1), max_size=8)


def test_the_policies_of_this_version_are_there():
    assert {"belady", "lfu", "linked", "lru", "s3fifo", "static", "window"} <= set(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(0, 20), pinned=pins, wanted=requests, ends=st.lists(st.integers(0, 2), min_size=1))
def test_a_policy_keeps_its_promises(name, capacity, pinned, wanted, ends):
    wanted = as_ids(wanted)
    cache, inside = make(name, capacity, pinned, wanted), set(pinned)
    for ids, ends_token in zip(wanted, itertools.cycle(ends), strict=False):
        hits = cache.touch(ids)
        assert set(ids[hits].tolist()) == inside & set(ids.tolist())
        admitted, evicted = cache.admit(ids[~hits])
        came, went = set(admitted.tolist()), set(evicted.tolist())
        assert len(came) == admitted.size
        assert len(went) == evicted.size
        assert came <= set(ids[~hits].tolist())
        in_use = (
            set() if plugins.load_class("coldpress.runtime.cache", CachePolicy, name).looks_ahead else set(ids.tolist())
        )
        assert went <= inside - pinned - in_use
        inside = (inside - went) | came
        assert len(inside - pinned) <= capacity
        assert set(np.flatnonzero(cache.present).tolist()) == inside
        assert cache.contains(np.arange(NUM_UNITS)).tolist() == cache.present.tolist()
        if ends_token:
            left = cache.end_tokens(ends_token).tolist()
            assert len(set(left)) == len(left)
            assert set(left) <= inside - pinned
            inside -= set(left)
            assert set(np.flatnonzero(cache.present).tolist()) == inside


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=20, deadline=None)
@given(capacity=st.integers(0, 20), pinned=pins, wanted=requests)
def test_decisions_repeat(name, capacity, pinned, wanted):
    def run():
        cache, log = make(name, capacity, pinned, as_ids(wanted)), []
        for ids in as_ids(wanted):
            hits = cache.touch(ids)
            log.append([part.tolist() for part in (*cache.admit(ids[~hits]), cache.end_tokens())])
        return log

    assert run() == run()


@pytest.mark.parametrize("name", POLICIES)
def test_dropped_units_are_out_and_leave_room(name):
    ids = np.array([1, 2, 3], np.int32)
    cache = make(name, 3, {9}, [ids, ids])
    cache.touch(ids)
    admitted, _ = cache.admit(ids)
    cache.drop(admitted)
    assert np.flatnonzero(cache.present).tolist() == [9]
    cache.touch(ids)
    again, evicted = cache.admit(ids)
    assert again.tolist() == admitted.tolist()
    assert evicted.size == 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_new_context_keeps_what_is_cached(name):
    ids = np.array([1, 2], np.int32)
    cache = make(name, 2, {5}, [ids])
    cache.touch(ids)
    cache.admit(ids)
    before = cache.present.copy()
    cache.reset()
    assert (cache.present == before).all()


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_admits_fills_its_room(name):
    ids = np.arange(10, dtype=np.int32)
    cache = make(name, 4, set(), [ids])
    cache.touch(ids)
    admitted, _ = cache.admit(ids)
    assert admitted.size == (4 if cache.admits else 0)
