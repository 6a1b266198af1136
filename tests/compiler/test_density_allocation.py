"""Density allocation: a rule's shares are whole units of the asked bytes, and cost less than the same for all."""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.choice import selector_arrays
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.layer_counts import ActivityRule
from coldpress.compiler.density_allocation import Key, Magnitudes, Shares, dip, global_threshold, greedy, uniform
from coldpress.compiler.io import Workspace
from coldpress.compiler.search import dram_shares
from coldpress.compiler.search.density import Fit, MeasuredLosses
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.allocate import run
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.runtime.sparsity import topk
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import SPLITS, Corpus, Split
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import num_units
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Sparsity
from tests.support.allocation import magnitudes_of, separable, task_of, used_bytes
from tests.support.curves import curves_of
from tests.support.models import write_model
from tests.support.statistics import corpus_of_tokens, device_of
from tests.support.tiny import tiny_spec

LAYERS = 3
FAMILIES = ("mlp_in", "mlp_mid")
ATTENTION = ("attn_in", "attn_out")
RNG = np.random.default_rng(5)
TOKENS: dict[Split, np.ndarray] = {split: RNG.integers(0, 384, (4, 24)).astype(np.int32) for split in SPLITS}


def test_magnitudes_are_those_of_the_entries() -> None:
    values = RNG.normal(size=3000)
    found, ranked = magnitudes_of(values), np.sort(np.abs(values))[::-1]
    for share in (0.1, 0.5, 0.9):
        level = ranked[int(share * ranked.size)]
        assert found.share_above(level) == pytest.approx(share, abs=1e-3)
        assert found.level(share) == pytest.approx(level, rel=1e-2)
    expected = (ranked[300:1500] ** 2).sum() / ranked.size
    assert found.squares_between(0.1, 0.5) == pytest.approx(expected, rel=1e-2)
    with pytest.raises(ColdpressError, match="layer 3: no magnitudes in the statistics"):
        Magnitudes({}, "layer 3")


@pytest.mark.parametrize("density", [0.03, 0.3, 0.5, 0.97])
def test_whole_units_meet_the_density_to_a_unit(density: float) -> None:
    task = task_of(density, {"mlp_in": 64, "mlp_mid": 172}, {"mlp_in": 36, "mlp_mid": 18}, num_layers=5)
    whole = used_bytes(task, dict.fromkeys(task.keys, 1.0))
    for _ in range(20):
        wanted = {key: min(1.0, density * RNG.uniform(0.5, 1.5)) for key in task.keys}
        drift = density / task.mean(wanted)
        found = task.whole_units({key: min(1.0, drift * share) for key, share in wanted.items()})
        if max(wanted.values()) * drift <= 1:
            assert abs(used_bytes(task, found) - density * whole) <= 36 / 2
        for key, share in found.items():
            units = share * task.num_units[key[1]]
            assert units == pytest.approx(round(units))
            assert 1 <= round(units) <= task.num_units[key[1]]


def test_one_unit_each_is_the_least() -> None:
    task = task_of(0.05, {"mlp_in": 10, "mlp_mid": 10}, {"mlp_in": 8, "mlp_mid": 8})
    found = task.whole_units({(0, "mlp_in"): 0.2, (0, "mlp_mid"): 0.0, (1, "mlp_in"): 0.0, (1, "mlp_mid"): 0.0})
    assert set(found.values()) == {0.1}, "two units of forty were asked for, four are the least"


@pytest.mark.parametrize("density", [0.3, 0.6])
def test_greedy_is_near_the_best_of_all_divisions(density: float) -> None:
    """All 30 ** 4 divisions into whole units, of which those count that take no more bytes."""
    task, losses = separable(density, units=30)
    found = greedy.Plugin().densities(task)
    counts = np.arange(1, 31)
    axes = [np.moveaxis(counts.reshape(-1, 1, 1, 1), 0, place) for place in range(4)]
    taken = sum(task.unit_bytes[key[1]] * axis for key, axis in zip(task.keys, axes, strict=True))
    cost = sum(
        np.array([losses.cost(key, count / 30) for count in counts])[axis - 1]
        for key, axis in zip(task.keys, axes, strict=True)
    )
    best = float(np.where(np.asarray(taken) <= used_bytes(task, found) + 1e-6, cost, np.inf).min())
    same = losses.on_validation(task.whole_units(uniform.Plugin().densities(task)))
    assert losses.on_validation(found) <= best + 0.05 * (same - best)
    assert losses.asked <= 6 * 5, "a pass over four parts and the model as it stands, for each step"


def test_greedy_takes_the_selector_s_own_division_where_that_is_better() -> None:
    task, losses = separable(0.5, units=12)
    own = task.whole_units(uniform.Plugin().densities(task))
    losses.on_validation = lambda shares: 1.0 + (shares != own)  # type: ignore[method-assign]
    assert greedy.Plugin().densities(task) == own


def test_one_threshold_in_all_layers_is_a_quantile_of_all_entries() -> None:
    task, losses = separable(0.4, units=200)
    losses.signals[1, "mlp_in"] *= 3
    losses.signals[0, "mlp_mid"] *= 0.2
    curves = {key: magnitudes_of(signal) for key, signal in losses.signals.items()}
    found = global_threshold.Plugin().densities(dataclasses.replace(task, magnitudes=curves.__getitem__))
    for family in FAMILIES:
        both = np.abs([losses.signals[layer, family] for layer in (0, 1)])
        level = np.quantile(both, 0.6)
        for layer in (0, 1):
            assert found[layer, family] == pytest.approx((both[layer] >= level).mean(), abs=2 / 200)
    assert found[1, "mlp_in"] > 0.5 > 0.3 > found[0, "mlp_in"]


def test_the_front_has_what_nothing_beats() -> None:
    points = [dip.DensityPoint(round(x, 2), round(y, 2), {"mlp_in": x}) for x, y in RNG.random((80, 2))]
    places = {(point.density, point.loss) for point in points}
    alone = {
        (density, loss)
        for density, loss in places
        if not any(x <= density and y <= loss and (x, y) != (density, loss) for x, y in places)
    }
    front = dip.pareto_front(points)
    assert {(point.density, point.loss) for point in front} == alone
    assert [point.density for point in front] == sorted(point.density for point in front)


def test_lines_are_those_that_points_lie_on() -> None:
    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    lines = {"mlp_in": (1.1, 0.3), "mlp_mid": (0.8, -0.6)}
    points = [
        dip.DensityPoint(
            sigmoid(x), 0.0, {family: sigmoid(slope * x + offset) for family, (slope, offset) in lines.items()}
        )
        for x in (-1.0, -0.2, 0.5, 1.5)
    ]
    for family, found in dip.fitted_lines(points).items():
        assert found == pytest.approx(lines[family])


def test_dip_divides_among_families_alone_and_better_than_not_at_all() -> None:
    """The best division that all layers share, by trying them all."""
    task, losses = separable(0.5, units=60)
    found = dip.Plugin().densities(task)
    spread = max(abs(found[0, family] - found[1, family]) for family in FAMILIES)
    assert spread <= 1 / 60 + 1e-9, "no more than what makes the bytes exact"
    tried = [
        losses.on_validation(task.same({"mlp_in": first / 60, "mlp_mid": 1.5 - first / 30})) for first in range(16, 45)
    ]
    same = losses.on_validation(task.whole_units(uniform.Plugin().densities(task)))
    assert losses.on_validation(found) <= min(tried) + 0.1 * (same - min(tried))


def test_many_layers_are_measured_in_groups() -> None:
    task = task_of(0.5, {"mlp_in": 8, "mlp_mid": 8}, {"mlp_in": 2, "mlp_mid": 1}, num_layers=40)
    parts = greedy.parts_of(task)
    assert sorted(key for part in parts for key in part) == sorted(task.keys)
    assert len(parts) == 2 * 14
    assert parts[0] == [(0, "mlp_in"), (1, "mlp_in"), (2, "mlp_in")]


@dataclasses.dataclass
class Counted:
    """Made-up losses of a model of 32 layers, and how often its tokens pass through it."""

    passes: float = 0.0

    def of(self, variants: list[Shares]) -> list[float]:
        for shares in variants:  # one begins where it first differs, and the first of them at the beginning
            differs = [layer for (layer, family), share in shares.items() if share != variants[0][layer, family]]
            self.passes += 1 - min(differs, default=0) / 32
        return [sum((1 - share) ** 2 * (1 + layer) for (layer, _), share in shares.items()) for shares in variants]

    def on_validation(self, shares: Shares) -> float:
        self.passes += 1
        return 1.0


@pytest.mark.parametrize("rule", [greedy, dip, global_threshold, uniform])
def test_the_key_says_how_often_a_rule_runs_the_model(rule: Any) -> None:
    """Of what is the default, a user learns the price of before a night is gone."""
    losses, magnitudes = Counted(), magnitudes_of(np.random.default_rng(0).laplace(size=20000))
    known: dict[str, Any] = {"magnitudes": lambda _: magnitudes, "losses": lambda: losses, "num_layers": 32}
    rule.Plugin().densities(task_of(0.5, {"mlp_in": 64, "mlp_mid": 160}, {"mlp_in": 36, "mlp_mid": 18}, **known))
    said = AllocateConfig.model_fields["density_allocation"].description or ""
    name = rule.__name__.rpartition(".")[2]
    if losses.passes:
        assert re.search(rf"\b{name} [^,]*\b{losses.passes:.0f} times", said)
    else:
        assert re.search(rf"\b{name}\b[^,]* never$", said)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("allocation")
    write_model(folder / "tiny", num_hidden_layers=LAYERS)
    return ingest.run(IngestConfig(model=str(folder / "tiny")), Workspace(folder / "work", "test"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of_tokens(tmp_path_factory.mktemp("corpus"), TOKENS)


@pytest.fixture(scope="module")
def activations(model: Model, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Activations:
    work = Workspace(tmp_path_factory.mktemp("activations"), "test")
    return count_activity(PassConfig(), model, corpus, (*FAMILIES, *ATTENTION), ActivityRule(frozenset()), work, 1)


def by_hand(model: Model, shares: Shares, tokens: np.ndarray) -> float:
    """transformers' own model, whole and with the largest entries alone, and the divergence of the two."""
    source = AutoModelForCausalLM.from_pretrained(Path(model.tensors["norm.weight"].file).resolve().parent).eval()
    ids = torch.from_numpy(tokens.astype(np.int64))

    def keep(family: str, layer: int) -> Any:
        def hook(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
            (signal,) = inputs
            count = round(shares[layer, family] * signal.shape[-1])
            kept = signal.abs().topk(count, dim=-1).indices
            return (torch.zeros_like(signal).scatter(-1, kept, signal.gather(-1, kept)),)

        return hook

    with torch.no_grad():
        whole = source(ids).logits.log_softmax(-1)
        for layer, block in enumerate(source.model.layers):
            block.mlp.register_forward_pre_hook(keep("mlp_in", layer))
            block.mlp.down_proj.register_forward_pre_hook(keep("mlp_mid", layer))
        pruned = source(ids).logits.log_softmax(-1)
    return float((whole.exp() * (whole - pruned)).sum(-1).mean())


def measured(stream: LayerStream, fit: Fit, work: Workspace) -> MeasuredLosses:
    return MeasuredLosses(stream, topk.Plugin(), fit, TOKENS["calibration"], TOKENS["validation"], work)


def losses_of(model: Model, work: Path) -> MeasuredLosses:
    def fit(key: Key, share: float) -> dict[str, np.ndarray]:
        return topk.Plugin().fit(num_units(key[1], model.spec), share, {}, topk.Options())

    space = Workspace(work, "test")
    return measured(LayerStream(model), fit, space)


def test_losses_are_divergences_of_transformers_own_model(model: Model, tmp_path: Path) -> None:
    base = {(layer, family): 0.75 for layer in range(LAYERS) for family in FAMILIES}
    variants = [base, {**base, (2, "mlp_mid"): 0.25}, {**base, (0, "mlp_in"): 0.25}, {**base, (1, "mlp_in"): 0.5}]
    losses = losses_of(model, tmp_path)
    found = losses.of(variants)
    for shares, loss in zip(variants, found, strict=True):
        assert loss == pytest.approx(by_hand(model, shares, TOKENS["calibration"]), rel=1e-3)
    assert losses.on_validation(base) == pytest.approx(by_hand(model, base, TOKENS["validation"]), rel=1e-3)
    fewer = losses_of(model, tmp_path / "other").of(variants[1:])
    assert fewer != found
    assert losses_of(model, tmp_path).of(variants[1:]) == fewer, "another question in the same folder"
    resumed = losses_of(model, tmp_path)
    resumed._measured = None  # type: ignore[assignment]
    assert resumed.of(variants) == found, "what was measured before an interruption is not measured again"


def test_what_variants_have_in_common_is_fitted_once(model: Model, tmp_path: Path) -> None:
    """A selector's fit may take long: thresholds from magnitudes, intervals of flash."""
    calls: list[tuple[Key, float]] = []

    def fit(key: Key, share: float) -> dict[str, np.ndarray]:
        calls.append((key, share))
        return topk.Plugin().fit(num_units(key[1], model.spec), share, {}, topk.Options())

    base = {(layer, family): 0.75 for layer in range(LAYERS) for family in FAMILIES}
    space = Workspace(tmp_path, "test")
    losses = measured(LayerStream(model), fit, space)
    losses.of([base, {**base, (2, "mlp_mid"): 0.25}, {**base, (0, "mlp_in"): 0.25}])
    assert sorted(calls) == sorted([*base.items(), ((2, "mlp_mid"), 0.25), ((0, "mlp_in"), 0.25)])


def allocate(
    model: Model, activations: Activations, corpus: Corpus | None, folder: Path, threads: int = 1, **settings: Any
) -> Sparsity:
    values = {"format": "fp16", "dram_budget": "80%", "context_length": 64, "density": 0.4, "method": "topk"}
    config = AllocateConfig(**(values | {"density_allocation": "greedy", "allocation_tokens": 48} | settings))
    curves = curves_of(model, folder / "curves", {"topk": {0.1: 1.01, 0.9: 1.0}}) if config.method == "auto" else None
    return run(config, model, activations, device_of(), Workspace(folder, config.to_json()), corpus, threads, curves)


@pytest.mark.parametrize("method", ["topk", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dip", "wina"))])
def test_the_stage_allocates_what_was_asked_for(
    model: Model, activations: Activations, corpus: Corpus, tmp_path: Path, method: str
) -> None:
    found = allocate(model, activations, corpus, tmp_path / "one", method=method)
    shares = {(layer, family): found.density(family, layer) for layer in range(LAYERS) for family in FAMILIES}
    units = {family: num_units(family, model.spec) for family in FAMILIES}
    weights = {"mlp_in": 2 * units["mlp_in"] * units["mlp_mid"], "mlp_mid": units["mlp_in"] * units["mlp_mid"]}
    mean = sum(weights[family] * share for (_, family), share in shares.items()) / (LAYERS * sum(weights.values()))
    assert mean == pytest.approx(0.4, abs=1 / units["mlp_in"] / LAYERS)
    kept = selector_arrays(found)
    assert {key: int(kept[key]["num_selected"][0]) for key in shares} == {
        key: round(share * units[key[1]]) for key, share in shares.items()
    }
    assert found == allocate(model, activations, corpus, tmp_path / "two", threads=2, method=method).model_copy(
        update={"arrays": found.arrays}
    )


def test_attention_beside_the_mlp_changes_neither_s_density(
    model: Model, activations: Activations, corpus: Corpus, tmp_path: Path
) -> None:
    """Attention's inputs and outputs have matrices of their own; what one part gives up, the other does not get."""
    settings: dict[str, Any] = {"density_allocation": "global_threshold", "options": {"attention": True}}
    found = allocate(model, activations, corpus, tmp_path / "attention", **settings)
    assert found.mlp_density(model.spec) == pytest.approx(0.4, abs=0.01)
    spec, mean = model.spec, {entry.family: sum(entry.per_layer) / LAYERS for entry in found.densities}
    heads, pairs = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    weights = {"attn_in": spec.hidden_size * (heads + 2 * pairs), "attn_out": spec.hidden_size * heads}
    share = sum(weights[family] * mean[family] for family in weights) / sum(weights.values())
    assert share == pytest.approx(0.4, abs=0.02)
    assert any(len(set(entry.per_layer)) > 1 for entry in found.densities if entry.family in weights)


def test_what_greedy_finds_costs_less_than_the_same_for_all(
    model: Model, activations: Activations, corpus: Corpus, tmp_path: Path
) -> None:
    found = allocate(model, activations, corpus, tmp_path / "greedy", density=0.3)
    same = allocate(model, activations, None, tmp_path / "same", density=0.3, density_allocation="uniform")
    costs = [
        by_hand(model, {(n, f): sparsity.density(f, n) for n in range(LAYERS) for f in FAMILIES}, TOKENS["validation"])
        for sparsity in (found, same)
    ]
    assert costs[0] < costs[1]


def test_auto_allocates_for_the_method_that_it_takes(
    model: Model, activations: Activations, corpus: Corpus, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"method": "auto", "density": 0.1, "dram_budget": "70%"}
    found = allocate(model, activations, corpus, tmp_path / "auto", **settings)
    assert [entry.method for entry in found.tried if entry.skipped is None] == ["dense", "topk"]
    if found.method == "topk":
        assert len(set(found.densities[0].per_layer)) > 1


def test_nothing_is_measured_where_nothing_is_left_out(model: Model, activations: Activations, tmp_path: Path) -> None:
    whole = allocate(model, activations, None, tmp_path / "whole", density=1.0)
    assert whole.is_whole


def test_a_rule_that_measures_needs_text(model: Model, activations: Activations, tmp_path: Path) -> None:
    with pytest.raises(ColdpressError, match="measures what densities cost on text, and no corpus was given"):
        allocate(model, activations, None, tmp_path / "refused")


def test_options_that_divide_the_density_are_not_overruled(
    model: Model, activations: Activations, tmp_path: Path
) -> None:
    found = allocate(model, activations, None, tmp_path / "own", method="dip", options={"input_density": 0.5})
    assert found.densities[0].per_layer == (0.5,) * LAYERS
    assert found.densities[1].per_layer == pytest.approx((0.2,) * LAYERS)


def test_a_share_is_lowered_by_one_unit_at_least() -> None:
    assert greedy._lowered(2 / 3, 3) == pytest.approx(1 / 3)
    assert greedy._lowered(1 / 3, 3) == pytest.approx(1 / 3)
    assert greedy._lowered(0.5, 1000) == pytest.approx(greedy.STEP * 0.5)


def wanted(family: str, share: float, patch: pytest.MonkeyPatch, **spec: int) -> float:
    """Returns the density where the budget is a share of the weights, 1,000 bytes."""
    patch.setattr(dram_shares, "weight_bytes", lambda *_: 1000)
    config: Any = SimpleNamespace(format="fp16")
    model: Any = SimpleNamespace(spec=tiny_spec(**spec))
    method: Any = SimpleNamespace(unit_bytes={family: 1})
    return dram_shares._wanted(config, model, method, int(share * 1000))


@pytest.mark.parametrize(("share", "density"), [(0.5, 1.0), (0.125, 0.5), (0.001, 0.02)])
def test_the_density_of_a_mixture_is_of_the_experts_that_a_token_uses(
    share: float, density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the experts is used: half of the weights hold all of them."""
    found = wanted("neuron", share, monkeypatch, num_experts=8, num_experts_per_tok=2)
    assert found == pytest.approx(max(density, dram_shares.MIN_DENSITY))


@pytest.mark.parametrize(("share", "density"), [(0.5, 0.5), (0.3, 1 / 3 + 2 / 3 * dram_shares.MIN_DENSITY)])
def test_a_budget_never_asks_for_less_than_a_selector_reaches(
    share: float, density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate, a third of the MLP, stays in DRAM."""
    assert wanted("up_down", share, monkeypatch) == pytest.approx(density)
