"""Reads go on while units are used: what begins and ends when, told by the device."""

import itertools

import numpy as np

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import choose_plan
from coldpress.runtime.flash import direct
from coldpress.runtime.store import planner
from coldpress.runtime.store.store import Store
from tests.support.stores import check_fetch, open_store, requests


class Told:
    """A ticket that tells what is asked of it."""

    def __init__(self, name, inner, told):
        self.name, self.inner, self.told = name, inner, told

    def wait(self, count):
        self.told.append(f"wait for {count} of {self.name}")
        self.inner.wait(count)

    def finish(self):
        self.told.append(f"end of {self.name}")
        return self.inner.finish()

    def abandon(self):
        self.inner.abandon()


class Telling:
    """A device that tells what is asked of it."""

    direct = moves_data = True

    def __init__(self, inner, told):
        self.inner, self.told, self.names = inner, told, iter("abcdefghijklmnop")

    def submit(self, extents, into, landing=None):
        name = next(self.names)
        self.told.append(f"{len(extents)} reads {name}")
        return Told(name, self.inner.submit(extents, into, landing), self.told)


def test_what_is_there_is_computed_with_while_the_rest_is_read(relu_artifact, monkeypatch):
    """Reads begin before the first batch, batches come as reads do, and a half is read into again when it was used."""
    told: list[str] = []
    monkeypatch.setattr(planner, "ARRIVAL_BYTES", 8192)
    monkeypatch.setattr(planner, "LEAST_HALF_BYTES", 4096)
    artifact = open_artifact(relu_artifact.path)
    changes = {"read_buffer_bytes": 8 * 4096, "collapse_gap_bytes": 0, "cache": "static"}
    plan = choose_plan(artifact.manifest).model_copy(update=changes)
    store = Store(artifact, plan, direct.Plugin(artifact, 8))
    part = store._parts[2, "up_down"]
    per_page = 4096 // part.units.unit_bytes
    pinned = np.flatnonzero(part.cache.present)
    far = part.order[2 * per_page * np.arange(12)]  # two pages apart: a read each
    store._device.flash = Telling(store._device.flash, told)
    ids = np.unique(np.concatenate([pinned, far])).astype(np.int32)
    for batch in store.submit((2, "up_down"), ids):
        told.append("hits" if np.isin(batch.ids, pinned).all() else "batch")
        rows = batch.rows[batch.slots]
        assert (rows == relu_artifact.units[2, "up_down"][batch.ids]).all()
    read = len(np.setdiff1d(far, pinned))
    assert 9 <= read <= 12
    assert told[:3] == ["4 reads a", "4 reads b", "hits"]
    assert told[3:8] == ["wait for 2 of a", "batch", "wait for 4 of a", "batch", "end of a"]
    assert told[8:10] == [f"{read - 8} reads c", "wait for 2 of b"]
    assert told[-2:] == ["batch", "end of c"]


def test_a_buffer_without_room_for_two_is_filled_again_when_it_was_used(relu_artifact):
    told: list[str] = []
    artifact = open_artifact(relu_artifact.path)
    plan = choose_plan(artifact.manifest).model_copy(update={"read_buffer_bytes": 8 * 4096, "cache": "static"})
    store = Store(artifact, plan, direct.Plugin(artifact, 8))
    store._device.flash = Telling(store._device.flash, told)
    for _ in store.submit((2, "up_down"), np.arange(512, dtype=np.int32)):
        told.append("batch")
    marks = [entry for entry in told if "reads" in entry or "end" in entry]
    assert [mark.split()[0].isdigit() for mark in marks] == [True, False] * (len(marks) // 2)
    assert len(marks) >= 8


def test_the_dense_pass_fills_one_half_while_the_other_is_used(relu_artifact, monkeypatch):
    monkeypatch.setattr(planner, "LEAST_HALF_BYTES", 4096)
    artifact = open_artifact(relu_artifact.path)
    plan = choose_plan(artifact.manifest)
    store, told = Store(artifact, plan, direct.Plugin(artifact, 8)), []
    store._device.flash = Telling(store._device.flash, told)
    ids, rows = [], []
    for part, codes in store.stream((9, "up_down")):
        told.append("used")
        ids.append(part)
        rows.append(codes.copy())
    assert (np.concatenate(ids) == relu_artifact.order[9, "up_down"]).all()
    assert (np.concatenate(rows) == relu_artifact.units[9, "up_down"][np.concatenate(ids)]).all()
    names = [entry[-1] for entry in told if "reads" in entry]
    assert len(names) >= 3
    steps = [("reads", name) for name in names[:1]]
    for before, after in itertools.pairwise(names):
        steps += [("reads", after), ("wait for", before), ("used", "d"), ("end of", before)]
    steps += [("wait for", names[-1]), ("used", "d"), ("end of", names[-1])]
    assert [(what in entry, entry[-1]) for entry, (what, _) in zip(told, steps, strict=True)] == [
        (True, name) for _, name in steps
    ]


def test_a_dense_pass_that_is_given_up_leaves_a_usable_store(relu_artifact, monkeypatch):
    monkeypatch.setattr(planner, "LEAST_HALF_BYTES", 4096)
    store = open_store(relu_artifact)
    streaming = store.stream((3, "up_down"))
    next(iter(streaming))
    streaming.close()
    for layer, family, ids in requests(relu_artifact):
        check_fetch(store, relu_artifact, layer, family, ids)
