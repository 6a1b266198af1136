"""distill: the sparse model comes closer to its dense self on text it never saw, and remains an ordinary checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from compiler import distill
from compiler._io import save_arrays
from compiler.checkpoint.tensors import read_role
from compiler.distill import DistillConfig, run
from compiler.distill import _training as distillation
from compiler.ingest import IngestConfig
from compiler.ingest import run as ingest
from runtime.sparsity import topk
from schemas.corpus import SPLITS, Corpus, TokenBlocks
from schemas.errors import ColdpressError
from schemas.model import Model
from schemas.sparsity import Sparsity
from tests.support.methods import fitted
from tests.support.models import write_model
from tests.support.statistics import sparsity_of, workspace

LAYERS, HIDDEN, UNITS, VOCAB = 2, 32, 80, 320
QUICK = DistillConfig(steps=20, blocks_per_step=4, learning_rate=1e-3, validation_blocks=8)


def model_at(folder: Path, model_type: str = "llama", relu: bool = False, tie: bool = False) -> Model:
    """A tiny ingested model."""
    write_model(
        folder / "checkpoint",
        model_type,
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=UNITS,
        vocab_size=VOCAB,
        context=64,
        relu=relu,
        tie=tie,
    )
    return ingest(IngestConfig(model=str(folder / "checkpoint")), workspace(folder / "ingest"))


def corpus_at(folder: Path) -> Corpus:
    """48 random blocks per split: what the dense model makes of them is all there is to learn."""
    tokens = np.random.default_rng(0).integers(2, VOCAB, (len(SPLITS), 48, 32)).astype(np.int32)
    splits = tuple(
        TokenBlocks(
            split=name,
            arrays=save_arrays(folder / f"{name}.safetensors", {"tokens": blocks}),
            num_blocks=48,
            block_tokens=32,
        )
        for name, blocks in zip(SPLITS, tokens, strict=True)
    )
    return Corpus(name="random", text_sha256="0" * 64, splits=splits)


def top_k(model: Model, folder: Path, density: float = 0.3) -> Sparsity:
    sparsity = sparsity_of("topk", {"mlp_in": (density,) * LAYERS, "mlp_mid": (density,) * LAYERS})
    return fitted(sparsity, model.spec, folder)


def load(model: Model) -> torch.nn.Module:
    """The model as transformers loads it from the record's folder."""
    return AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()


def held_out_divergence(teacher: torch.nn.Module, weights: torch.nn.Module, density: float) -> float:
    """KL on test blocks of `weights` under our own masks, written with sort instead of top-k."""

    def mask(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        kept = round(density * inputs[0].shape[-1])
        least = inputs[0].abs().sort(dim=-1).values[..., -kept, None]
        return (inputs[0] * (inputs[0].abs() >= least),)

    for layer in weights.get_submodule("model.layers"):
        layer.mlp.register_forward_pre_hook(mask)
        layer.mlp.down_proj.register_forward_pre_hook(mask)
    tokens = torch.tensor(np.random.default_rng(9).integers(2, VOCAB, (12, 32)))
    with torch.no_grad():
        p, q = (torch.log_softmax(model(input_ids=tokens).logits, dim=-1) for model in (teacher, weights))
    return float((p.exp() * (p - q)).sum(dim=-1).mean())


def test_a_few_steps_bring_the_sparse_model_closer_to_the_dense_one(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    distilled = run(QUICK, model, corpus, top_k(model, tmp_path, 0.15), workspace(tmp_path / "d"), 1)
    source = model.model_copy(update={"folder": str(tmp_path / "checkpoint")})
    before = held_out_divergence(load(source), load(source), 0.15)
    after = held_out_divergence(load(source), load(distilled), 0.15)
    assert after < 0.8 * before


@pytest.mark.parametrize(("model_type", "tie"), [("llama", True), ("phi3", False), ("opt", False)])
def test_record_and_folder_describe_the_same_model(tmp_path: Path, model_type: str, tie: bool) -> None:
    model, corpus = model_at(tmp_path, model_type, tie=tie), corpus_at(tmp_path)
    config = QUICK.model_copy(update={"steps": 1})
    distilled = run(config, model, corpus, top_k(model, tmp_path), workspace(tmp_path / "d"), 1)
    assert distilled.weights_sha256 != model.weights_sha256
    assert distilled.spec == model.spec
    assert distilled.tensors.keys() == model.tensors.keys()
    assert sum(file.name.endswith(".safetensors") for file in distilled.files) == LAYERS + 1
    assert (Path(distilled.folder) / "tokenizer.json").read_bytes() == (
        Path(model.folder) / "tokenizer.json"
    ).read_bytes()
    state = load(distilled).state_dict()
    roles = {source.tensor: (role, source) for role, source in distilled.tensors.items()}
    for name, (role, source) in roles.items():
        expected = state[name].numpy()[source.row_start : source.row_stop]
        assert (read_role(distilled, role) == expected).all(), role


def test_threads_and_folders_change_no_bit(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    config = QUICK.model_copy(update={"steps": 3})
    one = run(config, model, corpus, top_k(model, tmp_path), workspace(tmp_path / "1"), 1)
    three = run(config, model, corpus, top_k(model, tmp_path), workspace(tmp_path / "elsewhere"), 3)
    other_seed = run(
        config.model_copy(update={"seed": 1}), model, corpus, top_k(model, tmp_path), workspace(tmp_path / "2"), 1
    )
    assert one.weights_sha256 == three.weights_sha256 != other_seed.weights_sha256


def test_what_leaves_nothing_out_stays_as_it_is(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path, relu=True), corpus_at(tmp_path)
    for sparsity in (
        sparsity_of("relu", {"up_down": (0.2,) * LAYERS}),
        sparsity_of("dense", {"neuron": (1.0,) * LAYERS}),
        top_k(model, tmp_path, 1.0),
    ):
        assert run(QUICK, model, corpus, sparsity, workspace(tmp_path / "d"), 1) is model


def test_masks_of_the_methods(tmp_path: Path) -> None:
    model = model_at(tmp_path, relu=True)
    activity = np.random.default_rng(0).normal(size=(1, 160)).astype(np.float32)
    top = sparsity_of("topk", {"mlp_in": (0.25,) * LAYERS, "mlp_mid": (0.5, 1.0)})
    both = distill._masks(model, fitted(top, model.spec, tmp_path))
    assert [(mask.layer, mask.signal) for mask in both] == [(0, "mlp_input"), (1, "mlp_input"), (0, "mlp_inner")]
    assert [mask.kept(activity).sum() for mask in both] == [8, 8, 40]
    (first, _) = distill._masks(model, sparsity_of("predictor", {"neuron": (0.5, 0.5)}, predictor_rank=(8, 8)))
    assert (first.layer, first.signal) == (0, "mlp_inner")
    assert first.kept(activity).sum() == 36  # predictors miss the weakest tenth


def test_masking_keeps_the_largest_and_passes_gradients_through() -> None:
    values = torch.tensor([[3.0, -4.0, 1.0, 0.5], [0.0, 1.0, -2.0, 5.0]], requires_grad=True)
    found = distillation.masked(values, lambda seen: topk.select_many(seen, {"num_selected": np.array([2])}))
    assert found.tolist() == [[3.0, -4.0, 0.0, 0.0], [0.0, 0.0, -2.0, 5.0]]
    (found * torch.arange(8.0).reshape(2, 4)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]


def test_training_that_makes_it_worse_is_not_kept(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    wild = DistillConfig(steps=2, blocks_per_step=1, learning_rate=10.0, validation_blocks=2)
    distilled = run(wild, model, corpus, top_k(model, tmp_path, 0.5), workspace(tmp_path / "d"), 1)
    for role in model.tensors:
        assert (read_role(distilled, role) == read_role(model, role)).all(), role


def test_large_models_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    model = model_at(tmp_path).model_copy(update={"num_parameters": 7_000_000_000})
    with pytest.raises(
        ColdpressError, match=r"7,000,000,000 parameters.*at most 150,000,000; build with distill=false"
    ):
        run(QUICK, model, corpus_at(tmp_path), top_k(model, tmp_path), workspace(tmp_path / "d"), 1)
