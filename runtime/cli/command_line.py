"""Parses the command line of all our commands; refuses a mistake in one sentence."""

import argparse
import sys
from typing import NoReturn

from coldpress.schemas.errors import clipped, printable

EXIT_BAD_INPUT = 2


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one sentence without usage; parsers of its commands inherit that."""

    def error(self, message: str) -> NoReturn:
        """Prints the error and ends the process with exit code 2."""
        print(f"error: {printable(clipped(message, 500))}; see `{self.prog} --help`", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT)
