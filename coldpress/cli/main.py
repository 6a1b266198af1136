# PYTHON_ARGCOMPLETE_OK
"""`coldpress`: compiles models, says what a build will give, and runs, serves, measures and checks artifacts.

A command's module is imported when it is called: the runtime's commands need neither torch nor snakemake. Bad input
ends in one sentence on standard error and exit code 2.
"""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from coldpress.runtime.cli import arguments as runtime_arguments
from coldpress.runtime.cli.command_line import Parser, fail, guarded
from coldpress.schemas import __version__
from coldpress.schemas.manifest import FORMAT_MAJOR, FORMAT_MINOR

EXAMPLES = """examples:
  coldpress build mistral-7b --device pixel6 --corpus my-text.txt
  coldpress quote mistral-7b --device pixel6
  coldpress generate demo.coldpress --prompt "The quick brown" --max-new-tokens 40
  coldpress inspect demo.coldpress

`coldpress COMMAND --help` explains a command. For completion by the tab key:
  eval "$(register-python-argcomplete coldpress)"
"""


class Command(NamedTuple):
    """A command of the compiler or the server: a module with `add_arguments(parser)` and `run(arguments)`."""

    help: str
    module: str
    extra: str
    """The extra of the package that it needs; empty for none."""


COMPILER = {
    "build": Command("compile a model for a device", "coldpress.cli.build", "compiler"),
    "quote": Command("say what a build will give, before it is made", "coldpress.compiler.quote.command", "compiler"),
}
SERVING = {
    "chat": Command("chat with an artifact, by its checkpoint's template", "coldpress.cli.chat", ""),
    "serve": Command("serve an artifact to clients of OpenAI and Anthropic", "coldpress.server.command", "serve"),
}
OTHERS = {
    "export": Command("write an artifact's weights for another engine", "coldpress.cli.export", "compiler"),
    "device": Command("measure, import, show and compare device profiles", "coldpress.compiler.device.command", ""),
    "diff": Command("compare two artifacts or builds", "coldpress.cli.diff", ""),
    "doctor": Command("say what works on this machine, and what to do about the rest", "coldpress.cli.doctor", ""),
}
COMMANDS: dict[str, Command | None] = {
    **COMPILER,
    **SERVING,
    **dict.fromkeys(runtime_arguments.HELP),
    **OTHERS,
}
"""All commands in the order of the help; None for the runtime's own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `coldpress`, and returns its exit code."""
    if sys.stdout is None:
        return fail("standard output is closed, but this command prints to it; redirect it to a file")
    if _is_text_file(sys.stdout):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the run
    given = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in _words(given) if word in COMMANDS), None)
    try:
        parser = build_parser(name)
    except ModuleNotFoundError as error:
        return _missing(name or "", error)
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    arguments, unknown = parser.parse_known_args(given)
    if unknown and not getattr(arguments, "takes_more", False):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.argv, arguments.more = given, unknown
    return _run(name or "", arguments)


def build_parser(name: str | None) -> argparse.ArgumentParser:
    """Returns the parser of all commands; the one that is `name` has its arguments and `run`, its function.

    Raises:
        ModuleNotFoundError: if the command needs a package that is not installed.
    """
    parser = Parser(
        prog="coldpress", description="Compiles language models, and runs them from flash.", epilog=EXAMPLES
    )
    version = f"coldpress {__version__}, artifact format {FORMAT_MAJOR}.{FORMAT_MINOR}"
    parser.add_argument("--version", action="version", version=version)
    parsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for each, command in COMMANDS.items():
        text = runtime_arguments.HELP[each] if command is None else command.help
        made = parsers.add_parser(each, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if each == name:
            made.set_defaults(run=_declared(each, command, made))
    return parser


def _words(given: Sequence[str]) -> Sequence[str]:
    """Returns the words of the command line, those typed so far while the shell completes one."""
    return os.environ.get("COMP_LINE", "").split()[1:2] if "_ARGCOMPLETE" in os.environ else given[:1]


def _declared(name: str, command: Command | None, parser: argparse.ArgumentParser) -> Callable[..., int | None]:
    """Declares a command's arguments; returns its function."""
    if command is None:
        runtime_arguments.add_arguments(name, parser)
        return importlib.import_module("coldpress.runtime.cli.commands").RUN[name]
    module = importlib.import_module(command.module)
    module.add_arguments(parser)
    return module.run


def _run(name: str, arguments: argparse.Namespace) -> int:
    """Runs the parsed command."""
    subject = next((getattr(arguments, key) for key in ("artifact", "model") if hasattr(arguments, key)), name)
    try:
        with np.errstate(all="ignore"):  # no warnings: results are checked for overflow, and refused in one sentence
            return guarded(lambda: arguments.run(arguments), str(subject))
    except ModuleNotFoundError as error:
        return _missing(name, error)


def _missing(name: str, error: ModuleNotFoundError) -> int:
    """Says which package a command lacks, and how to install it.

    Raises:
        ModuleNotFoundError: the error itself, if the module is our own.
    """
    package = (error.name or "").partition(".")[0]
    if package in ("", "coldpress"):
        raise error
    command = COMMANDS.get(name)
    extra = (command and command.extra) or "compiler"
    return fail(f"coldpress {name} needs {package}, which is not installed; pip install '.[{extra}]' in a checkout")


def _is_text_file(stream: object) -> TypeGuard["io.TextIOWrapper[Any]"]:
    return isinstance(stream, io.TextIOWrapper)


if __name__ == "__main__":
    sys.exit(main())
