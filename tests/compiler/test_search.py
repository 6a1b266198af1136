"""Searches: what counts as best, and that the fast search finds what the exhaustive one finds."""

from dataclasses import replace

import pytest

from benchmarks.shared.searches import SEARCHES
from coldpress.compiler.search import MARGIN, Candidate, Goal, Judged, Space
from coldpress.compiler.search.words import front_of, tried_of
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import HeadFormat, head_of, of_layers, with_own

METHODS = ("dense", "topk", "wina", "gate")
FORMATS = ("int4_group32", "int8_group32")
CACHES = ("lfu", "lru", "static")
HEAD = HeadFormat(role="lm_head.weight", format="int4_group32")
LEAST = {"topk": 0.5, "wina": 0.4, "gate": 0.8}
SPACE = Space(
    methods=METHODS,
    formats=FORMATS,
    caches=CACHES,
    densities=lambda method, _: (None,) if method == "dense" else (LEAST[method], 0.9),
    budget_density=0.6,
)


def judge(candidate: Candidate) -> Judged:
    """Bytes over speed, with caches that save a part of them: the best is no cache's or selector's alone."""
    density = candidate.density or 1.0
    size = {"int4_group32": 1.0, "int8_group32": 1.9}[candidate.format]
    saved = {("topk", "lfu"): 0.5, ("topk", "lru"): 0.3, ("wina", "lru"): 0.35}.get(
        (candidate.method, candidate.cache), 0.0
    )
    reading = 1.0 if candidate.method == "dense" else 1.3
    if candidate.method == "gate":
        return Judged(candidate, refusal="gate: too large", needed_bytes=7)
    return Judged(
        candidate,
        token_s=density * size * reading * (1 - saved),
        ppl_ratio=1.0 + 0.1 * (1 - density) + (0.01 if size == 1.0 else 0.001),
        hit_rate=saved,
        dram_bytes=100,
        density=density,
        is_whole=candidate.method == "dense",
    )


def searched(name: str, goal: Goal) -> list[Judged]:
    return SEARCHES[name](SPACE, judge, goal)


@pytest.mark.parametrize("goal", [Goal(), Goal(0.7), Goal(0.4), Goal(0.01)])
def test_the_default_search_finds_what_judging_everything_finds(goal: Goal) -> None:
    found, everything = (goal.best(searched(name, goal)) for name in ("beam", "exhaustive"))
    assert found is not None
    assert found == everything
    assert len(searched("beam", goal)) < len(searched("exhaustive", goal))


def test_the_baseline_takes_the_budget_s_density_of_top_k() -> None:
    best = Goal().best(searched("activeflow", Goal()))
    assert best is not None
    assert best.candidate == Candidate("topk", "int4_group32", 0.6, "lfu")


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_stays_in_the_space(name: str) -> None:
    for one in searched(name, Goal()):
        candidate = one.candidate
        assert candidate.method in METHODS
        assert candidate.format in FORMATS
        assert candidate.cache in CACHES
        assert candidate.density is None or candidate.density >= LEAST[candidate.method]


def best_with_keys(name: str, saved: float, refused: tuple[str, ...] = ()) -> Judged:
    """The best where int8 keys and values save this share of a token's time, and some formats of them do not fit."""

    def judge_keys(candidate: Candidate) -> Judged:
        if candidate.kv_cache in refused:
            return Judged(candidate, refusal="too large", needed_bytes=7)
        found = judge(candidate)
        return replace(found, token_s=found.token_s * (1 - saved * (candidate.kv_cache == "int8")))

    space = replace(SPACE, kv_caches=("fp16", "int8"))
    best = Goal().best(SEARCHES[name](space, judge_keys, Goal()))
    assert best is not None
    return best


@pytest.mark.parametrize("name", ["beam", "exhaustive"])
@pytest.mark.parametrize(("saved", "kv_cache"), [(0.0, "fp16"), (MARGIN - 0.01, "fp16"), (MARGIN + 0.01, "int8")])
def test_keys_lose_precision_only_for_a_clear_gain(name: str, saved: float, kv_cache: str) -> None:
    best = best_with_keys(name, saved)
    assert best.candidate == replace(best_with_keys(name, 0.0).candidate, kv_cache=kv_cache)


@pytest.mark.parametrize("name", ["beam", "exhaustive"])
def test_keys_lose_precision_where_nothing_else_fits(name: str) -> None:
    assert best_with_keys(name, 0.0, refused=("fp16",)).candidate.kv_cache == "int8"


def best_with_head(name: str, saved: float, refused: bool = False) -> Judged:
    """The best where a smaller head saves this share of a token's time, and perhaps the default one does not fit."""

    def judge_head(candidate: Candidate) -> Judged:
        head = head_of(candidate.format)
        if refused and head is None:
            return Judged(candidate, refusal="too large", needed_bytes=7)
        found = judge(replace(candidate, format=of_layers(candidate.format)))
        return replace(found, candidate=candidate, token_s=found.token_s * (1 - saved * (head is not None)))

    space = replace(SPACE, heads=lambda formats: [with_own(of_layers(formats), HEAD)])
    best = Goal().best(SEARCHES[name](space, judge_head, Goal()))
    assert best is not None
    return best


@pytest.mark.parametrize("name", ["beam", "exhaustive"])
@pytest.mark.parametrize(("saved", "head"), [(0.0, None), (MARGIN - 0.01, None), (MARGIN + 0.01, HEAD)])
def test_the_head_loses_precision_only_for_a_clear_gain(name: str, saved: float, head: HeadFormat | None) -> None:
    plain = best_with_head(name, 0.0).candidate
    formats = with_own(of_layers(plain.format), head)
    assert best_with_head(name, saved).candidate == replace(plain, format=formats)


@pytest.mark.parametrize("name", ["beam", "exhaustive"])
def test_the_head_loses_precision_where_nothing_else_fits(name: str) -> None:
    assert head_of(best_with_head(name, 0.0, refused=True).candidate.format) == HEAD


@pytest.mark.parametrize("name", ["beam", "exhaustive"])
@pytest.mark.parametrize("fits", [True, False])
def test_attention_is_streamed_where_nothing_else_fits(name: str, fits: bool) -> None:
    def judge_attention(candidate: Candidate) -> Judged:
        found = judge(replace(candidate, format=of_layers(candidate.format)))
        found = replace(found, candidate=candidate)
        if candidate.streams_attention:
            return replace(found, token_s=2 * found.token_s)
        return found if fits else Judged(candidate, refusal="too large", needed_bytes=9)

    space = replace(SPACE, streams_attention=(False, True), heads=lambda formats: [with_own(formats, HEAD)])
    found = SEARCHES[name](space, judge_attention, Goal())
    best = Goal().best(found)
    assert best is not None
    assert best.candidate.streams_attention is not fits
    assert {one.candidate.method for one in found if one.candidate.streams_attention} <= {"dense"}
    if not fits:
        assert (best.candidate.method, head_of(best.candidate.format)) == ("dense", None), (
            "the default head, if it fits"
        )
        reason = tried_of(best, found, {}, Goal())[0].reason
        assert reason is not None
        assert "attention's are read from flash, too: nothing fits with attention in DRAM" in reason


def test_keys_stay_whole_where_the_head_s_gain_is_enough() -> None:
    """Both together save a twentieth, and the head alone nearly as much."""
    both, head, keys = (1 - MARGIN) * 0.98, (1 - MARGIN) * 0.99, 0.99
    taken = [made("dense", 1.0), made("dense", head), made("dense", keys), made("dense", both)]
    formats = with_own("fp16", HEAD)
    candidates = [
        replace(one.candidate, format=formats if number % 2 else "fp16", kv_cache="int8" if number > 1 else "fp16")
        for number, one in enumerate(taken)
    ]
    judged = [replace(one, candidate=candidate) for one, candidate in zip(taken, candidates, strict=True)]
    assert Goal().best(judged) == judged[1]


def test_the_record_says_what_a_smaller_head_gains() -> None:
    plain = made("dense", 0.02)
    taken = replace(plain, token_s=0.01, candidate=replace(plain.candidate, format=with_own("fp16", HEAD)))
    (tried,) = tried_of(taken, [plain, taken], {}, Goal())
    assert (tried.format, tried.head) == ("fp16", HEAD)
    assert tried.reason is not None
    assert tried.reason.endswith("; fp16, the head in int4_group32, since the default head takes 2.00 times as long")
    assert "head" not in tried_of(plain, [plain, taken], {}, Goal())[0].model_dump()


def test_the_baseline_leaves_keys_as_they_are() -> None:
    assert best_with_keys("activeflow", 0.5).candidate.kv_cache == "fp16"


@pytest.mark.parametrize(
    ("taken_s", "other_s", "words"),
    [(0.01, 0.02, "takes 2.00 times as long"), (0.02, 0.0196, "takes 0.98 times as long, no clear gain")],
)
def test_the_record_compares_keys(taken_s: float, other_s: float, words: str) -> None:
    taken, other = made("topk", taken_s), made("topk", other_s)
    other = replace(other, candidate=replace(other.candidate, kv_cache="int8"))
    tried = tried_of(taken, [made("dense", 0.03), taken, other], {}, Goal())
    assert tried[0].reason is not None
    assert tried[0].reason.endswith(f"; keys and values in fp16, since int8 {words}")
    assert tried[0].kv_cache == "fp16"


def made(method: str, token_s: float, ppl_ratio: float | None = 1.0, **changes: object) -> Judged:
    candidate = Candidate(method, "fp16", None, "lfu")
    return Judged(candidate, token_s, ppl_ratio, is_whole=method == "dense", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("relative", "method"), [(1.01, "dense"), (1 - MARGIN + 0.01, "dense"), (1 - MARGIN - 0.01, "relu")]
)
def test_a_method_must_save_a_twentieth_of_the_dense_run_s_time(relative: float, method: str) -> None:
    best = Goal().best([made("dense", 0.02), made("relu", 0.02 * relative)])
    assert best is not None
    assert best.candidate.method == method


def test_a_model_that_fits_is_run_whole() -> None:
    """A sparse run computes less; but nothing has to be read, so nothing is left out."""
    best = Goal().best([made("dense", 0.02, holds_everything=True), made("topk", 0.01, 1.04, holds_everything=True)])
    assert best is not None
    assert best.candidate.method == "dense"
    narrow, wide = made("dense", 0.02, 1.01, holds_everything=True), made("dense", 0.03, 1.0, holds_everything=True)
    assert Goal().best([wide, narrow]) is narrow, "both keep the quality"


@pytest.mark.parametrize("goal", [Goal(), Goal(0.1), Goal(0.001)])
def test_a_selector_that_holds_everything_uses_what_quality_needs(goal: Goal) -> None:
    """Where no dense run is a candidate: with several budgets, which share a selector."""
    less, whole = made("topk", 0.01, 1.04, holds_everything=True), made("topk", 0.02, 1.0, holds_everything=True)
    assert goal.best([less, whole, made("topk", 0.005, 1.0)]) is whole


@pytest.mark.parametrize(("max_token_s", "method"), [(0.05, "wina"), (0.015, "topk"), (0.001, "topk")])
def test_enough_speed_is_enough(max_token_s: float, method: str) -> None:
    judged = [made("dense", 0.1), made("wina", 0.03, 1.01), made("topk", 0.01, 1.04)]
    best = Goal(max_token_s).best(judged)
    assert best is not None
    assert best.candidate.method == method


def test_nothing_is_best_where_everything_is_refused() -> None:
    assert Goal().best([made("dense", 1.0, refusal="too large")]) is None


def test_the_record_says_why() -> None:
    judged = [
        made("dense", 0.03),
        made("topk", 0.01, 1.04, hit_rate=0.0),
        made("wina", 0.02, 1.01),
        made("gate", 0.04, 1.02),
        made("relu", 1.0, refusal="too large", needed_bytes=7),
    ]
    refusals: dict[str, ColdpressError] = {"relu": ColdpressError("too large"), "up": ColdpressError("loses too much")}
    tried = tried_of(judged[1], judged, refusals, Goal())
    assert [entry.method for entry in tried] == ["topk", "wina", "dense", "gate", "relu", "up"]
    words = {entry.method: entry.reason or entry.skipped for entry in tried}
    assert words["topk"] == (
        "the fastest that keeps the quality, 3.00 times as fast as a dense run, with a cache in which no unit stays "
        "until it is used again"
    )
    assert words["gate"] == "0.75 times as fast as a dense run"
    assert (words["relu"], words["up"]) == ("too large", "loses too much")
    assert [entry.needed_bytes for entry in tried[-2:]] == [7, None]
    assert [entry.method for entry in front_of(judged)] == ["topk", "wina", "dense"], "gate is slower, worse than wina"
