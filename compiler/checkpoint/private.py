"""A model's private folder: what `ingest` believed of a checkpoint, and after `distill` its weights, by content.

Both stages put it beside their record, which lists its files with their digests; whoever reads one comes through here.
"""

from pathlib import Path

from coldpress.compiler.io import checked_file
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import Model


def record_of(model: Model) -> str:
    """The record of the stage that made the folder."""
    return f"{Path(model.folder).parent}.json"


def private_folder(model: Model) -> Path:
    """The folder with configuration, tokenizer and licences, each held against the record.

    Raises:
        ColdpressError: if one is missing or has changed since its stage ended.
    """
    for file in (*model.private_files, *model.license_files):
        checked_file(Path(model.folder) / file.name, file.sha256, record_of(model))
    return Path(model.folder)


def checked_weights(model: Model, path: Path) -> Path:
    """A file of weights. Those that `distill` wrote are held against its record, once per process; a checkpoint's own
    lie elsewhere, and snakemake sees that they changed.

    Raises:
        CheckpointError: if it is not among the model's files.
        ColdpressError: if it is missing or has changed since it was distilled.
    """
    if path.parent == Path(model.folder):
        listed = {file.name: file.sha256 for file in model.files}
        if path.name not in listed:
            raise CheckpointError(
                f"{path}: the record of the model names it for a tensor but not among its files; delete "
                f"{record_of(model)}, then build again"
            )
        checked_file(path, listed[path.name], record_of(model))
    return path
