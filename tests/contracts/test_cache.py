"""What every cache policy owes the store; a new file in runtime/cache is found and put through this by itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import _plugins

POLICIES = _plugins.names("runtime.cache")
NUM_UNITS = 40


def make(name, capacity, pinned):
    return _plugins.load("runtime.cache", name).Cache(NUM_UNITS, capacity, np.array(sorted(pinned), np.int32))


requests = st.lists(st.sets(st.integers(0, NUM_UNITS - 1)), min_size=1, max_size=30)
pins = st.sets(st.integers(0, NUM_UNITS - 1), max_size=8)


def test_the_policies_of_this_version_are_there():
    assert {"lru", "lfu", "static"} <= set(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(0, 20), pinned=pins, wanted=requests)
def test_a_policy_keeps_its_promises(name, capacity, pinned, wanted):
    cache = make(name, capacity, pinned)
    inside = set(pinned)
    for ids in wanted:
        ids = np.array(sorted(ids), np.int32)
        hits = cache.touch(ids)
        assert set(ids[hits].tolist()) == inside & set(ids.tolist())
        admitted, evicted = cache.admit(ids[~hits])
        came, went = set(admitted.tolist()), set(evicted.tolist())
        assert len(came) == admitted.size
        assert len(went) == evicted.size
        assert came <= set(ids[~hits].tolist())
        assert went <= inside - pinned - set(ids.tolist())  # neither pinned nor of this request
        assert len(went) <= len(came)
        inside = (inside - went) | came
        assert len(inside - pinned) <= capacity
        assert set(np.flatnonzero(cache.present).tolist()) == inside
        assert cache.contains(np.arange(NUM_UNITS)).tolist() == cache.present.tolist()


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=20, deadline=None)
@given(capacity=st.integers(0, 20), pinned=pins, wanted=requests)
def test_decisions_repeat(name, capacity, pinned, wanted):
    def run():
        cache, log = make(name, capacity, pinned), []
        for ids in wanted:
            ids = np.array(sorted(ids), np.int32)
            hits = cache.touch(ids)
            log.append([part.tolist() for part in cache.admit(ids[~hits])])
        return log

    assert run() == run()


@pytest.mark.parametrize("name", POLICIES)
def test_dropped_units_are_out_and_leave_room(name):
    cache = make(name, 3, {9})
    ids = np.array([1, 2, 3], np.int32)
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
    cache = make(name, 2, {5})
    ids = np.array([1, 2], np.int32)
    cache.touch(ids)
    cache.admit(ids)
    before = cache.present.copy()
    cache.reset()
    assert (cache.present == before).all()


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_admits_fills_its_room(name):
    cache = make(name, 4, set())
    ids = np.arange(10, dtype=np.int32)
    cache.touch(ids)
    admitted, _ = cache.admit(ids)
    assert admitted.size == (4 if cache.admits else 0)
