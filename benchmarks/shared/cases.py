"""Loads a model with its text in token blocks, for the benchmarks that score one on the other."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness.places import data
from benchmarks.shared.real_models import MODELS as REAL_MODELS
from benchmarks.shared.real_models import file_of
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.checkpoint.private import private_folder
from coldpress.compiler.io import Workspace, save_arrays
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.schemas.corpus import SPLITS, Corpus, TokenBlocks
from coldpress.schemas.model import Model

BLOCK_TOKENS = 256
MODELS = {
    "prose7m": "wikitext-2",
    "tinystories656k": "tinystories",
    "stories260k": "tinystories",
    "prose7m-relu": "wikitext-2",
}
"""Model -> the corpus that calibrates and scores it."""
WITH_MIXTURES = MODELS | {"tinystories-mixtral-8x": "tinystories"}
"""MODELS and mixtures of experts, for benchmarks whose densities are shares of the units that a router picks."""
CORPORA = WITH_MIXTURES | {"tinystories656k-relu": "tinystories", "tinystories-opt-0.9m": "tinystories"}
CORPORA |= dict.fromkeys(REAL_MODELS, "wikitext-2")
"""Every model -> its corpus."""
Parts = Mapping[str, tuple[str, slice]]
"""Split -> (its text, `fit` or `test`; slice of the text's blocks)."""


@dataclass(frozen=True)
class Case:
    """A model with its text."""

    name: str
    model: Model
    stream: LayerStream
    splits: Mapping[str, np.ndarray]
    """Split -> int32 token ids [num_blocks, BLOCK_TOKENS]."""
    folder: Path
    """Folder for derived files."""

    @property
    def source(self) -> Path:
        """The folder of the checkpoint, but for a real model."""
        return data() / "models" / self.name

    def corpus(self, calibration: str = "calibration") -> Corpus:
        """Returns the text as a record of the build's stages, with the named split as calibration text."""
        parts = {**self.splits, "calibration": self.splits[calibration]}
        splits = tuple(
            TokenBlocks(
                split=split,
                arrays=save_arrays(self.folder / f"{calibration}-{split}.safetensors", {"tokens": parts[split]}),
                num_blocks=len(parts[split]),
                block_tokens=BLOCK_TOKENS,
            )
            for split in SPLITS
        )
        return Corpus(name="benchmark", text_sha256="0" * 64, splits=splits)


class Replaced(LayerStream):
    """A model whose matrices are replaced, by role, as they are read."""

    def __init__(self, model: Model, matrix: Callable[[str], np.ndarray | None], threads: int) -> None:
        """Takes role -> float32 values, or None for a tensor that stays; `threads` matrices of a layer at a time."""
        super().__init__(model, threads)
        self._matrix = matrix

    def _of_role(self, role: str):
        import torch

        found = self._matrix(role)
        return super()._of_role(role) if found is None else torch.from_numpy(found)


def case_of(name: str, folder: Path, parts: Parts) -> Case:
    """Returns the model with its text in blocks."""
    source = file_of(name, folder) if name in REAL_MODELS else data() / "models" / name
    model = ingest.run(IngestConfig(model=str(source)), Workspace(folder / "ingest", "benchmark"))
    blocks = blocks_of(private_folder(model), data() / "corpora" / CORPORA[name])
    splits = {split: blocks[text][part] for split, (text, part) in parts.items()}
    return Case(name, model, LayerStream(model, len(os.sched_getaffinity(0))), splits, folder)


def blocks_of(source: Path, corpus: Path) -> dict[str, np.ndarray]:
    """Returns all whole blocks, int32 [n, BLOCK_TOKENS], of the text to fit on and of the text to score."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    found = {}
    for name, text in texts(corpus).items():
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        found[name] = ids[: ids.size // BLOCK_TOKENS * BLOCK_TOKENS].reshape(-1, BLOCK_TOKENS)
    return found


def texts(corpus: Path) -> Mapping[str, str]:
    """Returns the text to fit on and the text to score; removes WikiText's marks of tokenized text."""
    if corpus.name == "wikitext-2":
        return {
            name: _plain((corpus / f"{file}.txt").read_text()) for name, file in (("fit", "valid"), ("test", "test"))
        }
    return {name: _stories(corpus / f"{file}.jsonl") for name, file in (("fit", "calib"), ("test", "eval"))}


def _plain(text: str) -> str:
    for mark, plain in ((" <unk>", ""), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")):
        text = text.replace(mark, plain)
    return text


def _stories(path: Path) -> str:
    return "\n\n".join(json.loads(line)["text"] for line in path.read_text().splitlines())
