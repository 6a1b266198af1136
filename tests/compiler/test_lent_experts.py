"""Experts that are read one at a time, for many blocks of tokens."""

import gc
import threading
import time
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.activity import forward, lent_experts
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.lent_experts import Lender, blocks_at_once, waiting_bytes
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.schemas.model import Model
from tests.support.models import write_model

EXPERTS, BLOCKS, TOKENS = 4, 7, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_model(tmp_path_factory.mktemp("model") / "tiny", "mixtral", num_hidden_layers=2)
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 384, (BLOCKS, TOKENS)).astype(np.int32)


@pytest.fixture(autouse=True)
def kept_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of these models are small; only the tests that say so keep them."""
    monkeypatch.setattr(lent_experts, "KEPT_BYTES", 0)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often each matrix of layer 0 is read."""
    found: Counter[str] = Counter()
    real = LayerStream._loaded

    def counted(stream: LayerStream, path: str) -> Any:
        found[path] += "layers.0." in path
        return real(stream, path)

    monkeypatch.setattr(LayerStream, "_loaded", counted)
    return found


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("at_once", [1, 3, BLOCKS])
def test_waves_change_no_bit(
    model: Model, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch, threads: int, at_once: int
) -> None:
    """Each block by itself gives what any number of blocks give side by side."""
    stream = LayerStream(model)
    expected = np.concatenate([stream.logits(block[None]) for block in tokens])
    monkeypatch.setattr(forward, "blocks_at_once", lambda *_: at_once)
    assert np.array_equal(LayerStream(model, threads).logits(tokens), expected)


def test_a_wave_reads_a_matrix_once(
    model: Model, tokens: np.ndarray, loads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = LayerStream(model, 2)
    hidden = stream.embed(tokens)
    monkeypatch.setattr(forward, "blocks_at_once", lambda *_: BLOCKS)
    stream.run_layer(0, hidden)
    assert len(loads) == 3 * EXPERTS
    assert set(loads.values()) == {1}
    monkeypatch.setattr(forward, "blocks_at_once", lambda *_: 3)
    loads.clear()
    stream.run_layer(0, hidden)
    assert set(loads.values()) == {3}  # waves of 3, 3 and 1 blocks


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_experts_that_are_kept_change_no_bit_and_are_read_once(
    model: Model, tokens: np.ndarray, loads: Counter[str], monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    expected = LayerStream(model, threads).logits(tokens)
    every = 3 * 4 * EXPERTS * model.spec.hidden_size * model.spec.intermediate_size
    monkeypatch.setattr(lent_experts, "KEPT_BYTES", every)
    assert lent_experts.kept_bytes(model.spec, 4) == every
    loads.clear()
    assert np.array_equal(LayerStream(model, threads).logits(tokens), expected)
    of_experts = {path: count for path, count in loads.items() if "layers.0." in path and ".experts." in path}
    assert (len(of_experts), {*of_experts.values()}) == (3 * EXPERTS, {1})
    monkeypatch.setattr(lent_experts, "KEPT_BYTES", every - 1)
    assert lent_experts.kept_bytes(model.spec, 4) == 0


def test_experts_that_no_token_uses_are_not_read(model: Model, tokens: np.ndarray, loads: Counter[str]) -> None:
    stream = LayerStream(model)
    stream.run_layer(0, stream.embed(tokens[:1, :1]))
    assert len(loads) == 3 * model.spec.num_experts_per_tok < 3 * EXPERTS


def test_memory_holds_one_expert(model: Model, tokens: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when cycles of references are collected."""
    real, held = LayerStream._loaded, list[weakref.ref[Any]]()
    most = 0

    def watched(stream: LayerStream, path: str) -> Any:
        nonlocal most
        found = real(stream, path)
        held.append(weakref.ref(found.weight))
        most = max(most, sum(ref() is not None for ref in held))
        return found

    stream = LayerStream(model, 2)
    hidden = stream.embed(tokens)
    monkeypatch.setattr(LayerStream, "_loaded", watched)
    gc.disable()
    try:
        stream.run_layer(0, hidden)
        left = sum(ref() is not None for ref in held)
    finally:
        gc.enable()
    assert (most, left) == (2, 0)  # gate and up


def test_on_one_core_blocks_run_in_their_order(model: Model, tokens: np.ndarray) -> None:
    stream, found = LayerStream(model), list[int]()

    def hooks(block: int) -> forward.Hooks:
        def change(_: Any) -> None:
            found.append(block)

        return {"mlp_inner": change}

    stream.run_layer(0, stream.embed(tokens), hooks)
    assert found == list(range(BLOCKS))


def test_an_error_in_one_block_ends_the_others(model: Model, tokens: np.ndarray) -> None:
    """What went wrong is raised, not that the others waited for it; the layer can run again."""
    stream = LayerStream(model, 2)
    loaded, hidden = stream.load_layer(0, TOKENS), stream.embed(tokens)

    def work(block: int) -> None:
        if block == 2:
            raise ArithmeticError("block 2")
        loaded.run(hidden[block : block + 1], {})

    before = threading.active_count()
    before = threading.active_count()
    with pytest.raises(ArithmeticError, match="block 2"):
        stream.each_block(loaded, work, BLOCKS)
    assert threading.active_count() == before
    assert threading.active_count() == before
    assert np.array_equal(loaded.run(hidden[:1], {}).numpy(), stream.run_layer(0, hidden)[:1].numpy())


def test_an_error_while_an_expert_is_read_is_raised() -> None:
    def load(number: int, name: str) -> Any:
        raise OSError(f"{number} {name}")

    lender = Lender(load, 2, 4)

    def work(_: int) -> None:
        next(lender.lend([3], ["down"]))

    with pytest.raises(OSError, match="3 down"):
        lender.each(work, 4)


def test_no_more_blocks_run_than_there_are_cores() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def work(_: int) -> None:
        nonlocal running, most
        for _lent in lender.lend([0], ["gate"]):
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.01)  # in which another block could begin
            with lock:
                running -= 1

    lender = Lender(lambda number, name: (number, name), 2, 6)  # pyright: ignore[reportArgumentType]
    lender.each(work, 6)
    assert most == 2


@pytest.mark.parametrize(("blocks_per_call", "reads"), [(1, 1), (3, 2), (8, 4)])
def test_a_call_of_several_blocks_takes_their_places_in_a_wave(blocks_per_call: int, reads: int) -> None:
    found: list[int] = []

    def load(number: int, name: str) -> Any:
        found.append(number)

    def work(_: int) -> None:
        for _lent in lender.lend([5], ["gate"]):
            pass

    lender = Lender(load, 2, 6)
    lender.each(work, 4, blocks_per_call)
    assert found == [5] * reads


def test_waves_are_as_large_as_memory_allows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    one = waiting_bytes(model.spec, TOKENS, 4)
    wide = 2 * (model.spec.hidden_size + 2 * model.spec.intermediate_size)  # two experts a token
    assert one == TOKENS * 4 * (wide + 8 * model.spec.hidden_size)
    monkeypatch.setattr(lent_experts, "WAITING_BYTES", 5 * one)
    assert blocks_at_once(model.spec, TOKENS, 4, 2) == 5
    assert blocks_at_once(model.spec, TOKENS, 4, 1) == 1
    monkeypatch.setattr(lent_experts, "WAITING_BYTES", one)
    assert blocks_at_once(model.spec, TOKENS, 4, 2) == 2
