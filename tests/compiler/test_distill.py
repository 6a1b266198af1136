"""distill: the sparse model comes closer to its dense self on text it never saw, and remains an ordinary checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch

from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.compiler.device import memory
from coldpress.compiler.stages.distill import DistillConfig, run
from coldpress.compiler.stages.distill._masks import masked, masks_of
from coldpress.runtime.sparsity import topk
from coldpress.schemas.errors import DoesNotFitError
from tests.support.distilling import LAYERS, QUICK, corpus_at, held_out_divergence, load, model_at, top_k
from tests.support.methods import fitted
from tests.support.statistics import sparsity_of, workspace


@pytest.mark.slow
def test_a_few_steps_bring_the_sparse_model_closer_to_the_dense_one(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    distilled = run(QUICK, model, corpus, top_k(model, tmp_path, 0.15), workspace(tmp_path / "d"), 1)
    source = model.model_copy(update={"folder": str(tmp_path / "checkpoint")})
    before = held_out_divergence(load(source), load(source), 0.15)
    after = held_out_divergence(load(source), load(distilled), 0.15)
    assert after < 0.8 * before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "tie"),
    [
        ("llama", True),
        ("phi3", False),
        ("opt", False),
        ("gemma2", True),
        ("gpt_neox", False),
        ("falcon", True),
        ("phi", True),
    ],
)
def test_record_and_folder_describe_the_same_model(tmp_path: Path, model_type: str, tie: bool) -> None:
    model, corpus = model_at(tmp_path, model_type, tie=tie), corpus_at(tmp_path)
    config = QUICK.model_copy(update={"distill_steps": 1})
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
        expected = np.concatenate([state[name].numpy()[start:stop] for start, stop in source.runs()])
        assert (read_role(distilled, role) == expected).all(), role


@pytest.mark.slow
def test_threads_and_folders_change_no_bit(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    config = QUICK.model_copy(update={"distill_steps": 3})
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
    both = masks_of(model.spec, fitted(top, model.spec, tmp_path))
    assert [(mask.layer, mask.signal) for mask in both] == [(0, "mlp_input"), (1, "mlp_input"), (0, "mlp_inner")]
    assert [mask.kept(activity).sum() for mask in both] == [8, 8, 40]
    (first, _) = masks_of(model.spec, sparsity_of("predictor", {"neuron": (0.5, 0.5)}, predictor_rank=(8, 8)))
    assert (first.layer, first.signal) == (0, "mlp_inner")
    assert first.kept(activity).sum() == 36  # predictors miss the weakest tenth


def test_masking_keeps_the_largest_and_passes_gradients_through() -> None:
    values = torch.tensor([[3.0, -4.0, 1.0, 0.5], [0.0, 1.0, -2.0, 5.0]], requires_grad=True)
    found = masked(values, lambda seen: topk.Plugin().select_many(seen, {"num_selected": np.array([2])}))
    assert found.tolist() == [[3.0, -4.0, 0.0, 0.0], [0.0, 0.0, -2.0, 5.0]]
    (found * torch.arange(8.0).reshape(2, 4)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]


def test_training_that_makes_it_worse_is_not_kept(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    wild = DistillConfig(distill_steps=2, distill_blocks=1, learning_rate=10.0, validation_blocks=2)
    distilled = run(wild, model, corpus, top_k(model, tmp_path, 0.5), workspace(tmp_path / "d"), 1)
    for role in model.tensors:
        assert (read_role(distilled, role) == read_role(model, role)).all(), role


def test_without_straight_through_only_what_is_kept_has_a_gradient() -> None:
    values = torch.tensor([[3.0, -4.0, 1.0]], requires_grad=True)
    found = masked(values, lambda seen: np.abs(seen) > 2, straight_through=False)
    assert found.tolist() == [[3.0, -4.0, 0.0]]
    found.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 1.0, 0.0]]


def test_what_does_not_fit_into_memory_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_at(tmp_path)
    sparsity, corpus = top_k(model, tmp_path), corpus_at(tmp_path)
    monkeypatch.setattr(memory, "free_dram_bytes", lambda: 1 << 20)
    monkeypatch.setattr("coldpress.compiler.training.source.Source.build", lambda *_: pytest.fail("loaded"))
    with pytest.raises(
        DoesNotFitError,
        match=rf"needs 7\d\d MB of memory for the {model.num_parameters:,} parameters of llama with recipe=self, "
        "this machine has 1.05 MB free; build with recipe=lora, a smaller block_tokens or distill=false",
    ):
        run(QUICK, model, corpus, sparsity, workspace(tmp_path / "d"), 1)
    with pytest.raises(DoesNotFitError, match="build with fewer --cores, a smaller block_tokens or distill=false"):
        run(QUICK.model_copy(update={"recipe": "lora"}), model, corpus, sparsity, workspace(tmp_path / "d"), 2)
