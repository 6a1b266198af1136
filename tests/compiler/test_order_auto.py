"""auto: heuristics compete on tokens that they were not made from, and Algorithm 1 stays unless it is beaten."""

import numpy as np
import pytest

from compiler.order import auto, collapse, misses, ripple
from compiler.order._task import Problem
from tests.support.statistics import device_of, problem_of, topical

FLASH = device_of(latency_s=1e-6).flash
"""Few units are read within one latency, whatever their order; without one, order matters."""


def grouped(order: np.ndarray, num_tokens: int, group: int, seed: int) -> np.ndarray:
    """bool [n, num_tokens]: on each token one run of `group` units in `order` is active."""
    active = np.zeros((order.size, num_tokens), bool)
    starts = np.random.default_rng(seed).integers(0, order.size // group, num_tokens) * group
    for token, start in enumerate(starts):
        active[order[start : start + group], token] = True
    return active


def test_the_winner_is_found_on_the_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text changes at its end: an order that suits the first seven eighths loses to one that suits the rest."""
    first, last = np.random.default_rng(1).permutation(96), np.random.default_rng(2).permutation(96)
    active = np.concatenate([grouped(first, 1792, 8, 3), grouped(last, 256, 8, 4)], axis=1)
    problem = problem_of(active, flash=FLASH)
    assert problem.num_judged == 256
    orders = {"first": first, "last": last}
    monkeypatch.setattr(auto, "_rivals", lambda _: orders)
    chosen, order = auto.choose(problem)
    assert chosen == "last"
    assert (order == last).all()
    del orders["last"]
    orders["random"] = np.random.default_rng(5).permutation(96)
    chosen, order = auto.choose(problem)
    assert chosen in ("first", "ripple")


def candidates_of(problem: Problem) -> dict[str, float]:
    """Seconds on the last tokens of everything that competes."""
    orders = {"ripple": ripple.arrange(problem.fitting), **auto._rivals(problem)}
    return {name: problem.judge(order).seconds for name, order in orders.items()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("unit_bytes", "slots"), [(432, 0), (6912, 12), (24576, 30)])
def test_never_worse_than_algorithm_1_on_the_last_tokens(seed: int, unit_bytes: int, slots: int) -> None:
    active = topical(150, 1024, 8, seed)
    hottest = tuple(np.argsort(-active.sum(axis=1), kind="stable")[: 10 * (seed % 3)].tolist())
    problem = problem_of(active, hottest, unit_bytes=unit_bytes, cache="lru", cache_slots=slots, flash=FLASH)
    seconds = candidates_of(problem)
    chosen, order = auto.choose(problem)
    if chosen == "ripple":
        assert (order == ripple.arrange(problem)).all()
        assert min(seconds.values()) > (1 - auto.MARGIN) * seconds["ripple"]
    else:
        assert problem.judge(order).seconds == seconds[chosen] == min(seconds.values())
        assert seconds[chosen] <= (1 - auto.MARGIN) * seconds["ripple"]


def test_the_search_wins_where_there_is_headroom() -> None:
    """Small units, the hottest fifth pinned, few active: gaps and reads matter more than pairs side by side."""
    active = topical(300, 2048, 12)
    hottest = tuple(np.argsort(-active.sum(axis=1), kind="stable")[:60].tolist())
    problem = problem_of(active, hottest, unit_bytes=432, flash=FLASH)
    chosen, _ = auto.choose(problem)
    seconds = candidates_of(problem)
    assert chosen == min(seconds, key=lambda name: seconds[name]) != "ripple"
    assert seconds[chosen] < 0.95 * seconds["ripple"]


def test_noise_is_decided_in_favour_of_algorithm_1() -> None:
    active = np.random.default_rng(0).random((100, 1024)) < 0.5
    problem = problem_of(active, unit_bytes=24576)
    chosen, order = auto.choose(problem)
    assert chosen == "ripple"
    assert (order == ripple.arrange(problem)).all()


def test_a_fit_never_sees_the_tokens_it_is_judged_by() -> None:
    active = topical(80, 1024, 6)
    other = active.copy()
    other[:, -128:] = topical(80, 128, 6, seed=9)
    first, second = problem_of(active, (3, 4)), problem_of(other, (3, 4))
    for module in (ripple, misses):
        assert (module.arrange(first.fitting) == module.arrange(second.fitting)).all()
    start = misses.arrange(first.fitting)
    fits = [collapse.refine(problem.fitting.missed, start, 0.1) for problem in (first, second)]
    assert (fits[0] == fits[1]).all()


def test_no_contest_where_nothing_can_be_won(monkeypatch: pytest.MonkeyPatch) -> None:
    """All units of a token fit one latency: every order takes as long."""
    monkeypatch.setattr(auto, "_rivals", lambda _: pytest.fail("there is nothing to win"))
    problem = problem_of(topical(40, 1024, 4), unit_bytes=432)
    assert problem.judge(ripple.arrange(problem)).seconds == pytest.approx(problem.least_seconds)
    assert auto.choose(problem)[0] == "ripple"


@pytest.mark.parametrize("unit_bytes", [432, 4096, 6912])
def test_no_order_beats_the_least_seconds(unit_bytes: int) -> None:
    """The bound is kept by any order, and reached where each token's units lie side by side on whole pages."""
    order = np.random.default_rng(1).permutation(96)
    problem = problem_of(grouped(order, 1024, 8, 3), unit_bytes=unit_bytes, flash=FLASH)
    for found in (order, np.arange(96), ripple.arrange(problem)):
        assert problem.judge(found).seconds >= (1 - 1e-9) * problem.least_seconds
    if unit_bytes == 4096:
        assert problem.judge(order).seconds == pytest.approx(problem.least_seconds)


def test_too_few_tokens_to_judge_by() -> None:
    problem = problem_of(topical(40, 300, 4))
    assert problem.num_judged < auto.LEAST_JUDGED_TOKENS
    assert auto.choose(problem)[0] == "ripple"
