"""Calibration in shards: the parts of the text, and that put together they are what one job finds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.activity.shards import merge, shard_text, task_tokens
from coldpress.compiler.io import Workspace, load_arrays, load_record, save_arrays, save_record
from coldpress.compiler.job import execute
from coldpress.compiler.stages import calibrate, ingest, recalibrate
from coldpress.compiler.stages.calibrate import CalibrateConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.recalibrate import RecalibrateConfig
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import SPLITS, Corpus, TokenBlocks
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model
from tests.support.methods import families_of, fitted
from tests.support.models import write_model
from tests.support.statistics import sparsity_of

BLOCKS, BLOCK_TOKENS, LAYERS, TASKS = 7, 13, 4, ("code", "prose", "unused")
WORK = "test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model(folder, num_hidden_layers=LAYERS, relu=True)
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", WORK))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    rng = np.random.default_rng(5)
    tokens = rng.integers(2, 384, (BLOCKS, BLOCK_TOKENS)).astype(np.int32)
    tasks = np.repeat(rng.integers(-1, 2, (BLOCKS, 1)), BLOCK_TOKENS, axis=1).astype(np.int16)
    tasks[:, 9:] = 1
    arrays = save_arrays(tmp_path_factory.mktemp("corpus") / "tokens.safetensors", {"tokens": tokens, "tasks": tasks})
    blocks = (
        TokenBlocks(split=split, arrays=arrays, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, tasks=TASKS)
        for split in SPLITS
    )
    return Corpus(name="random", text_sha256="0" * 64, splits=tuple(blocks))


def calibrated(
    model: Model, corpus: Corpus, work: Path, shard: int = 0, num_shards: int = 1, **config: Any
) -> Activations:
    settings = CalibrateConfig(**{"shard": shard, "num_shards": num_shards} | config)
    return calibrate.run(settings, model, corpus, Workspace(work, WORK), 2)


def assert_same(found: Activations, expected: Activations) -> None:
    """Records and files, but for where the files lie."""

    def without_paths(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_paths(part) for key, part in value.items() if key != "array_file"}
        return [without_paths(part) for part in value] if isinstance(value, list | tuple) else value

    assert without_paths(found.model_dump()) == without_paths(expected.model_dump())


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [3, 7])
def test_shards_give_what_one_job_gives(model: Model, corpus: Corpus, tmp_path: Path, num_shards: int) -> None:
    """13 tokens a block: shards do not begin on whole bytes."""
    whole = calibrated(model, corpus, tmp_path / "whole")
    parts = [calibrated(model, corpus, tmp_path / f"{shard}", shard, num_shards) for shard in range(num_shards)]
    assert sum(part.num_tokens for part in parts) == whole.num_tokens
    merged = merge(parts[::-1], Workspace(tmp_path / "merged", WORK))
    assert_same(merged, whole)
    assert [layer.layer for layer in merged.layers] == list(range(LAYERS))


def test_shards_of_chosen_densities(model: Model, corpus: Corpus, tmp_path: Path) -> None:
    first = calibrated(model, corpus, tmp_path / "first")
    densities = dict.fromkeys(families_of("topk", model.spec), (0.3,) * LAYERS)
    sparsity = fitted(sparsity_of("topk", densities), model.spec, tmp_path)

    def run(name: str, shards: tuple[Activations, ...] | None = None, **config: Any) -> Activations:
        work = Workspace(tmp_path / name, WORK)
        return recalibrate.run(RecalibrateConfig(**config), model, corpus, sparsity, first, work, 1, shards)

    parts = tuple(run(f"{shard}", shard=shard, num_shards=2) for shard in range(2))
    assert_same(run("merged", parts), run("whole"))
    assert_same(run("merged", parts), run("whole"))  # again, from the files that are there


def test_shards_on_the_command_line(model: Model, corpus: Corpus, tmp_path: Path) -> None:
    save_record(model, tmp_path / "ingest.json")
    save_record(corpus, tmp_path / "tokenize.json")
    common = ["--model", str(tmp_path / "ingest.json")]
    common += ["--corpus", str(tmp_path / "tokenize.json")]
    outputs = [str(tmp_path / f"shard-{shard}.json") for shard in range(2)]
    for shard, output in enumerate(outputs):
        execute("calibrate", [*common, "--shard", str(shard), "--num-shards", "2", "--output", output])
    execute("calibrate", [*common, "--shards", *outputs, "--output", str(tmp_path / "merged.json")])
    merged = load_record(tmp_path / "merged.json", Activations)
    whole = calibrated(model, corpus, tmp_path / "whole")
    for found, expected in zip(merged.layers, whole.layers, strict=True):
        for one, two in (
            (found.inputs, expected.inputs),
            (found.family("neuron").arrays, expected.family("neuron").arrays),
        ):
            arrays, wanted = load_arrays(one), load_arrays(two)
            assert arrays.keys() == wanted.keys()
            assert all(np.array_equal(arrays[name], wanted[name]) for name in wanted)
        assert found.input_similarity == expected.input_similarity


def test_parts_of_the_text(corpus: Corpus) -> None:
    tokens = load_arrays(corpus.split("calibration").arrays)["tokens"]
    parts = [shard_text(corpus, shard, 3) for shard in range(3)]
    assert [start for start, _ in parts] == [0, 2, 4]
    assert np.array_equal(np.concatenate([text.tokens for _, text in parts]), tokens)
    counted = task_tokens(corpus, parts[0][1])
    assert [task.name for task in counted] == list(TASKS)
    assert sum(task.num_tokens for task in counted) <= parts[0][1].tokens.size
    assert counted[2].num_tokens == 0
    for shard, num_shards in ((3, 3), (0, 8)):
        with pytest.raises(ColdpressError, match=f"shard {shard} of {num_shards} was asked for"):
            shard_text(corpus, shard, num_shards)


def test_parts_that_do_not_belong_together(model: Model, corpus: Corpus, tmp_path: Path) -> None:
    one, two = (calibrated(model, corpus, tmp_path / f"{shard}", shard, 2) for shard in range(2))
    work = Workspace(tmp_path / "merged", WORK)
    with pytest.raises(ColdpressError, match="the shards hold the blocks 0-2, 0-2, expected each once"):
        merge((one, one), work)
    with pytest.raises(ColdpressError, match="the shards hold the blocks 3-6, expected each once"):
        merge((two,), work)
    other = two.model_copy(update={"weights_sha256": "1" * 64, "layers": two.layers[1:]})
    with pytest.raises(ColdpressError, match="the shards differ in weights_sha256, layers, expected parts of one"):
        merge((one, other), work)


def test_contexts_and_tasks_add_up(model: Model, corpus: Corpus, tmp_path: Path) -> None:
    found = calibrated(model, corpus, tmp_path / "w")
    tasks = load_arrays(corpus.split("calibration").arrays)["tasks"]
    assert (found.block_tokens, found.first_block) == (BLOCK_TOKENS, 0)
    assert [(task.name, task.num_tokens) for task in found.tasks] == [
        (name, int((tasks == number).sum())) for number, name in enumerate(TASKS)
    ]
    for layer in (0, LAYERS - 1):
        arrays = load_arrays(found.layers[layer].family("neuron").arrays)
        active = np.unpackbits(arrays["bits"], axis=1, count=found.num_tokens, bitorder="little")
        by_block = active.reshape(-1, BLOCKS, BLOCK_TOKENS)
        assert np.array_equal(arrays["context_counts"], by_block.sum(axis=2).T)
        assert arrays["context_counts"].dtype == np.uint16
        expected = [active[:, (tasks == number).ravel()].sum(axis=1) for number in range(3)]
        assert np.array_equal(arrays["task_counts"], expected)
        assert arrays["task_counts"].sum() > 0
