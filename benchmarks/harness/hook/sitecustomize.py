"""Found by every Python whose PYTHONPATH has this folder: notes at its end which of the project's files it has read.

A record's inputs are what its run has loaded, in this process and in all that it started (harness/inputs.py): modules,
and files that Python's own `open` has read. Each process leaves one text file in the folder that BENCHMARK_INPUTS
names, a path to a line.
"""

import atexit
import os
import sys

_FOLDER = os.environ.get("BENCHMARK_INPUTS")
_ROOTS = tuple(os.environ.get("BENCHMARK_ROOTS", "").split(os.pathsep))
_opened = set()


def _see(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and (arguments[1] or "r")[:1] == "r":
        path = arguments[0] if arguments[0].startswith("/") else os.path.join(os.getcwd(), arguments[0])
        if path.startswith(_ROOTS) and not path.endswith(".pyc"):
            _opened.add(path)


def _note(folder):
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())} | _opened
    named = sorted(path for path in files if path and path.startswith(_ROOTS))
    if os.path.isdir(folder):  # a process that outlives the run notes nothing
        with open(os.path.join(folder, f"{os.getpid()}.txt"), "w") as file:
            file.write("\n".join(named))


if _FOLDER:
    sys.addaudithook(_see)
    atexit.register(_note, _FOLDER)
