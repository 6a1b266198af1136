"""Lists the outside files that a build depends on, as the rules name them: the checkpoint, the corpus, an importance
matrix."""

import os
from pathlib import Path

from coldpress.compiler.checkpoint.hub import checkpoint_paths
from coldpress.compiler.stages.tokenize import files
from coldpress.compiler.workflow.settings import BuildConfig


def declared(names: list[str]) -> list[str]:
    """Returns the file names that Snakemake can be told of: it takes a name with a brace for a wildcard, wherever it
    stands, and writes names into texts."""
    return [name for name in names if name.isprintable() and "{" not in name]


def stamps(config: BuildConfig, names: list[str]) -> list[tuple[str, int, int]]:
    """Returns (name, bytes, time in ns) of all other files, for a rule's params."""
    others = {name: (config.folder / name).stat() for name in sorted(set(names) - set(declared(names)))}
    return [(name, status.st_size, status.st_mtime_ns) for name, status in others.items()]


def checkpoint_files(config: BuildConfig) -> list[str]:
    """Returns the files of a local checkpoint that the build depends on; none for a hub model, fixed by its commit."""
    if config.model.revision is not None:
        return []
    return [config.near(path) for path in checkpoint_paths(Path(config.model.source))]


def corpus_files(config: BuildConfig) -> list[str]:
    """Returns the files of a corpus that is a file or a folder; none for a corpus with a name."""
    path = Path(os.path.normpath(config.folder / config["corpus"]))
    return [config.near(file) for file in files.corpus_files(path)]


def imatrix_files(config: BuildConfig) -> list[str]:
    """Returns the importance matrix, if the build has one."""
    return [config["imatrix"]] if config["imatrix"] else []
