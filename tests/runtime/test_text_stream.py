"""Stop strings: found wherever tokens cut them, and never a piece of them in the output."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coldpress.runtime.text.stream import StopFinder, TextStream
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError
from tests.support.models import write_tokenizer
from tests.support.tokenizers import FakeArtifact


def character_by_character(text, stops):
    """(what stands before the stop string that is complete first, that string), by brute force."""
    for end in range(len(text) + 1):
        whole = [stop for stop in stops if text[:end].endswith(stop)]
        if whole:
            longest = max(whole, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=14),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 14), max_size=6),
)
def test_the_cut_does_not_depend_on_the_pieces(text, stops, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    finder, shown = StopFinder(stops), ""
    before, stop = character_by_character(text, stops)
    for first, last in pairwise(edges):
        shown += finder.push(text[first:last])
        assert before.startswith(shown)  # nothing is taken back
    assert (shown + finder.rest(), finder.found) == (before, stop)


def test_only_what_may_begin_a_stop_string_is_held_back():
    finder = StopFinder(["\n\nQ:"])
    assert [finder.push(piece) for piece in ("one\n", "two\n\n", "Q", "A", "\n\nQ:three", "four")] == [
        *("one", "\ntwo", "", "\n\nQA", "", "")
    ]
    assert (finder.found, finder.rest()) == ("\n\nQ:", "")


@pytest.fixture
def codec(tmp_path):
    write_tokenizer(tmp_path, 384)
    return TextCodec(FakeArtifact(tmp_path))


def test_a_stop_string_that_spans_tokens_is_cut_from_the_text(codec):
    text = "The map was wrong about the bridge"
    prompt, new = (ids := codec.encode(text))[:2], ids[2:]
    continuation = codec.continuation(prompt, new)
    for begin in range(len(continuation) - 6):
        stop = continuation[begin : begin + 6]
        stream = TextStream(codec, prompt, ["nowhere", stop])
        shown = [stream.add(token_id) for token_id in new]
        assert stream.stop == stop
        assert "".join(shown) == stream.text() == continuation[: continuation.index(stop)]
    stream = TextStream(codec, prompt, ["bridges"])
    shown = "".join(map(stream.add, new))
    assert continuation == shown + "bridge" == stream.text()
    assert (stream.stop, stream.remainder()) == (None, "bridge")


def test_text_without_stop_strings_ends_with_what_is_not_certain(codec):
    ids = codec.encode("a 日")
    stream = TextStream(codec, ids[:1])
    shown = "".join(stream.add(token_id) for token_id in ids[1:-1])
    assert "\ufffd" not in shown
    assert stream.text().startswith(shown)
    assert stream.text().endswith("\ufffd")


@pytest.mark.parametrize("stop", ["", "\udcff"])
def test_what_is_no_text_is_refused(stop):
    with pytest.raises(ColdpressError, match="is not text, expected at least one character"):
        StopFinder(["x", stop])


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=st.lists(st.integers(2, 383), min_size=1, max_size=12), new=st.lists(st.integers(2, 383), max_size=12))
def test_pieces_and_the_remainder_are_the_text_even_inside_characters(codec, prompt, new):
    """Of any ids: half a character at the end of the prompt, in the middle, or at the end of the text."""
    stream = TextStream(codec, prompt)
    pieces = [stream.add(token_id) for token_id in new]
    assert "".join(pieces) + stream.remainder() == stream.text()
