"""The command-line parser of all our commands: it refuses in one sentence, as everything else does."""

import argparse
import sys
from typing import NoReturn

from coldpress.schemas.errors import clipped, printable

EXIT_BAD_INPUT = 2


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one sentence, without pages of usage; so are those of its commands."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        print(f"error: {printable(clipped(message, 500))}; see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT)
