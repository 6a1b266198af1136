"""Asks a dry run which records each stage takes, for tests that run stages without Snakemake."""

import atexit
import functools
import json
import os
import shlex
import tempfile
from pathlib import Path

from coldpress.compiler.needs import Inputs
from coldpress.compiler.workflow import settings
from coldpress.compiler.workflow.settings import BuildConfig
from tests.support.data import ROOT
from tests.support.workflow import Server


def inputs_for(config: BuildConfig) -> Inputs:
    """Returns stage -> record parameter -> the stage that makes the record, for a build of this configuration."""
    asked = {
        "method": "predictor" if settings.needs_predictors(config) else "dense",
        "relufy": config["relufy"],
        "distill": str(config["distill"]).lower(),
        "algorithm": config["algorithm"],
    }
    return inputs_of_rules(*(f"{key}={value}" for key, value in asked.items()), export=bool(config["export"]))


@functools.cache
def inputs_of_rules(*config: str, export: bool = False, importance: bool = False) -> Inputs:
    """Returns the same for settings of `--config`; `export` and `importance` add these stages."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "imatrix.dat").touch()
        more = [*(["export=gguf"] if export else []), *(["imatrix=imatrix.dat"] if importance else [])]
        arguments = ["-s", str(ROOT / "Snakefile"), "--cores", "1"]
        arguments += ["--dry-run", "--printshellcmds", "--config", "model=relu-demo", *config, *more]
        done = _server().run(arguments, Path(folder), {**os.environ, "HF_HUB_OFFLINE": "1"})
    return inputs_in(done.stdout + done.stderr)


def inputs_in(output: str) -> Inputs:
    """Returns the same from the output of a dry run with --printshellcmds: the command of preflight has it."""
    lines = [shlex.split(line) for line in output.splitlines() if " -m coldpress.compiler preflight " in line]
    assert lines, output[-3000:]
    return json.loads(lines[0][lines[0].index("--inputs") + 1])


@functools.cache
def _server() -> Server:
    """Starts a server for this checkout's snakemake; it ends with this process."""
    server = Server(ROOT)
    atexit.register(server.close)
    return server
