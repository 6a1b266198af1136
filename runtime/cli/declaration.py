"""Declares the commands of `coldpress` on click.

A command's flags are the fields of a frozen record, each declared once, by `option`, `switch` or `argument`. A value
that is not given is the field's default. rich-click prints the help.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, fields
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource, augment_usage_errors
from rich.text import Text
from rich_click import RichArgument, RichCommand, RichGroup, RichHelpConfiguration, RichHelpFormatter, RichOption
from rich_click.rich_panel import RichOptionPanel

from coldpress.runtime.cli.command_line import flag, guarded

PLACE, FILE = click.Path(readable=False), click.Path(readable=False, path_type=Path)
"""Types of text and of a `Path` that the shell completes by files' names; what is no file is said when it is opened."""
KEY = "key_"
"""Before the name of a build's key, so that it is no other flag's."""
COMMON = (
    "device",
    "dram_budget",
    "corpus",
    "context_length",
    "max_ppl_ratio",
    "method",
    "format",
    "kv_cache",
    "revision",
)
"""Keys that the short help shows."""
HELP: Mapping[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "rich_help_config": RichHelpConfiguration(
        theme="default-slim",
        enable_theme_env_var=False,
        force_terminal=None,
        text_markup=None,
        commands_before_options=True,
        options_table_column_types=["opt_all_metavar", "help"],
        append_metavars_help_string="{}",
        required_long_string="(required)",
    ),
}
"""Settings of the help: sections without boxes, in color only on a terminal."""
Flags = TypeVar("Flags")
SPELLINGS: Mapping[str, tuple[str, ...]] = {"dram": ("--dram-budget",), "dram_budget": ("--dram",)}


def option(help: str, *, default: Any = None, **settings: Any) -> Any:
    """Declares a field as the flag of its name, with click's `settings`."""

    def make(name: str) -> RichOption:
        return RichOption([flag(name), *SPELLINGS.get(name, ()), name], help=help, **settings)

    return field(default=default, metadata={"make": make})


def switch(help: str, **settings: Any) -> Any:
    """Declares a field as a flag without a value: True where it is given."""
    return option(help, default=False, is_flag=True, **settings)


def argument(help: str, **settings: Any) -> Any:
    """Declares a field as a word of the command line that has no flag; None where it may be left out, and is."""

    def make(name: str) -> RichArgument:
        return RichArgument([name], help=help, **settings)

    default: dict[str, Any] = {} if settings.get("required", True) else {"default": None}
    return field(metadata={"make": make}, **default)


class _AsWritten(RichCommand):
    """Help whose paragraphs fill the terminal's width; paragraphs with indented lines stay as they are written."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _print_text(self.help, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _print_text(self.epilog, formatter)

    def get_help(self, ctx: click.Context) -> str:
        """Returns the help, without the spaces that fill lines up."""
        return "\n".join(line.rstrip() for line in super().get_help(ctx).splitlines()).rstrip()


def _print_text(text: str | None, formatter: click.HelpFormatter) -> None:
    assert isinstance(formatter, RichHelpFormatter)
    for paragraph in (text or "").strip("\n").split("\n\n"):
        is_written = any(line.startswith(" ") for line in paragraph.splitlines())
        shown = paragraph if is_written else " ".join(paragraph.splitlines())
        formatter.write(formatter.highlighter(Text(f"{shown}\n" if shown else "")), soft_wrap=is_written)


class Commands(_AsWritten, RichGroup):
    """A command that has commands."""


class Command(_AsWritten):
    """A command of `coldpress`; `invoke` returns its exit code.

    Attributes:
        one_of: The section of flags that exclude each other; empty for none.
        needs_one: Whether one of them has to be given.
        takes_more: Whether flags that are not declared, each with a value, become its parameter `more`.
        rare: Names of parameters that `--help-all` shows, and `--help` does not.
    """

    one_of, needs_one, takes_more = "", False, False
    rare: Collection[str] = ()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.takes_more:
            known = {name for each in self.get_params(ctx) for name in each.opts}
            ctx.params["more"], args = split_off(args, known, ctx)
        with augment_usage_errors(ctx):
            left = super().parse_args(ctx, args)
        among = [each for each in self.params if isinstance(each, RichOption) and each.panel == self.one_of]
        given = [
            each.opts[0] for each in among if ctx.get_parameter_source(each.name or "") is ParameterSource.COMMANDLINE
        ]
        if not ctx.resilient_parsing and len(given) > 1:
            raise click.UsageError(f"{' and '.join(given)} exclude each other", ctx)
        if not (ctx.resilient_parsing or given) and self.needs_one:
            raise click.UsageError(f"one of {', '.join(each.opts[0] for each in among)} is missing", ctx)
        return left

    def get_help(self, ctx: click.Context) -> str:
        """Returns the help, without the rare flags: the shell completes them all the same."""
        rare = [each for each in self.params if each.name in self.rare and isinstance(each, RichOption)]
        for each in rare:
            each.hidden = True
        try:
            return super().get_help(ctx)
        finally:
            for each in rare:
                each.hidden = False

    def invoke(self, ctx: click.Context) -> int:
        import numpy as np  # not for a help or a completion

        subject = ctx.params.get("artifact") or ctx.params.get("model") or ctx.info_name
        with np.errstate(all="ignore"):  # no warnings: results are checked for overflow, and refused in one sentence
            return guarded(partial(super().invoke, ctx), str(subject))


def known_keys() -> dict[str, dict[str, Any]]:
    """Returns the keys of a build from their JSON schema: name -> what the schema says of it."""
    text = resources.files("coldpress.schemas").joinpath("json/config.schema.json").read_text(encoding="utf-8")
    return json.loads(text)["properties"]


def with_keys(made: Command, given_otherwise: Collection[str]) -> Command:
    """Adds a flag for each key that is not `given_otherwise`, and `--help-all`; their values are put into `more`."""
    rare: list[str] = []
    for name, declared in known_keys().items():
        if name in given_otherwise:
            continue
        default = declared.get("default")
        text = declared["description"] + ("" if default is None else f" (default: {default})")
        names = [flag(name), *SPELLINGS.get(name, ()), f"{KEY}{name}"]
        made.params.append(
            RichOption(names, help=text, metavar="VALUE", panel="Keys", callback=_keep, expose_value=False)
        )
        rare += [] if name in COMMON else [f"{KEY}{name}"]
    how: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
    made.params.append(RichOption(["--help-all"], help="Show all keys, too.", callback=_show_all, **how))
    made.rare = rare
    made.add_panel(RichOptionPanel("Keys"))
    return made


def _keep(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        context.params["more"][(parameter.name or "").removeprefix(KEY)] = value


def _show_all(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        assert isinstance(context.command, Command)
        print(_AsWritten.get_help(context.command, context))
        context.exit()


def split_off(words: Sequence[str], known: set[str], ctx: click.Context) -> tuple[dict[str, str], list[str]]:
    """Returns the values of flags that are not `known` by name, from `--name value` or `--name=value`; other words.
    Raises `UsageError` if such a flag has no value."""
    found: dict[str, str] = {}
    others, left = list[str](), list(words)
    while left and left[0] != "--":
        word = left.pop(0)
        name, is_one, value = word.partition("=")
        if not name.startswith("--") or name in known:
            others.append(word)
        elif is_one or left:
            found[name.removeprefix("--").replace("-", "_")] = value if is_one else left.pop(0)
        elif not ctx.resilient_parsing:
            raise click.UsageError(f"'{name}' was given without a value", ctx)
    return found, [*others, *left]


def command(
    flags: type[Flags],
    run: Callable[[Flags], int | None],
    *,
    name: str,
    help: str | None = None,
    examples: str = "",
    more_help: str = "",
    usage: str = "[OPTIONS]",
    one_of: str = "",
    needs_one: bool = False,
    takes_more: bool = False,
) -> Command:
    """Returns the command that calls `run` with a record of its flags; None from `run` is success.

    Args:
        help: What it does, in paragraphs; usually the docstring of its module, by default that of `run`.
        examples: Lines that call it; lines that do not are left out.
        usage: Its flags in the usage line.
        one_of, needs_one, takes_more: See `Command`.
    """

    def call(**given: Any) -> int | None:
        return run(flags(**{name: value for name, value in given.items() if value is not None}))

    params = [each.metadata["make"](each.name) for each in fields(flags) if each.metadata]  # type: ignore[arg-type]
    calls = [line for line in examples.splitlines() if f" {name} " in f"{line} "]
    epilog = "\n\n".join(filter(None, (more_help, "\n".join(["examples:", *calls]) if calls else "")))
    made = Command(
        name=name, callback=call, params=params, help=help or run.__doc__, epilog=epilog, options_metavar=usage
    )
    made.one_of, made.needs_one, made.takes_more = one_of, needs_one, takes_more
    sections = dict.fromkeys(str(each.panel) for each in params if each.panel)
    made.panels = [
        RichOptionPanel("Arguments", column_types=["opt_all", "help"]),
        *(RichOptionPanel(section) for section in sorted((*sections, "Options"), key=lambda title: title != one_of)),
    ]
    return made
