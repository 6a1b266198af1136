"""Records what a search found: the best candidate of each selector with a reason in words, and the front."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from coldpress.compiler.search import Goal, Judged, fastest_dense
from coldpress.runtime.dram.kv_cache import DEFAULT_KV_CACHE
from coldpress.runtime.quantization._mixed import format_fields, in_words
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import Method, head_of, of_layers, without_kept
from coldpress.schemas.sparsity import Tried


def tried_of(
    best: Judged,
    judged: Sequence[Judged],
    refusals: Mapping[Method, ColdpressError],
    goal: Goal,
    alone: Judged | None = None,
) -> tuple[Tried, ...]:
    """Lists each selector's best candidate, the taken one first, then refusals; `alone`: this budget's choice alone."""
    built, dense = [one for one in judged if one.refusal is None], fastest_dense(judged)
    of_method: dict[Method, Judged] = {best.candidate.method: best}
    for one in sorted(built, key=lambda one: one.token_s):
        of_method.setdefault(one.candidate.method, one)
    found = [
        _entry(
            one,
            _why_best(one, dense, goal, alone) + _head(one, judged) + _keys(one, judged)
            if one is best
            else _over_dense(one, dense),
        )
        for one in of_method.values()
    ]
    needed = {one.candidate.method: one.needed_bytes for one in judged if one.refusal is not None}
    skipped = [
        Tried(method=method, skipped=str(error), needed_bytes=needed.get(method))
        for method, error in refusals.items()
        if method not in of_method
    ]
    return (*found, *skipped)


def front_of(judged: Sequence[Judged]) -> tuple[Tried, ...]:
    """Returns the candidates that no other one beats in seconds, quality and DRAM, the fastest first."""
    known = [one for one in judged if one.refusal is None and one.ppl_ratio is not None]
    kept = [one for one in known if not any(_beats(other, one) for other in known)]
    dense = fastest_dense(known)
    return tuple(_entry(one, _over_dense(one, dense)) for one in sorted(kept, key=_cost))


def _cost(one: Judged) -> tuple[float, float, int]:
    assert one.ppl_ratio is not None
    return one.token_s, one.ppl_ratio, one.dram_bytes


def _beats(other: Judged, one: Judged) -> bool:
    return _cost(other) != _cost(one) and all(
        theirs <= own for theirs, own in zip(_cost(other), _cost(one), strict=True)
    )


def _entry(one: Judged, reason: str) -> Tried:
    candidate = one.candidate
    return Tried(
        method=candidate.method,
        **format_fields(without_kept(candidate.format)),
        cache=candidate.cache,
        kv_cache=candidate.kv_cache,
        token_s=one.token_s,
        reason=reason,
        density=min(1.0, one.density),
        ppl_ratio=one.ppl_ratio,
        hit_rate=one.hit_rate,
        routing=candidate.routing,
        dram_bytes=one.dram_bytes,
    )


def _why_best(one: Judged, dense: Judged | None, goal: Goal, alone: Judged | None) -> str:
    if alone is None or alone.candidate.shared == one.candidate.shared:
        return _why_taken(one, dense, goal)
    own = _why_taken(one, dense, goal) if one.holds_everything else _over_dense(one, dense)
    shared, other = (_shared(which) for which in (one, alone))
    return (
        f"{own}; all budgets share {shared}, alone this one would take {other}, "
        f"{one.token_s / alone.token_s:.2f} times as fast"
    )


def _shared(one: Judged) -> str:
    shared = one.candidate.shared
    of_keys = "" if shared.kv_cache == DEFAULT_KV_CACHE else f" with keys and values in {shared.kv_cache}"
    of_attention = ", attention on flash" if shared.streams_attention else ""
    return f"{shared.method} in {in_words(shared.format)}{of_keys}{of_attention}"


def _head(one: Judged, judged: Sequence[Judged]) -> str:
    """Compares a head in a format of its own with the default one; empty if the best candidate has that."""
    own = one.candidate.format
    if head_of(own) is None:
        return ""
    layers = of_layers(own)
    others = [other for other in judged if replace(other.candidate, format=own) == one.candidate and not other.refusal]
    usual = (other for other in others if head_of(other.candidate.format) is None)
    plain = next((other for other in usual if of_layers(other.candidate.format) == layers), None)
    without = "does not fit" if plain is None else f"takes {plain.token_s / one.token_s:.2f} times as long"
    return f"; {in_words(one.candidate.format)}, since the default head {without}"


def _keys(one: Judged, judged: Sequence[Judged]) -> str:
    """Compares the formats of keys and values that the best candidate was judged with; empty if it was only one."""
    found = ""
    for other in judged:
        own, kv_cache = one.candidate.kv_cache, other.candidate.kv_cache
        if kv_cache == own or replace(other.candidate, kv_cache=own) != one.candidate:
            continue
        ratio = other.token_s / one.token_s
        cost = f"takes {ratio:.2f} times as long" + (", no clear gain" if ratio < 1 else "")
        found += f"; keys and values in {own}, since {kv_cache} {'does not fit' if other.refusal else cost}"
    return found


def _why_taken(one: Judged, dense: Judged | None, goal: Goal) -> str:
    if one.holds_everything:
        return "the whole model fits in DRAM, so no unit is read from flash"
    if goal.max_token_s is not None:
        enough = one.token_s <= goal.max_token_s
        return (
            f"the best quality at {1 / goal.max_token_s:g} tokens/s"
            if enough
            else f"the fastest: none reaches {1 / goal.max_token_s:g} tokens/s"
        )
    if one.candidate.streams_attention:
        return "every weight is used, and attention's are read from flash, too: nothing fits with attention in DRAM"
    if one.is_whole:
        return "every weight is used, since leaving some out is not clearly faster at this quality"
    return f"the fastest that keeps the quality, {_over_dense(one, dense)}"


def _over_dense(one: Judged, dense: Judged | None) -> str:
    if dense is None or one is dense:
        return "a dense run" if one.is_whole else "a dense run does not fit"
    if (routing := one.candidate.routing) is not None:
        gain = f"{dense.token_s / one.token_s:.2f} times as fast as a dense run"
        return f"{gain}, with routers that prefer experts in DRAM ({routing.routing}:{routing.strength:g})"
    missed = ", with a cache in which no unit stays until it is used again" if one.hit_rate == 0 else ""
    return f"{dense.token_s / one.token_s:.2f} times as fast as a dense run{missed}"
