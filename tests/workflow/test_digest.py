"""The digest of a stage misses nothing: all that its job imports in a real build counts."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coldpress.compiler.code_digest import source_files
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.workflow.settings import resolve
from tests.support.workflow import Workflow

WATCHED = """
import importlib, json, sys
import coldpress.compiler.job
if sys.argv[1] == "explore":  # another density, or another size of DRAM, runs the same modules again
    variants = importlib.import_module("coldpress.compiler.quality.variants")
    variants.DENSITIES = variants.CACHED_DENSITIES = (0.5,)
    variants.RESIDENT_SHARES = (0.6,)
coldpress.compiler.job.execute(sys.argv[1], sys.argv[2:])
imported = {module.__file__ for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
print(json.dumps(sorted(imported)))
"""
RUNNER = {
    "coldpress/compiler/job.py",
    "coldpress/compiler/code_digest.py",
    "coldpress/compiler/lock.py",
    "coldpress/compiler/pipeline.py",
    "coldpress/compiler/io.py",
    "coldpress/runtime/artifact/__init__.py",
    "coldpress/runtime/artifact/byte_planes.py",
    "coldpress/schemas/sealed.py",
    "coldpress/runtime/__init__.py",
    "coldpress/runtime/cli/__init__.py",
    "coldpress/runtime/cli/command_line.py",
}
"""What reads the command line, loads records and calls a stage; that it changes no result, the tests of jobs hold."""

LEFT_OUT = ("relufy", "distill", "route", "export", "draft")
"""Stages that the build has no job of."""


@pytest.fixture(scope="module")
def commands(built: Workflow) -> dict[str, list[str]]:
    """The arguments of one job of every stage, as the rules give them."""
    found = []
    # only the first has `gram`, `importance` and `explore`; the build's own jobs are those of the last
    first = {"algorithm": "gptq", "imatrix": built.imatrix, "method": "auto", "explore_tokens": 1}
    for settings in (first, {"algorithm": "rtn"}):
        done = built.run("--dry-run", "--printshellcmds", "--forceall", **settings)
        found += re.findall(r"-m coldpress.compiler (\w+) (.*?) 2> ", done.stdout + done.stderr)
    return {stage: shlex.split(arguments) for stage, arguments in found}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in LEFT_OUT])
def test_all_that_a_job_runs_is_in_its_digest(
    built: Workflow, commands: dict[str, list[str]], tmp_path: Path, stage: str
) -> None:
    copy = built.at(tmp_path)
    shutil.copytree(built.folder, copy.folder, dirs_exist_ok=True, symlinks=True)
    shutil.rmtree(copy.device / stage, ignore_errors=True)
    command = [text.replace(str(built.folder), str(copy.folder)) for text in commands[stage]]
    environment = copy.environment() | {"PYTHONPATH": f"{copy.environment()['PYTHONPATH']}:{copy.tree}"}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, stage, *command],
        cwd=copy.model.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {_named(copy.tree, file) for file in json.loads(done.stdout.splitlines()[-1])}
    config = {key: str(value) for key, value in built.config.items()} | (
        {"method": "auto", "algorithm": "gptq"} if stage == "explore" else {}
    )
    plugins = resolve(config).plugins()
    digested = {_named(copy.tree, str(file)) for file in source_files(stage, plugins, copy.tree)}
    assert imported - digested - RUNNER - {""} == set()


def _named(tree: Path, file: str) -> str:
    """A Python file of the checkout by its path in it; empty for any other."""
    path = Path(file)
    inside = path.suffix == ".py" and path.is_relative_to(tree)
    return path.relative_to(tree).as_posix() if inside else ""
