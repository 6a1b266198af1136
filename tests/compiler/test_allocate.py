"""allocate: the budget adds up, densities follow their source, and what does not fit is said in numbers."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler import cost_model
from coldpress.compiler.activity import unit_statistics
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.search.dram_shares import predictor_sizes
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.allocate import run as run_stage
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.runtime.plugins import names
from coldpress.runtime.sparsity import flash
from coldpress.schemas.activations import Activations
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import ColdpressError, DoesNotFitError, UnknownNameError
from coldpress.schemas.memory import OverBudgetError
from coldpress.schemas.model import Model, role_shape
from coldpress.schemas.sparsity import Sparsity
from tests.support.curves import curves_of
from tests.support.models import write_model
from tests.support.statistics import activations_of, device_of, model_of

LAYERS, HIDDEN, UNITS, TOKENS = 12, 256, 1024, 64


@pytest.fixture
def model() -> Model:
    return model_of(LAYERS, HIDDEN, UNITS)


@pytest.fixture
def activations(tmp_path: Path) -> Activations:
    """Layer i fires with a density of (i + 1) / 32."""
    rng = np.random.default_rng(0)
    layers = [rng.random((UNITS, TOKENS)) < (i + 1) / 32 for i in range(LAYERS)]
    return activations_of(tmp_path, [{"neuron": x, "up_down": x} for x in layers])


@pytest.fixture
def everywhere(activations: Activations, tmp_path: Path) -> Activations:
    """The same with statistics of the families that selectors without exact zeros have."""
    others = ("mlp_mid", "gate_down")
    active = np.random.default_rng(1).random((UNITS, TOKENS)) < 0.5
    families = dict.fromkeys(others, active) | {"mlp_in": active[:HIDDEN]}
    added = activations_of(tmp_path / "more", [families] * LAYERS)
    layers = zip(activations.layers, added.layers, strict=True)
    both = tuple(entry.model_copy(update={"families": entry.families + other.families}) for entry, other in layers)
    return activations.model_copy(update={"layers": both})


@pytest.fixture
def ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose weights are all 1, for selectors that look at them."""
    monkeypatch.setattr(
        unit_statistics,
        "read_rows",
        lambda model, role, start, stop: np.ones((stop - start, *role_shape(model.spec, role)[1:]), np.float32),
    )


def config(method: str, budget: int | str = "50%", **changes: Any) -> AllocateConfig:
    values = {"method": method, "format": "int8_group32", "dram_budget": budget, "context_length": 128}
    values |= {"density_allocation": "uniform"}  # the model has no files that could be run
    return AllocateConfig(**(values | changes))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(
    config: AllocateConfig, model: Model, activations: Activations, device: DeviceProfile, **ratios: dict[float, float]
) -> Sparsity:
    """The stage, with a workspace for these settings alone; `ratios` are the quality curves of `auto`."""
    curves = curves_of(model, Path("curves"), ratios, num_tokens=32) if config.method == "auto" else None
    return run_stage(config, model, activations, device, Workspace(Path("allocate"), config.to_json()), curves=curves)


def parts(sparsity: Sparsity) -> list[int]:
    budget = sparsity.budget
    return [
        budget.resident_bytes,
        budget.predictor_bytes,
        budget.kv_cache_bytes,
        budget.bookkeeping_bytes,
        budget.buffer_bytes,
        budget.cache_bytes,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", names("coldpress.runtime.sparsity"))
@pytest.mark.parametrize("format_name", names("coldpress.runtime.quantization"))
def test_the_parts_add_up_to_the_budget(
    model: Model, everywhere: Activations, ones: None, method: str, format_name: str
) -> None:
    sparsity = run(config(method, "90%", format=format_name), model, everywhere, device_of())
    dense = cost_model.dense_footprint_bytes(model, sparsity.format, 128)
    besides = run(config("dense", "90%", format=format_name), model, everywhere, device_of()).budget.bookkeeping_bytes
    assert sparsity.budget.dram_budget_bytes == dense * 90 // 100 + besides
    assert sum(parts(sparsity)) == sparsity.budget.dram_budget_bytes
    assert min(parts(sparsity)[2:]) > 0
    families = tuple(entry.family for entry in sparsity.densities)
    assert sparsity.budget.resident_bytes == cost_model.resident_bytes(model, families, sparsity.format)
    assert all(len(entry.per_layer) == LAYERS for entry in sparsity.densities)


@pytest.mark.parametrize(("method", "family"), [("relu", "up_down"), ("predictor", "neuron")])
def test_exact_zeros_give_measured_densities(model: Model, activations: Activations, method: str, family: Any) -> None:
    """Twelve layers: an order of layers by name would mix up 2 and 10."""
    sparsity = run(config(method, "80%"), model, activations, device_of())
    expected = [entry.family(family).density for entry in activations.layers]
    assert list(sparsity.densities[0].per_layer) == expected
    assert expected == pytest.approx([(i + 1) / 32 for i in range(LAYERS)], abs=0.02)


def test_top_k_density_is_budget_over_model_size(model: Model, activations: Activations) -> None:
    """sp = 1 - M_max / S_m (ActiveFlow 4.1)."""
    sparsity = run(config("topk", "45%"), model, activations, device_of())
    m_max = sparsity.budget.dram_budget_bytes - sparsity.budget.bookkeeping_bytes
    expected = m_max / cost_model.weight_bytes(model, "int8_group32")
    for entry in sparsity.densities:
        assert entry.per_layer == pytest.approx((expected,) * LAYERS)
    assert run(config("topk", "100%"), model, activations, device_of()).densities[0].per_layer == (1.0,) * LAYERS


def test_the_user_s_density_holds(model: Model, activations: Activations) -> None:
    sparsity = run(config("topk", density=0.3), model, activations, device_of())
    assert [entry.family for entry in sparsity.densities] == ["mlp_in", "mlp_mid"]
    assert all(entry.per_layer == (0.3,) * LAYERS for entry in sparsity.densities)


def test_dip_divides_the_user_s_density(model: Model, activations: Activations) -> None:
    found = run(config("dip", density=0.5, options={"input_density": 0.6}), model, activations, device_of())
    assert [found.density(family, LAYERS - 1) for family in ("mlp_in", "mlp_mid")] == pytest.approx([0.6, 0.3])
    by_rule = run(config("dip", density=0.5), model, activations, device_of())
    assert (2 * by_rule.density("mlp_in", 3) + by_rule.density("mlp_mid", 3)) / 3 == pytest.approx(0.5)


def test_a_density_counts_what_stays_in_dram(model: Model, activations: Activations) -> None:
    """The gate is a third of the MLP, so that a density of a half leaves a quarter of up and down."""
    found = run(config("gate", "90%", density=0.5), model, activations, device_of())
    assert found.density("up_down", LAYERS - 1) == pytest.approx(1 / 4)
    assert found.mlp_density(model.spec) == pytest.approx(1 / 2)
    with pytest.raises(ColdpressError, match=r"density=0\.3 was asked for, but method gate uses 0\.333 of the MLP's"):
        run(config("gate", "90%", density=0.3), model, activations, device_of())


def test_fatrelu_is_never_denser_than_relu(model: Model, activations: Activations) -> None:
    """Layer i has (i + 1) / 32 that is not zero, spread between 1 and 2."""
    found = run(config("fatrelu", "90%", density=0.5), model, activations, device_of())  # a quarter of up and down
    expected = [min(0.25, entry.family("up_down").density) for entry in activations.layers]
    assert found.densities[0].per_layer == pytest.approx(tuple(expected))
    assert expected[0] < 0.25 < activations.layers[-1].family("up_down").density
    assert found.arrays is not None
    levels = [load_arrays(found.arrays)[f"{layer}.up_down.threshold"][0] for layer in range(LAYERS)]
    assert levels[0] == pytest.approx(1, abs=1e-6), "what is not zero is used"
    assert levels[-1] == pytest.approx(2 - 0.25 * 32 / LAYERS, abs=0.05)
    smooth = activations.model_copy(update={"exact_zeros": False})
    with pytest.raises(ColdpressError, match="method fatrelu needs activations that are exactly zero"):
        run(config("fatrelu", "90%"), model, smooth, device_of())


@pytest.mark.slow
@pytest.mark.usefixtures("ones")
@pytest.mark.parametrize("layers", [1, 2])
def test_flash_knows_what_a_read_costs(model: Model, everywhere: Activations, layers: int) -> None:
    sparsity = run(config("flash", density=0.3, layers_per_group=layers), model, everywhere, device_of())
    assert sparsity.arrays is not None
    own = device_of().flash.break_even_gap_bytes / cost_model.unit_bytes("mlp_mid", model.spec, "int8_group32")
    assert load_arrays(sparsity.arrays)["3.mlp_mid.read_units"][0] == pytest.approx(own / layers)


@pytest.mark.usefixtures("ones")
def test_flash_is_fitted_with_what_dram_will_hold(
    model: Model, everywhere: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands alone between units in DRAM is dear to read, so the price for the same density is lower."""
    monkeypatch.setattr(flash, "DRAWN_UNITS", 1 << 11)
    prices = []
    for budget in ("60%", "90%"):
        sparsity = run(config("flash", budget, density=0.4), model, everywhere, device_of())
        assert sparsity.arrays is not None
        prices.append(load_arrays(sparsity.arrays)["0.mlp_mid.price"][0])
    assert prices[1] < 0.9 * prices[0]


def test_the_selector_is_fitted_for_every_layer_and_family(model: Model, activations: Activations) -> None:
    sparsity = run(config("topk", density=0.3, options={"attention": True}), model, activations, device_of())
    assert sparsity.families == ("attn_in", "attn_out", "mlp_in", "mlp_mid")
    assert sparsity.options == {"attention": True}
    assert sparsity.arrays is not None
    arrays = load_arrays(sparsity.arrays)
    assert len(arrays) == 4 * LAYERS
    assert arrays["11.mlp_mid.num_selected"].tolist() == [round(0.3 * UNITS)]
    assert arrays["2.attn_in.num_selected"].tolist() == [round(0.3 * HIDDEN)]
    assert run(config("relu", "90%"), model, activations, device_of()).arrays is None
    with pytest.raises(UnknownNameError, match=r"unknown option of topk 'attentions'\. Did you mean 'attention'"):
        run(config("topk", options={"attentions": True}), model, activations, device_of())
    with pytest.raises(ColdpressError, match="option attention of topk is 'yes', expected true or false"):
        run(config("topk", options={"attention": "yes"}), model, activations, device_of())


def test_predictors_without_exact_zeros_follow_the_budget(model: Model, activations: Activations) -> None:
    smooth = activations.model_copy(update={"exact_zeros": False})
    sparsity = run(config("predictor", density=0.25), model, smooth, device_of())
    assert sparsity.densities[0].per_layer == (0.25,) * LAYERS
    assert len(sparsity.predictor_rank) == LAYERS


def test_a_predictor_may_be_as_large_as_the_matrix_it_predicts(model: Model, activations: Activations) -> None:
    sparsity = run(config("predictor", "90%"), model, activations, device_of())
    assert sparsity.predictor_rank == (192,) * LAYERS
    assert 192 * (HIDDEN + UNITS) <= HIDDEN * UNITS < (192 + 32) * (HIDDEN + UNITS)
    without = run(config("relu", "90%"), model, activations, device_of())
    assert (without.predictor_rank, without.predictor_format, without.predictor_limit_bytes) == ((), None, 0)


def test_the_papers_sizes_are_allowed() -> None:
    """OPT-6.7B's last layer, of 5.4 %, has a rank of 1,024 (LLM in a flash C.1 and Table 6), and 1 GB is free."""
    opt = model_of(32, 4096, 16384, gated_mlp=False)
    sizes = predictor_sizes(config("predictor"), opt, {"neuron": (0.03,) * 31 + (0.0536,)}, 1 << 30)
    assert sizes.largest[-1] >= 1024
    assert sizes.expected_bytes < sizes.limit_bytes


def test_half_the_bytes_buy_larger_predictors(model: Model) -> None:
    """Where DRAM is what limits them: room for the least of all layers, 626,688 bytes in int8, and some more."""
    largest = {
        name: predictor_sizes(
            config("predictor", predictor_format=name), model, {"neuron": (0.1,) * LAYERS}, 1 << 20
        ).largest[0]
        for name in ("int8_group32", "int4_group32")
    }
    assert largest == {"int8_group32": 96, "int4_group32": 192}


def test_where_nothing_is_left_out_nothing_is_predicted(model: Model, activations: Activations, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    layers = [np.ones((UNITS, TOKENS), bool) if i == 3 else rng.random((UNITS, TOKENS)) < 0.1 for i in range(LAYERS)]
    one_whole = activations_of(tmp_path / "whole", [{"neuron": x} for x in layers])
    sparsity = run(config("predictor", "70%"), model, one_whole, device_of())
    assert [layer for layer, rank in enumerate(sparsity.predictor_rank) if not rank] == [3]
    assert sum(parts(sparsity)) == sparsity.budget.dram_budget_bytes
    smooth = activations.model_copy(update={"exact_zeros": False})
    for changes in ({"density": 1.0}, {"dram_budget": "100%"}):
        with pytest.raises(ColdpressError, match=r"has nothing to predict: .*; use method=dense, or a lower"):
            run(config("predictor", **changes), model, smooth, device_of())


@pytest.mark.parametrize(("format_name", "group", "group_bytes"), [("fp16", 1, 2), ("int8_group32", 32, 34)])
@pytest.mark.parametrize("budget", ["40%", "50%", "60%"])
def test_predictors_stay_within_their_share(
    model: Model, activations: Activations, budget: str, format_name: str, group: int, group_bytes: int
) -> None:
    sparsity = run(config("predictor", budget, predictor_format=format_name), model, activations, device_of())
    divided = sparsity.budget
    fixed = divided.resident_bytes + divided.kv_cache_bytes + divided.bookkeeping_bytes
    free = divided.dram_budget_bytes - fixed

    def stored(rank: int) -> int:
        return group_bytes * (rank * -(-HIDDEN // group) + UNITS * -(-rank // group))

    assert sparsity.predictor_format == format_name
    least = 32 if group == 32 else 8
    assert sparsity.budget.predictor_bytes <= sparsity.predictor_limit_bytes
    assert sparsity.predictor_limit_bytes == max(LAYERS * stored(least), free * 6 // 10)
    for rank in sparsity.predictor_rank:
        assert rank == least or stored(rank) + (LAYERS - 1) * stored(least) <= sparsity.predictor_limit_bytes


def test_an_int8_kv_cache_is_counted_as_what_it_takes(everywhere: Activations, ones: None) -> None:
    """Heads of 32 values take 34 bytes each; a budget in percent is of weights and such a cache."""
    model = model_of(LAYERS, HIDDEN, UNITS, head_dim=32, rotary_dim=32)
    fp16, int8 = (
        run(config("topk", "90%", kv_cache=kept), model, everywhere, device_of()) for kept in ("fp16", "int8")
    )
    heads = 2 * LAYERS * model.spec.num_key_value_heads * 128
    assert (fp16.kv_cache, fp16.budget.kv_cache_bytes) == ("fp16", 64 * heads)
    assert (int8.kv_cache, int8.budget.kv_cache_bytes) == ("int8", 34 * heads)
    assert fp16.budget.dram_budget_bytes - int8.budget.dram_budget_bytes == pytest.approx(0.9 * 30 * heads, abs=1)
    assert sum(parts(int8)) == int8.budget.dram_budget_bytes


def test_heads_of_which_int8_would_take_more_are_refused(activations: Activations) -> None:
    narrow = model_of(LAYERS, HIDDEN, UNITS, head_dim=16)
    with pytest.raises(ColdpressError, match=r"int8 takes 34 bytes for the 16 values .* use fp16"):
        run(config("topk", kv_cache="int8"), narrow, activations, device_of())


def test_a_budget_too_small_is_refused_with_its_parts(model: Model, activations: Activations) -> None:
    resident = cost_model.resident_bytes(model, ("mlp_in", "mlp_mid"), "int8_group32")
    with pytest.raises(DoesNotFitError) as error:
        run(config("topk", resident), model, activations, device_of())
    text = str(error.value)
    assert f"{resident:,} bytes was asked for" in text
    assert "cached, in int8_group32 with 128 tokens of context: " in text
    assert f"{resident:,} resident tensors, {cost_model.kv_cache_bytes(model.spec, 128):,} KV cache, " in text
    assert "shorter context_length or a smaller format" in text
    assert "\n" not in text


def test_the_least_budget_that_fits_is_accepted(model: Model, activations: Activations) -> None:
    with pytest.raises(DoesNotFitError) as error:
        run(config("topk", 1000, density=0.5), model, activations, device_of())
    needed = int(str(error.value).split("asked for, ")[1].split(" ")[0].replace(",", ""))
    sparsity = run(config("topk", needed, density=0.5), model, activations, device_of())
    assert sum(parts(sparsity)) == needed
    with pytest.raises(DoesNotFitError):
        run(config("topk", needed - 1, density=0.5), model, activations, device_of())


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"method": "relu", "density": 0.5}, ColdpressError, "leave density out"),
        ({"method": "dense", "density": 0.5}, ColdpressError, "leave density out"),
        ({"method": "topk", "cache": "lruu"}, UnknownNameError, "unknown cache 'lruu'"),
        ({"method": "topk", "predictor_format": "int3"}, UnknownNameError, "unknown quantization 'int3'"),
        ({"method": "topk", "dram_budget": "9GiB"}, DoesNotFitError, "device test has 8,589,934,592"),
        ({"method": "topk", "dram_budget": "much"}, ColdpressError, "'much' is not an amount of memory"),
    ],
)
def test_settings_that_do_not_go_together(
    model: Model, activations: Activations, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        run(config(**settings), model, activations, device_of())


@pytest.mark.parametrize(
    ("longrope", "text"),
    [
        (False, "exceeds the 256 tokens of model tiny; use a shorter one"),
        (True, r"exceeds the 128 tokens of model tiny \(config.json has 256, but longrope's short factors hold"),
    ],
)
def test_a_context_that_is_too_long_says_why(
    tmp_path: Path, activations: Activations, longrope: bool, text: str
) -> None:
    factors = [1.0 + 0.1 * index for index in range(8)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": factors[::-1]}
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 128} if longrope else {}
    folder = write_model(tmp_path / "tiny", "phi3", num_hidden_layers=2, overrides=changes)
    model = ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))
    with pytest.raises(ColdpressError, match=text):
        run(config("topk", context_length=257), model, activations, device_of())


def test_relu_needs_exact_zeros_and_bits(model: Model, activations: Activations) -> None:
    with pytest.raises(ColdpressError, match="needs activations that are exactly zero"):
        run(config("relu"), model, activations.model_copy(update={"exact_zeros": False}), device_of())
    first = activations.layers[0].model_copy(update={"families": ()})
    with pytest.raises(ColdpressError, match="layer 0: no activation bits of family up_down"):
        run(
            config("relu"),
            model,
            activations.model_copy(update={"layers": (first, *activations.layers[1:])}),
            device_of(),
        )


def test_the_log_says_what_to_expect(model: Model, activations: Activations, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run(config("predictor", "70%"), model, activations, device_of())
    assert "KV cache" in caplog.text


def of_density(tmp_path: Path, density: float) -> Activations:
    """Zeros are exact; units fire at random."""
    rng = np.random.default_rng(1)
    layers = [rng.random((UNITS, TOKENS)) < density for _ in range(LAYERS)]
    return activations_of(tmp_path / f"at{density}", [{"neuron": x, "up_down": x} for x in layers])


@pytest.mark.parametrize(("density", "method"), [(0.01, "predictor"), (0.9, "dense")])
def test_auto_takes_dense_unless_another_method_is_clearly_faster(
    model: Model, tmp_path: Path, density: float, method: str
) -> None:
    activations = of_density(tmp_path, density)
    sparsity = run(config("auto", "60%"), model, activations, device_of())
    judged = {entry.method: entry.token_s for entry in sparsity.tried}
    judged = {method: token_s for method, token_s in judged.items() if token_s is not None}
    assert set(judged) == {"dense", "predictor", "relu"}
    assert next(iter(judged)) == sparsity.method
    assert (sparsity.method == "dense") == (min(judged.values()) > 0.95 * judged["dense"])
    assert sparsity.method == method
    alone = run(config(method, "60%"), model, activations, device_of())
    found = sparsity.model_copy(update={"tried": (), "front": (), "curves": None, "cache": alone.cache})
    assert found == alone, "as if it had been asked for"


def test_auto_takes_dense_where_all_fits(model: Model, tmp_path: Path) -> None:
    """Nothing is read then, and a sparse run computes as much or more."""
    assert run(config("auto", "100%"), model, of_density(tmp_path, 0.5), device_of()).method == "dense"


def test_auto_records_the_methods_that_it_skipped(model: Model, tmp_path: Path) -> None:
    """`relu` keeps all gates in DRAM, and a dense run keeps none."""
    activations = of_density(tmp_path, 0.05)
    with pytest.raises(OverBudgetError) as least:
        run(config("relu", 100_000), model, activations, device_of())
    budget = least.value.needed_bytes - 1
    with pytest.raises(OverBudgetError) as alone:
        run(config("relu", budget), model, activations, device_of())
    sparsity = run(config("auto", budget), model, activations, device_of())
    skipped = next(entry for entry in sparsity.tried if entry.method == "relu")
    assert (skipped.token_s, skipped.skipped) == (None, str(alone.value))
    assert f" {skipped.needed_bytes:,} are needed" in str(alone.value)


def test_auto_says_what_does_not_fit(model: Model, tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match="100,000 bytes was asked for"):
        run(config("auto", 100_000), model, of_density(tmp_path, 0.05), device_of())


@pytest.mark.slow
def test_auto_of_a_model_without_exact_zeros(model: Model, everywhere: Activations, ones: None) -> None:
    smooth = model.model_copy(update={"spec": model.spec.model_copy(update={"hidden_act": "silu"})})
    curve = {0.1: 1.05, 0.9: 1.0}

    def judged(**settings: Any) -> tuple[Sparsity, dict[str, Any]]:
        found = run(config("auto", **settings), smooth, everywhere, device_of(), topk=curve)
        return found, {entry.method: entry for entry in found.tried}

    sparsity, tried = judged(density=0.1)
    assert [method for method, entry in tried.items() if entry.skipped is None] == ["topk", "dense"]
    assert sparsity.method == "topk"
    assert tried["topk"].density == pytest.approx(0.1, abs=1e-3)
    with_attention = judged(density=0.1, options={"attention": True})[1]
    assert with_attention["dense"].token_s == tried["dense"].token_s, (
        "an option that a candidate does not have is not its concern"
    )
    assert with_attention["topk"].token_s > tried["topk"].token_s, "small scattered reads"
