"""Lists the outside files of a build as the rules name them: the checkpoint, the corpus, an importance matrix."""

import os
import platform
from collections import Counter
from pathlib import Path

from coldpress.compiler.checkpoint.hub import checkpoint_paths
from coldpress.compiler.io import sha256_of
from coldpress.compiler.stages.tokenize import files
from coldpress.compiler.stages.tokenize.text import PYDOC
from coldpress.compiler.workflow.settings import BuildConfig


def declared(names: list[str]) -> list[str]:
    """Returns the file names that Snakemake can be told of: it takes a name with a brace for a wildcard, wherever it
    stands, and writes names into texts."""
    return [name for name in names if name.isprintable() and "{" not in name]


def stamps(config: BuildConfig, names: list[str]) -> list[tuple[str, int, int]]:
    """Returns (name, bytes, time in ns) of all other files, for a rule's params."""
    others = {name: (config.workdir / name).stat() for name in sorted(set(names) - set(declared(names)))}
    return [(name, status.st_size, status.st_mtime_ns) for name, status in others.items()]


def checkpoint_files(config: BuildConfig) -> list[str]:
    """Returns the files of a local checkpoint that the build depends on; none for a hub model, fixed by its commit, or
    for packages, fixed by their digest."""
    if config.model.revision is not None or config.model.packages is not None:
        return []
    return [config.near(path) for path in checkpoint_paths(Path(config.model.source))]


def packages(config: BuildConfig) -> list[str]:
    return [config.model.packages.sha256] if config.model.packages else []


def corpus_files(config: BuildConfig) -> list[str]:
    """Returns the files of a corpus that is a file or a folder; none for a corpus with a name."""
    path = Path(os.path.normpath(config.workdir / config["corpus"]))
    return [config.near(file) for file in files.corpus_files(path)]


def corpus(config: BuildConfig, names: list[str]) -> list[tuple[str, int, str]] | list[str]:
    """Returns what a corpus is besides its files' contents, for a rule's params: no place, so that it is the same on
    another machine. Snakemake's cache knows a rule's files by their contents, in any order: (name, bytes, digest or "")
    of each file say which file has which content, digests where sizes are equal. A corpus with a name has that name,
    and Python's version for the documentation that comes with Python."""
    if not names:
        given = config["corpus"]
        return [given, platform.python_version()] if given == PYDOC else [given]
    paths = [Path(os.path.normpath(config.workdir / name)) for name in names]
    top = os.path.dirname(os.path.normpath(config.workdir / config["corpus"]))
    sizes = Counter(path.stat().st_size for path in paths)
    return [
        (os.path.relpath(path, top), size, sha256_of(path) if sizes[size] > 1 else "")
        for path, size in ((path, path.stat().st_size) for path in paths)
    ]


def given_files(config: BuildConfig, key: str) -> list[str]:
    return [config[key]] if config[key] else []
