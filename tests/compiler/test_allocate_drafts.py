"""allocate: a dense run that drafts with its coarse planes is taken where its drafts pay, and the record says so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.dense_run import dense_run
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import allocate
from coldpress.compiler.stages.allocate import AllocateConfig, Floor, Inputs, searched
from coldpress.runtime.store.computing import in_pass
from coldpress.schemas.activations import Activations
from coldpress.schemas.curves import CoarseDraft
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Sparsity
from tests.support.curves import NO_LOSS, curves_of
from tests.support.statistics import activations_of, device_of, model_of

LAYERS, HIDDEN, UNITS, TOKENS = 11, 1024, 2048, 8
SLOW = device_of(read_curve=((4096, 1e8), (65536, 4e8)), dram_bytes_per_s=4e10)
"""Flash that takes a hundred times as long as DRAM."""


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(LAYERS, HIDDEN, UNITS, hidden_act="silu")


@pytest.fixture(scope="module")
def activations(tmp_path_factory: pytest.TempPathFactory) -> Activations:
    active = np.random.default_rng(1).random((UNITS, TOKENS)) < 0.5
    return activations_of(tmp_path_factory.mktemp("activations"), [{"neuron": active}] * LAYERS, exact_zeros=False)


def config_of(**changes: Any) -> AllocateConfig:
    values: dict[str, Any] = {"method": "auto", "format": "auto", "cache": "static", "context_length": 128}
    return AllocateConfig(**(values | {"dram_budget": "85%", "max_ppl_ratio": 1.05} | changes))


def found(
    folder: Path, model: Model, activations: Activations, acceptance: float = 0.9, device=SLOW, **changes: Any
) -> Sparsity:
    """Curves know formats and drafts alone: every candidate is a dense run."""
    config, curves = config_of(**changes), curves_with(model, folder, acceptance)
    return allocate.run(config, model, activations, device, Workspace(folder, config.to_json()), curves=curves)


def curves_with(model: Model, folder: Path, acceptance: float):
    known = curves_of(model, folder / "curves", {}, {"int4_group32": 1.01, "int3_group32": 1.2}, num_tokens=TOKENS)
    loss = NO_LOSS | {"ppl_ratio": 1.01}
    drafts = (CoarseDraft(format="int4_2_2", acceptance=acceptance, acceptance_error=0.02, **loss),)
    return known.model_copy(update={"drafts": drafts})


def test_drafts_are_taken_where_reading_is_slow(tmp_path: Path, model: Model, activations: Activations) -> None:
    sparsity = found(tmp_path, model, activations)
    assert (sparsity.method, sparsity.format) == ("dense", "int4_2_2")
    assert sparsity.draft_tokens == sparsity.tried[0].draft_tokens > 1
    assert f"by up to {sparsity.draft_tokens} drafts a pass from its coarse planes" in str(sparsity.tried[0].reason)
    assert sparsity.tried[0].ppl_ratio == pytest.approx(1.01), "drafts lose nothing"


def test_the_seconds_are_those_of_drafts_and_of_a_pass_over_its_tokens(
    tmp_path: Path, model: Model, activations: Activations
) -> None:
    """Acceptance counts less its error. A pass reads as much as a token does, and computes longer."""
    sparsity = found(tmp_path, model, activations)
    budget, room = sparsity.budget, sparsity.budget.buffer_bytes + sparsity.budget.cache_bytes
    # the table of embeddings is the head as well, so that a token reads all of it
    draft_s = (budget.resident_bytes + budget.kv_cache_bytes / 2) / 4e10
    found_s: list[float] = []
    for count in range(9):
        shape = model, "int4_2_2", 128, budget.dram_budget_bytes, in_pass(SLOW, 1 + count)
        run = dense_run(*shape, room_bytes=room)
        assert run is not None
        found_s.append((run.token_s + count * draft_s) / sum(0.88**number for number in range(count + 1)))
    assert sparsity.tried[0].token_s == pytest.approx(min(found_s), rel=1e-3)


@pytest.mark.parametrize(
    ("acceptance", "changes"),
    [(0.9, {"draft": "off"}), (0.05, {}), (0.9, {"dram_budget": "100%"})],
    ids=["off", "wrong drafts", "nothing is read"],
)
def test_drafts_are_not_taken_where_they_lose(
    tmp_path: Path, model: Model, activations: Activations, acceptance: float, changes: dict[str, Any]
) -> None:
    sparsity = found(tmp_path, model, activations, acceptance, **changes)
    assert (sparsity.method, sparsity.format, sparsity.draft_tokens) == ("dense", "int4_group32", 0)


def test_a_small_gain_is_no_reason_for_drafts(tmp_path: Path, model: Model, activations: Activations) -> None:
    """As for any other candidate: a twentieth of the dense run's time must be saved."""
    device = device_of(read_curve=((4096, 2e10), (65536, 4e10)), latency_s=1e-6, dram_bytes_per_s=4e10)
    assert found(tmp_path, model, activations, device=device).draft_tokens == 0


def test_a_named_draft_narrows_the_search(tmp_path: Path, model: Model, activations: Activations) -> None:
    """Only dense runs in planes draft with them; a wrong draft stays the user's choice."""
    config = config_of(draft="coarse", dram_budget=10**9)
    inputs = Inputs(model, activations, SLOW, Workspace(tmp_path, "test"), None, 1, curves_with(model, tmp_path, 0.9))
    kinds = {one.candidate.format for one in searched(config, inputs, Floor(inputs.curves, 1.05)).judged}
    assert kinds <= {"int4_2_2", "int4_3_1", "int8_4_4"}
    sparsity = found(tmp_path, model, activations, 0.05, draft="coarse")
    assert sparsity.format in kinds


def test_a_named_plain_format_takes_no_drafts(tmp_path: Path, model: Model, activations: Activations) -> None:
    sparsity = found(tmp_path, model, activations, format="int4_group32")
    assert (sparsity.format, sparsity.draft_tokens) == ("int4_group32", 0)
    with pytest.raises(ColdpressError, match="draft=coarse was asked for, and format=int4_group32 has no coarse"):
        found(tmp_path, model, activations, format="int4_group32", draft="coarse")
