"""`python -m compiler <stage>`: runs one stage as a job (compiler/job.py)."""

import errno
import logging
import sys

from compiler.job import STAGES, execute
from schemas import __version__
from schemas.errors import ColdpressError, UnknownNameError

REMEDY = "pip install 'coldpress[compiler]', or make env in a checkout"


def main(argv: list[str] | None = None) -> int:
    """Entry point; bad input ends in one sentence and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__, "\nStages, in order:\n  " + "\n  ".join(STAGES), "\n\n`python -m compiler <stage> --help`")
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
        if name in ("", "compiler", "runtime", "schemas"):
            raise
        print(f"error: the compiler needs {name}, which is not installed; {REMEDY}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"error: no space left on the device that holds {error.filename or 'the build folder'}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
