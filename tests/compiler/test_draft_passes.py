"""Replays of a draft model's guesses: passes counted by hand, and by a run of the runtime that is told the guesses."""

import numpy as np
import pytest

from coldpress.compiler.draft_passes import COUNTS, _passes_of, best_drafts
from coldpress.compiler.io import save_arrays
from coldpress.schemas.drafter import Drafter


def drafter(folder, right, certainty, token_s=1e-9):
    arrays = {"right": np.array(right, bool), "certainty": np.array(certainty, np.float32)}
    saved = save_arrays(folder / "guesses.safetensors", arrays)
    return Drafter(name="small", dram_bytes=1, token_s=token_s, num_tokens=arrays["right"].size, arrays=saved)


@pytest.mark.parametrize(
    ("right", "certainty", "count", "least", "expected"),
    [
        ([True] * 10, [1.0] * 10, 4, 0.0, [0, 0, 0, 0, 2]),  # five tokens each
        ([False] * 4, [1.0] * 4, 2, 0.0, [1, 1, 2]),  # one token each; before the end there is less to draft
        ([True, False, True, True, True], [1.0] * 5, 2, 0.0, [0, 0, 2]),  # two tokens, then three
        # 1 and .5 reach .3, .25 does not; two accepted of .75 expected make the next ones 3 / 1.75 times as sure
        ([True] * 6, [0.5] * 6, 4, 0.3, [0, 0, 2, 0, 0]),
        ([True] * 7, [0.5] * 7, 4, 0.3, [0, 0, 1, 1, 0]),
        ([True] * 6, [0.5] * 6, 4, 0.6, [1, 1, 1, 0, 0]),  # .5, then .5 * 2 / 1.5, which reaches .6; no room for more
        ([False] * 4, [0.5] * 4, 4, 0.3, [1, 2, 1, 0, 0]),  # .75 expected and none accepted leave 1 / 1.75
    ],
)
def test_passes_by_hand(right, certainty, count, least, expected):
    assert _passes_of(right, certainty, count, least).tolist() == expected


def test_every_token_is_written_once_and_no_pass_has_more_drafts_than_are_left():
    random = np.random.default_rng(0)
    for count in COUNTS:
        right, certainty = random.random(97) < 0.7, random.random(97)
        passes, place = _passes_of(right.tolist(), certainty.tolist(), count, 0.2), 0
        for drafts in _drafts_of_each_pass(right, certainty, count, 0.2):
            accepted = int(np.argmin(np.append(right[place : place + drafts], False)))
            passes[drafts] -= 1
            place += accepted + 1
        assert place == 97
        assert not passes.any()


def _drafts_of_each_pass(right, certainty, count, least):
    """Searches from the definition: the smallest number of drafts that are accepted with less than `least`, by their
    certainties' product and by what became of the drafts before."""
    place, came, promised = 0, 0, 0.0
    while place < len(right):
        most = min(count, len(right) - place - 1)
        products = np.cumprod(certainty[place : place + most])
        likely = products * (1 + came) / (1 + promised)
        drafts = next((n + 1 for n, sure in enumerate(likely) if sure < least), most)
        yield drafts
        promised += products[:drafts].sum()
        accepted = int(np.argmin(np.append(right[place : place + drafts], False)))
        came, place = came + accepted, place + 1 + accepted


def test_cheap_right_guesses_are_drafted_as_far_as_can_be(tmp_path):
    found = best_drafts(drafter(tmp_path, np.ones((3, 90)), np.ones((3, 90))), [1.0] * 9)
    assert (found.draft_tokens, found.tokens_per_pass) == (8, 9.0)
    assert found.token_s == pytest.approx(1 / 9)
    assert found.error == 0


def test_the_dearer_a_guess_the_fewer_are_made(tmp_path):
    """Guesses of even certainty, half of them right."""
    random = np.random.default_rng(1)
    right, certainty = random.random((4, 500)) < 0.5, np.full((4, 500), 0.5)
    counts = []
    for token_s in (0.01, 0.1, 0.3):
        found = best_drafts(drafter(tmp_path, right, certainty, token_s), [1.0] * 9)
        counts.append(found.drafts_per_pass)
        assert found.token_s == pytest.approx((1 + token_s * found.drafts_per_pass) / found.tokens_per_pass, rel=1e-3)
    assert counts[0] > counts[1] > counts[2] > 0


def test_passes_that_compute_longer_with_more_tokens_have_fewer(tmp_path):
    known = drafter(tmp_path, np.random.default_rng(2).random((4, 500)) < 0.7, np.full((4, 500), 0.7))
    flat, steep = (best_drafts(known, [1 + slope * n for n in range(9)]) for slope in (0.0, 0.5))
    assert steep.drafts_per_pass < flat.drafts_per_pass
    assert steep.token_s > flat.token_s
