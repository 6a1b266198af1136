"""Notes at once each of the project's files that a process reads; any Python with this folder in PYTHONPATH imports it.

A record's inputs are the files that its run has loaded, in this process and in all that it started or forked
(harness/inputs.py): modules, and files that Python's own `open` has read. All processes append to the file that
BENCHMARK_INPUTS names, one path per line. They append at once, since a forked process of a pool and a killed one do not
reach their end.
"""

import os
import sys
from importlib.util import source_from_cache

_noted = set()


def _see(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and (arguments[1] or "r")[:1] == "r":
        note(os.path.join(os.getcwd(), arguments[0]))
    elif event == "import" and arguments[1]:  # an extension module, whose file Python does not open
        note(arguments[1])


def note(path):
    """Notes one file if it is the project's and not yet noted."""
    notes, roots = os.environ.get("BENCHMARK_INPUTS"), os.environ.get("BENCHMARK_ROOTS", "").split(os.pathsep)
    ours = path.startswith(tuple(roots)) and "/site-packages/" not in path
    if not notes or path in _noted or path == notes or not (ours or "/_native." in path):
        return
    _noted.add(path)
    source = source_from_cache(path) if path.endswith(".pyc") else path
    try:
        file = os.open(notes, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:  # this process outlives the run
        return
    os.write(file, f"{source}\n".encode())
    os.close(file)


def begin(modules):
    """Notes these modules, and from now on every file that is read."""
    for module in modules:
        note(getattr(module, "__file__", None) or "")
    sys.addaudithook(_see)


if os.environ.get("BENCHMARK_INPUTS") and __name__ == "sitecustomize":
    begin(list(sys.modules.values()))
