"""Scores tasks with one right answer by a model under a selector: endings to choose from, and words to be found.

A line of a task's file is `{"context": …, "choices": […], "label": …}`, where the model chooses the likeliest ending,
or `{"context": …, "target": …}`, where greedy decoding must give the target. lm-evaluation-harness scores such items in
the same way (`multiple_choice`, and `loglikelihood` with its `acc`). The harness itself scores artifacts
(runtime/cli/harness.py); this module scores models under masks, which the harness cannot run layer by layer.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evaluation.evaluate import Masks, Sparse
from coldpress.compiler.activity.forward import HeadPart, LayerStream
from coldpress.schemas.errors import ColdpressError

BATCH_TOKENS = 1 << 15
"""Token positions that go through the layers together; a layer's weights are read once for them."""
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Item:
    """One item of a task; an item with a target has it as its only choice."""

    context: str
    choices: tuple[str, ...]
    label: int


def read_items(path: Path) -> tuple[Item, ...]:
    """Reads the items of a JSON-lines file; an item with a target gets it as its only choice.

    Raises:
        ColdpressError: for a line that is neither kind of item, by its number.
    """
    items = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            items.append(_item(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ColdpressError(
                f"{path}:{number}: no item of a task, expected context with choices and label, or context with target; "
                "correct the line"
            ) from error
    if not items:
        raise ColdpressError(f"{path} has no items, expected a line for each; give another file")
    return tuple(items)


def _item(values: dict[str, Any]) -> Item:
    if "target" in values:
        found = Item(values["context"], (values["target"],), 0)
    else:  # the harness, too, puts a blank between context and ending by default
        found = Item(values["context"], tuple(f" {choice}" for choice in values["choices"]), values["label"])
    texts = (found.context, *found.choices)
    if not all(isinstance(text, str) and text for text in texts) or found.label not in range(len(found.choices)):
        raise ValueError(values)
    return found


def right_answers(
    stream: LayerStream, items: Sequence[Item], encode: Encode, sparse: Sparse | None = None
) -> np.ndarray:
    """Returns which items the model answers rightly, bool [num_items]; their mean is its accuracy.

    Args:
        stream: The model.
        items: The questions.
        encode: Returns a text's token ids, special tokens included.
        sparse: A fitted selector for every token; None for the dense model. One that sees residency chooses as
            if nothing were in DRAM.

    Raises:
        ColdpressError: if an ending is no token of its own.
    """
    pairs = [
        (index, choice, _encoded(encode, item, choice)) for index, item in enumerate(items) for choice in item.choices
    ]
    scored: dict[tuple[int, str], tuple[float, bool]] = {}
    for batch in _batches(pairs):
        length = max(len(ids) for _, _, (ids, _) in batch)
        tokens = np.zeros((len(batch), length), np.int64)
        for row, (_, _, (ids, _)) in zip(tokens, batch, strict=True):
            row[: len(ids)] = ids  # tokens after a text cannot change the predictions within it
        hooks = Masks(sparse, stream.spec).layer if sparse else None
        hidden = stream.last_hidden(tokens, hooks)
        nll, likeliest = stream.score(hidden, tokens), _likeliest(stream, hidden, tokens)
        for row, (index, choice, (ids, given)) in enumerate(batch):
            part = slice(given - 1, len(ids) - 1)
            scored[index, choice] = float(nll[row, part].sum()), bool(likeliest[row, part].all())
    return np.array(
        [_is_right(item, [scored[index, choice] for choice in item.choices]) for index, item in enumerate(items)]
    )


def _likeliest(stream: LayerStream, hidden: Any, tokens: np.ndarray) -> np.ndarray:
    """Returns where no token has a larger logit than the one that follows, bool [num_blocks, T - 1]."""
    import torch

    targets = torch.from_numpy(np.asarray(tokens[:, 1:], np.int64))
    highest, chosen = torch.full(targets.shape, -torch.inf), torch.zeros(targets.shape)
    for part in stream.head_parts(hidden[:, :-1]):

        def run(row: int, part: HeadPart = part) -> None:
            logits = part.logits(row).float()
            highest[row] = torch.maximum(highest[row], logits.amax(dim=-1))
            chosen[row] += part.chosen(logits, targets[row])

        stream.each(run, len(tokens))
    return (chosen >= highest).numpy()


def _is_right(item: Item, scored: Sequence[tuple[float, bool]]) -> bool:
    if len(scored) == 1:
        return scored[0][1]
    return int(np.argmin([nll for nll, _ in scored])) == item.label


def _encoded(encode: Encode, item: Item, choice: str) -> tuple[list[int], int]:
    """Returns (ids of context and ending, number of the context's ids); blanks at the seam belong to the ending."""
    context = item.context.rstrip()
    ids = list(encode(item.context + choice))
    given = len(encode(context))
    if not 0 < given < len(ids):
        raise ColdpressError(f"the ending '{choice[:40]}' of a task is no token of its own behind its context")
    return ids, given


_Pair = tuple[int, str, tuple[list[int], int]]


def _batches(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """Yields batches of texts of similar length, so that padding stays small."""
    batch: list[_Pair] = []
    for pair in sorted(pairs, key=lambda pair: len(pair[2][0])):
        if batch and (len(batch) + 1) * len(pair[2][0]) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(pair)
    yield batch
