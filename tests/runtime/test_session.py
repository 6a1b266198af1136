"""A session and its callers: one at a time, said so; a generator that is given up does no harm; closing closes."""

import threading

import numpy as np
import pytest

from coldpress.runtime.generate.batch import generate_batch
from coldpress.runtime.generate.session import Session
from coldpress.schemas.errors import ColdpressError
from tests.support.artifacts import open_descriptors

PROMPT = [3, 14, 15]


@pytest.mark.slow
def test_two_threads_in_one_session_are_told_so(relu_artifact):
    """They used to share one read buffer, and healthy storage was blamed for the checksums."""
    expected = Session(relu_artifact.path).generate(PROMPT, 12).token_ids
    session, barrier, texts, refusals = Session(relu_artifact.path), threading.Barrier(4), [], []

    def run():
        barrier.wait()
        for _ in range(5):
            try:
                texts.append(session.generate(PROMPT, 12).token_ids)
            except ColdpressError as error:
                refusals.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) + len(refusals) == 20
    assert set(texts) == {expected}
    assert all("this session is in use by another call" in sentence for sentence in refusals)


def test_a_session_in_use_refuses_every_call_until_its_generator_is_closed(relu_artifact):
    session = Session(relu_artifact.path)
    expected = Session(relu_artifact.path).generate(PROMPT, 8)
    steps = session.stream(PROMPT, 8)
    assert [next(steps).id, next(steps).id] == list(expected.token_ids[:2])
    calls = (
        session.close,
        lambda: session.generate(PROMPT, 2),
        lambda: session.perplexity(np.array([PROMPT]), sparse=True),
        lambda: next(session.stream(PROMPT, 2)),
    )
    for call in calls:
        with pytest.raises(ColdpressError, match="in use by another call, expected one at a time"):
            call()
    steps.close()
    assert session.generate(PROMPT, 8).token_ids == expected.token_ids
    with pytest.raises(ColdpressError, match="in use") as kept:  # with the failed call's frames in it
        session.generate(PROMPT, 3, on_token=lambda _: session.generate(PROMPT, 1))
    assert session.generate(PROMPT, 8).token_ids == expected.token_ids
    assert kept.value.__traceback__ is not None
    session.close()


def test_closing_waits_for_a_change_of_budget_in_another_thread(relu_artifact, monkeypatch):
    """Else the change would read through a descriptor that is closed by then, and perhaps another file's."""
    session = Session(relu_artifact.path)
    resizing, may_go_on, events = threading.Event(), threading.Event(), []
    resize, close = session.store.resize, session.store.close

    def slow(*arguments):
        resizing.set()
        assert may_go_on.wait(20)
        resize(*arguments)
        events.append("resized")

    def closed():
        events.append("closed")
        close()

    monkeypatch.setattr(session.store, "resize", slow)
    monkeypatch.setattr(session.store, "close", closed)
    budget = session.plan.dram_budget_bytes + 50_000
    changing = threading.Thread(target=session.resize, args=(budget,))
    closing = threading.Thread(target=session.close)
    changing.start()
    assert resizing.wait(20)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    may_go_on.set()
    for thread in (changing, closing):
        thread.join(20)
    assert events == ["resized", "closed"]
    with pytest.raises(ColdpressError, match="this session is closed"):
        session.resize(budget)


@pytest.mark.parametrize("flash", ["direct", "simulated"])
def test_a_closed_session_has_no_file_open_and_says_so(relu_artifact, flash):
    before = open_descriptors(relu_artifact.path, collect=True)
    with Session(relu_artifact.path, flash=flash) as session:
        assert len(session.generate(PROMPT, 2).token_ids) == 2
        assert open_descriptors(relu_artifact.path) == before + 2
    assert open_descriptors(relu_artifact.path) == before
    with pytest.raises(ColdpressError, match="this session is closed, expected an open one"):
        session.generate(PROMPT, 2)
    session.close()


def test_an_id_that_no_integer_holds_is_refused(relu_artifact):
    with pytest.raises(ColdpressError, match="token id 99999999999999999999 is outside any vocabulary"):
        Session(relu_artifact.path).generate([1, 99999999999999999999], 2)


@pytest.mark.parametrize("wrong", [1.5, 2.0, np.float32(3), True, np.bool_(True), "3", None, [3], 10**60 + 0.5])
def test_what_is_no_whole_number_is_no_token_id(relu_artifact, wrong):
    """A fraction used to be cut off, and the text continued was another one."""
    session = Session(relu_artifact.path)
    with pytest.raises(ColdpressError, match=r"token id .* at place 1 of a prompt is of type \w+, expected a whole"):
        session.generate([1, wrong], 2)
    with pytest.raises(ColdpressError, match="expected a whole number"):
        generate_batch(session, [[1], [1, wrong]], 2)
    assert session.generate([1, 3], 2).token_ids


def test_integers_of_numpy_are_token_ids(relu_artifact):
    session = Session(relu_artifact.path)
    expected = session.generate(PROMPT, 4).token_ids
    for given in (np.array(PROMPT, np.uint8), [np.int32(one) for one in PROMPT], tuple(PROMPT)):
        assert session.generate(given, 4).token_ids == expected
    for wrong, words in ((np.array([2**63], np.uint64), "id 9223372036854775808 is outside"), ([-1], "token id -1 is")):
        with pytest.raises(ColdpressError, match=words):
            session.generate(wrong, 4)
