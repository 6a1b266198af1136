"""predict and size in a mixture of experts: what counts is what a token's own experts do."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.predictor_network import NetworkWeights, over_all, scores
from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.compiler.cost_model import predictor_bytes
from coldpress.compiler.io import load_arrays, save_arrays
from coldpress.compiler.stages.predict import PredictConfig, run
from coldpress.compiler.stages.predict import _experts as experts_of
from coldpress.compiler.stages.predict import training as training
from coldpress.compiler.stages.size.passes import _mlp as mlp_of
from coldpress.compiler.stages.size.passes import network_of, nll_with
from coldpress.runtime.artifact.contents import layout_bytes, predictor_tensors
from coldpress.runtime.sparsity import predictor
from coldpress.schemas.families import num_units
from coldpress.schemas.manifest import LayerPredictorInfo, Manifest
from coldpress.schemas.model import Model, TensorSource
from coldpress.schemas.predictors import Point, PredictorSize, TrainedLayer, TrainedPredictors, matrix_shapes
from tests.support.methods import nothing_cached
from tests.support.product import source_of
from tests.support.statistics import activations_of, model_of, pack, sparsity_of, workspace

PREDICTOR = predictor.Plugin()
HIDDEN, WIDTH, EXPERTS, CHOSEN, TOKENS, RANK = 32, 48, 4, 2, 1600, 32


def mixture(**tensors: TensorSource) -> Model:
    model = model_of(1, HIDDEN, WIDTH, num_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    return model.model_copy(update={"tensors": {**model.tensors, **tensors}, "weights_sha256": "5" * 64})


class Setting:
    """A layer whose experts look for six things each, along a direction that gates lean against; the last is rare."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.folder, self.router = folder, rng.normal(size=(EXPERTS, HIDDEN))
        topics = rng.normal(size=(6 * EXPERTS, HIDDEN)) / np.sqrt(HIDDEN)
        self.gate = np.repeat(topics, WIDTH // 6, axis=0) + 0.02 * rng.normal(size=(EXPERTS * WIDTH, HIDDEN))
        x = rng.normal(size=(TOKENS, HIDDEN)) + 8 * topics[rng.integers(len(topics), size=TOKENS)]
        self.gate[:, 0], x[:, 0], self.router[:, 0] = -0.7, np.sqrt(HIDDEN), 0
        self.router[-1, 0] = -4
        self.inputs = x.astype(np.float16)
        logits = self.inputs.astype(np.float64) @ self.router.T
        self.experts = np.argsort(np.argsort(-logits, axis=1), axis=1) < CHOSEN
        self.active = (self.inputs @ self.gate.T > 0) & np.repeat(self.experts, WIDTH, axis=1)
        self.activations = activations_of(folder / "activations", [{"neuron": self.active.T}], [self.inputs])
        self.model = self._model()

    def _model(self) -> Model:
        gates = {f"experts.{expert}.gate_proj": part for expert, part in enumerate(np.split(self.gate, EXPERTS))}
        arrays = {name: part.astype(np.float32) for name, part in (gates | {"router": self.router}).items()}
        saved = save_arrays(self.folder / "weights.safetensors", arrays)
        return mixture(
            **{
                f"layers.0.{name}.weight": TensorSource(
                    file=saved.array_file, tensor=name, row_start=0, row_stop=len(part), shape=part.shape
                )
                for name, part in arrays.items()
            }
        )

    def trained(self, name: str, threads: int = 1) -> TrainedPredictors:
        sparsity = sparsity_of("predictor", {"neuron": (0.1,)}, predictor_rank=(RANK,), predictor_format="fp16")
        work = workspace(self.folder / name)
        return run(PredictConfig(predictor_steps=60), self.model, self.activations, sparsity, (0,), work, threads)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("predict"))


@pytest.fixture(scope="module")
def trained(setting: Setting) -> TrainedLayer:
    return setting.trained("all").layers[0]


def test_active_units_of_a_token_s_experts_are_found(setting: Setting, trained: TrainedLayer) -> None:
    assert 0 < setting.experts[:, -1].mean() < 0.1 < setting.experts[:, 0].mean()
    found = trained.sizes[-1].points[0]
    held_out = setting.active[-TOKENS // 10 :]
    assert trained.density == pytest.approx(held_out.mean(), abs=1e-6)
    assert found.recall > 0.9
    assert found.predicted_density < 1.3 * 1.75 * trained.density
    assert found.predicted_density < CHOSEN / EXPERTS
    assert found.precision == pytest.approx(found.recall * trained.density / found.predicted_density, rel=1e-6)
    assert all(math.isfinite(point.threshold) for size in trained.sizes for point in size.points)


def test_the_runtime_s_selector_agrees(setting: Setting, trained: TrainedLayer) -> None:
    """The record's figures, from the stored codes, token by token."""
    size = trained.sizes[-1]
    arrays = {**load_arrays(size.arrays), "format": np.array("fp16"), "num_selected": np.array([0])}
    arrays["threshold"] = np.array(size.points[0].threshold)
    last = slice(-TOKENS // 10, None)
    predicted = np.zeros_like(setting.active[last])
    for row, x, own in zip(predicted, setting.inputs[last].astype(np.float32), setting.experts[last], strict=True):
        row[PREDICTOR.select_among(x, arrays, nothing_cached(EXPERTS * WIDTH), own)] = True
    assert not predicted[~np.repeat(setting.experts[last], WIDTH, axis=1)].any()
    active = setting.active[last]
    assert predicted.mean() == pytest.approx(size.points[0].predicted_density, abs=0.002)
    assert (predicted & active).sum() / active.sum() == pytest.approx(size.points[0].recall, abs=0.01)


def test_a_predictor_has_a_row_for_every_unit_of_every_expert(setting: Setting, trained: TrainedLayer) -> None:
    size, spec = trained.sizes[-1], setting.model.spec
    stored = load_arrays(size.arrays)
    assert {name: len(codes) for name, codes in stored.items()} == {"fc1": size.rank, "fc2": EXPERTS * WIDTH}
    assert matrix_shapes(spec, 8) == {"fc1": (8, HIDDEN), "fc2": (EXPERTS * WIDTH, 8)}
    info = LayerPredictorInfo(layer=0, rank=size.rank, format="fp16", threshold=0.0)
    layout = predictor_tensors(Manifest.model_construct(model=spec, predictors=(info,)))
    assert {name: (codes.dtype, codes.shape) for name, codes in stored.items()} == {
        name.removeprefix("0."): entry for name, entry in layout.items()
    }
    assert size.nbytes == predictor_bytes(spec, size.rank, "fp16") == layout_bytes(layout)


def test_threads_do_not_change_a_byte(setting: Setting, trained: TrainedLayer) -> None:
    found = setting.trained("again", threads=3).layers[0]
    assert [size.arrays.sha256 for size in found.sizes] == [size.arrays.sha256 for size in trained.sizes]
    assert [size.points for size in found.sizes] == [size.points for size in trained.sizes]


def test_experts_without_an_active_unit_are_those_of_the_router(setting: Setting) -> None:
    """Where activity is a choice, an expert that counts for little may have none; inputs in fp16 may say another."""
    kept = setting.active.copy()
    kept[::2] &= np.repeat(np.arange(EXPERTS) == np.argmax(setting.experts, axis=1)[::2, None], WIDTH, axis=1)
    found = experts_of(setting.model, 0, setting.inputs, pack(kept.T))
    assert (found.sum(axis=1) == CHOSEN).all()
    assert (found == setting.experts).mean() > 0.999
    wrong = setting.inputs.copy()
    wrong[:, 1:] = 0  # all logits but the last expert's are equal
    shown = setting.active.reshape(TOKENS, EXPERTS, WIDTH).any(axis=2)
    found = experts_of(setting.model, 0, wrong, pack(setting.active.T))
    assert (found & shown == shown).all()
    assert (found.sum(axis=1) == CHOSEN).all()


# By hand: three experts of two units, two a token; fc1 passes both inputs on

BOTH = NetworkWeights(torch.eye(2), torch.tensor([[1.0, 0], [2, 0], [10, 0], [20, 0], [0, 3], [0, 4]]))
INPUTS = torch.tensor([[1.0, 1], [2, 1], [3, 2]])
OWN = torch.tensor([[True, False, True], [True, False, True], [True, True, False]])
BY_HAND = training.Examples(INPUTS, torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0], [0, 1, 0, 0]], dtype=torch.uint8), OWN)
"""Scores: 1 2 3 4, 2 4 3 4, 3 6 30 60; the second expert's are the largest, and nobody's but the last token's."""


def test_scores_are_of_a_token_s_experts() -> None:
    found = scores(BOTH, INPUTS, OWN)
    assert found.tolist() == [[1, 2, 3, 4], [2, 4, 3, 4], [3, 6, 30, 60]]
    whole, places = scores(BOTH, INPUTS), over_all(found, OWN, 6)
    assert places.tolist() == torch.where(OWN.repeat_interleave(2, dim=1), whole, 0.0).tolist()
    assert BY_HAND.used_share == pytest.approx(2 / 3)
    assert BY_HAND.density == pytest.approx(5 / 18)


def test_thresholds_are_of_a_token_s_experts() -> None:
    """Active are scores of 2, 4, 2, 4 and 6: two of five may be missed at 0.6, and 1, 2, 3, … of 18 predicted."""
    threshold = training.choose_threshold(BOTH, BY_HAND, 0.6)
    assert threshold == 4
    found = training.quality(BOTH, threshold, BY_HAND)
    assert (found.recall, found.precision) == (pytest.approx(3 / 5), pytest.approx(3 / 6))
    assert found.predicted_density == pytest.approx(6 / 18)  # of those with 4 one is not active, nor are 30 and 60
    assert training.choose_threshold(BOTH, BY_HAND, 1.0) == 2
    for allowed, predicted in ((1, 1), (2, 2), (3, 3), (5, 3), (6, 6)):  # three have 4: all of them or none
        limit = training.limit_threshold(BOTH, BY_HAND, (allowed + 0.01) / 18)
        assert int((BY_HAND.scores(BOTH) >= limit).sum()) == predicted
    assert training.limit_threshold(BOTH, BY_HAND, 0.67) == 1.0
    idle = training.Examples(INPUTS, torch.zeros_like(BY_HAND.active), OWN)
    assert training.quality(BOTH, training.choose_threshold(BOTH, idle, 0.9), idle).predicted_density == 0


def test_an_expert_s_units_are_as_skewed_as_on_its_tokens() -> None:
    """Frequencies 1/3, 1 on three tokens, 0, 0 on one, and 0, 1/2 on two: weighed by tokens, their mean is 5/12."""
    entropy = {share: -sum(p * math.log(p) for p in (share, 1 - share) if p) for share in (1 / 3, 1 / 2, 5 / 12)}
    expected = 1 - (3 * entropy[1 / 3] + 2 * entropy[1 / 2]) / 12 / entropy[5 / 12]
    assert training.skewness(BY_HAND) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_gradients_are_those_of_the_loss_over_used_experts(dtype: torch.dtype, tolerance: float) -> None:
    """By autograd, over all units with the others' terms left out; of an expert that nobody uses they are zero."""
    generator = torch.Generator().manual_seed(1)
    own = torch.zeros(20, 4, dtype=torch.bool)
    own[:, 1] = True
    own[torch.arange(20), torch.where(torch.arange(20) % 2 == 0, 0, 2)] = True
    active = (torch.rand(20, 6, generator=generator) < 0.3).to(torch.uint8)
    part = training.Examples(torch.randn(20, 6, generator=generator), active, own)
    fc1 = torch.randn(5, 6, generator=generator).requires_grad_()
    fc2 = torch.randn(12, 5, generator=generator).requires_grad_()
    found = torch.relu(part.inputs @ fc1.T) @ fc2.T
    mask = own.repeat_interleave(3, dim=1)
    batch = torch.tensor([3, 0, 7, 12, 19, 4])
    torch.nn.functional.binary_cross_entropy_with_logits(
        found[batch][mask[batch]], active[batch].float().flatten(), pos_weight=torch.tensor(3.5)
    ).backward()
    ours = [fc1.detach().clone(), fc2.detach().clone()]
    training._set_gradients(ours[0], ours[1], part, batch, 3.5, dtype)
    for mine, expected in zip(ours, (fc1, fc2), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, expected.grad, rtol=tolerance, atol=tolerance)
    assert not ours[1].grad[9:].any()  # type: ignore[index]


# size


def test_what_is_left_out_of_the_model_is_what_is_not_predicted(tmp_path: Path) -> None:
    """With every unit of a token's experts predicted nothing changes, with one of them much does; of an MLP's output
    the cosine says so, too."""
    source = source_of(tmp_path, "mixtral", False)
    spec, stream = source.model.spec, LayerStream(source.model)
    random = np.random.default_rng(0)
    codes = {name: random.normal(size=shape).astype(np.float16) for name, shape in matrix_shapes(spec, 8).items()}
    arrays = {name: values.view(np.uint8).reshape(len(values), -1) for name, values in codes.items()}
    saved = save_arrays(tmp_path / "predictor.safetensors", arrays)
    whole = stream.token_nll(source.tokens)
    results = {}
    for threshold in (-1e9, 0.0, 1e9):
        point = Point(threshold=threshold, recall=1, precision=1, predicted_density=1)
        size = PredictorSize(rank=8, arrays=saved, nbytes=1, points=(point,))
        networks = {layer: network_of(PREDICTOR, "fp16", size, point, spec.hidden_size) for layer in range(2)}
        results[threshold] = nll_with(stream, source.tokens, networks, networks.__getitem__)
    np.testing.assert_array_equal(results[-1e9][0], whole)
    assert results[-1e9][1] == pytest.approx({0: 1.0, 1: 1.0}, abs=1e-5)
    assert 0.2 < results[0.0][1][0] < 0.95
    assert results[1e9][1][0] < results[0.0][1][0]
    assert np.abs(results[0.0][0] - whole).mean() > 1e-3


def test_an_output_is_that_of_all_experts(tmp_path: Path) -> None:
    """Each expert's columns with its own units, whoever uses it."""
    source = source_of(tmp_path, "mixtral", False)
    spec, random = source.model.spec, torch.Generator().manual_seed(0)
    own = torch.zeros(9, spec.num_experts, dtype=torch.bool)
    for row in own:
        row[torch.randperm(spec.num_experts, generator=random)[: spec.num_experts_per_tok]] = True
    inner = torch.randn(9, num_units("neuron", spec), generator=random)
    inner *= own.repeat_interleave(spec.intermediate_size, dim=1)
    names = [f"layers.1.experts.{expert}.down_proj.weight" for expert in range(spec.num_experts)]
    down = np.concatenate([read_role(source.model, name) for name in names], axis=1)
    found = mlp_of(LayerStream(source.model), 1).output(inner, own)
    np.testing.assert_allclose(found.numpy(), inner.numpy() @ down.T, rtol=0, atol=1e-4)
