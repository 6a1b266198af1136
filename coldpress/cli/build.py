"""Compiles a model for a device: runs `snakemake --config …` with the rules of this checkout, and shows its progress.

Every key of a build is a flag, in small letters with hyphens: `--help-all` lists all. An option of a chosen plug-in
is one, too (`--window-tokens 3` with `--cache window`). What is built already is not built again.
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coldpress.runtime.cli.command_line import flag
from coldpress.runtime.cli.declaration import FILE, PLACE, argument, command, known_keys, option, switch, with_keys
from coldpress.schemas.errors import ColdpressError

EXAMPLES = """
  coldpress build mistral-7b --device pixel6 --corpus my-text.txt
  coldpress build ./my-checkpoint --device build/host.yaml --dram-budget 1GB,2GB
  coldpress build relu-demo --device pixel6 --dry-run
  coldpress build --matrix builds.yaml --accepted accepted.json
"""
GIVEN_OTHERWISE = ("model", "locked")


@dataclass(frozen=True, kw_only=True)
class BuildFlags:
    model: str | None = argument(
        "a profile's name, a folder with a checkpoint, or a model of the hub", type=PLACE, required=False
    )
    cores: str = option("cores of this machine that jobs share (default: all)", default="all", metavar="N")
    dry_run: bool = switch("only show what would be done")
    locked: bool = switch("refuse a branch of the hub that no earlier build has pinned to a commit")
    profile: str | None = option(
        "snakemake's profile, for a cluster (default: profiles/default)", type=PLACE, metavar="FOLDER"
    )
    json: bool = switch("print one JSON object; progress goes to standard error")
    matrix: Path | None = option(
        "build models x devices x floors of a YAML file", type=FILE, metavar="FILE", panel="Many builds"
    )
    output: Path = option(
        "index.html, summary.json, junit.xml and changes.md of a matrix (default: build/matrix)",
        default=Path("build/matrix"),
        type=FILE,
        metavar="FOLDER",
        panel="Many builds",
    )
    accepted: Path | None = option(
        "what a matrix was accepted with: a build that is worse in quality, speed, size or determinism fails",
        type=FILE,
        metavar="FILE",
        panel="Many builds",
    )
    accept: bool = switch("write this matrix into --accepted", panel="Many builds")
    update_lock: bool = switch(
        "write the lock file beside the matrix anew: models whose weights or text differ from it are not built",
        panel="Many builds",
    )
    more: Mapping[str, str] = field(default_factory=dict)
    """The keys of the build, and options of plug-ins."""


def run(flags: BuildFlags) -> int:
    """Builds; returns the exit code of the build. Raises ColdpressError if a flag has no value or does not go with
    another, or there are no rules."""
    if unknown := flags.more.keys() - known_keys().keys():
        from coldpress.compiler.workflow.keys import check_flags  # it imports all stages

        check_flags(sorted(unknown))
    config = {**flags.more, **({"locked": "true"} if flags.locked else {})}
    told = ["--cores", flags.cores, *(["--dry-run"] if flags.dry_run else [])]
    told += ["--workflow-profile", flags.profile] if flags.profile else []
    if flags.matrix is not None:
        return _run_matrix(flags, flags.matrix, config, told)
    if flags.model is None:
        raise ColdpressError("no model was given; name one, or a file of builds with --matrix")
    return _shown({"model": flags.model} | config, told, flags)


def _run_matrix(flags: BuildFlags, file: Path, config: Mapping[str, str], told: Sequence[str]) -> int:
    if flags.model is not None or config:
        given = flags.model or next(flag(key) for key in config)
        raise ColdpressError(
            f"'{given}' was given with --matrix, whose file names models and keys; leave one of them out"
        )
    if flags.accept and flags.accepted is None:
        raise ColdpressError("--accept writes a file; name it with --accepted")
    if flags.dry_run:
        return _shown({"matrix": str(file)}, told, flags)
    from coldpress.cli import matrix

    with _beside_json(flags):
        code, results = matrix.run(
            file, flags.output, flags.accepted, told, accept=flags.accept, update_lock=flags.update_lock
        )
    if flags.json:
        print(json.dumps({"exit_code": code, **results.model_dump(mode="json")}))
    return code


def _shown(config: Mapping[str, str], told: Sequence[str], flags: BuildFlags) -> int:
    with _beside_json(flags):
        code = followed(config, told)
    if flags.json:
        is_built = not code and not flags.dry_run
        print(json.dumps({"exit_code": code, **(built(config) if is_built else {})}))
    return code


def _beside_json(flags: BuildFlags) -> contextlib.AbstractContextManager[object]:
    return contextlib.redirect_stdout(sys.stderr) if flags.json else contextlib.nullcontext()


def followed(config: Mapping[str, str], told: Sequence[str]) -> int:
    import snakemake  # noqa: F401  says what to install, before anything else is missing

    from coldpress.compiler.python_api import started  # the help needs none of it
    from coldpress.compiler.workflow.progress import follow

    with started(config, told) as process:
        assert process.stdout is not None
        try:
            return follow(process.stdout)
        except KeyboardInterrupt:  # the terminal has interrupted snakemake, too, which ends its jobs first
            process.wait()
            print("interrupted; the same command continues", file=sys.stderr)
            raise


def built(config: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a finished build made, as JSON-ready data."""
    from coldpress.compiler.io import load_record
    from coldpress.compiler.workflow.settings import resolve
    from coldpress.schemas.metrics import Metrics

    resolved = resolve(config)
    metrics = load_record(resolved.target_folder / "metrics.json", Metrics)
    return {
        "artifact": os.path.relpath(resolved.artifact),
        "manifest_sha256": metrics.artifact_sha256,
        "report": os.path.relpath(resolved.target_folder / "report.html"),
        "metrics": metrics.model_dump(mode="json"),
    }


COMMAND = with_keys(
    command(
        BuildFlags,
        run,
        name="build",
        help=__doc__,
        examples=EXAMPLES,
        usage="--device DEVICE [--KEY VALUE ...]",
        takes_more=True,
    ),
    GIVEN_OTHERWISE,
)
