"""gram: the products of what every matrix takes in, against transformers' own modules, whatever the cores."""

from pathlib import Path

import numpy as np
import pytest
import torch

from coldpress.compiler.activity import gram_pass
from coldpress.compiler.io import Workspace, load_arrays, save_arrays
from coldpress.compiler.stages import gram, ingest, quantize
from coldpress.compiler.stages.allocate import with_smaller
from coldpress.compiler.stages.gram import GramConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.quantize import QuantizeConfig
from coldpress.runtime.sparsity.topk import num_selected
from coldpress.schemas.corpus import SPLITS, Corpus, TokenBlocks
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.gram import INPUT_OF, GramMatrices
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Sparsity
from tests.support.hf import load_hf
from tests.support.methods import fitted
from tests.support.models import write_model
from tests.support.records import tiny_sparsity

LAYERS, BLOCKS, TOKENS = 3, 5, 24
MODULES = {"q_proj": "self_attn", "o_proj": "self_attn", "up_proj": "mlp", "down_proj": "mlp"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    tokens = np.random.default_rng(5).integers(2, 384, (BLOCKS, TOKENS)).astype(np.int32)
    arrays = save_arrays(tmp_path_factory.mktemp("corpus") / "tokens.safetensors", {"tokens": tokens})
    blocks = (TokenBlocks(split=split, arrays=arrays, num_blocks=BLOCKS, block_tokens=TOKENS) for split in SPLITS)
    return Corpus(name="random", text_sha256="0" * 64, splits=tuple(blocks))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("silu") / "tiny"
    write_model(folder, num_hidden_layers=LAYERS, relu=False)
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))


def grams_of(
    model: Model, corpus: Corpus, sparsity: Sparsity, folder: Path, threads: int = 1, tokens: int = 1 << 20
) -> GramMatrices:
    config = GramConfig(compute_dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram_pass, "GRAM_TOKENS", tokens)
        return gram.run(config, model, corpus, sparsity, Workspace(folder, "test"), threads)


def inputs_seen(model: Model, tokens: np.ndarray, keep: dict[str, int] | None = None) -> dict[str, np.ndarray]:
    """`<layer>.<role>` -> all that transformers' module got, float64 [tokens, n]; `keep` prunes to the k largest."""
    source = load_hf(Path(model.folder).parents[1])
    seen: dict[str, list[np.ndarray]] = {}

    def watch(name: str, role: str):
        def hook(_module, arguments):
            (values,) = arguments
            if keep and role in keep:
                smallest = values.abs().topk(keep[role], dim=-1).values[..., -1:]
                values = torch.where(values.abs() >= smallest, values, 0.0)
            seen.setdefault(name, []).append(values.double().reshape(-1, values.shape[-1]).numpy())
            return (values,)

        return hook

    for number, layer in enumerate(source.model.layers):
        for role in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
            part = layer.self_attn if hasattr(layer.self_attn, role) else layer.mlp
            getattr(part, role).register_forward_pre_hook(watch(f"{number}.{role}", role))
    with torch.no_grad():
        for block in tokens:
            source(torch.from_numpy(block[None].astype(np.int64)))
    return {name: np.concatenate(parts) for name, parts in seen.items()}


@pytest.mark.parametrize("method", ["dense", "topk"])
def test_each_matrix_has_the_products_of_its_own_inputs(model, corpus, tmp_path, method):
    sparsity = fitted(tiny_sparsity(model, method, "fp16"), model.spec, tmp_path)
    found = grams_of(model, corpus, sparsity, tmp_path / "gram")
    keep = None
    if method == "topk":
        (hidden, inner) = (sparsity.density(family, 0) for family in ("mlp_in", "mlp_mid"))
        sizes = {"gate_proj": (hidden, model.spec.hidden_size), "down_proj": (inner, model.spec.intermediate_size)}
        sizes["up_proj"] = sizes["gate_proj"]
        keep = {role: num_selected(size, share) for role, (share, size) in sizes.items()}
    expected = inputs_seen(model, load_arrays(corpus.split("calibration").arrays)["tokens"], keep)
    assert found.num_tokens == BLOCKS * TOKENS
    for layer in found.layers:
        arrays = load_arrays(layer.arrays)
        for role, signal in INPUT_OF.items():
            inputs = expected[f"{layer.layer}.{role}"]
            wanted = inputs.T @ inputs
            np.testing.assert_allclose(arrays[signal], wanted, atol=2e-4 * np.abs(wanted).max(), err_msg=role)


def test_cores_change_no_byte_and_a_run_that_was_cut_goes_on(model, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(gram_pass, "TILE_ROWS", 16)
    sparsity = fitted(tiny_sparsity(model, "topk", "fp16"), model.spec, tmp_path)
    digests = [
        [layer.arrays.sha256 for layer in grams_of(model, corpus, sparsity, tmp_path / f"{threads}", threads).layers]
        for threads in (1, 3)
    ]
    assert digests[0] == digests[1]
    for layer in (1, 2):
        (tmp_path / "3" / f"layer-{layer}.safetensors").unlink()
    again = grams_of(model, corpus, sparsity, tmp_path / "3", 2)
    assert [layer.arrays.sha256 for layer in again.layers] == digests[0]


def test_only_as_many_tokens_as_are_wanted(model, corpus, tmp_path):
    found = grams_of(model, corpus, tiny_sparsity(model, "dense", "fp16"), tmp_path, tokens=3 * TOKENS + 5)
    assert found.num_tokens == 3 * TOKENS


def test_quantize_takes_them(model, corpus, tmp_path):
    sparsity = tiny_sparsity(model, "dense", "int4_group32")
    found = grams_of(model, corpus, sparsity, tmp_path / "gram")
    codes = {}
    for algorithm in ("rtn", "gptq"):
        config = QuantizeConfig(algorithm=algorithm)
        record = quantize.run(config, model, sparsity, (0, 1, 2), Workspace(tmp_path / algorithm, "test"), found)
        codes[algorithm] = [load_arrays(layer.arrays) for layer in record.layers]
        codes[f"{algorithm} shared"] = load_arrays(record.shared)
    for plain, corrected in zip(codes["rtn"], codes["gptq"], strict=True):
        differ = {name for name in plain if not np.array_equal(plain[name], corrected[name])}
        assert differ >= {"units.block", "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}
        assert not any("norm" in name for name in differ)
    for name, array in codes["rtn shared"].items():
        assert np.array_equal(array, codes["gptq shared"][name])


@pytest.mark.parametrize("given", [None, "of other weights"])
def test_without_those_of_its_weights_quantize_refuses(model, corpus, tmp_path, given):
    sparsity = tiny_sparsity(model, "dense", "int4_group32")
    found = grams_of(model, corpus, sparsity, tmp_path / "gram") if given else None
    other = model.model_copy(update={"weights_sha256": "1" * 64})
    with pytest.raises(ColdpressError, match=f"algorithm=gptq needs Gram matrices .* {given or 'none were given'}"):
        quantize.run(QuantizeConfig(algorithm="gptq"), other, sparsity, (0,), Workspace(tmp_path, "test"), found)


def test_of_several_budgets_the_smallest_one_s_units_count(model, corpus, tmp_path):
    few = fitted(tiny_sparsity(model, "topk", "fp16"), model.spec, tmp_path / "few")
    every = fitted(tiny_sparsity(model, "topk", "fp16", density=1.0), model.spec, tmp_path / "all")
    found = {
        name: [layer.arrays.sha256 for layer in grams_of(model, corpus, chosen, tmp_path / name, tokens=TOKENS).layers]
        for name, chosen in (("few", few), ("all", every), ("both", with_smaller(every, [few])))
    }
    assert found["both"] == found["few"] != found["all"]
