"""The evaluation's masked forward pass against the runtime, which decodes an artifact token by token."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.evaluation.evaluate import CacheSettings, Masks, Sparse, evaluate, mlp_density
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.runtime import plugins
from coldpress.runtime.generate.session import Session
from coldpress.runtime.sparsity import Selector, topk
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import num_units
from coldpress.schemas.model import Model
from tests.support.artifacts import Built, Recipe, build_artifact, small_spec
from tests.support.hf import load_hf, roles_of, spec_of
from tests.support.methods import families_of, fit
from tests.support.models import write_model
from tests.support.product import arrays_of, reading_of
from tests.support.tiny import tiny_spec

METHODS = plugins.names("coldpress.runtime.sparsity")
TOKENS = np.random.default_rng(8).integers(0, 384, (2, 20)).astype(np.int32)
SLOTS_SHARE = 0.3


@pytest.fixture(scope="module", params=[False, True], ids=["silu", "relu"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose weights fp16 holds exactly, so that what is packed is what is evaluated."""
    folder = tmp_path_factory.mktemp("source")
    write_model(folder / "tiny", num_hidden_layers=2, relu=request.param, dtype="float16")
    return ingest.run(IngestConfig(model=str(folder / "tiny")), Workspace(folder / "work", "test"))


def cache_of(model: Model, families: tuple[str, ...]) -> CacheSettings:
    return CacheSettings("lru", {name: round(SLOTS_SHARE * num_units(name, model.spec)) for name in families})


def opened(built: Built) -> Session:
    """Under the artifact's plan as it stands: its budget has room for more units than it keeps."""
    return Session(built.path, plan=built.manifest.plans[0], modelled=True)


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in METHODS), ("predictor", {"topk_ratio": 1.5})])
def test_logits_are_those_of_the_runtime(name: str, options: dict[str, float], source: Model, tmp_path: Path) -> None:
    """Up to a unit at the edge of a choice: the runtime's KV cache is fp16."""
    selector = plugins.load("coldpress.runtime.sparsity", Selector, name)
    if selector.NEEDS_EXACT_ZEROS and source.spec.hidden_act != "relu":
        pytest.skip("a model without exact zeros")
    families = families_of(name, source.spec)
    hf = load_hf(Path(source.tensors["norm.weight"].file).resolve().parent)
    spec = spec_of(hf.config)
    recipe = Recipe(
        spec=spec,
        method=name,
        options=options,
        pinned_share=0,
        slots_share=SLOTS_SHARE,
        density=0.4,
        context_length=TOKENS.shape[1],
        read_buffer_bytes=1 << 18,
    )
    session = opened(build_artifact(tmp_path / "a.coldpress", recipe, roles_of(hf, spec)))
    decoded = []
    for block in TOKENS:
        session.decoder.begin(len(block))
        decoded.append(np.stack([session.decoder.decode(int(token)) for token in block]))
    sparse = Sparse(selector, families, arrays_of(session))
    masks = Masks(sparse, source.spec)
    if selector.SEES_RESIDENCY:
        masks.cache, masks.reading = cache_of(source, families), reading_of(session)
    stream = LayerStream(source)
    found = stream.head(stream.last_hidden(TOKENS, masks.layer)).numpy()
    error = np.abs(found - np.stack(decoded)).max(axis=2)
    assert np.median(error) < 2e-3 * np.abs(found).max()
    assert np.abs(found - np.stack(decoded)).mean() < 5e-3 * np.abs(found).max()
    left_out = np.abs(found - stream.logits(TOKENS)).max()
    if selector.EXACT or source.spec.hidden_act != "relu":  # of a ReLU's units a small share may be all that count
        assert (left_out < 1e-4) == selector.EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "layers_per_group", "cache"),
    [
        ("topk", {"use_read_units": True}, 1, "lru"),
        ("dip_ca", {"use_read_units": True}, 2, "lru"),
        ("flash", {}, 1, "lru"),
        ("flash", {}, 1, "static"),
        ("topk", {}, 2, "static"),
    ],
)
def test_what_is_read_and_used_along_is_what_the_runtime_reads(
    name: str, options: dict[str, Any], layers_per_group: int, cache: str, source: Model, tmp_path: Path
) -> None:
    families = families_of(name, source.spec)
    hf = load_hf(Path(source.tensors["norm.weight"].file).resolve().parent)
    recipe = Recipe(
        spec=spec_of(hf.config),
        method=name,
        options=options,
        cache=cache,
        pinned_share=0,
        slots_share=SLOTS_SHARE if cache == "lru" else 0,
        density=0.3,
        context_length=TOKENS.shape[1],
        page_bytes=512,
        collapse_gap_bytes=512,
        read_buffer_bytes=1 << 18,
        layers_per_group=layers_per_group,
    )
    session = opened(build_artifact(tmp_path / "a.coldpress", recipe, roles_of(hf, spec_of(hf.config))))
    decoded = []
    for block in TOKENS:
        session.decoder.begin(len(block))
        decoded.append(np.stack([session.decoder.decode(int(token)) for token in block]))
    slots = cache_of(source, families) if cache == "lru" else None
    masks = Masks(
        Sparse(plugins.load("coldpress.runtime.sparsity", Selector, name), families, arrays_of(session)),
        source.spec,
        slots,
    )
    masks.reading = reading_of(session)
    stream = LayerStream(source)
    found = stream.head(stream.last_hidden(TOKENS, masks.layer)).numpy()
    assert np.median(np.abs(found - np.stack(decoded)).max(axis=2)) < 2e-3 * np.abs(found).max()
    counted, reads = session.store.counters, masks.read.values()
    assert sum(entry.reads for entry in reads) == pytest.approx(counted.reads, rel=0.01)
    assert sum(entry.bytes for entry in reads) == pytest.approx(counted.read_bytes, rel=0.01)
    assert sum(entry.seconds for entry in reads) == pytest.approx(session.store.clock.flash_s, rel=0.01)
    sizes = {entry.family: entry.unit_bytes for entry in session.artifact.manifest.families}
    used = sum(sum(blocks.values()) * sizes[family] for (_, family), blocks in masks.used.items())
    assert used == pytest.approx(counted.active_bytes, rel=0.01)


def of(method: str, model: Model, density: float, oracle: bool = False, **options: Any) -> Sparse:
    families = families_of(method, model.spec)
    arrays = {
        (layer, name): fit(method, num_units(name, model.spec), density, **options)
        for layer in range(model.spec.num_hidden_layers)
        for name in families
    }
    return Sparse(plugins.load("coldpress.runtime.sparsity", Selector, method), families, arrays, oracle)


def test_nll_is_that_of_the_masked_layers(source: Model) -> None:
    """The last layer's down projection by hand; before it nothing is left out."""
    sparse = of("glu", source, 1.0)
    sparse.arrays[1, "mlp_mid"]["num_selected"] = np.array([40], np.int32)  # type: ignore[index]
    stream = LayerStream(source)

    def only_the_largest(layer: int) -> Any:
        def masked(part: Any) -> Any:
            import torch

            kept = topk.Plugin().select_many(part.numpy(), {"num_selected": np.array([40])})
            return part * torch.from_numpy(kept)

        return (lambda block: {"mlp_inner": masked}) if layer else None

    expected, count = stream.nll(TOKENS, only_the_largest)
    found = evaluate(stream, TOKENS, sparse)
    assert found.nll == pytest.approx(expected, rel=1e-6)
    assert found.num_predicted == count
    assert found.ppl == pytest.approx(math.exp(expected / count))
    assert found.mlp_density == pytest.approx((2 + (1 + 40 / 160) / 2) / 3)


@pytest.mark.parametrize(
    ("method", "gated", "oracle", "share", "expected"),
    [
        ("gate", True, False, 0.25, (1 + 2 * 0.25) / 3),
        ("gate", True, True, 0.25, 0.25),
        ("glu", True, False, 0.25, (2 + 0.25) / 3),
        ("glu", False, False, 0.25, (1 + 0.25) / 2),
        ("glu", False, True, 0.25, 0.25),
        ("topk", True, False, 0.25, 0.25),
    ],
)
def test_density_counts_all_matrices(method: str, gated: bool, oracle: bool, share: float, expected: float) -> None:
    spec = small_spec(gated_mlp=gated)
    families = families_of(method, spec)
    sparse = Sparse(plugins.load("coldpress.runtime.sparsity", Selector, method), families, {}, oracle)
    assert mlp_density(sparse, spec, dict.fromkeys(families, share)) == pytest.approx(expected)


def test_a_choice_that_sees_the_cache_reads_less(source: Model) -> None:
    stream, cache = LayerStream(source), cache_of(source, families_of("dip_ca", source.spec))
    blind = evaluate(stream, TOKENS, of("dip_ca", source, 0.3, gamma=1.0), cache)
    aware = evaluate(stream, TOKENS, of("dip_ca", source, 0.3, gamma=0.05), cache)
    assert aware.misses < 0.8 * blind.misses
    assert (
        aware.hits + aware.misses == blind.hits + blind.misses == 2 * TOKENS.size * (round(0.3 * 64) + round(0.3 * 160))
    )
    without = evaluate(stream, TOKENS, of("dip", source, 0.3))
    assert blind.nll == pytest.approx(without.nll, rel=1e-6)
    assert (without.hits, without.misses) == (0, 0)


def test_the_warm_up_fills_the_cache_and_is_not_scored(source: Model) -> None:
    """The cache stays from block to block: the second one alone begins with other units in DRAM."""
    stream, cache = LayerStream(source), cache_of(source, families_of("dip_ca", source.spec))
    sparse = of("dip_ca", source, 0.3, gamma=0.05)
    both, second = (
        evaluate(stream, TOKENS, sparse, cache, warm_up_blocks=1),
        evaluate(stream, TOKENS[1:], sparse, cache),
    )
    assert both.num_predicted == second.num_predicted == TOKENS.shape[1] - 1
    assert both.misses < second.misses
    assert both.nll != second.nll


def test_what_cannot_be_scored_is_refused(source: Model) -> None:
    cache = CacheSettings("lru", {"mlp_in": 8, "mlp_mid": 8})
    with pytest.raises(ColdpressError, match="2 blocks with a warm-up of 2 leave none to score"):
        evaluate(LayerStream(source), TOKENS, of("topk", source, 0.5), cache, warm_up_blocks=2)
    with pytest.raises(ColdpressError, match="a cache sees one block after another, found 2 threads; use one"):
        evaluate(LayerStream(source, threads=2), TOKENS, of("topk", source, 0.5), cache)


def test_the_density_of_a_mixture_counts_resident_matrices_of_the_experts_that_are_used() -> None:
    """Gate and up are resident, a token uses two of four experts; of down it uses a quarter of all units."""
    spec = tiny_spec(num_experts=4, num_experts_per_tok=2)
    sparse: Any = SimpleNamespace(oracle=False)
    assert mlp_density(sparse, spec, {"mlp_mid": 0.25}) == pytest.approx((0.25 + 2 * 0.5) / 3)
    sparse.oracle = True
    assert mlp_density(sparse, spec, {"mlp_mid": 0.25}) == pytest.approx(0.25)
