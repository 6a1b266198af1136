"""explore: what selectors and formats cost is what transformers' own model says, and the choice keeps the quality."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.layer_counts import ActivityRule, countable_families, exact_families
from coldpress.compiler.activity.rounded import RoundedKeys
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.quality import passes, trace
from coldpress.compiler.quality.trace import rounded
from coldpress.compiler.quality.variants import CACHED_DENSITIES, DENSITIES, RESIDENT_SHARES
from coldpress.compiler.search.floor import Floor, least_density, ratio_at
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.stages import allocate, explore, gram, ingest, quantize
from coldpress.compiler.stages.explore import ExploreConfig
from coldpress.compiler.stages.gram import GramConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.quantize import QuantizeConfig
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.runtime.sparsity import flash
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import SPLITS, Corpus, Split
from coldpress.schemas.curves import Curve, Curves, KvCacheLoss, Point
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import WHOLE_MLP, HeadFormat, OwnFormats
from coldpress.schemas.model import Model
from tests.support.curves import NO_LOSS, curves_of
from tests.support.models import write_model
from tests.support.records import tiny_sparsity
from tests.support.statistics import corpus_of_tokens, device_of

LAYERS = 11
RNG = np.random.default_rng(6)
TOKENS: dict[Split, np.ndarray] = {split: RNG.integers(0, 384, (3, 24)).astype(np.int32) for split in SPLITS}


@pytest.fixture(scope="module", autouse=True)
def _few_drawn_units() -> Iterator[None]:
    """`flash` finds its prices from fewer drawn units: a sixteenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "DRAWN_UNITS", 1 << 10)
        yield


def ingested(folder: Path, num_hidden_layers: int = LAYERS, **changes: Any) -> Model:
    write_model(folder / "model", num_hidden_layers=num_hidden_layers, **changes)
    return ingest.run(IngestConfig(model=str(folder / "model")), Workspace(folder / "ingest", "test"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return ingested(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return corpus_of_tokens(tmp_path_factory.mktemp("corpus"), TOKENS)


def counted(model: Model, corpus: Corpus, folder: Path) -> Activations:
    families = countable_families(model.spec)
    activity = ActivityRule(exact_families(families, model.spec))
    return count_activity(PassConfig(), model, corpus, families, activity, Workspace(folder, "test"), 1)


def explored(model: Model, corpus: Corpus, folder: Path, threads: int = 1, **settings: Any) -> Curves:
    config = ExploreConfig(method="auto", explore_tokens=48, **{"explore": "whole"} | settings)
    activations = counted(model, corpus, folder / "calibrate")
    return explore.run(config, model, corpus, activations, Workspace(folder / "explore", "test"), threads)


@pytest.fixture(scope="module")
def activations(model: Model, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Activations:
    return counted(model, corpus, tmp_path_factory.mktemp("activations"))


@pytest.fixture(scope="module")
def curves(model: Model, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Curves:
    return explored(model, corpus, tmp_path_factory.mktemp("curves"))


@pytest.fixture
def few(model: Model, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Curves:
    """The curves of an undisturbed run with few selectors; one of them chooses token by token."""
    monkeypatch.setattr(explore, "candidates", lambda *_: ("topk", "dip_ca", "dense"))
    return explored(model, corpus, tmp_path / "few")


def pruned_by_hand(model: Model, density: float, tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities of transformers' own model, whole and with the largest entries of its MLPs' inputs alone."""
    source = AutoModelForCausalLM.from_pretrained(Path(model.tensors["norm.weight"].file).resolve().parent).eval()
    ids = torch.from_numpy(tokens.astype(np.int64))

    def keep(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        (signal,) = inputs
        kept = signal.abs().topk(round(density * signal.shape[-1]), dim=-1).indices
        return (torch.zeros_like(signal).scatter(-1, kept, signal.gather(-1, kept)),)

    with torch.no_grad():
        whole = source(ids).logits.log_softmax(-1)
        for block in source.model.layers:
            block.mlp.register_forward_pre_hook(keep)
            block.mlp.down_proj.register_forward_pre_hook(keep)
        return whole, source(ids).logits.log_softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("density", [DENSITIES[0], DENSITIES[-1]])
def test_a_point_is_what_transformers_own_model_loses(model: Model, curves: Curves, density: float) -> None:
    tokens = TOKENS["validation"][:2]
    whole, pruned = pruned_by_hand(model, density, tokens)
    kld = (whole.exp() * (whole - pruned)).sum(-1).double().numpy()
    following = torch.from_numpy(tokens[:, 1:].astype(np.int64))[..., None]
    lost = (whole - pruned)[:, :-1].gather(-1, following)[..., 0].double().mean().item()
    (curve,) = curves.of("topk")
    (point,) = (point for point in curve.points if point.density == density)
    assert point.mean_kld == pytest.approx(kld.mean(), rel=1e-3)
    assert point.p999_kld == pytest.approx(np.percentile(kld, 99.9), rel=1e-3)
    parts = kld.reshape(2 * 4, -1).mean(axis=1)  # of two blocks, each in quarters
    assert point.mean_kld_error == pytest.approx(parts.std(ddof=1) / math.sqrt(8), rel=1e-2)
    assert point.ppl_ratio == pytest.approx(math.exp(lost), rel=1e-5)


def test_every_candidate_has_a_curve_or_a_reason(curves: Curves) -> None:
    found = {curve.method for curve in curves.curves}
    reasons = {entry.method: entry.reason for entry in curves.unexplored}
    assert found.isdisjoint(reasons)
    assert {"topk", "threshold", "dip", "wina", "gate", "up", "glu", "cats"} <= found
    assert {"dense"} == reasons.keys(), "and none that needs exact zeros"
    least = {"gate": 1 / 3, "cats": 1 / 3, "up": 1 / 3, "glu": 2 / 3}  # of the MLP, what stays in DRAM
    for curve in curves.curves:
        measured = DENSITIES if curve.resident_share is None else CACHED_DENSITIES
        reached = tuple(density for density in measured if density > least.get(curve.method, 0))
        assert tuple(point.density for point in curve.points) == reached
    for method in ("flash", "dip_ca"):
        assert tuple(curve.resident_share for curve in curves.of(method)) == RESIDENT_SHARES
    in_blocks = {"fp16", "int8_group32", "q5_1", "q4_1", "int4_group32"}
    assert {loss.format for loss in curves.formats} == in_blocks


@pytest.mark.slow
def test_a_model_with_exact_zeros_has_further_candidates(corpus: Corpus, tmp_path: Path) -> None:
    curves = explored(ingested(tmp_path, relu=True, num_hidden_layers=2), corpus, tmp_path)
    reasons = {entry.method: entry.reason for entry in curves.unexplored}
    assert "loses nothing" in reasons["relu"]
    assert "predictor_tolerance" in reasons["predictor"]
    (capped,) = curves.of("fatrelu")
    assert capped.points[-1].mean_kld < 1e-9, "more units than are nonzero"


def test_narrower_formats_lose_more(curves: Curves) -> None:
    loss = {entry.format: entry.mean_kld for entry in curves.formats}
    assert loss["fp16"] < loss["int8_group32"] < loss["q4_1"] < loss["int4_group32"]


def in_groups(heads: torch.Tensor) -> torch.Tensor:
    """Keys or values whose last axis is a group of 32: whole multiples of its largest magnitude's 127th part, with that
    part then rounded to half precision, as llama.cpp's Q8_0 does."""
    scale = heads.abs().amax(-1, keepdim=True) / 127
    return (heads / scale).round() * scale.half().float()


def test_keys_and_values_are_those_of_an_int8_kv_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = ingested(tmp_path, num_hidden_layers=2, overrides={"head_dim": 32}), TOKENS["validation"]
    plain = LayerStream(model)
    found = RoundedKeys(plain, "int8").logits(tokens)
    source = AutoModelForCausalLM.from_pretrained(Path(model.tensors["norm.weight"].file).resolve().parent).eval()
    ids, attention = torch.from_numpy(tokens.astype(np.int64)), torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        whole = source(ids).logits.numpy()
        monkeypatch.setattr(
            torch.nn.functional,
            "scaled_dot_product_attention",
            lambda query, key, value, **rest: attention(query, in_groups(key), in_groups(value), **rest),
        )
        rounded_by_hand = source(ids).logits.numpy()
    np.testing.assert_allclose(plain.logits(tokens), rounded_by_hand, atol=2e-5)
    np.testing.assert_allclose(found, rounded_by_hand, atol=2e-5)
    assert np.abs(rounded_by_hand - whole).max() > 1e-3, "rounding shows"


def test_a_kv_cache_takes_its_part(model: Model, tmp_path: Path) -> None:
    known = curves_of(model, tmp_path, {}, {"fp16": 1.0})
    assert Floor(known, 1.1).kv_cache_ratio("fp16") == 1.0
    assert Floor(known, 1.1).kv_cache_ratio("int8") is None, "it was not measured"
    losses = tuple(KvCacheLoss(kv_cache="int8", ppl_ratio=ratio, **NO_LOSS) for ratio in (1.02, 0.99))
    floors = [Floor(known.model_copy(update={"kv_caches": (loss,)}), 1.1) for loss in losses]
    assert [floor.kv_cache_ratio("int8") for floor in floors] == [1.02, 1.0], "a lucky rounding is no credit"


def test_the_trace_is_the_whole_models_signals(model: Model, curves: Curves) -> None:
    source = AutoModelForCausalLM.from_pretrained(Path(model.tensors["norm.weight"].file).resolve().parent).eval()
    seen: dict[str, torch.Tensor] = {}
    for layer in curves.trace_layers:
        mlp = source.model.layers[layer].mlp
        for signal, module in (("mlp_input", mlp), ("mlp_inner", mlp.down_proj)):
            name = f"{layer}.{signal}"
            module.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0]}))
    with torch.no_grad():
        source(torch.from_numpy(TOKENS["validation"][:2].astype(np.int64)))
    trace = load_arrays(curves.trace)
    assert curves.trace_layers == (0, 3, 7, 10)
    for name, expected in seen.items():
        values = expected.reshape(-1, expected.shape[-1]).numpy()
        np.testing.assert_allclose(trace[name], values, rtol=2**-6, atol=1e-4)


@pytest.mark.parametrize("density", DENSITIES)
def test_what_the_trace_leaves_off_hardly_changes_what_is_chosen(density: float) -> None:
    """Of units with magnitudes around those that are chosen, one in 300 changes places with another."""
    signals = np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32)
    chosen = [
        np.abs(kept).argsort(axis=1)[:, -round(density * 4096) :]
        for kept in (signals, rounded(signals.astype(np.float16)))
    ]
    same = [np.isin(*pair).mean() for pair in zip(*chosen, strict=True)]
    assert 0.99 < np.mean(same) < 1


def test_signals_are_rounded_to_the_nearest() -> None:
    """Against a search through all numbers of so few bits."""
    values = np.random.default_rng(0).normal(size=300).astype(np.float16)
    codes = np.arange(0, 1 << 16, 32, dtype=np.uint16).view(np.float16).astype(np.float64)
    fewer = codes[np.isfinite(codes)]
    errors = np.abs(fewer[:, None] - values.astype(np.float64)).min(axis=0)
    assert np.array_equal(np.abs(rounded(values).astype(np.float64) - values.astype(np.float64)), errors)


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on(
    model: Model, corpus: Corpus, few: Curves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its first pass and again later: no pass is measured twice, and the record is that of an undisturbed run."""
    measured: list[int] = []
    ends = [1]
    whole = passes.compare

    def compare(*arguments: Any) -> Any:
        if len(measured) == ends[-1]:
            raise KeyboardInterrupt
        measured.append(1)
        return whole(*arguments)

    monkeypatch.setattr(passes, "compare", compare)
    with pytest.raises(KeyboardInterrupt):
        explored(model, corpus, tmp_path)
    monkeypatch.setattr(trace, "_traced", lambda *_: pytest.fail("the whole model had run"))
    ends.append(4)
    with pytest.raises(KeyboardInterrupt):
        explored(model, corpus, tmp_path)
    ends.append(-1)
    again = explored(model, corpus, tmp_path)
    assert len(measured) == len(few.curves) + len(few.formats) + len(few.heads)
    assert again.model_copy(update={"trace": few.trace}) == few
    assert again.trace.sha256 == few.trace.sha256


@pytest.mark.slow
def test_threads_change_nothing(model: Model, corpus: Corpus, few: Curves, tmp_path: Path) -> None:
    other = explored(model, corpus, tmp_path, threads=3)
    assert other.model_copy(update={"trace": few.trace}) == few
    assert other.trace.sha256 == few.trace.sha256


def lost_by_codes(model: Model, corpus: Corpus, format_name: str, algorithm: str, folder: Path) -> float:
    """The divergence of transformers' own model with the codes that `quantize` stores by an algorithm, on the whole
    validation text."""
    sparsity, layers = tiny_sparsity(model, "dense", format_name), tuple(range(model.spec.num_hidden_layers))
    known: dict[str, Any] = {"activations": counted(model, corpus, folder / "calibrate")}
    if algorithm == "gptq":
        known["gram"] = gram.run(GramConfig(), model, corpus, sparsity, Workspace(folder / "gram", "test"), 1)
    config, work = QuantizeConfig(algorithm=algorithm), Workspace(folder / "codes", "test")
    source = AutoModelForCausalLM.from_pretrained(Path(model.tensors["norm.weight"].file).resolve().parent).eval()
    ids = torch.from_numpy(TOKENS["validation"].astype(np.int64))
    codec = load("coldpress.runtime.quantization", Format, format_name)
    with torch.no_grad():
        whole = source(ids).logits.log_softmax(-1)
        for layer in quantize.run(config, model, sparsity, layers, work, **known).layers:
            arrays, block = load_arrays(layer.arrays), source.model.layers[layer.layer]
            units = arrays["units.block"]  # 5 of 32 neurons: 32 rows of gate, of up, and 64 rows of 32 values of down
            gate, up, down = (np.ascontiguousarray(part) for part in np.split(units, 3, axis=1))
            gate, up = (codec.decode(part.reshape(160, -1), 64) for part in (gate, up))
            blocks = codec.decode(down.reshape(5 * 64, -1), 32).reshape(5, 64, 32)
            down = np.concatenate(list(blocks), axis=1)
            for module, values in ((block.mlp.gate_proj, gate), (block.mlp.up_proj, up), (block.mlp.down_proj, down)):
                module.weight.copy_(torch.from_numpy(values))
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                module = getattr(block.self_attn, name)
                module.weight.copy_(torch.from_numpy(codec.decode(arrays[f"{name}.weight"], module.in_features)))
        found = source(ids).logits.log_softmax(-1)
    return float((whole.exp() * (whole - found)).sum(-1).double().mean())


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gptq", "rtn"])
def test_codes_are_those_of_the_build(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """By Gram matrices, which do not stay on disk, or by the importance of inputs."""
    model = ingested(tmp_path, num_hidden_layers=2)
    monkeypatch.setattr(explore, "candidates", lambda *_: ("dense",))
    found = explored(model, corpus, tmp_path / "explore", algorithm=algorithm)
    losses = {loss.format: loss.mean_kld for loss in found.formats if loss.family == "block"}
    for name in ("q4_1", "int4_group32"):
        by_codes = lost_by_codes(model, corpus, name, algorithm, tmp_path / name)
        assert losses[name] == pytest.approx(by_codes, rel=1e-3), name
    assert not list((tmp_path / "explore" / "explore" / "gram").glob("*.safetensors"))


def curve_of(**ratios: float) -> Curve:
    points = (Point(density=int(name[1:]) / 10, ppl_ratio=ratio, **NO_LOSS) for name, ratio in ratios.items())
    return Curve(method="topk", points=tuple(points))


def test_a_curve_never_rises_and_ends_without_loss() -> None:
    curve = curve_of(d3=1.4, d5=1.04, d7=1.06, d9=0.99)
    assert ratio_at(curve, 0.3) == pytest.approx(1.4)
    assert ratio_at(curve, 0.5) == ratio_at(curve, 0.7) == pytest.approx(1.05)
    assert ratio_at(curve, 0.9) == ratio_at(curve, 1.0) == 1.0, "a lucky point is no credit"
    assert ratio_at(curve, 0.4) == pytest.approx((1.4 + 1.05) / 2)


@pytest.mark.parametrize(
    ("most", "density"),
    [(2.0, 0.3), (1.401, 0.3), (1.226, 0.4), (1.051, 0.5), (1.05, 0.71), (1.001, 0.9), (0.99, None)],
)
def test_the_least_density_that_keeps_a_ratio(most: float, density: float | None) -> None:
    assert least_density(curve_of(d3=1.4, d5=1.05, d7=1.05, d9=1.0), most) == density


def test_a_format_takes_its_part(model: Model, tmp_path: Path) -> None:
    curves = curves_of(model, tmp_path, {"topk": {0.3: 1.2, 0.5: 1.1, 0.9: 1.0}}, {"int4_group32": 1.05, "fp16": 0.99})
    assert Floor(curves, 1.101).least_density("topk", "fp16") == 0.5
    assert Floor(curves, 1.101 * 1.05).least_density("topk", "int4_group32") == 0.5
    assert Floor(curves, 1.04).least_density("topk", "int4_group32") is None
    assert Floor(curves, 1.1).ratio("topk", "int4_group32", 0.5) == pytest.approx(1.1 * 1.05)
    assert Floor(curves, 1.1).ratio("dense", "int4_group32", 1.0) == 1.05
    assert Floor(curves, 1.1).formats(("fp16", "int4_group32")) == ("fp16", "int4_group32")
    assert Floor(curves, 1.02).formats(("fp16", "int4_group32")) == ("fp16",)
    assert Floor(curves, 0.9).formats(("fp16", "int4_group32")) == ("fp16",), "the best, if none keeps the floor"


def test_a_format_keeps_the_floor_with_its_error_added(model: Model, tmp_path: Path) -> None:
    losses = {"int4_group32": 1.04, "int8_group32": 1.0}
    curves = curves_of(model, tmp_path, {"topk": {0.3: 1.2, 0.5: 1.1}}, losses, format_error=0.02)
    assert Floor(curves, 1.059).formats(tuple(losses)) == ("int8_group32",)
    assert Floor(curves, 1.061).formats(tuple(losses)) == tuple(losses)
    assert Floor(curves, 1.01).formats(tuple(losses)) == ("int8_group32",), "the best, where none keeps it"
    assert Floor(curves, 1.101 * 1.02).least_density("topk", "int8_group32") == 0.5
    assert (Floor(curves, 1.101).least_density("topk", "int8_group32") or 1) > 0.5
    head = OwnFormats(layers="int8_group32", head=HeadFormat(role="lm_head.weight", format="int4_group32"))
    (worse,) = (loss for loss in curves.formats if loss.ppl_ratio > 1 and loss.family == WHOLE_MLP)
    known = curves.model_copy(update={"heads": (worse,)})
    assert Floor(known, 1.1).most_format_ratio(head) == pytest.approx(1.04 + 0.02 * 2**0.5)


def test_between_two_sizes_of_dram_the_worse_curve_counts(model: Model, tmp_path: Path) -> None:
    found = curves_of(model, tmp_path, {"dip_ca": {0.5: 1.2, 0.9: 1.0}}, {"fp16": 1.0})
    few, many = found.curves[0], curve_of(d5=1.3, d9=1.0).model_copy(update={"method": "dip_ca"})
    both = (few.model_copy(update={"resident_share": 0.25}), many.model_copy(update={"resident_share": 0.6}))
    floor = Floor(found.model_copy(update={"curves": both}), 1.1)
    assert floor.ratio("dip_ca", "fp16", 0.5, 0.1) == pytest.approx(1.2)
    assert floor.ratio("dip_ca", "fp16", 0.5, 0.4) == pytest.approx(1.3)
    assert floor.ratio("dip_ca", "fp16", 0.5, 0.9) == pytest.approx(1.3)
    assert floor.least_density("dip_ca", "fp16", 0.1) == pytest.approx(0.71)
    assert floor.least_density("dip_ca", "fp16", 0.4) == pytest.approx(0.77)


def test_what_is_chosen_keeps_the_quality(model: Model, activations: Activations, tmp_path: Path) -> None:
    lossy = {"topk": {0.3: 1.5, 0.6: 1.1, 0.9: 1.0}, "wina": {0.3: 1.01, 0.6: 1.0, 0.9: 1.0}}
    curves = curves_of(model, tmp_path, lossy, {"fp16": 1.0})

    def tried(most: float | Literal["off"], **settings: Any) -> dict[str, Any]:
        values = {"method": "auto", "format": "fp16", "dram_budget": "95%", "context_length": 64}
        config = AllocateConfig(**values | {"density_allocation": "uniform", "max_ppl_ratio": most} | settings)
        work = Workspace(tmp_path / f"{most}{settings}", "test")
        found = allocate.run(config, model, activations, device_of(), work, curves=curves)
        return {entry.method: entry for entry in found.tried}

    found = tried(1.101)
    assert (found["topk"].density, found["topk"].ppl_ratio) == (pytest.approx(0.6), pytest.approx(1.1))
    assert (found["wina"].density, found["wina"].ppl_ratio) == (pytest.approx(0.3), pytest.approx(1.01))
    assert (found["dense"].density, found["dense"].ppl_ratio) == (1.0, 1.0)
    assert found["wina"].token_s <= found["topk"].token_s
    assert found["flash"].skipped == "was not measured here"
    strict = tried(0.9)
    assert strict["topk"].skipped is not None
    assert "no density below 1 keeps perplexity within 0.9 times the source's" in strict["topk"].skipped
    given = tried(1.1, density=0.5)
    assert given["topk"].skipped is not None
    assert "at density 0.5 perplexity is 1.233 times the source's" in given["topk"].skipped
    assert given["wina"].density == pytest.approx(0.5), "a given density is no less than the quality asks"
    open_floor = tried("off")
    assert open_floor["topk"].density == pytest.approx(open_floor["wina"].density, abs=0.02), "the budget's"


def test_curves_of_other_weights_are_refused(model: Model, activations: Activations, curves: Curves) -> None:
    config = AllocateConfig(method="auto", format="fp16", dram_budget="90%", context_length=64)
    other = curves.model_copy(update={"weights_sha256": "1" * 64})
    with pytest.raises(ColdpressError, match=r"the curves belong to weights 1{12}, .* delete explore\.json"):
        allocate.run(config, model, activations, device_of(), Workspace(Path("nowhere"), "test"), curves=other)
    with pytest.raises(ColdpressError, match="give --curves, from explore"):
        allocate.run(config, model, activations, device_of(), Workspace(Path("nowhere"), "test"))
