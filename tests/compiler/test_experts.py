"""Mixtures of experts in the compiler: what is counted, what is costed and what is refused. The product of the stages
is in test_product.py, the forward pass in tests/contracts/test_architectures.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.layer_counts import ActivityRule
from coldpress.compiler.activity.unit_statistics import unit_norms
from coldpress.compiler.candidates import families_for
from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.compiler.cost_model import resident_bytes, stored_format, unit_bytes
from coldpress.compiler.dense_run import dense_run
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.needs import Build, needs_of
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.sections import dense_bookkeeping_bytes
from coldpress.compiler.stages import gram, ingest, order, place, recalibrate
from coldpress.compiler.stages.allocate import run as allocate
from coldpress.compiler.stages.calibrate import CalibrateConfig
from coldpress.compiler.stages.calibrate import run as calibrate
from coldpress.compiler.stages.distill import DistillConfig
from coldpress.compiler.stages.distill import run as distill
from coldpress.compiler.stages.gram import GramConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.order import OrderConfig, _task
from coldpress.compiler.stages.recalibrate import RecalibrateConfig
from coldpress.compiler.stages.relufy import relufied
from coldpress.compiler.workflow import settings
from coldpress.compiler.workflow.settings import of_all_stages, resolve
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FamilyName, Signal, num_units
from coldpress.schemas.metrics import DenseRun
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Densities, Sparsity
from tests.support.models import write_model
from tests.support.records import tiny_sparsity
from tests.support.statistics import activations_of, device_of, few_blocks, model_of, placement_of, sparsity_of

LAYERS, EXPERTS, CHOSEN, WIDTH = 2, 4, 2, 160


@pytest.fixture(scope="module", params=[False, True], ids=["silu", "relu"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("mixture") / "tiny"
    write_model(folder, "mixtral", num_hidden_layers=LAYERS, relu=request.param)
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return few_blocks(tmp_path_factory.mktemp("corpus"))


def sparsity(model: Model, family: FamilyName = "neuron") -> Sparsity:
    densities = (Densities(family=family, per_layer=(CHOSEN / EXPERTS,) * LAYERS),)
    return tiny_sparsity(model, method="dense").model_copy(update={"densities": densities})


@pytest.mark.parametrize(("name", "each"), [("neuron", WIDTH), ("block", WIDTH // 32)])
def test_units_of_the_chosen_experts_are_counted(
    name: FamilyName, each: int, model: Model, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, whatever else they are, where the router's own logits say so; of blocks without another pass."""
    before = calibrate(CalibrateConfig(), model, corpus, Workspace(tmp_path / "a", "test"), 1)
    work = Workspace(tmp_path / "b", "test")
    if name == "block":
        monkeypatch.setattr(recalibrate, "count_activity", None)
    found = recalibrate.run(RecalibrateConfig(), model, corpus, sparsity(model, name), before, work, 1)
    tokens = load_arrays(corpus.split("calibration").arrays)["tokens"]
    for layer, entry in enumerate(found.layers):
        family = entry.family(name)
        assert family is not None
        assert family.num_units == EXPERTS * each
        assert family.density == pytest.approx(CHOSEN / EXPERTS, rel=0.01)  # of a ReLU all of an expert may be zero
        arrays = load_arrays(family.arrays)
        bits = np.unpackbits(arrays["bits"], axis=1, count=tokens.size, bitorder="little").astype(bool)
        logits = load_arrays(entry.inputs)["mlp_inputs"] @ read_role(model, f"layers.{layer}.router.weight").T
        chosen = np.argsort(np.argsort(-logits, axis=1), axis=1) < CHOSEN  # the inputs are kept in fp16
        assert np.mean(bits == np.repeat(chosen, each, axis=1).T) > 0.99
        assert arrays["counts"].tolist() == bits.sum(axis=1).tolist()
        assert len(np.unique(arrays["counts"])) > 1


@pytest.mark.parametrize("rule", ["uniform", "greedy", pytest.param("dip", marks=pytest.mark.slow), "global_threshold"])
def test_half_of_what_a_tokens_experts_have_is_chosen(rule: str, model: Model, corpus: Corpus, tmp_path: Path) -> None:
    """Of all experts that is as much less as a token uses fewer; attention has one part."""
    config = AllocateConfig(
        method="topk",
        options={"attention": True},
        density=0.5,
        density_allocation=rule,
        allocation_tokens=48,
        format="fp16",
        dram_budget="60%",
        context_length=32,
    )
    families = families_for("topk", {"attention": True}, model.spec)
    activity = ActivityRule(frozenset())
    counted = count_activity(PassConfig(), model, corpus, families, activity, Workspace(tmp_path / "a", "test"), 1)
    work = Workspace(tmp_path / "b", "test")
    found = allocate(config, model, counted, device_of(), work, corpus=corpus)
    used = wanted = 0.0
    for entry in found.densities:
        in_all = unit_bytes(entry.family, model.spec, "fp16") * num_units(entry.family, model.spec)
        of_mlp = entry.family.startswith("mlp")
        assert max(entry.per_layer) <= (CHOSEN / EXPERTS if of_mlp else 1)
        used += sum(entry.per_layer) * in_all
        wanted += 0.5 * LAYERS * in_all * (CHOSEN / EXPERTS if of_mlp else 1)
    assert used == pytest.approx(wanted, rel=0.01 if rule != "global_threshold" else 0.1)
    chosen = recalibrate.run(RecalibrateConfig(), model, corpus, found, counted, Workspace(tmp_path / "c", "test"), 1)
    inputs = chosen.layers[-1].family("mlp_in")
    assert inputs is not None
    assert inputs.density == pytest.approx(found.density("mlp_in", LAYERS - 1), rel=0.02)


def test_the_router_weighs_what_a_unit_adds(model: Model, corpus: Corpus) -> None:
    """The inner activation times down is the output, without any weight."""
    seen: dict[Signal, np.ndarray] = {}
    stream = LayerStream(model)

    def keep(signal: Signal) -> Any:
        return lambda part: seen.update({signal: part.numpy().copy()})

    loaded = stream.load_layer(1, 12)
    hidden = stream.embed(np.arange(12, dtype=np.int32)[None])
    given: list[np.ndarray] = []
    loaded.module.get_submodule("block_sparse_moe").register_forward_hook(
        lambda _module, _inputs, output: given.append(output[0].detach().numpy().copy())
    )
    loaded.run(hidden, {name: keep(name) for name in ("mlp_input", "expert_inputs", "mlp_inner")})
    down = np.concatenate([read_role(model, f"layers.1.experts.{e}.down_proj.weight") for e in range(EXPERTS)], axis=1)
    np.testing.assert_allclose(given[0], seen["mlp_inner"] @ down.T, rtol=0, atol=1e-5)
    each = seen["expert_inputs"].reshape(12, EXPERTS, -1)
    logits = seen["mlp_input"] @ read_role(model, "layers.1.router.weight").T
    chosen = np.argsort(np.argsort(-logits, axis=1), axis=1) < CHOSEN
    assert (each == np.where(chosen[..., None], seen["mlp_input"][:, None], 0)).all()


def test_gram_matrices_are_of_attention_alone(model: Model, corpus: Corpus, tmp_path: Path) -> None:
    config = GramConfig(compute_dtype="float32")
    found = gram.run(config, model, corpus, sparsity(model), Workspace(tmp_path / "gram", "test"), 1)
    assert set(load_arrays(found.layers[0].arrays)) == {"attention_input", "attention_mixed"}


def test_norms_are_of_every_expert(model: Model) -> None:
    def of(name: str) -> np.ndarray:
        return read_role(model, f"layers.1.experts.{EXPERTS - 1}.{name}_proj.weight").astype(np.float64)

    squares = (of("gate") ** 2).sum(axis=1) + (of("up") ** 2).sum(axis=1) + (of("down") ** 2).sum(axis=0)
    found = unit_norms(model, 1, "neuron")
    assert found.shape == (EXPERTS * WIDTH,)
    assert found[-WIDTH:] == pytest.approx(np.sqrt(squares), rel=1e-6)


def test_a_layer_streams_as_it_computes(model: Model) -> None:
    """A layer's copy computes with its own weights, not with those of the empty one that it was copied from."""
    stream = LayerStream(model)
    hidden = stream.embed(np.arange(12, dtype=np.int32)[None])
    one, two = stream.load_layer(0, 12), stream.load_layer(1, 12)
    first = one.run(hidden, {})
    assert not np.allclose(first.numpy(), two.run(hidden, {}).numpy())
    assert np.array_equal(first.numpy(), one.run(hidden, {}).numpy())


def test_experts_are_stored_in_the_format_and_routers_as_they_are() -> None:
    assert stored_format("layers.3.experts.12.down_proj.weight", "int4_group32") == "int4_group32"
    assert stored_format("layers.3.router.weight", "int4_group32") is None


def test_a_dense_run_reads_what_a_router_picks() -> None:
    """With next to nothing in DRAM, every token reads k experts of each layer, with a read of each or a few."""
    mixture = model_of(num_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    one_mlp = model_of(intermediate_size=EXPERTS * WIDTH)
    expert_bytes = WIDTH * unit_bytes("neuron", mixture.spec, "fp16")
    device = device_of()

    def run(model: Model) -> DenseRun | None:
        least = resident_bytes(model, ("neuron",), "fp16")
        least += dense_bookkeeping_bytes(model.spec, "fp16", device.flash.page_bytes.value)
        return dense_run(model, "fp16", 64, least + (64 << 10), device)

    found, whole = run(mixture), run(one_mlp)
    assert found is not None
    assert whole is not None
    pages = found.reads_per_token * 2 * device.flash.page_bytes.value
    wanted = LAYERS * CHOSEN * expert_bytes - found.pinned_bytes * CHOSEN / EXPERTS
    assert wanted <= found.flash_bytes_per_token <= wanted + pages
    assert LAYERS * CHOSEN <= found.reads_per_token < found.flash_bytes_per_token / 8192
    assert found.flash_bytes_per_token < 0.6 * whole.flash_bytes_per_token
    assert found.token_s < whole.token_s


def test_what_does_not_run_yet_is_refused(model: Model, corpus: Corpus, tmp_path: Path) -> None:
    assert families_for("dense", {}, model.spec) == ("block",)
    assert {"block", "mlp_in", "mlp_mid"} <= set(families_for("auto", {}, model.spec)), "units inside experts, too"
    assert families_for("predictor", {}, model.spec) == ("neuron",)
    assert families_for("dense", {"families": "neuron+attn_in"}, model.spec) == ("neuron", "attn_in")
    with pytest.raises(ColdpressError, match=r"method=dense keeps attn_in on flash.*use method=dense"):
        families_for("dense", {"families": "attn_in"}, model.spec)
    with pytest.raises(ColdpressError, match=r"families=expert: unknown 'expert', known are neuron"):
        families_for("dense", {"families": "expert"}, model.spec)
    with pytest.raises(ColdpressError, match=r"relufy=relu was asked for, .* mixture of 4 experts.* relufy=off"):
        relufied(model.spec, "relu")
    with pytest.raises(ColdpressError, match=r"distill=true was asked for, .* build with distill=false"):
        distill(DistillConfig(), model, corpus, sparsity(model), Workspace(tmp_path, "test"), 1)


def test_the_workflow_knows_a_mixture(model: Model) -> None:
    folder = Path(next(iter(model.tensors.values())).file).resolve().parent
    config = settings.resolve({"model": str(folder)})
    assert {"dense", "topk"} <= set(config.plugins()["coldpress.runtime.sparsity"])
    assert not settings.needs_predictors(config)


def test_experts_that_are_used_together_lie_beside_each_other_and_whole(tmp_path: Path) -> None:
    """Experts 0 and 3, and 1 and 2, are used on the same tokens; some units of one are pinned."""
    width = 8
    mixture = model_of(
        num_hidden_layers=1, intermediate_size=width, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, hidden_act="silu"
    )
    outer = np.arange(64) % 2 == 0
    active = np.repeat(np.stack([outer, ~outer, ~outer, outer]), width, axis=0)
    layers: list[Mapping[FamilyName, np.ndarray]] = [{"neuron": active}]
    found = order.run(
        OrderConfig(order="ripple"),
        mixture,
        activations_of(tmp_path, layers),
        sparsity_of("dense", {"neuron": (CHOSEN / EXPERTS,)}, cache_bytes=0),
        placement_of(tmp_path, layers, pinned=(3, 4)),
        device_of(),
        (0,),
        Workspace(tmp_path / "order", "test"),
    )
    ids = load_arrays(found.entries[0].arrays)["order"].reshape(EXPERTS, width)
    experts = (ids[:, 0] // width).tolist()
    assert (ids == np.array(experts)[:, None] * width + np.arange(width)).all()
    assert {frozenset(experts[:2]), frozenset(experts[2:])} == {frozenset((0, 3)), frozenset((1, 2))}


@pytest.mark.slow
@pytest.mark.parametrize("often", [0.0, 0.95])
def test_layers_are_pinned_whole_where_no_expert_is_used_more_often(often: float, tmp_path: Path) -> None:
    """Room for two layers of four. Where experts 0 and 1 are used on most tokens, in all layers, it is for them."""
    layers, width, random = 4, 8, np.random.default_rng(3)
    shape = {"num_hidden_layers": layers, "intermediate_size": width, "num_experts": EXPERTS}
    mixture = model_of(num_experts_per_tok=CHOSEN, hidden_act="silu", **shape)
    active: list[Mapping[FamilyName, np.ndarray]] = []
    for _ in range(layers):
        likes = random.random((EXPERTS, 512))
        likes[:2] -= random.random(512) < often
        active.append({"neuron": np.repeat(likes.argsort(axis=0).argsort(axis=0) < CHOSEN, width, axis=0)})
    room = 2 * EXPERTS * width * unit_bytes("neuron", mixture.spec, "fp16")
    found = place.run(
        place.PlaceConfig(),
        mixture,
        activations_of(tmp_path / "a", active),
        sparsity_of("dense", {"neuron": (CHOSEN / EXPERTS,) * layers}, cache_bytes=room),
        device_of(latency_s=0.0),
        Workspace(tmp_path / "place", "test"),
    )
    arrays = load_arrays(found.arrays)
    pinned = [np.flatnonzero(arrays[f"{layer}.neuron"] == 0).tolist() for layer in range(layers)]
    whole = list(range(EXPERTS * width))
    if often:
        assert pinned != [whole, whole, [], []]
    else:
        assert (pinned, found.pinned_share) == ([whole, whole, [], []], 1.0)
    assert len(found.shares_tried) == 11


def needs(stage: str, method: str, model: Model) -> int:
    """What a stage holds in memory."""
    config = resolve({"method": method, "order": "ripple", "format": "fp16"})
    build = Build(model, of_all_stages(config), {stage: {}}, config.device, num_tokens=512, block_tokens=32)
    return needs_of(stage, build).ram_bytes


def test_preflight_counts_one_expert_s_units_in_pairs_where_a_selector_chooses_within_experts() -> None:
    """Of experts that are used whole, experts are."""
    mixture = model_of(num_experts=EXPERTS, num_experts_per_tok=CHOSEN, hidden_act="silu")
    units = max(mixture.spec.hidden_size, mixture.spec.intermediate_size)
    bits = 512 // 4 * EXPERTS * (WIDTH - WIDTH // 32)  # of neurons, and of blocks
    assert needs("order", "topk", mixture) - needs("order", "dense", mixture) == 2 * (units**2 - EXPERTS**2) + bits


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_units_are_paired_within_their_expert_alone(
    cache_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token uses two of 12 experts, and of their 8 units the even ones or the odd ones: an order of all 96 units
    would place units of different experts side by side."""
    experts, width, random = 12, 8, np.random.default_rng(1)
    mixture = model_of(
        num_hidden_layers=1, intermediate_size=width, num_experts=experts, num_experts_per_tok=CHOSEN, hidden_act="silu"
    )
    active = np.zeros((experts, width, 512), bool)
    for token in range(512):
        active[random.choice(experts, CHOSEN, replace=False), token % 2 :: 2, token] = True
    sizes: list[int] = []
    counted = _task.pair_counts
    monkeypatch.setattr(_task, "pair_counts", lambda bits, *rest: sizes.append(len(bits)) or counted(bits, *rest))
    layers: list[Mapping[FamilyName, np.ndarray]] = [{"neuron": active.reshape(-1, 512)}]
    found = order.run(
        OrderConfig(order="ripple"),
        mixture,
        activations_of(tmp_path, layers),
        sparsity_of("topk", {"neuron": (CHOSEN / experts / 2,)}, cache_bytes=cache_bytes),
        placement_of(tmp_path, layers, pinned=(3, 4)),
        device_of(),
        (0,),
        Workspace(tmp_path / "order", "test"),
    )
    ids = load_arrays(found.entries[0].arrays)["order"].reshape(experts, width)
    assert (ids // width == np.arange(experts)[:, None]).all()
    halves = ids % 2
    assert (halves[:, :4] == halves[:, :1]).all()
    assert (halves[:, 4:] != halves[:, :1]).all()
    assert sizes == [width] * experts
    assert found.entries[0].heuristic == "ripple"


def test_preflight_counts_predictors_of_all_experts_and_labels_of_a_token_s() -> None:
    """By hand: labels of two experts and two copies of one's, bits, two gates, the predictor with its moments and
    scores of a batch; more of each than of one MLP, and less than of one as wide as all experts."""
    hidden, width, tokens = 64, WIDTH, 512
    found = {
        name: {
            stage: needs(
                stage,
                "predictor",
                model_of(2, hidden, inner, num_experts=experts, num_experts_per_tok=chosen),
            )
            for stage in ("predict", "size")
        }
        for name, (inner, experts, chosen) in {
            "one": (width, 1, 1),
            "mixture": (width, EXPERTS, CHOSEN),
            "wide": (EXPERTS * width, 1, 1),
        }.items()
    }
    rank = hidden * CHOSEN * width // (hidden + CHOSEN * width)
    expected = tokens * (6 * hidden + 4 * width) + tokens * EXPERTS * width // 8 + 8 * hidden * EXPERTS * width
    expected += 20 * rank * (hidden + EXPERTS * width) + 16 * 256 * CHOSEN * width
    assert found["mixture"]["predict"] == (500 << 20) + expected
    for stage in ("predict", "size"):
        assert found["one"][stage] < found["mixture"][stage]
    assert found["mixture"]["predict"] < found["wide"]["predict"]
