"""When further prompts begin: what idle places have cost is held against what a dense pass costs."""

import pytest

from coldpress.runtime.generate.admission import Admission


def admission(*prefills):
    """Of chunks of 100 tokens, behind dense passes and one pass of four sequences in 100 ms."""
    found = Admission(100)
    for num_passes, seconds in prefills:
        found.prefilled(num_passes, seconds)
    found.decoded(4, 0.1, idle=False)
    return found


def passes_until_it_pays(found, num_tokens, seconds, *, of, most=100):
    """How many passes of so many sequences and seconds go by before prompts of `num_tokens` begin."""
    for count in range(most):
        if found.pays(num_tokens):
            return count
        found.decoded(of, seconds, idle=True)
    return most


@pytest.mark.parametrize(
    ("prefills", "num_tokens", "of", "seconds", "expected"),
    [
        ([(1, 1.0)], 12, 2, 0.1, 18),  # each wastes the half of itself; 880 ms in all
        ([(1, 1.0)], 12, 3, 0.1, 36),  # a quarter
        ([(1, 1.0)], 12, 2, 0.06, 88),  # 10 ms, since two take less than four
        ([(1, 1.0)], 52, 2, 0.1, 10),  # prompts that fill half of the dense pass have the other half to gain
        ([(3, 3.0)], 12, 2, 0.1, 18),
        ([(1, 5.0), (1, 1.0), (1, 2.0)], 12, 2, 0.1, 18),
    ],
)
def test_places_are_idle_for_as_long_as_a_dense_pass_is_worth(prefills, num_tokens, of, seconds, expected):
    assert passes_until_it_pays(admission(*prefills), num_tokens, seconds, of=of) == expected


def test_where_each_token_takes_as_long_in_whatever_company_nothing_is_lost():
    """On a machine, too, whose seconds go up and down."""
    found = admission((1, 1.0))
    for _ in range(100):
        found.decoded(2, 0.07, idle=True)
        found.decoded(2, 0.03, idle=True)
    assert not found.pays(12)


def test_what_most_of_them_take_is_a_mean():
    """Of 100 and 60 ms; then five take 200 ms."""
    found = admission((1, 1.0))
    found.decoded(4, 0.06, idle=False)
    assert passes_until_it_pays(found, 12, 0.1, of=2) == 15  # 60 ms each
    found.prefilled(1, 1.0)
    found.decoded(5, 0.2, idle=False)
    assert passes_until_it_pays(found, 12, 0.1, of=2) == 44  # 20 ms each


def test_idle_time_is_counted_from_the_last_prompts_on():
    found = admission((1, 1.0))
    found.decoded(1, 2.0, idle=True)
    assert found.pays(12)
    found.prefilled(1, 1.0)
    assert not found.pays(12)


def test_no_time_is_lost_while_every_place_is_taken():
    found = admission((1, 1.0))
    found.decoded(2, 10.0, idle=False)
    assert not found.pays(12)


@pytest.mark.parametrize("num_tokens", [100, 200])
def test_prompts_that_fill_a_dense_pass_wait_for_none(num_tokens):
    assert admission((1, 1.0)).pays(num_tokens)
    assert not admission((1, 1.0)).pays(99)
