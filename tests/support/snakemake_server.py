"""Runs snakemake in forked processes, each with the imports of this one: `python -P snakemake_server.py CHECKOUT`.

A fresh interpreter spends most of a dry run on importing snakemake and the stages and on parsing their sources for
their digests. A forked one finds all that done, as it was when this process began. Each line of standard input asks for
one run, as a JSON object: `arguments`, `folder`, `environment`, and the files `stdout` and `stderr`. Each line of the
answer is an exit code.
"""

import importlib
import json
import os
import runpy
import sys


def main() -> None:
    """Answers requests one by one; in a forked process it returns when snakemake does."""
    sys.path.insert(0, sys.argv[1])
    import_workflow()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(request)
            runpy.run_module("snakemake", run_name="__main__")
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def import_workflow() -> None:
    """Imports what every run needs: snakemake, what it loads late, and the checkout's stages with their sources."""
    for name in (
        "snakemake.cli",
        "smart_open",
        "coldpress.compiler.workflow.settings",
        "coldpress.compiler.workflow.ending",
    ):
        importlib.import_module(name)
    from coldpress.compiler.code_digest import source_files
    from coldpress.compiler.job import parameters_of
    from coldpress.compiler.pipeline import STAGES

    for stage in STAGES:
        parameters_of(stage)
        source_files(stage, {})


def _become(request: dict[str, object]) -> None:
    """Takes the folder, the environment, the streams and the command line that were asked for."""
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(dict(request["environment"]))  # type: ignore[call-overload]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(str(request[name]), os.O_WRONLY), number)
    sys.argv = ["snakemake", *request["arguments"]]  # type: ignore[misc]


if __name__ == "__main__":
    main()
