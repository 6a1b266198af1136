"""Finds out which compiler is running: its version, the commit of its checkout, and the versions of its libraries."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from coldpress.schemas import __version__
from coldpress.schemas.provenance import Provenance

DECIDING = ("torch", "transformers", "numpy", "scipy", "scikit-learn", "pulp", "highspy", "zstandard")
"""Libraries that decide bytes of artifacts."""
RUNNING = ("snakemake", "safetensors", "tokenizers", "pydantic", "matplotlib")
"""Further libraries that a build runs with."""
CHECKOUT = Path(__file__).resolve().parents[1]
MARK = "compiler/provenance.py"
"""A file that a checkout's commits have: an environment inside a user's own repository is no checkout of this one."""


def provenance(checkout: Path = CHECKOUT) -> Provenance:
    commit = _git(checkout, "rev-parse", "HEAD") if _git(checkout, "ls-files", "--", MARK) else None
    return Provenance(
        compiler_version=__version__,
        commit=commit,
        dirty=bool(commit and _git(checkout, "status", "--porcelain", "--untracked-files=no")),
        python_version=platform.python_version(),
        libraries=versions((*DECIDING, *RUNNING)),
    )


def versions(names: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git(folder: Path, *words: str) -> str | None:
    """Returns git's answer; None without git or a repository. git's own variables would name another repository."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, env=own)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
