"""Several tokens in one pass: each computes as if it came alone, whatever selects, and what they share is read once."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from coldpress.runtime import plugins
from coldpress.runtime.decoder import blocks
from coldpress.runtime.decoder.decoder import PREFILL_CHUNK_TOKENS
from coldpress.runtime.generate.session import Session
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.sparsity import Selector
from coldpress.runtime.trace import FETCH, Recorder
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from tests.support.artifacts import Recipe, build_artifact, small_spec
from tests.support.kernels import formats_of
from tests.support.methods import pairs

TOKENS = np.array([3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26])
NUM_PREFILLED = 4
METHODS = plugins.names("coldpress.runtime.sparsity")
BLIND = [name for name in METHODS if not plugins.load("coldpress.runtime.sparsity", Selector, name).SEES_RESIDENCY]
SEEING = [name for name in METHODS if name not in BLIND]
FORMATS = formats_of(small_spec().hidden_size)
ALL_IN_DRAM = {"pinned_share": 1.0, "slots_share": 0.0}


def recipe_of(method, quantization="fp16", **changes):
    exact = plugins.load("coldpress.runtime.sparsity", Selector, method).NEEDS_EXACT_ZEROS
    spec = small_spec(num_hidden_layers=11, intermediate_size=64, hidden_act="relu" if exact else "silu")
    return Recipe(spec=spec, method=method, format=quantization, density=0.3, **changes)


def apart(session, tokens=TOKENS):
    """Logits of the tokens behind the prefilled ones, one after the other."""
    session.decoder.begin(32)
    session.decoder.prefill(tokens[:NUM_PREFILLED])
    return np.stack([session.decoder.decode(token) for token in tokens[NUM_PREFILLED:].tolist()])


def together(session, *sizes, tokens=TOKENS):
    """The same, so many at a time."""
    session.decoder.begin(32)
    session.decoder.prefill(tokens[:NUM_PREFILLED])
    edges = NUM_PREFILLED + np.cumsum([0, *sizes])
    return np.concatenate([session.decoder.decode_many(tokens[a:b]) for a, b in itertools.pairwise(edges)])


def assert_close(found, expected):
    """Sums differ in their last bits, and with them, now and then, a key or value by the last bit of fp16."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize(("method", "quantization"), pairs(BLIND, FORMATS))
def test_tokens_decoded_together_have_the_logits_of_one_after_the_other(method, quantization, tmp_path):
    """To the bit: with everything in memory, products and sums are in one order, whatever is computed together."""
    session = Session(build_artifact(tmp_path / "a", recipe_of(method, quantization, **ALL_IN_DRAM)).path)
    expected = apart(session)
    assert (together(session, 1, 5, 2) == expected).all()
    assert session.store.counters.misses == 0


@pytest.mark.parametrize("method", ["relu", "dense"])
@pytest.mark.parametrize("quantization", ["fp16", "int4_group32"])
def test_where_units_have_to_be_read_they_have_them_up_to_rounding(method, quantization, tmp_path):
    """Of selectors whose choice has no edge at which rounding would decide."""
    built = build_artifact(tmp_path / "a", recipe_of(method, quantization))
    session = Session(built.path)
    expected = apart(session)
    assert session.store.counters.misses > 0
    assert_close(together(Session(built.path), 8), expected)
    assert_close(together(session, 1, 5, 2), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "spec"),
    [
        *((method, {}) for method in ("relu", "dense", "topk", "predictor")),
        *((method, {"num_experts": 4, "num_experts_per_tok": 2}) for method in ("relu", "dense", "topk")),
    ],
)
def test_many_tokens_multiply_matrices_of_their_own_units(method, spec, tmp_path, monkeypatch):
    """Units are copied side by side, a few at a time, from slots and from what is read."""
    monkeypatch.setattr(blocks, "GATHERED_BYTES", 1 << 10)
    monkeypatch.setattr(blocks, "FEW_TOKENS", 4)
    recipe = recipe_of(method, "fp16")
    built = build_artifact(tmp_path / "a", replace(recipe, spec=recipe.spec.model_copy(update=spec)))
    expected = apart(Session(built.path))
    assert_close(together(Session(built.path), 8), expected)


def test_more_than_few_tokens_have_the_logits_of_one_after_the_other(tmp_path):
    """In attention and resident matrices, too."""
    tokens = np.random.default_rng(0).integers(0, 90, NUM_PREFILLED + FEW_TOKENS + 8)
    built = build_artifact(tmp_path / "a", recipe_of("relu", context_length=64))
    found = []
    for size in (1, FEW_TOKENS + 8):
        session = Session(built.path)
        session.decoder.begin(64)
        session.decoder.prefill(tokens[:NUM_PREFILLED])
        pieces = np.split(tokens[NUM_PREFILLED:], range(size, FEW_TOKENS + 8, size))
        found.append(np.concatenate([session.decoder.decode_many(piece) for piece in pieces]))
    assert_close(found[1], found[0])


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 3}, {"norm": "layer_norm", "position": "learned", "rotary_dim": 0}]
)
def test_no_token_sees_what_comes_after_it(changes, tmp_path):
    recipe = recipe_of("topk", **ALL_IN_DRAM)
    built = build_artifact(tmp_path / "a", replace(recipe, spec=recipe.spec.model_copy(update=changes)))
    session = Session(built.path)
    expected = apart(session)
    assert (together(session, 8) == expected).all()
    other = TOKENS.copy()
    other[-1] += 1
    found = together(session, 8, tokens=other)
    assert (found[:-1] == expected[:-1]).all()
    assert (found[-1] != expected[-1]).any()


def test_what_several_tokens_use_is_asked_for_once(tmp_path):
    recorders = [Recorder(), Recorder()]
    built = build_artifact(tmp_path / "a", recipe_of("topk"))
    apart(Session(built.path, recorder=recorders[0]))
    together(Session(built.path, recorder=recorders[1]), 8)
    one_by_one, at_once = ([event for event in each.events if event.kind == FETCH] for each in recorders)
    assert len(one_by_one) == 8 * len(at_once) == 8 * 2 * 11
    for event in at_once:
        of_place = [one.ids for one in one_by_one if (one.layer, one.family) == (event.layer, event.family)]
        assert event.ids.tolist() == np.unique(np.concatenate(of_place)).tolist()


def test_tokens_taken_back_leave_nothing_behind(tmp_path):
    session = Session(build_artifact(tmp_path / "a", recipe_of("topk", **ALL_IN_DRAM)).path)
    expected = apart(session)
    session.decoder.begin(32)
    session.decoder.prefill(TOKENS[:NUM_PREFILLED])
    session.decoder.decode_many(np.array([*TOKENS[NUM_PREFILLED:7], 1, 2, 3, 4]))
    session.decoder.roll_back(7)
    assert session.decoder.length == 7
    found = session.decoder.decode_many(TOKENS[7:])
    assert (found == expected[7 - NUM_PREFILLED :]).all()
    with pytest.raises(ValueError, match="length is 13, the KV cache has 12 tokens"):
        session.decoder.roll_back(13)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("method", SEEING)
def test_where_what_is_in_memory_never_changes_each_token_uses_its_own_units(method, experts, tmp_path):
    """With pinned units alone, a selector that sees them chooses for tokens together as for one after the other."""
    known = plugins.load("coldpress.runtime.sparsity", Selector, method).OPTIONS.model_fields
    options = {"use_read_units": False} if "use_read_units" in known else {}
    recipe = recipe_of(method, options=options, cache="static", slots_share=0.0)
    shape = {"intermediate_size": 256, "num_experts": experts, "num_experts_per_tok": min(2, experts)}
    built = build_artifact(tmp_path / "a", replace(recipe, spec=recipe.spec.model_copy(update=shape), density=0.7))
    recorders = [Recorder(), Recorder()]
    expected = apart(Session(built.path, recorder=recorders[0]))
    session = Session(built.path, recorder=recorders[1])
    assert_close(together(session, 1, 5, 2), expected)
    assert session.store.counters.misses > 0
    own, shared = ([event.ids for event in each.events if event.kind == FETCH] for each in recorders)
    parts = len(session.plan.parts)
    for part in range(parts):  # of the second pass, which has five tokens
        of_part = [ids.tolist() for ids in own[part::parts][1:6]]
        assert shared[parts + part].tolist() == sorted(set().union(*of_part))
    assert any(ids.size < together.size for ids, together in zip(own[parts:], shared[parts:], strict=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options", "cache"),
    [
        ("dip_ca", {}, "lru"),
        ("flash", {"use_read_units": False}, "lru"),
        ("flash", {}, "static"),
        ("topk", {"use_read_units": True}, "lru"),
        ("predictor", {"use_read_units": True}, "lru"),
    ],
)
def test_a_selector_that_sees_what_is_in_memory_decodes_one_token_at_a_time(method, options, cache, tmp_path):
    session = Session(build_artifact(tmp_path / "a", recipe_of(method, options=options, cache=cache)).path)
    session.decoder.begin(32)
    session.decoder.prefill(TOKENS[:NUM_PREFILLED])
    with pytest.raises(ColdpressError, match=f"the selector '{method}' uses what is in DRAM, .* decode one at a time"):
        session.decoder.decode_many(TOKENS[4:6])
    session.decoder.decode_many(TOKENS[4:5])


def test_more_than_fit_are_refused(topk_artifact):
    session = Session(topk_artifact.path)
    session.decoder.begin(6)
    session.decoder.prefill(TOKENS[:NUM_PREFILLED])
    for count in (0, PREFILL_CHUNK_TOKENS + 1):
        with pytest.raises(ColdpressError, match=f"{count} tokens are to be decoded at once, expected 1 to 256"):
            session.decoder.decode_many(np.ones(count, int))
    with pytest.raises(ColdpressError, match=f"{FEW_TOKENS + 1} tokens are to be decoded at once, expected 1 to 32"):
        session.decoder.decode_each([np.ones(FEW_TOKENS + 1, int)], [0])
    with pytest.raises(DoesNotFitError, match="3 more tokens do not fit the context: 4 of 6 are in use"):
        session.decoder.decode_many(TOKENS[4:7])
    with pytest.raises(ColdpressError, match="token id 96 is outside the vocabulary"):
        session.decoder.decode_many(np.array([1, 96]))
