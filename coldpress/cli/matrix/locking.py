"""Holds a matrix to its lock file: what each model's weights and text were when the file was written.

The file lies beside the matrix (builds.yaml, builds.lock), for a repository to keep. The first run writes it. Later
runs read weights and text again before anything else, and build no cell of a model whose inputs are others: a folder
that somebody changed, or a profile that names another commit, is found in seconds and not after hours.
"""

from pathlib import Path

from pydantic import ValidationError

from coldpress.compiler.io import load_record
from coldpress.schemas.base import Record
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model

INPUTS = {"revision": "commit", "weights_sha256": "weights", "text_sha256": "text"}
"""Locked field -> the input whose hash it holds."""


class Locked(Record):
    """The inputs of a model's builds."""

    revision: str | None
    """The commit of a hub model."""
    weights_sha256: str
    text_sha256: str


class Lock(Record):
    """builds.lock."""

    models: dict[str, Locked]
    """By the model's name in the names of builds."""


def lock_file(matrix: Path) -> Path:
    """Returns where the lock file of a matrix lies."""
    return matrix.with_suffix(".lock")


def read_lock(path: Path) -> Lock | None:
    """Reads a lock file; None if there is none.

    Raises:
        ColdpressError: if the file cannot be read, or is no lock file.
    """
    try:
        return Lock.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise ColdpressError(
            f"{path} cannot be read as a lock file; restore it, or write it anew with --update-lock"
        ) from error


def inputs_of(folder: Path) -> Locked:
    """Reads what the weights and the text in the folder of a model's builds are.

    Raises:
        ColdpressError: if a record cannot be read.
    """
    model, corpus = load_record(folder / "ingest.json", Model), load_record(folder / "tokenize.json", Corpus)
    return Locked(revision=model.revision, weights_sha256=model.weights_sha256, text_sha256=corpus.text_sha256)


def differences(lock: Path, name: str, before: Locked, now: Locked) -> str | None:
    """Returns the sentence that refuses a model's builds; None if its inputs are those of the lock file."""
    found = [
        f"{words} {_short(getattr(before, field))} became {_short(getattr(now, field))}"
        for field, words in INPUTS.items()
        if getattr(before, field) != getattr(now, field)
    ]
    if not found:
        return None
    return f"{name} differs from {lock.name}: {', '.join(found)}; restore it, or accept it with --update-lock"


def _short(value: str | None) -> str:
    return "none" if value is None else value[:12]
