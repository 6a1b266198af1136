"""Runs snakemake in forked processes, each with the imports of this one: `python -P snakemake_server.py CHECKOUT`.

A fresh interpreter spends most of a dry run on importing snakemake and the stages and on parsing their sources for
their digests. A forked process inherits all that, as of this process's start. Each line of standard input asks for
one run, as a JSON object: `arguments`, `folder`, `environment`, the files `stdout` and `stderr`, and the `python` that
starts jobs. Each line of the answer is an exit code.
"""

import atexit
import importlib
import json
import os
import runpy
import sys
import threading
import traceback
from typing import NoReturn


def main() -> None:
    """Answers requests one by one."""
    sys.path.insert(0, sys.argv[1])
    import_workflow()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(request)
            run_and_end("snakemake")
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def import_workflow() -> None:
    """Imports the modules of every run: snakemake and its plug-ins, the Snakefile's imports, and all stages.

    It also parses the sources of the checkout's stages for their digests.
    """
    from snakemake.cli import get_argument_parser

    get_argument_parser()
    workflow = "coldpress.compiler.workflow"
    names = (f"{workflow}.{name}" for name in ("around_snakemake", "commands", "download", "inputs"))
    for name in ("smart_open", *names):
        importlib.import_module(name)
    from coldpress.compiler.code_digest import source_files
    from coldpress.compiler.job import parameters_of
    from coldpress.compiler.pipeline import STAGES

    for stage in STAGES:
        parameters_of(stage)
        source_files(stage, {})


def run_and_end(module: str) -> NoReturn:
    """Runs a module and ends this process like an interpreter, but without freeing its heap.

    Freeing it would take longer than many runs.
    """
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(request: dict[str, object]) -> None:
    """Takes over the request's folder, environment, streams and command line."""
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(dict(request["environment"]))  # type: ignore[call-overload]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(str(request[name]), os.O_WRONLY), number)
    sys.executable = str(request["python"])
    sys.argv = ["snakemake", *request["arguments"]]  # type: ignore[misc]


if __name__ == "__main__":
    main()
