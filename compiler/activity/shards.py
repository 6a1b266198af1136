"""Cuts calibration text into shards, and merges the statistics of shards: bit for bit those of one job.

Every block of tokens is computed alone. Results over several blocks are either counts, or one number per block whose
mean is taken over all of them in order. Reads array files; memory holds one family of one layer.
"""

import functools
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from coldpress.compiler.activity.array_rows import RowReader, writing_rows
from coldpress.compiler.activity.expert_counts import curve_of, merged
from coldpress.compiler.activity.layer_counts import CalibrationText
from coldpress.compiler.activity.packed_bits import joined
from coldpress.compiler.activity.statistics import key_of, layer_record
from coldpress.compiler.io import Workspace, checked_path, load_arrays
from coldpress.runtime.artifact.tensor_files import NUMPY_NAMES
from coldpress.schemas.activations import Activations, LayerStatistics, TaskTokens
from coldpress.schemas.base import ArrayFile
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import FamilyName

COPY_ROWS = 1024
SUMMED = ("counts", "magnitude_histogram", "task_counts")
SAME = ("exact_zeros", "block_tokens", "compute_dtype", "weights_sha256")
"""Fields that all shards of one text and model share."""


def shard_text(corpus: Corpus, shard: int, num_shards: int) -> tuple[int, CalibrationText]:
    """Returns (first block, text) of one of `num_shards` parts of the calibration blocks, whose sizes differ by at most
    one block; raises ColdpressError if there is no such shard, or there are fewer blocks than shards."""
    blocks = corpus.split("calibration")
    if not shard < num_shards <= blocks.num_blocks:
        raise ColdpressError(
            f"shard {shard} of {num_shards} was asked for, expected a shard below the number of shards, and at most "
            f"{blocks.num_blocks} shards, one per calibration block; use fewer shards or more calibration_tokens"
        )
    start, stop = (blocks.num_blocks * edge // num_shards for edge in (shard, shard + 1))
    arrays = load_arrays(blocks.arrays)
    tasks = arrays["tasks"][start:stop] if "tasks" in arrays else None
    return start, CalibrationText(arrays["tokens"][start:stop], tasks, len(blocks.tasks))


def task_tokens(corpus: Corpus, text: CalibrationText) -> tuple[TaskTokens, ...]:
    names = corpus.split("calibration").tasks
    if text.tasks is None:
        return ()
    found = np.bincount(text.tasks[text.tasks >= 0].ravel(), minlength=len(names))
    return tuple(TaskTokens(name=name, num_tokens=int(count)) for name, count in zip(names, found, strict=True))


def merge(parts: Sequence[Activations], work: Workspace) -> Activations:
    """Returns the statistics of the whole text from those of its shards, in any order; raises ColdpressError if the
    shards belong to different texts or models, or one is missing or given twice."""
    parts = sorted(parts, key=lambda part: part.first_block)
    first = parts[0]
    _check(parts)
    tasks = tuple(
        TaskTokens(name=task.name, num_tokens=sum(part.tasks[index].num_tokens for part in parts))
        for index, task in enumerate(first.tasks)
    )
    num_tokens = sum(part.num_tokens for part in parts)
    layers = tuple(_layer(number, parts, work) for number in range(len(first.layers)))
    experts = curve_of(layers, num_tokens, first.block_tokens or num_tokens)
    return first.model_copy(update={"num_tokens": num_tokens, "tasks": tasks, "layers": layers, "experts": experts})


def _check(parts: Sequence[Activations]) -> None:
    first = parts[0]
    shape = [[(family.family, family.num_units) for family in layer.families] for layer in first.layers]
    for part in parts:
        different = [name for name in SAME if getattr(part, name) != getattr(first, name)]
        if [[(family.family, family.num_units) for family in layer.families] for layer in part.layers] != shape:
            different.append("layers")
        if [task.name for task in part.tasks] != [task.name for task in first.tasks]:
            different.append("tasks")
        if different or not part.block_tokens:
            raise ColdpressError(
                f"the shards differ in {', '.join(different or ['block_tokens'])}, expected parts of one calibration; "
                "calibrate them again with the same settings"
            )
    ends = [part.first_block + part.num_tokens // (part.block_tokens or 1) for part in parts]
    starts = [part.first_block for part in parts]
    if starts != [0, *ends[:-1]]:
        blocks = ", ".join(f"{start}-{end - 1}" for start, end in zip(starts, ends, strict=True))
        raise ColdpressError(f"the shards hold the blocks {blocks}, expected each once; give every shard once")


def _layer(number: int, parts: Sequence[Activations], work: Workspace) -> LayerStatistics:
    layers = [part.layers[number] for part in parts]
    tokens = [part.num_tokens for part in parts]
    families: dict[FamilyName, tuple[int, ArrayFile]] = {}
    done: dict[str, ArrayFile] = {}  # families with the same signal share a file
    for index, family in enumerate(layers[0].families):
        files = [layer.families[index].arrays for layer in layers]
        key = key_of(number, family.family)
        if files[0].array_file not in done:
            done[files[0].array_file] = work.once(key, functools.partial(_merged, files, tokens))
        families[family.family] = (family.num_units, done[files[0].array_file])
    key = key_of(number, "inputs")
    inputs = work.current(key) or _inputs([layer.inputs for layer in layers], key, work)
    earlier = ((family, work.current(key_of(number - 1, family))) for family in families if number)
    before = {family: file for family, file in earlier if file}
    used = [layer.experts.arrays for layer in layers if layer.experts is not None]
    experts = work.once(key_of(number, "experts"), functools.partial(merged, used, tokens)) if used else None
    squared = [layer.mean_squares for layer in layers if layer.mean_squares is not None]
    squares = work.once(key_of(number, "squares"), functools.partial(_joined, squared)) if squared else None
    return layer_record(number, families, before, inputs, sum(tokens), experts, squares)


def _joined(files: Sequence[ArrayFile]) -> dict[str, np.ndarray]:
    arrays = [load_arrays(file) for file in files]
    return {signal: np.concatenate([part[signal] for part in arrays]) for signal in arrays[0]}


def _merged(files: Sequence[ArrayFile], tokens: Sequence[int]) -> dict[str, np.ndarray]:
    arrays = [load_arrays(file) for file in files]
    found: dict[str, np.ndarray] = {"magnitude_edges": arrays[0]["magnitude_edges"]}
    for name in SUMMED:
        if name in arrays[0]:
            found[name] = np.sum([part[name] for part in arrays], axis=0, dtype=arrays[0][name].dtype)
    if "bits" in arrays[0]:
        found["bits"] = joined([part["bits"] for part in arrays], tokens)
        found["context_counts"] = np.concatenate([part["context_counts"] for part in arrays])
    return found


def _inputs(files: Sequence[ArrayFile], key: str, work: Workspace) -> ArrayFile:
    with ExitStack() as stack:
        readers = [stack.enter_context(RowReader(checked_path(file))) for file in files]
        specs = dict[str, tuple[str, tuple[int, ...]]]()
        for name, entry in readers[0].entries.items():
            num_rows = sum(reader.entries[name].shape[0] for reader in readers)
            specs[name] = NUMPY_NAMES[entry.dtype], (num_rows, *entry.shape[1:])
        writer = stack.enter_context(writing_rows(work.begin(key), specs))
        for name, (dtype, (_, *rest)) in specs.items():
            start = 0
            for reader in readers:
                rows = reader.entries[name].shape[0]
                for row in range(0, rows, COPY_ROWS):
                    block = np.empty((min(COPY_ROWS, rows - row), *rest), dtype)
                    writer.write(name, start + row, reader.read(name, row, block))
                start += rows
    return work.finish(key)
