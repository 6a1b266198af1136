"""allocate with a draft model: its DRAM is part of the budget, and it is taken where it makes tokens clearly faster."""

from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.io import Workspace, save_arrays
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.stages.allocate import run
from coldpress.schemas.drafter import Drafter
from coldpress.schemas.memory import OverBudgetError
from tests.support.curves import curves_of
from tests.support.statistics import activations_of, device_of, model_of

LAYERS, HIDDEN, UNITS, TOKENS = 12, 256, 1024, 64
DRAFT_BYTES = 300_000


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def drafter(right=0.9, token_s=1e-12):
    shape = (4, 256)
    guesses = {"right": np.random.default_rng(0).random(shape) < right, "certainty": np.full(shape, right, np.float32)}
    arrays = save_arrays(Path("guesses.safetensors"), guesses)
    return Drafter(name="small", dram_bytes=DRAFT_BYTES, token_s=token_s, num_tokens=1024, arrays=arrays)


def allocated(given, method="dense", budget="70%", draft="auto", **changes):
    model = model_of(LAYERS, HIDDEN, UNITS)
    active = np.random.default_rng(0).random((UNITS, TOKENS)) < 0.5
    families = dict.fromkeys(("neuron", "up_down", "mlp_mid", "gate_down"), active) | {"mlp_in": active[:HIDDEN]}
    activations = activations_of(Path("counts"), [families] * LAYERS)
    values = {"method": method, "format": "int8_group32", "dram_budget": budget, "context_length": 128, "draft": draft}
    config = AllocateConfig(**(values | {"density_allocation": "uniform"} | changes))
    curves = curves_of(model, Path("curves"), {}, num_tokens=32) if method == "auto" else None
    work = Workspace(Path("allocate"), config.to_json())
    return run(config, model, activations, device_of(), work, curves=curves, drafter=given)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "auto"])
def test_a_draft_model_that_guesses_well_is_taken_and_counts_in_the_budget(method):
    found, plain = allocated(drafter(), method).budget, allocated(None, method).budget
    assert found.draft_bytes == DRAFT_BYTES
    assert plain.draft_bytes == 0
    assert found.held.num_bytes + found.cache_bytes == found.dram_budget_bytes == plain.dram_budget_bytes
    assert found.cache_bytes + found.buffer_bytes == plain.cache_bytes + plain.buffer_bytes - DRAFT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "auto"])
@pytest.mark.parametrize(
    "given", [{"right": 0.0}, {"token_s": 1.0}], ids=["wrong guesses", "guesses that take too long"]
)
def test_a_draft_model_that_saves_nothing_is_left_out(method, given):
    assert allocated(drafter(**given), method) == allocated(None, method)


def test_one_that_is_asked_for_is_taken_whatever_it_brings():
    assert allocated(drafter(right=0.0), draft="model").budget.draft_bytes == DRAFT_BYTES


def test_it_is_left_out_where_another_draft_is_asked_for():
    assert allocated(drafter(), draft="lookup").budget.draft_bytes == 0


@pytest.mark.parametrize("draft", ["auto", "model"])
def test_with_room_for_the_whole_model_there_is_nothing_to_save(draft):
    assert allocated(drafter(), budget="100%", draft=draft).budget.draft_bytes == 0


def test_a_token_that_leaves_out_units_has_no_drafts():
    """Each token of a pass would use others."""
    assert allocated(drafter(), "topk", draft="model").budget.draft_bytes == 0


def test_a_budget_that_cannot_hold_it_is_refused_if_it_is_asked_for():
    with pytest.raises(OverBudgetError) as caught:
        allocated(None, budget=1000)
    budget = caught.value.needed_bytes + DRAFT_BYTES // 2
    assert allocated(drafter(), budget=budget).budget.draft_bytes == 0
    with pytest.raises(OverBudgetError, match="300,000 draft model"):
        allocated(drafter(), budget=budget, draft="model")


@pytest.mark.slow
def test_the_search_counts_what_drafts_save():
    taken, plain = allocated(drafter(), "auto").tried[0], allocated(None, "auto").tried[0]
    assert taken.token_s < 0.5 * plain.token_s


def test_a_draft_model_s_head_has_the_format_of_its_layers():
    """It is half of a small model, and its tokens are checked."""
    found, usual = (allocated(None, draft="off", budget="100%", head_as_layers=own) for own in (True, False))
    assert (found.head.format, usual.head) == ("int8_group32", None)
    small = allocated(None, draft="off", budget="100%", format="iq4_nl", head_as_layers=True)
    plain = allocated(None, draft="off", budget="100%", format="iq4_nl")
    assert small.head.format == "iq4_nl"
    assert small.budget.resident_bytes < plain.budget.resident_bytes
