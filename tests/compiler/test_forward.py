"""The streamed forward pass: threads, memory, other weights, likelihoods. Parity is in contracts/test_architectures."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coldpress.compiler.activity import forward
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.schemas.errors import CheckpointError, ColdpressError
from coldpress.schemas.model import Model
from tests.support.checkpoints import rewrite
from tests.support.models import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=3, relu=True)
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 384, (5, 40)).astype(np.int32)


def test_threads_change_no_bit(model: Model, tokens: np.ndarray) -> None:
    one, two = (LayerStream(model, threads=threads) for threads in (1, 2))
    assert np.array_equal(one.logits(tokens), two.logits(tokens))
    assert one.nll(tokens) == two.nll(tokens)
    assert np.array_equal(one.logits(tokens)[3:4], two.logits(tokens[3:4]))


def test_the_number_of_torchs_own_threads_changes_no_bit(model: Model, tokens: np.ndarray) -> None:
    import torch

    before = torch.get_num_threads()
    stream = LayerStream(model)
    try:
        torch.set_num_threads(1)
        one = stream.logits(tokens)
        torch.set_num_threads(2)
        assert np.array_equal(one, stream.logits(tokens))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_is_gone_when_nobody_holds_it(model: Model, dtype: forward.ComputeDtype) -> None:
    """At once, not when cycles of references are collected: layers of a 7B model have no room side by side."""
    loaded = LayerStream(model, dtype=dtype).load_layer(0, 8)
    weights = [weakref.ref(parameter) for parameter in loaded.module.parameters()]
    gc.disable()
    try:
        del loaded
        assert weights
        assert not [weight for weight in weights if weight() is not None]
    finally:
        gc.enable()


def rewritten(folder: Path, changed: Callable[[str, np.ndarray], np.ndarray]) -> Model:
    """The same checkpoint with other weights."""
    write_model(folder, num_hidden_layers=3, relu=True)
    weights = load_file(folder / "model.safetensors")
    save_file({name: changed(name, array) for name, array in weights.items()}, folder / "model.safetensors")
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))


def test_one_layer_is_read_at_a_time(model: Model, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def watched(reader: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: Model, role: str, *rest: Any) -> Any:
            read.append(role)
            return reader(model, role, *rest)

        return call

    for name in ("read_role", "read_rows", "read_stored"):
        monkeypatch.setattr(forward, name, watched(getattr(forward, name)))
    stream = LayerStream(model)
    hidden = stream.embed(tokens)
    assert set(read) == {"embed_tokens.weight"}
    read.clear()
    stream.run_layer(1, hidden)
    assert {role.split(".")[1] for role in read} == {"1"}
    assert len(read) == len(set(read)) == 9
    assert all(parameter.is_meta for parameter in stream._skeleton.parameters())


def test_a_hook_at_the_mlps_inner_values_stands_for_other_weights(
    model: Model, tokens: np.ndarray, tmp_path: Path
) -> None:
    muted = rewritten(tmp_path / "m", lambda name, array: array * np.float32(".down_proj." not in name))

    def silenced(layer: int) -> Any:
        return lambda block: {"mlp_inner": lambda inner: inner * 0}

    stream = LayerStream(model)
    found = LayerStream(muted).nll(tokens)
    assert found == stream.nll(tokens, silenced)
    assert found[0] != stream.nll(tokens)[0]


def test_a_likelihood_does_not_depend_on_how_the_head_is_cut(
    model: Model, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = LayerStream(model)
    whole, logits = stream.nll(tokens), stream.logits(tokens)
    monkeypatch.setattr(forward, "HEAD_ROWS", 100)
    cut = stream.nll(tokens)
    assert cut[1] == whole[1] == 5 * 39
    assert cut[0] == pytest.approx(whole[0], rel=1e-6)
    assert np.allclose(stream.logits(tokens), logits, atol=1e-5)


def test_a_head_in_memory_gives_the_same_logits(
    model: Model, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "HEAD_ROWS", 100)
    stream = LayerStream(model)
    hidden, kept = stream.last_hidden(tokens), list(stream.head_weights())
    assert len(kept) > 1
    expected = stream.head(hidden)
    monkeypatch.setattr(forward, "read_rows", None)  # the head is not read again
    assert np.array_equal(stream.head(hidden, kept).numpy(), expected.numpy())


def test_likelihood_by_hand(model: Model, tokens: np.ndarray) -> None:
    stream = LayerStream(model)
    logits = stream.logits(tokens)[:, :-1].astype(np.float64)
    log_sums = np.log(np.exp(logits).sum(axis=-1))
    chosen = np.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    assert stream.nll(tokens)[0] == pytest.approx((log_sums - chosen).sum(), rel=1e-9)


def test_an_input_mask_reaches_gate_and_up(model: Model, tokens: np.ndarray, tmp_path: Path) -> None:
    """Zeroing entries of the MLP's input equals zeroing the columns of gate and up."""

    def without_columns(name: str, array: np.ndarray) -> np.ndarray:
        array = array.copy()
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            array[:, ::2] = 0
        return array

    def mask(part: Any) -> Any:
        masked = part.clone()
        masked[:, ::2] = 0
        return masked

    masked = LayerStream(model).nll(tokens, lambda layer: lambda block: {"mlp_input": mask})
    assert masked[0] == pytest.approx(LayerStream(rewritten(tmp_path / "m", without_columns)).nll(tokens)[0], rel=1e-6)


def test_a_device_that_is_not_there(model: Model) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(ColdpressError, match="device cuda is not available on this machine; use cpu"):
        LayerStream(model, device="cuda")


def test_weights_that_turned_bad_after_ingest(tmp_path: Path, tokens: np.ndarray) -> None:
    """What is not finite ends the pass where it arises, and not as a NaN in some record."""
    folder = write_model(tmp_path / "tiny", num_hidden_layers=3)
    model = ingest.run(IngestConfig(model=str(folder)), Workspace(tmp_path / "work", "test"))
    rewrite(folder, lambda weights: weights["model.layers.1.mlp.up_proj.weight"].__setitem__((3, 5), 3e38))
    with pytest.raises(CheckpointError, match="layer 1 of tiny gives hidden states that are NaN or infinite on ord"):
        LayerStream(model).last_hidden(tokens)
