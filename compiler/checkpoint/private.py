"""A model's private folder: the believed parts of a checkpoint from `ingest`, and after `distill` its weights.

Both stages put it beside their record, which lists its files with digests. All readers use the functions here, which
check the digests.
"""

from pathlib import Path

from coldpress.compiler.io import checked_file, deletion
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import Model

LINKS = "weights"
"""Folder of `ingest`, beside its private folder, with links to the checkpoint's files of weights."""


def record_of(model: Model) -> str:
    return f"{Path(model.folder).parent}.json"


def private_folder(model: Model) -> Path:
    """Returns the folder with configuration, tokenizer and licences; raises ColdpressError if a file is missing or has
    changed."""
    for file in (*model.private_files, *model.license_files):
        checked_file(Path(model.folder) / file.name, file.sha256, record_of(model))
    return Path(model.folder)


def checked_weights(model: Model, path: Path) -> Path:
    """Returns a file of weights; checks a file of the build folder against its record, once per process. `relufy` and
    `distill` write such files, and an object store gives copies of a checkpoint's files. Where `ingest` has left links,
    the files lie elsewhere, and Snakemake notices if they change. Raises CheckpointError if it is not among the model's
    files, ColdpressError if it is missing or has changed since it was distilled."""
    folder = Path(model.folder)
    if path.parent == folder or (path.parent == folder.with_name(LINKS) and not path.is_symlink()):
        listed = {file.name: file.sha256 for file in model.files}
        if path.name not in listed:
            raise CheckpointError(
                f"{path}: the model's record uses it for a tensor but does not list it among the files; "
                f"{deletion(Path(record_of(model)))}, then build again"
            )
        checked_file(path, listed[path.name], record_of(model))
    return path
