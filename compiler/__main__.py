"""`python -m coldpress.compiler <stage>`: runs one stage as a job (compiler/job.py), as the rules do."""

import errno
import logging
import os
import sys

from coldpress.compiler.job import execute
from coldpress.compiler.pipeline import STAGES
from coldpress.schemas import __version__
from coldpress.schemas.errors import NO_THREAD, ColdpressError, UnknownNameError, is_refused_thread

REMEDY = "pip install '.[compiler]' or make env in a checkout"
REMEDIES = {
    errno.ENOSPC: "free some room or choose another build_dir",
    errno.EDQUOT: "free some room or choose another build_dir",
    errno.EACCES: "allow it",
    errno.EPERM: "allow it",
    errno.EROFS: "choose another build_dir",
    errno.EAGAIN: "allow more processes and threads (ulimit -u), or free some memory",
    errno.ENOLCK: "choose a build_dir on a file system that has locks",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; bad input ends in one sentence and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if not argv or argv[0] in ("-h", "--help"):
        print(
            __doc__,
            "\nStages, in order:\n  " + "\n  ".join(STAGES),
            "\n\n`python -m coldpress.compiler <stage> --help`",
        )
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"coldpress {__version__}")
        return 0
    try:
        if argv[0] not in STAGES:
            raise UnknownNameError("stage", argv[0], STAGES)
        execute(argv[0], argv[1:])
    except ColdpressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "coldpress"):
            raise
        print(f"error: the compiler needs {name}, which is not installed; {REMEDY}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"error: {argv[0]} was given no more memory ({error}); free some, then build again", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not is_refused_thread(error):
            raise
        print(f"error: {argv[0]} {NO_THREAD}, then build again", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno is None:  # not from the system but from a library, or a defect
            raise
        print(f"error: {_told(error, argv)}", file=sys.stderr)
        return 2
    return 0


def _told(error: OSError, argv: list[str]) -> str:
    """Describes a system error in one sentence; an error without a file name concerns the stage's output folder."""
    output = argv[argv.index("--output") + 1 :] if "--output" in argv else []
    named = None if isinstance(error.filename, int) else error.filename
    place = named or (f"a file in {os.path.dirname(os.path.abspath(output[0]))}" if output else "the build")
    number = error.errno or 0
    remedy = REMEDIES.get(number, "see to its disk and file system")
    return f"{os.fsdecode(place)}: {os.strerror(number)} ({argv[0]} stopped there); {remedy}, then build again"


if __name__ == "__main__":
    sys.exit(main())
