"""predict: predictors find what they are asked to find, grow where they must, and are the same bytes every time."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from coldpress.compiler.activity.predictor_network import NetworkWeights
from coldpress.compiler.io import load_arrays, save_arrays
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.stages.predict import PredictConfig, ranks_tried, run
from coldpress.compiler.stages.predict import training as training
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from coldpress.runtime.sparsity import predictor
from coldpress.schemas.activations import Activations
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FormatName
from coldpress.schemas.model import Model, TensorSource
from coldpress.schemas.predictors import Point, TrainedLayer, TrainedPredictors
from tests.support.methods import nothing_cached
from tests.support.statistics import activations_of, model_of, pack, sparsity_of, workspace

LAYERS, HIDDEN, UNITS, TOKENS = 3, 32, 96, 1200
STEPS = 60

FINAL = [
    name
    for name in names("coldpress.runtime.quantization")
    if load("coldpress.runtime.quantization", Format, name).IS_FINAL
]


class Setting:
    """A model whose neurons look for 4, 12 and 32 different things; its MLP inputs and its exact activation bits."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.gates, inputs, layers = [], [], []
        for num_topics in (4, 12, 32):
            topics = rng.normal(size=(num_topics, HIDDEN)) / np.sqrt(HIDDEN)
            home = rng.integers(num_topics, size=UNITS)
            gate = topics[home] + 0.02 * rng.normal(size=(UNITS, HIDDEN))
            x = rng.normal(size=(TOKENS, HIDDEN)) + 8 * topics[rng.integers(num_topics, size=TOKENS)]
            gate[:, 0], x[:, 0] = -0.7, np.sqrt(HIDDEN)  # a shared direction that gates lean against
            inputs.append(x)
            self.gates.append(gate.astype(np.float32))
            layers.append({"neuron": (x.astype(np.float16) @ gate.T).T > 0})
        self.activations = activations_of(folder / "activations", layers, inputs)
        self.model = with_gates(folder, self.gates)
        self.folder = folder

    def run(
        self,
        name: str,
        *layers: int,
        threads: int = 1,
        ranks: tuple[int, ...] = (32,) * LAYERS,
        format_name: FormatName = "fp16",
    ) -> TrainedPredictors:
        densities = {"neuron": tuple(0.15 if rank else 1.0 for rank in ranks)}
        sparsity = sparsity_of("predictor", densities, predictor_rank=ranks, predictor_format=format_name)
        work = workspace(self.folder / name)
        return run(PredictConfig(predictor_steps=STEPS), self.model, self.activations, sparsity, layers, work, threads)


def with_gates(folder: Path, gates: list[np.ndarray]) -> Model:
    """A model whose record leads to these gate matrices."""
    saved = save_arrays(folder / "gates.safetensors", {f"gate.{i}": gate for i, gate in enumerate(gates)})
    sources = {
        f"layers.{i}.gate_proj.weight": TensorSource(
            file=saved.array_file, tensor=f"gate.{i}", row_start=0, row_stop=UNITS, shape=(UNITS, HIDDEN)
        )
        for i in range(len(gates))
    }
    model = model_of(LAYERS, HIDDEN, UNITS)
    return model.model_copy(update={"tensors": {**model.tensors, **sources}, "weights_sha256": "5" * 64})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting(tmp_path_factory.mktemp("predict"))


@pytest.fixture(scope="module")
def trained(setting: Setting) -> TrainedPredictors:
    return setting.run("all", 0, 1, 2)


def best(one: TrainedLayer) -> Point:
    """Of the largest predictor."""
    return one.sizes[-1].points[0]


def test_active_units_are_found_within_the_limit(setting: Setting, trained: TrainedPredictors) -> None:
    for one, statistics in zip(trained.layers, setting.activations.layers, strict=True):
        density = statistics.family("neuron").density
        assert density is not None
        found = best(one)
        assert found.recall > 0.9  # 0.99 was asked for, on other tokens
        assert found.predicted_density < 1.3 * 1.75 * density  # what was held to the limit are other tokens
        assert found.precision == pytest.approx(found.recall * density / found.predicted_density, rel=0.1)


def test_training_ends_where_a_predictor_finds_what_it_should(trained: TrainedPredictors) -> None:
    ranks = [[size.rank for size in one.sizes] for one in trained.layers]
    assert ranks[0][-1] < ranks[2][-1] == 32
    for one in trained.layers:
        recalls = [size.points[0].recall for size in one.sizes]
        assert recalls[-1] >= recalls[0]
        assert one.suggested_rank in [size.rank for size in one.sizes]


def test_training_ends_where_larger_predictors_find_no_more(setting: Setting, tmp_path: Path) -> None:
    """Units that are active by chance: there is nothing to be found, at any rank."""
    chance = np.random.default_rng(1).random((UNITS, TOKENS)) < 0.15
    inputs = load_arrays(setting.activations.layers[0].inputs, "mlp_inputs")["mlp_inputs"]
    activations = activations_of(tmp_path / "activations", [{"neuron": chance}], [inputs])
    sparsity = sparsity_of("predictor", {"neuron": (0.15,)}, predictor_rank=(32,), predictor_format="fp16")
    work = workspace(tmp_path / "work")
    (one,) = run(PredictConfig(predictor_steps=STEPS), setting.model, activations, sparsity, (0,), work, 1).layers
    assert [size.rank for size in one.sizes] == list(ranks_tried(0.15 * HIDDEN, 32, "fp16")[:3])
    assert len(ranks_tried(0.15 * HIDDEN, 32, "fp16")) > 3


def test_further_thresholds_miss_less_whatever_they_predict(trained: TrainedPredictors) -> None:
    smallest = trained.layers[2].sizes[0].points
    assert len(smallest) > 2
    thresholds = [point.threshold for point in smallest]
    assert thresholds == sorted(thresholds, reverse=True)
    assert smallest[0].recall < smallest[1].recall < smallest[-1].recall
    assert smallest[-1].predicted_density > smallest[0].predicted_density


def test_the_largest_allowed_rank_is_the_limit(setting: Setting) -> None:
    found = setting.run("small", 0, 2, ranks=(8, 8, 12)).layers
    assert [[size.rank for size in one.sizes] for one in found] == [[8], [8, 12]]


def test_skewed_layers_begin_with_smaller_predictors(setting: Setting) -> None:
    """Same density; in one layer a tenth of the units have nearly all of the activity."""
    rng = np.random.default_rng(5)
    frequency = {"even": np.full(400, 0.1), "skewed": np.where(np.arange(400) < 40, 0.91, 0.01)}
    found = {
        name: training.skewness(training.Examples(torch.empty(0), torch.tensor(rng.random((2000, 400)) < values)))
        for name, values in frequency.items()
    }
    entropy = -(0.1 * np.log(0.1) + 0.9 * np.log(0.9))
    skewed = -np.mean([p * np.log(p) + (1 - p) * np.log(1 - p) for p in frequency["skewed"]])
    assert found["even"] == pytest.approx(0, abs=0.01)
    assert found["skewed"] == pytest.approx(1 - skewed / entropy, abs=0.02)
    whole = training.Examples(torch.empty(0), torch.ones(10, 4, dtype=torch.uint8))
    assert training.skewness(whole) == 1


@pytest.mark.parametrize("format_name", FINAL)
def test_the_runtime_s_selector_agrees(setting: Setting, format_name: FormatName) -> None:
    """The figures of the record are those of the stored codes with the stored threshold, token by token."""
    (one,) = setting.run(f"as-{format_name}", 1, format_name=format_name).layers
    entry, found = one.sizes[-1], best(one)
    stored, nbytes = load_arrays(entry.arrays), load("coldpress.runtime.quantization", Format, format_name).nbytes
    assert {name: (a.dtype, a.shape) for name, a in stored.items()} == {
        "fc1": (np.uint8, (entry.rank, nbytes(HIDDEN))),
        "fc2": (np.uint8, (UNITS, nbytes(entry.rank))),
    }
    assert one.format == format_name
    assert entry.nbytes == sum(array.nbytes for array in stored.values())
    arrays = {**stored, "format": np.array(format_name), "threshold": np.float32(found.threshold)}
    arrays["num_selected"] = np.array([0])
    inputs = load_arrays(setting.activations.layers[1].inputs)["mlp_inputs"][-TOKENS // 10 :]
    active = (inputs.astype(np.float64) @ setting.gates[1].T) > 0
    predicted = np.zeros_like(active)
    for token, x in enumerate(inputs.astype(np.float32)):
        predicted[token, predictor.Plugin().select(x, arrays, nothing_cached(UNITS))] = True
    assert predicted.mean() == pytest.approx(found.predicted_density, abs=0.003)
    assert active.mean() == pytest.approx(one.density, abs=0.003)
    assert (predicted & active).sum() / active.sum() == pytest.approx(found.recall, abs=0.01)


@pytest.mark.parametrize("format_name", FINAL)
def test_rounding_is_final(format_name: FormatName) -> None:
    """Weights that were chosen as they are stored are stored as they were chosen."""
    generator = torch.Generator().manual_seed(3)
    weights = NetworkWeights(torch.randn(40, 70, generator=generator), torch.randn(90, 40, generator=generator))
    once = weights.rounded(format_name)
    twice = once.rounded(format_name)
    assert (once.fc1 == twice.fc1).all()
    assert (once.fc2 == twice.fc2).all()
    assert format_name == "fp16" or not torch.allclose(once.fc2, weights.fc2, rtol=1e-3)


def test_training_chooses_by_the_weights_as_they_are_stored(setting: Setting) -> None:
    """In 4 bits the last evaluation need not be the best one, and none is better than what training gives back."""
    entry = setting.activations.layers[2]
    bits = load_arrays(entry.family("neuron").arrays, "bits")["bits"]
    fitted, chosen_by, _ = training.split(load_arrays(entry.inputs)["mlp_inputs"], bits, 0.2)
    gate = torch.tensor(setting.gates[2])
    start = training.initial(32, training.main_directions(fitted, gate, 32), fitted, gate)
    chosen = training.train(start, fitted, chosen_by, STEPS, 512, 0.95, 0, "int4_group32")
    assert (chosen.fc2 == chosen.rounded("int4_group32").fc2).all()
    exact = training.train(start, fitted, chosen_by, STEPS, 512, 0.95, 0, "fp16").rounded("int4_group32")
    density = [
        training.quality(w, training.choose_threshold(w, chosen_by, 0.95), chosen_by).predicted_density
        for w in (chosen, exact)
    ]
    assert density[0] <= density[1]


def test_a_layer_that_uses_all_its_units_gets_no_predictor(setting: Setting) -> None:
    found = setting.run("whole", 0, 1, 2, ranks=(8, 0, 8))
    assert [entry.layer for entry in found.layers] == [0, 2]
    assert setting.run("nothing", 1, ranks=(8, 0, 8)).layers == ()


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["fp16", "int8_group32"])
def test_chunks_and_threads_do_not_change_a_byte(setting: Setting, format_name: FormatName) -> None:
    whole = setting.run(f"whole-{format_name}", 0, 1, 2, format_name=format_name)
    parallel = setting.run(f"parallel-{format_name}", 0, 1, 2, threads=3, format_name=format_name)
    alone = [setting.run(f"alone-{format_name}", layer, format_name=format_name).layers[0] for layer in range(LAYERS)]

    def content(layers: Iterable[TrainedLayer]) -> list[tuple[str, tuple[Point, ...]]]:
        return [(size.arrays.sha256, size.points) for one in layers for size in one.sizes]

    assert content(parallel.layers) == content(alone) == content(whole.layers)


def test_an_interrupted_run_keeps_finished_predictors(setting: Setting, trained: TrainedPredictors) -> None:
    def times(of: TrainedPredictors) -> list[int]:
        return [Path(size.arrays.array_file).stat().st_mtime_ns for one in of.layers for size in one.sizes]

    before = times(trained)
    again = setting.run("all", 0, 1, 2)
    assert again == trained
    assert times(again) == before


def test_predictors_are_bound_to_the_weights_and_threads_restored(setting: Setting) -> None:
    before = torch.get_num_threads()
    assert setting.run("bound", 0).weights_sha256 == setting.model.weights_sha256
    assert torch.get_num_threads() == before


def test_training_beats_its_start(setting: Setting) -> None:
    entry = setting.activations.layers[2]
    bits = load_arrays(entry.family("neuron").arrays, "bits")["bits"]
    fitted, chosen_by, judged_on = training.split(load_arrays(entry.inputs)["mlp_inputs"], bits, 0.2)
    gate = torch.tensor(setting.gates[2])
    start = training.initial(16, training.main_directions(fitted, gate, 32), fitted, gate)
    trained = training.train(start, fitted, chosen_by, 120, 512, 0.95, 0, "fp16")
    density = [
        training.quality(w, training.choose_threshold(w, chosen_by, 0.95), judged_on).predicted_density
        for w in (start.rounded("fp16"), trained)
    ]
    assert density[1] < 0.8 * density[0]


def test_few_directions_are_the_first_of_all() -> None:
    """What a random subspace finds of the gate is what all singular vectors say, within a hundredth."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(600, 200, generator=generator) * torch.logspace(0, -1.5, 200)
    gate = torch.randn(500, 200, generator=generator)
    part = training.Examples(inputs, torch.zeros(600, 500, dtype=torch.uint8))
    few, every = training.main_directions(part, gate, 20), training.main_directions(part, gate, 200)
    assert few.shape == (20, 200)
    assert every.shape == (200, 200)
    seen = [float((inputs @ rows.T).square().sum()) for rows in (few, every[:20])]
    kept = [float((gate @ (inputs.T @ (inputs @ rows.T))).square().sum()) for rows in (few, every[:20])]
    assert seen[0] == pytest.approx(seen[1], rel=1e-2)
    assert kept[0] == pytest.approx(kept[1], rel=1e-2)
    assert (few == training.main_directions(part, gate, 20)).all()


def test_threshold_reaches_the_target_exactly() -> None:
    weights = NetworkWeights(torch.eye(2), torch.tensor([[1.0, 0.0]]))
    inputs = torch.stack([torch.arange(1.0, 101.0), torch.zeros(100)], dim=1)
    part = training.Examples(inputs, (torch.arange(100)[:, None] >= 50).to(torch.uint8))
    threshold = training.choose_threshold(weights, part, 0.9)
    assert threshold == 56.0  # scores 51..100 are active; five of them may be missed
    found = training.quality(weights, threshold, part)
    assert (found.recall, found.precision, found.predicted_density) == (0.9, 1.0, 0.45)
    limit = training.limit_threshold(weights, part, 0.3)
    assert training.quality(weights, limit, part).predicted_density == 0.3
    assert training.limit_threshold(weights, part, 2.0) == 1.0
    idle = training.Examples(inputs, torch.zeros(100, 1, dtype=torch.uint8))
    silent = training.quality(weights, training.choose_threshold(weights, idle, 0.9), idle)
    assert (silent.recall, silent.precision, silent.predicted_density) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_gradients_are_those_of_the_balanced_loss(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    part = training.Examples(
        torch.randn(20, 6, generator=generator), (torch.rand(20, 9, generator=generator) < 0.3).to(torch.uint8)
    )
    fc1 = torch.randn(5, 6, generator=generator).requires_grad_()
    fc2 = torch.randn(9, 5, generator=generator).requires_grad_()
    z = torch.relu(part.inputs @ fc1.T) @ fc2.T
    weight = torch.tensor(3.5)
    torch.nn.functional.binary_cross_entropy_with_logits(z, part.active.float(), pos_weight=weight).backward()
    ours = [fc1.detach().clone(), fc2.detach().clone()]
    training._set_gradients(*ours, part, torch.arange(20), 3.5, dtype)
    for mine, expected in zip(ours, (fc1, fc2), strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, expected.grad, rtol=tolerance, atol=tolerance)


def test_parts_are_disjoint_and_in_order() -> None:
    inputs = np.arange(100, dtype=np.float16)[:, None]
    parts = training.split(inputs, pack(np.arange(100)[None] % 3 == 0), 0.2)
    assert [len(part.inputs) for part in parts] == [80, 10, 10]
    assert torch.cat([part.inputs for part in parts]).ravel().tolist() == list(range(100))
    assert (torch.cat([part.active for part in parts]).ravel().numpy() == (np.arange(100) % 3 == 0)).all()


def test_ladders_lie_around_what_is_expected() -> None:
    """120 of a mean of 3 % in OPT-6.7B, and 1,024 and more for its last layer (LLM in a flash C.1)."""
    assert ranks_tried(0.03 * 4096, 192, "fp16") == (8, 48, 64, 96, 128, 192)
    assert {256, 1024} < set(ranks_tried(0.054 * 4096, 1408, "fp16"))
    assert ranks_tried(1000, 40, "fp16") == (8, 40)
    assert ranks_tried(0, 40, "fp16") == (8, 16, 24, 32, 40)


@pytest.mark.parametrize("format_name", ["int8_group32", "int4_group32"])
def test_ranks_fill_the_groups_of_their_format(setting: Setting, format_name: FormatName) -> None:
    assert ranks_tried(0, 192, format_name) == (32, 64, 96, 128, 192)
    (one,) = setting.run(f"filled-{format_name}", 0, format_name=format_name).layers
    assert [size.rank for size in one.sizes] == [32]


def test_a_method_without_predictors_gets_an_empty_record(setting: Setting) -> None:
    """Which method a build has may be open until `allocate` has chosen."""
    work = workspace(setting.folder / "none")
    found = run(
        PredictConfig(), setting.model, setting.activations, sparsity_of("relu", {"neuron": (0.1,)}), (0,), work, 1
    )
    assert found.layers == ()


def test_refusals(setting: Setting) -> None:
    def attempt(activations: Activations, ranks: tuple[int, ...]) -> None:
        sparsity = sparsity_of("predictor" if ranks else "relu", {"neuron": (0.1,)}, predictor_rank=ranks)
        run(PredictConfig(), setting.model, activations, sparsity, (0,), workspace(setting.folder / "refused"), 1)

    with pytest.raises(ColdpressError, match="the activations are not those of shape's weights"):
        attempt(setting.activations.model_copy(update={"weights_sha256": "6" * 64}), (8,))
    few = activations_of(setting.folder / "few", [{"neuron": np.ones((UNITS, 32), bool)}], [np.ones((32, HIDDEN))])
    with pytest.raises(ColdpressError, match="32 calibration tokens, a predictor needs at least 64"):
        attempt(few, (8,))
    layer = few.layers[0].model_copy(update={"families": ()})
    with pytest.raises(ColdpressError, match="layer 0: no activation bits of family neuron"):
        attempt(few.model_copy(update={"layers": (layer,)}), (8,))


def test_batches_follow_the_seed():
    """Every token comes once before any comes again, in an order that the seed alone decides."""

    def drawn(seed):
        batches = training._Batches(30, 10, seed)
        return [batches.take().tolist() for _ in range(6)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    for batches in (drawn(1)[:3], drawn(1)[3:]):
        assert sorted(token for batch in batches for token in batch) == list(range(30))


def test_a_format_that_is_searched_anew_is_refused() -> None:
    assert "int8_group32" in FINAL
    assert "q4_1" not in FINAL
    with pytest.raises(ValueError, match="predictor_format=q4_k is searched anew"):
        AllocateConfig(predictor_format="q4_k")
