"""`coldpress`: compiles models, says what a build will give, and runs, serves, measures and checks artifacts.

A command's module is imported when it is called: the runtime's commands need neither torch nor snakemake. Bad input
ends in one sentence on standard error and exit code 2.
"""

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import click
from click.exceptions import NoSuchCommand
from click.shell_completion import shell_complete
from rich_click import RichCommand, RichOption

from coldpress.runtime.cli.command_line import fail, guarded
from coldpress.runtime.cli.declaration import HELP, Commands
from coldpress.schemas import __version__
from coldpress.schemas.errors import clipped

COMPLETION, RUNTIME = "_COLDPRESS_COMPLETE", "coldpress.runtime.cli.commands"

EXAMPLES = """examples:
  coldpress build mistral-7b --device pixel6 --corpus my-text.txt
  coldpress quote mistral-7b --device pixel6
  coldpress generate demo.coldpress --prompt "The quick brown" --max-new-tokens 40
  coldpress inspect demo.coldpress

`coldpress COMMAND --help` explains a command. Completion by the tab key, in bash (in zsh: zsh_source) and in fish:
  eval "$(_COLDPRESS_COMPLETE=bash_source coldpress)"
  _COLDPRESS_COMPLETE=fish_source coldpress | source
"""


class KnownCommand(NamedTuple):
    """A command: what it does, and its module, which has `COMMAND`."""

    help: str
    module: str
    extra: str = ""
    """The extra of the package that it needs; empty for none."""


COMMANDS = {
    "build": KnownCommand("compile a model for a device", "coldpress.cli.build", "compiler"),
    "quote": KnownCommand(
        "say what a build will give, before it is made", "coldpress.compiler.quote.command", "compiler"
    ),
    "chat": KnownCommand("chat with an artifact, by its checkpoint's template", "coldpress.cli.chat"),
    "serve": KnownCommand("serve an artifact to clients of OpenAI and Anthropic", "coldpress.server.command", "serve"),
    "generate": KnownCommand("continue a prompt, reading weights from flash", RUNTIME),
    "inspect": KnownCommand("show what an artifact is: model, files, families, plans", RUNTIME),
    "verify": KnownCommand("check every byte of an artifact: digests, page checksums, weights", RUNTIME),
    "bench": KnownCommand("measure decoding for selectors and caches; the last line is JSON", RUNTIME),
    "simulate": KnownCommand("replay a trace on a modelled device, without weights", RUNTIME),
    "emulate": KnownCommand("run any command with the reads and the memory of a device", RUNTIME),
    "export": KnownCommand("write an artifact's weights for another engine", "coldpress.cli.export", "compiler"),
    "device": KnownCommand("measure, import, show and compare device profiles", "coldpress.compiler.device.command"),
    "diff": KnownCommand("compare two artifacts or builds", "coldpress.cli.diff"),
    "doctor": KnownCommand("say what works on this machine, and what to do about the rest", "coldpress.cli.doctor"),
}


def load(name: str) -> click.Command:
    """Returns a command; raises ModuleNotFoundError if it needs a package that is not installed."""
    module = importlib.import_module(COMMANDS[name].module)
    return module.COMMANDS[name] if COMMANDS[name].module == RUNTIME else module.COMMAND


class FrontDoor(Commands):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(name) if name else None, rest


def _version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        from coldpress.schemas.manifest import FORMAT_MAJOR, FORMAT_MINOR  # a help needs no records

        print(f"coldpress {__version__}, artifact format {FORMAT_MAJOR}.{FORMAT_MINOR}")
        context.exit()


FRONT_DOOR = FrontDoor(
    name="coldpress",
    help="Compiles language models, and runs them from flash.",
    epilog=EXAMPLES,
    no_args_is_help=False,
    context_settings=dict(HELP),
    commands={name: RichCommand(name=name, short_help=known.help) for name, known in COMMANDS.items()},
    params=[
        RichOption(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
        )
    ],
)


def main(argv: Sequence[str] | None = None) -> int:
    if sys.stdout is None:
        return fail("standard output is closed, but this command prints to it; redirect it to a file")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the run
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if asked := os.environ.get(COMPLETION):
            return shell_complete(FRONT_DOOR, {}, "coldpress", COMPLETION, asked)
        return guarded(lambda: _run(given), "coldpress")
    except click.UsageError as error:
        return _refused(error)
    except ModuleNotFoundError as error:
        return _missing(next((word for word in given if word in COMMANDS), ""), error)


def _run(given: list[str]) -> int:
    try:
        with FRONT_DOOR.make_context("coldpress", list(given), obj=given) as context:
            return FRONT_DOOR.invoke(context)
    except click.exceptions.Exit as done:  # after a help
        return done.exit_code


def _refused(error: click.UsageError) -> int:
    text = error.message if isinstance(error, click.NoSuchOption | NoSuchCommand) else error.format_message()
    text = text[:1].lower() + clipped(text[1:].rstrip("."), 500)
    if isinstance(error, click.NoSuchOption | NoSuchCommand) and error.possibilities:
        text += f" (did you mean {' or '.join(error.possibilities)}?)"
    return fail(f"{text}; see `{error.ctx.command_path if error.ctx else 'coldpress'} --help`")


def _missing(name: str, error: ModuleNotFoundError) -> int:
    package = (error.name or "").partition(".")[0]
    if package in ("", "coldpress"):
        raise error
    extra = COMMANDS[name].extra or "compiler"
    return fail(f"coldpress {name} needs {package}, which is not installed; pip install '.[{extra}]' in a checkout")


if __name__ == "__main__":
    sys.exit(main())
