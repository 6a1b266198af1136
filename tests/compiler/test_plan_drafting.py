"""plan: drafts where validation text repeats, every token uses every unit and the run reads; elsewhere the reason."""

from dataclasses import replace

import numpy as np
import pytest

from coldpress.compiler.io import save_arrays
from coldpress.compiler.seconds import Setting, requests_of, token_seconds
from coldpress.compiler.stages.plan.drafting import gains, replayed
from coldpress.runtime.drafts import Draft, lookup
from coldpress.runtime.plugins import load
from coldpress.runtime.simulate import pass_seconds
from coldpress.runtime.store.computing import FURTHER_SHARE
from coldpress.schemas.corpus import Corpus, TokenBlocks
from coldpress.schemas.drafter import Drafter
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.layout import placed_parts
from tests.compiler.test_plan import check_layout, laid, records, whole_of, with_budget

REPEATING = np.tile(np.arange(8, dtype=np.int32), (4, 16))
DISTINCT = np.arange(4 * 128, dtype=np.int32).reshape(4, 128)


def corpus_of(folder, blocks):
    """Text that repeats as `blocks` in its validation split alone: no other split may be read."""
    arrays = save_arrays(folder / "validation.safetensors", {"tokens": blocks})
    split = TokenBlocks(split="validation", arrays=arrays, num_blocks=len(blocks), block_tokens=blocks.shape[1])
    return Corpus(name="made", text_sha256="0" * 64, splits=(split,))


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    """A dense model of eleven layers that lacks DRAM for a third of its units."""
    given = records(tmp_path_factory.mktemp("reading"), "dense", num_hidden_layers=11, num_pinned=0)
    units_bytes = sum(section.length_bytes for section in laid(*given).sections)
    return with_budget(given, whole_of(given) - units_bytes // 3)


def test_text_that_repeats_is_drafted_and_the_reason_has_the_figures(reading, tmp_path):
    found = laid(*reading, corpus=corpus_of(tmp_path, REPEATING), draft="auto")
    plan, reason = found.plans[0], found.made.choices[0].reasons[-1]
    assert (plan.draft, plan.draft_tokens) == ("lookup", 4)
    assert reason.startswith("drafts of lookup, up to 4 a pass: ")
    assert "times as fast on validation text" in reason
    check_layout(*reading, found)


@pytest.mark.parametrize("blocks", [DISTINCT, REPEATING[:1]], ids=["nothing repeats", "one block has no error"])
def test_text_that_promises_no_gain_is_not_drafted(reading, tmp_path, blocks):
    found = laid(*reading, corpus=corpus_of(tmp_path, blocks), draft="auto")
    assert (found.plans[0].draft, found.plans[0].draft_tokens) == (None, 0)
    assert found.made.choices[0].reasons[-1].startswith("no drafts: the best of 3 ways does not pay")


def test_where_drafts_save_no_read_no_text_is_looked_at(reading, tmp_path):
    """`laid` gives a corpus without splits: looking at it would fail."""
    whole = with_budget(reading, whole_of(reading))
    sparse = records(tmp_path, "topk", num_hidden_layers=11, share=0.5)
    for given, words in ((whole, "no unit is read"), (sparse, "uses different units")):
        found = laid(*given, draft="auto")
        assert found.plans[0].draft is None
        assert words in found.made.choices[0].reasons[-1]


@pytest.mark.parametrize(("method", "options"), [("dip_ca", {}), ("topk", {"use_read_units": True})])
def test_tokens_that_use_what_is_in_dram_are_not_drafted(tmp_path, method, options):
    """Though each uses every unit: the reader refuses such a plan."""
    model, sparsity, placement, device = records(tmp_path, method, num_hidden_layers=11, share=1.0, num_pinned=0)
    given = with_budget((model, sparsity.model_copy(update={"options": options}), placement, device), 10**9)
    units_bytes = sum(section.length_bytes for section in laid(*given).sections)
    given = with_budget(given, whole_of(given) - units_bytes // 3)
    found = laid(*given, corpus=corpus_of(tmp_path, REPEATING), draft="auto")
    assert found.plans[0].draft is None
    assert "depends on what is in DRAM" in found.made.choices[0].reasons[-1]
    check_layout(*given, found)
    with pytest.raises(ColdpressError, match=f"draft=lookup was asked for, and {method} uses what is in DRAM"):
        laid(*given, draft="lookup")


def test_a_single_block_says_which_number_is_best_and_no_error(reading, tmp_path):
    found = laid(*reading, corpus=corpus_of(tmp_path, REPEATING[:1]), draft="lookup")
    assert found.plans[0].draft_tokens == 4
    assert "inf" not in found.made.choices[0].reasons[-1]


def test_a_named_draft_is_kept_with_the_best_number_and_off_says_nothing(reading, tmp_path):
    found = laid(*reading, corpus=corpus_of(tmp_path, DISTINCT), draft="lookup")
    assert found.plans[0].draft == "lookup"
    assert found.made.choices[0].reasons[-1].endswith("; as given")
    off = laid(*reading, draft="off")
    assert off.plans[0].draft is None
    assert not any("draft" in reason for reason in off.made.choices[0].reasons)
    assert "draft" not in off.made.to_json()


def test_a_selector_that_sees_the_cache_refuses_a_named_draft(tmp_path):
    given = records(tmp_path, "dip_ca", num_hidden_layers=11)
    with pytest.raises(ColdpressError, match="draft=lookup was asked for, and dip_ca uses what is in DRAM"):
        laid(*given, draft="lookup")


def test_the_dram_that_allocate_gives_to_a_draft_model_is_no_unit_s(reading, tmp_path):
    """The plan drafts with it as often as its guesses on validation text pay."""
    model, sparsity, *rest = reading
    guesses = {"right": np.ones((4, 128), bool), "certainty": np.full((4, 128), 0.9, np.float32)}
    arrays = save_arrays(tmp_path / "guesses.safetensors", guesses)
    known = Drafter(name="small", dram_bytes=20_000, token_s=1e-9, num_tokens=512, arrays=arrays)
    budget = sparsity.budget.model_copy(update={"draft_bytes": 20_000})
    given = model, sparsity.model_copy(update={"budget": budget}), *rest
    found, plain = laid(*given, drafter=known, draft="auto"), laid(*reading)
    (plan,), (other,) = found.plans, plain.plans
    assert (plan.draft, plan.draft_tokens, plan.draft_bytes, plan.draft_certainty) == ("model", 8, 20_000, 0.0)
    assert plan.dram_budget_bytes == other.dram_budget_bytes
    units = [sum(part.num_pinned + part.cache_slots for part in one.parts) for one in (plan, other)]
    assert units[0] < units[1]
    assert found.made.choices[0].reasons[-1].startswith("drafts of small, up to 8 a pass: ")


def test_passes_are_those_of_a_run_that_is_followed_by_hand():
    """1 2 3 1 2 | 3 is proposed after the second `1 2`; then `2 3`, and so on."""
    text = [1, 2, 3, 1, 2, 3, 9, 9]
    # from 1: passes give 2, 3, 1, 2 with nothing to propose; after `1 2` come 3 (right) and 1 (wrong: 9), so that the
    # pass gives 3 and 9; nothing follows `3 9`, so that the last pass gives 9
    assert replayed(load("coldpress.runtime.drafts", Draft, "lookup"), text, 2) == [0, 0, 0, 0, 2, 0]
    assert lookup.LEAST == 2


def test_a_gain_weighs_each_pass_with_its_own_seconds():
    blocks = np.array([[1, 2, 3, 1, 2, 3, 9, 9]] * 2)
    two = next(
        gain for gain in gains(["lookup"], blocks, [1.0 + tokens for tokens in range(1, 6)]) if gain.draft_tokens == 2
    )
    assert two.speed == pytest.approx(7 * 2 / (5 * 2 + 4))
    assert two.error == 0
    assert (two.tokens_per_pass, two.drafts_per_pass) == (pytest.approx(7 / 6), pytest.approx(2 / 6))


def test_a_pass_pays_for_one_tokens_reads_and_for_a_share_of_each_further_tokens_computing(reading):
    """Where computing costs next to nothing, a pass takes as long as a token. Where reading does, it takes as long as
    its products, and each further token's take a share of the first one's."""
    setting = setting_of(reading, laid(*reading))
    one, two, three = seconds_of(setting)
    assert one < two < three < 3 * one
    one, _, three = seconds_of(with_dram_rate(setting, 1e15))
    assert three == pytest.approx(one, rel=1e-3)
    one, _, three = seconds_of(with_dram_rate(setting, 1e5))
    assert three == pytest.approx((1 + 2 * FURTHER_SHARE) * one, rel=1e-2)


def test_a_pass_of_one_token_takes_as_long_as_a_simulated_token(reading):
    setting = setting_of(reading, laid(*reading))
    every = {
        (part.layer, part.family): np.arange(section.num_units, dtype=np.int32)
        for part, section in placed_parts(setting.plan, setting.sections)
    }
    expected = token_seconds(setting, requests_of([every], first=2), requests_of([every]))
    assert seconds_of(setting)[0] == pytest.approx(expected, rel=1e-12)


def seconds_of(setting):
    return pass_seconds(setting.artifact, setting.plan, 3)


def setting_of(given, found):
    model, sparsity, _, device = given
    return Setting(model, sparsity.format, device, found.sections, found.plans[0])


def with_dram_rate(setting, bytes_per_s):
    figure = setting.device.dram_bytes_per_s.model_copy(update={"value": bytes_per_s})
    return replace(setting, device=setting.device.model_copy(update={"dram_bytes_per_s": figure, "compute": None}))
