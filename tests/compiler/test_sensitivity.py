"""The sensitivity of matrices, compared with gradients of transformers' whole model."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coldpress.compiler.activity import lent_experts
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.sensitivity import _Backward, sensitivities
from coldpress.compiler.rounding import rtn
from coldpress.compiler.rounding._matrix import Rounding
from coldpress.compiler.stages.allocate._mixed import SAMPLE_ROWS, expected_divergence, formats_of_matrices
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from coldpress.schemas.model import Model
from tests.support.hf import load_hf
from tests.support.models import MIXTURES
from tests.support.product import source_of

LAYERS, BLOCK_TOKENS = 11, 24


@pytest.fixture(scope="module", params=["llama", "phi3", "gemma2"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path, np.ndarray]:
    """A gated model, one that stacks q, k, v, and one with norms behind its matrices and a cap on logits."""
    folder = tmp_path_factory.mktemp("source")
    source = source_of(folder, request.param, relu=False, layers=LAYERS)
    tokens = np.random.default_rng(1).integers(0, source.model.spec.vocab_size, (3, BLOCK_TOKENS))
    return source.model, source.path, tokens


def test_gradients_are_those_of_the_whole_model(case, monkeypatch: pytest.MonkeyPatch) -> None:
    model, source, tokens = case
    whole = load_hf(source)
    ids = torch.from_numpy(tokens)
    drawn = torch.from_numpy(np.random.default_rng(2).integers(0, model.spec.vocab_size, tokens.shape))
    seen: dict[str, tuple[Any, Any]] = {}

    def watch(name: str) -> Any:
        def hook(_: Any, inputs: Any, output: Any) -> None:
            output.register_hook(lambda by_output: seen.__setitem__(name, (inputs[0].detach(), by_output)))

        return hook

    linears = {name: part for name, part in whole.model.layers.named_modules() if isinstance(part, torch.nn.Linear)}
    for name, part in linears.items():
        part.register_forward_hook(watch(name))
    log_shares = torch.log_softmax(whole(ids).logits.float(), dim=-1)
    log_shares.gather(-1, drawn[..., None]).sum().backward()

    def log_sums(_: _Backward, hidden: Any) -> Any:
        return torch.logsumexp(whole(ids).logits.double(), dim=-1).detach(), drawn

    monkeypatch.setattr(_Backward, "_drawn", log_sums)
    found = sensitivities(LayerStream(model, 2), tokens)
    rows = {role: tensor.shape[0] for role, tensor in model.tensors.items() if role in found}
    assert len(rows) == LAYERS * 7
    stacked = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name, (inputs, by_output) in seen.items():
        layer, *_, module = name.split(".")
        products = torch.einsum("btr,btc->rc", by_output.double() ** 2, inputs.double() ** 2) / (2 * tokens.size)
        start = 0
        for role in (f"layers.{layer}.{part}.weight" for part in stacked.get(module, (module,))):
            own = found[role]
            stop = start + rows[role]
            of_rows = own.outputs.astype(np.float64) * own.inputs.sum(dtype=np.float64)
            np.testing.assert_allclose(of_rows, products[start:stop].sum(dim=1), rtol=2e-3, atol=1e-12)
            share = own.inputs.astype(np.float64) / own.inputs.sum(dtype=np.float64)
            np.testing.assert_allclose(share, products.sum(dim=0) / products.sum(), rtol=2e-3, atol=1e-12)
            start = stop
        assert start == len(products)


def _watched_experts(layer: int, block: Any, seen: dict[str, list[tuple[Any, Any]]]) -> None:
    """Makes a block of Mixtral multiply expert by expert, keep each matrix's input and the gradient by its output, and
    take its router to be constant."""
    experts, router = block.experts, block.gate.forward

    def product(name: str, x: Any, weight: Any) -> Any:
        found = x @ weight.T
        found.register_hook(lambda by_output: seen.setdefault(name, []).append((x.detach(), by_output)))
        return found

    def forward(hidden: Any, chosen: Any, weights: Any) -> Any:
        whole = torch.zeros_like(hidden)
        for expert in range(experts.num_experts):
            at, place = torch.where(chosen == expert)
            name = f"layers.{layer}.experts.{expert}"
            gate, up = experts.gate_up_proj[expert].chunk(2)
            gated = product(f"{name}.gate_proj.weight", hidden[at], gate)
            inner = experts.act_fn(gated) * product(f"{name}.up_proj.weight", hidden[at], up)
            down = product(f"{name}.down_proj.weight", inner, experts.down_proj[expert])
            whole = whole.index_add(0, at, down * weights[at, place, None])
        return whole

    experts.forward = forward
    block.gate.forward = lambda x: tuple(part.detach() for part in router(x))


@pytest.mark.slow
def test_gradients_of_experts_are_those_of_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tmp_path, "mixtral", relu=False, layers=LAYERS)
    model, tokens = source.model, np.random.default_rng(1).integers(0, source.model.spec.vocab_size, (3, BLOCK_TOKENS))
    whole, seen = load_hf(source.path), dict[str, list[tuple[Any, Any]]]()
    for number, layer in enumerate(whole.model.layers):
        _watched_experts(number, layer.mlp, seen)
    drawn = torch.from_numpy(np.random.default_rng(2).integers(0, model.spec.vocab_size, tokens.shape))
    log_shares = torch.log_softmax(whole(torch.from_numpy(tokens)).logits.float(), dim=-1)
    log_shares.gather(-1, drawn[..., None]).sum().backward()
    log_sums = torch.logsumexp(whole(torch.from_numpy(tokens)).logits.double(), dim=-1).detach()
    monkeypatch.setattr(_Backward, "_drawn", lambda *_: (log_sums, drawn))
    for memory in (0, 1 << 30):  # lent one at a time, and kept
        monkeypatch.setattr(lent_experts, "KEPT_BYTES", memory)
        found = sensitivities(LayerStream(model, 2), tokens)
        used = {role for role, each in seen.items() if sum(len(x) for x, _ in each)}
        assert len(used) > 3 * LAYERS
        assert used == {role for role in found if ".experts." in role}
        for role in used:
            products = sum((by.double().square().T @ x.double().square() for x, by in seen[role]), torch.zeros(1))
            own, products = found[role], (products / (2 * tokens.size)).numpy()
            of_rows = own.outputs.astype(np.float64) * own.inputs.sum(dtype=np.float64)
            np.testing.assert_allclose(of_rows, products.sum(axis=1), rtol=2e-3, atol=1e-12)
            share = own.inputs.astype(np.float64) / own.inputs.sum(dtype=np.float64)
            np.testing.assert_allclose(share, products.sum(axis=0) / products.sum(), rtol=2e-3, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", names("coldpress.compiler.architectures"))
def test_every_matrix_has_one(architecture: str, tmp_path: Path) -> None:
    """All matrices of a dense model, and in each layer of a mixture some experts'."""
    source = source_of(tmp_path, architecture, relu=False, layers=2)
    found = sensitivities(LayerStream(source.model), np.asarray(source.tokens[:1]))
    assert all(np.isfinite(one.outputs).all() and one.outputs.sum() > 0 < one.inputs.sum() for one in found.values())
    of_experts = {re.sub(r"experts\.\d+", "experts.0", role) for role in found}
    asked = formats_of_matrices(source.model).keys()
    assert asked <= of_experts if architecture in MIXTURES else asked == found.keys()


@pytest.mark.slow
def test_threads_change_no_bit(case) -> None:
    model, _, tokens = case
    one, two = (sensitivities(LayerStream(model, threads), tokens) for threads in (1, 2))
    for role, own in one.items():
        np.testing.assert_array_equal(own.outputs, two[role].outputs, role)
        np.testing.assert_array_equal(own.inputs, two[role].inputs, role)


def test_tokens_are_drawn_by_the_model(case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand draws of one position: each token as often as its probability says, within five deviations."""
    model, _, tokens = case
    stream, count = _Backward(LayerStream(model, 1)), 10_000
    hidden = stream.last_hidden(tokens[:1])[:, -1:]
    expected = torch.softmax(stream.head(hidden).double()[0, 0], dim=-1).numpy()
    log_sums, drawn = stream._drawn(hidden.expand(1, count, -1).contiguous())
    found = np.bincount(drawn[0].numpy(), minlength=len(expected)) / count
    assert np.abs(found - expected).max() < 5 * np.sqrt(expected.max() / count)
    assert found.max() < 1
    np.testing.assert_allclose(log_sums[0, 0], torch.logsumexp(stream.head(hidden).double()[0, 0], dim=-1), rtol=1e-6)


def test_a_sample_of_rows_expects_what_all_rows_do(case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle weighs the errors of the format's own codes, row by row."""
    model, _, tokens = case
    role = f"layers.{LAYERS - 1}.up_proj.weight"
    own = sensitivities(LayerStream(model), tokens)[role]
    rounding = Rounding(rtn.Plugin())
    compared = ("int4_group32", "q5_1")
    weights = rounding.weights(model, role, "row").read(0, len(own.outputs))
    found = expected_divergence(rounding, model, role, own, compared)
    for name in compared:
        codec = load("coldpress.runtime.quantization", Format, name)
        errors = codec.decode(codec.encode(weights), weights.shape[1]).astype(np.float64) - weights
        assert found[name] == pytest.approx(float(own.outputs @ errors**2 @ own.inputs), rel=1e-4)
    assert found["int4_group32"] > 2 * found["q5_1"] > 0
    assert len(own.outputs) <= SAMPLE_ROWS
    monkeypatch.setattr("coldpress.compiler.stages.allocate._mixed.SAMPLE_ROWS", len(own.outputs) // 2)
    half = expected_divergence(rounding, model, role, own, compared)
    assert all(half[name] == pytest.approx(found[name], rel=0.3) and half[name] != found[name] for name in compared)
