"""Less or more DRAM while a text is under way: tokens stay, caches follow, and memory goes back to the system."""

import json
import mmap
import subprocess
import sys
import threading

import numpy as np
import pytest

from coldpress.runtime import plugins
from coldpress.runtime.artifact.errors import DeviceError
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cache import CacheFacts, make
from coldpress.runtime.dram.budget import as_run, fixed_bytes, refit
from coldpress.runtime.generate.session import Session
from coldpress.runtime.store import memory
from coldpress.runtime.store.memory import SlotMemory, moved
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from tests.support.artifacts import Recipe, build_artifact, small_spec
from tests.support.data import ROOT
from tests.support.stores import Failing, check_fetch, open_store, requests

PROMPT = [3, 14, 15]
POLICIES = [name for name in plugins.names("coldpress.runtime.cache") if name != "belady"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    recipe = Recipe(spec=small_spec(num_hidden_layers=11, intermediate_size=128), pinned_share=1 / 8, slots_share=1 / 2)
    return build_artifact(tmp_path_factory.mktemp("resize") / "a", recipe)


def budgets(built):
    """The plan's, hardly any, a little more, and more than there are units."""
    plan = built.manifest.plans[0]
    least = fixed_bytes(built.manifest, plan)
    return plan.dram_budget_bytes, least, least + 60_000, 4 * plan.dram_budget_bytes


def test_tokens_stay_through_every_change(built):
    whole = Session(built.path).generate(PROMPT, 24, ignore_eos=True).token_ids
    first, least, little, all_units = budgets(built)
    session, found, hit_rates = Session(built.path), [], {}
    changes = {4: least, 8: all_units, 12: little, 16: first, 20: all_units}
    for token in session.stream(PROMPT, 24, ignore_eos=True):
        found.append(token.id)
        if len(found) in changes:
            session.resize(changes[len(found)])
            assert session.store.dram_used_bytes <= changes[len(found)] == session.plan.dram_budget_bytes
            rows = sum(pool.slots.rows.nbytes for pool in session.store._memory.pools.values())
            assert rows == session.store.dram_used_bytes - fixed_bytes(session.artifact.manifest, session.plan)
        hit_rates[len(found)] = token.hit_rate
    assert found == list(whole)
    assert max(hit_rates[at] for at in range(5, 9)) == 0 < hit_rates[4]
    assert hit_rates[12] > hit_rates[16] > 0
    assert hit_rates[24] == max(hit_rates.values())


@pytest.mark.slow
@pytest.mark.parametrize("cache", POLICIES)
def test_units_stay_what_they_are_under_every_policy(built, cache):
    store = open_store(built, cache=cache)
    artifact = open_artifact(built.path)
    plans = [refit(built.manifest, store.plan, budget) for budget in budgets(built)]
    wanted = requests(built, num_tokens=10)
    for plan in [*plans, *plans[::-1]]:
        for _ in range(len(built.units)):
            layer, family, ids = next(wanted)
            check_fetch(store, built, layer, family, ids)
        before = {key: store.residency(key).present.copy() for key in built.units}
        store.resize(artifact, plan)
        for part in store.plan.parts:  # with room for all units, all are pinned
            present = store.residency((part.layer, part.family)).present
            pinned = artifact.rank(part.layer, part.family)[: part.num_pinned]
            assert present[pinned].all()
            cached = np.setdiff1d(np.flatnonzero(present), pinned)
            assert cached.size <= part.cache_slots
            assert before[part.layer, part.family][cached].all()
            if part.num_pinned + part.cache_slots >= before[part.layer, part.family].sum() and part.cache_slots:
                assert present[before[part.layer, part.family]].all()


@pytest.mark.parametrize("cache", [name for name in POLICIES if name not in ("static", "window", "linked")])
def test_what_goes_first_is_what_was_used_least(cache):
    policy = make(cache, {}, CacheFacts(20, 8, np.array([19]), np.arange(20), None))
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7], [1, 3], [1, 3]):
        policy.serve(np.array(ids, np.int32))
    policy.resize(6, np.array([19]))
    assert np.flatnonzero(policy.present).tolist() == [1, 3, 4, 5, 6, 7, 19]
    policy.resize(7, np.array([18]))
    assert np.flatnonzero(policy.present).tolist() == [1, 3, 4, 5, 6, 7, 18]
    assert policy.num_free == 1
    policy.serve(np.array([0, 2], np.int32))
    assert np.count_nonzero(policy.present) == 8


def test_what_does_not_fit_changes_nothing(built):
    session = Session(built.path)
    whole = session.generate(PROMPT, 6, ignore_eos=True).token_ids
    plan, used = session.plan, session.store.dram_used_bytes
    with pytest.raises(DoesNotFitError, match="before any unit is cached"):
        session.resize(fixed_bytes(built.manifest, plan) - 1)
    assert (session.plan, session.store.dram_used_bytes) == (plan, used)
    assert session.generate(PROMPT, 6, ignore_eos=True).token_ids == whole
    session.close()
    with pytest.raises(ColdpressError, match="this session is closed"):
        session.resize(plan.dram_budget_bytes)


def test_another_thread_may_take_memory_away(built):
    """It waits for the token under way; the text is none the wiser."""
    whole = Session(built.path).generate(PROMPT, 24, ignore_eos=True).token_ids
    session, done = Session(built.path), threading.Event()
    sizes = budgets(built)

    def change():
        for turn in range(200):
            session.resize(sizes[turn % len(sizes)])
            if done.is_set():
                return

    thread = threading.Thread(target=change)
    thread.start()
    found = session.generate(PROMPT, 24, ignore_eos=True).token_ids
    done.set()
    thread.join()
    assert found == whole


def test_rows_move_where_they_are_told():
    random = np.random.default_rng(0)
    for num_old, num_new in ((40, 10), (10, 40), (7, 7), (0, 5), (5, 0)):
        slots = SlotMemory(num_old, 3 * mmap.PAGESIZE + 8)
        slots.rows[:] = random.integers(0, 256, slots.rows.shape)
        before, count = slots.rows.copy(), min(num_old, num_new, 6)
        old, new = (random.permutation(size)[:count] for size in (num_old, num_new))
        after = moved(slots, num_new, old, new)
        assert after.rows.shape == (num_new, 3 * mmap.PAGESIZE + 8)
        assert (after.rows[new] == before[old]).all()


def test_memory_that_the_system_refuses_leaves_the_former_budget(built, monkeypatch):
    whole = Session(built.path).generate(PROMPT, 12, ignore_eos=True).token_ids
    session, large = Session(built.path), budgets(built)[3]
    session.generate(PROMPT, 4, ignore_eos=True)
    plan, used, real = session.plan, session.store.dram_used_bytes, memory.moved
    monkeypatch.setattr(memory, "moved", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(DoesNotFitError, match=f"the run goes on with {plan.dram_budget_bytes} bytes"):
        session.resize(large)
    monkeypatch.setattr(memory, "moved", real)
    assert (session.plan, session.store.dram_used_bytes) == (plan, used)
    assert session.generate(PROMPT, 12, ignore_eos=True).token_ids == whole
    session.resize(large)
    assert session.generate(PROMPT, 12, ignore_eos=True).token_ids == whole


CHILD = """
import sys, numpy as np
from coldpress.runtime.store.memory import SlotMemory, moved
def rss():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) >> 10
memory = SlotMemory(1600, 40000)
memory.rows[:] = 7
sizes = [rss()]
memory = moved(memory, 400, np.arange(0, 1600, 4), np.arange(400))
sizes.append(rss())
memory = moved(memory, 1600, np.arange(400), np.arange(1600)[-400:])
sizes.append(rss())
peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) >> 10
print([*sizes, peak])
"""


def test_memory_goes_back_to_the_system():
    """61 MiB of rows, a quarter of which stay; never both mappings at once."""
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, check=True)
    whole, quarter, again, peak = json.loads(done.stdout)
    assert 40 < whole - quarter < 50
    assert abs(again - quarter) < 4
    assert peak - whole < 8


@pytest.mark.parametrize("cache", ["lru", "linked"])
def test_what_could_not_be_read_is_not_taken_for_pinned(built, cache):
    """A device that fails while pinned units come in; later they are asked for as others are."""

    session = Session(built.path, cache=cache)
    store, artifact = session.store, session.artifact
    least, all_units = (refit(built.manifest, store.plan, budget) for budget in budgets(built)[1::2])
    session.resize(least.dram_budget_bytes)
    inner = store._device.flash
    store._device.flash = Failing(inner, 3)
    with pytest.raises(DeviceError):
        session.resize(all_units.dram_budget_bytes)
    assert session.plan == as_run(built.manifest, all_units)
    store._device.flash = inner
    pinned = [store.residency((layer, family)).present.sum() for layer, family in store._parts]
    assert max(pinned) > min(pinned) == 0
    for layer, family, ids in requests(built):
        check_fetch(store, built, layer, family, ids)
    store.resize(artifact, all_units)
    for layer, family, ids in requests(built):
        check_fetch(store, built, layer, family, ids)
