"""allocate: several DRAM budgets in one record, each divided by itself, over one image."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler import cost_model
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.sections import Whole, kept_arrays, make_sections
from coldpress.compiler.stages.allocate import run
from coldpress.compiler.workflow import settings
from coldpress.schemas.activations import Activations
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Sparsity
from tests.support.curves import curves_of
from tests.support.statistics import activations_of, device_of, model_of

LAYERS, HIDDEN, UNITS, TOKENS = 11, 256, 1024, 64


@pytest.fixture
def model() -> Model:
    return model_of(LAYERS, HIDDEN, UNITS)


@pytest.fixture
def activations(tmp_path: Path) -> Activations:
    active = np.random.default_rng(1).random((UNITS, TOKENS)) < 0.5
    families = dict.fromkeys(("neuron", "up_down", "mlp_mid", "gate_down"), active) | {"mlp_in": active[:HIDDEN]}
    return activations_of(tmp_path, [families] * LAYERS)


def divided(
    folder: Path, model: Model, activations: Activations, budget: int | str, method: str = "topk", **changes: Any
) -> Sparsity:
    values = {"format": "int8_group32", "context_length": 128, "density_allocation": "uniform"}
    config = AllocateConfig(method=method, dram_budget=budget, **values, **changes)
    work = Workspace(folder / "allocate", config.to_json())
    curves = curves_of(model, folder / "curves", {}) if method == "auto" else None
    return run(config, model, activations, device_of(), work, curves=curves)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["topk", "dense", "predictor", "relu"])
def test_each_budget_is_divided_as_alone_but_for_the_tables_of_all(
    tmp_path: Path, model: Model, activations: Activations, method: str
) -> None:
    """Bookkeeping counts the selector's arrays of every plan, since all are in memory."""
    asked = ("60%", "90%", "75%")
    found = divided(tmp_path, model, activations, ",".join(asked), method)
    sections = make_sections(model.spec, found.families, found.format)
    arrays = sum(array.num_bytes for array in kept_arrays(sections, method))
    assert len(found.decisions) == 3
    for decision, share in zip(found.decisions, ("90%", "75%", "60%"), strict=True):
        alone = divided(tmp_path / share, model, activations, share, method)
        assert decision.budget.dram_budget_bytes == alone.budget.dram_budget_bytes
        assert decision.budget.bookkeeping_bytes == alone.budget.bookkeeping_bytes + 2 * arrays
        budget = decision.budget
        uses = (budget.resident_bytes, budget.predictor_bytes, budget.kv_cache_bytes, budget.bookkeeping_bytes)
        assert sum(uses) + budget.buffer_bytes + budget.cache_bytes == budget.dram_budget_bytes
        assert decision.method == found.method
        assert not decision.smaller


def test_smaller_budgets_have_densities_and_arrays_of_their_own(
    tmp_path: Path, model: Model, activations: Activations
) -> None:
    """As the budget asks for (ActiveFlow 4.1); a density that the user gives is that of all."""
    found = divided(tmp_path, model, activations, "40%,80%")
    means = [float(np.mean([entry.per_layer for entry in decision.densities])) for decision in found.decisions]
    assert means[0] > means[1]
    arrays = [load_arrays(decision.arrays) for decision in found.decisions if decision.arrays is not None]
    assert len(arrays) == 2
    assert any(not np.array_equal(arrays[0][name], arrays[1][name]) for name in arrays[0])
    given = divided(tmp_path / "given", model, activations, "40%,80%", density=0.3)
    assert [decision.densities for decision in given.decisions] == [given.densities] * 2


def test_predictors_are_no_larger_than_every_budget_holds(
    tmp_path: Path, model: Model, activations: Activations
) -> None:
    found = divided(tmp_path, model, activations, "50%,95%", "predictor")
    small = divided(tmp_path / "small", model, activations, "50%", "predictor")
    assert found.predictor_limit_bytes <= small.predictor_limit_bytes
    assert all(rank <= least for rank, least in zip(found.predictor_rank, small.predictor_rank, strict=True))


def test_a_budget_named_twice_is_refused(tmp_path: Path, model: Model, activations: Activations) -> None:
    with pytest.raises(ColdpressError, match=r"dram_budget=4000000,4MB names 4,000,000 bytes twice; give each budget"):
        Whole(model, "int8_group32", 128, "fp16", 4096).budgets("4000000,4MB")
    whole = cost_model.dense_footprint_bytes(model, "int8_group32", 128)
    with pytest.raises(ColdpressError, match="twice"):
        divided(tmp_path, model, activations, "50%,50.0%")
    assert whole > 0


def test_a_budget_below_what_must_be_resident_is_named(tmp_path: Path, model: Model, activations: Activations) -> None:
    with pytest.raises(
        DoesNotFitError, match=r"a DRAM budget of 100,000 bytes was asked for, [\d,]+ are needed before"
    ):
        divided(tmp_path, model, activations, "80%,100kB")


def test_the_key_takes_a_list() -> None:
    resolved = settings.resolve({"model": "relu-demo", "dram_budget": "1GB, 2GB,50%"})
    assert resolved["dram_budget"] == "1000000000,2000000000,50%"
    assert settings.resolve({"model": "relu-demo", "dram_budget": "1GB"})["dram_budget"] == 10**9
    with pytest.raises(ColdpressError, match=r"dram_budget=2 is 2 bytes; did you mean 2GB\?"):
        settings.resolve({"model": "relu-demo", "dram_budget": "2"})
    with pytest.raises(ColdpressError, match="'much' is not an amount of memory"):
        settings.resolve({"model": "relu-demo", "dram_budget": "1GB,much"})
    with pytest.raises(ColdpressError, match="names 65 budgets, expected at most 64"):
        settings.resolve({"model": "relu-demo", "dram_budget": ",".join(f"{n}GB" for n in range(1, 66))})
