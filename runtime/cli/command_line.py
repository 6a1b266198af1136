"""Runs a command of ours, and ends every mistake in one sentence and its exit code."""

import errno
import os
import sys
from collections.abc import Callable

from coldpress.schemas.errors import NO_THREAD, ColdpressError, is_refused_thread, printable

EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def guarded(run: Callable[[], int | None], subject: str) -> int:
    """Runs a command and returns its exit code; what a user can mend ends in one sentence that names `subject`."""
    try:
        code = run()
        sys.stdout.flush()
    except ColdpressError as error:
        return fail(str(error))
    except BrokenPipeError:  # the reader of our output has gone, so that there is nobody to tell
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        place = subject
        if error.errno in DISK_FULL and not error.filename:
            # only standard output has no file name, so that the full disk is the one behind it
            _drop_output()
            place = "standard output"
        return fail(f"{error.filename or place}: {error.strerror or error}")
    except RuntimeError as error:
        if not is_refused_thread(error):
            raise
        return fail(f"{subject}: this process {NO_THREAD}")
    except MemoryError:
        return fail(f"{subject}: this process needs more memory than it may have; give a smaller --dram-budget")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code or 0


def fail(sentence: str) -> int:
    print(f"error: {printable(sentence)}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _drop_output() -> None:
    """Redirects unwritten output to nowhere; else Python would try to flush it at exit, and print a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
