"""Says, before any build, what a model will do on a device: whether it fits, how fast it decodes, with what quality.

    coldpress quote mistral-7b --device pixel6
    coldpress quote build/prose7m --device all --json
    coldpress quote prose7m-pixel6.coldpress --device oneplus12 --dram-budget 2GB
    coldpress quote mistral-7b --device pixel6 --dram-budget 2GB,3GB,4GB --method dense --format int4_group32

Every key of a build is a flag here, too: the quote is of the build that they would make.
The model is a name or folder as for `model=`, and only its config.json is read; a build folder, with measured curves
and activations; or an artifact, which carries them. No weight is read. Several budgets are those of one build.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from coldpress.runtime.cli.declaration import PLACE, argument, command, option, switch, with_keys
from coldpress.runtime.device_profiles.devices import DEVICE_HELP


@dataclass(frozen=True, kw_only=True)
class Question:
    """The flags of `coldpress quote`; None takes a default that depends on the model or the device."""

    model: str = argument("what model= takes, a build folder such as build/<model>, or an artifact", type=PLACE)
    device: str = option(DEVICE_HELP, required=True, metavar="NAME,…|all")
    dram_budget: str | None = option(
        "as dram_budget= takes it (default: each device's); several as 1GB,2GB,4GB quote one build of them all, whose "
        "plans share method, format and KV-cache format",
        metavar="BYTES,…",
    )
    prompt_tokens: int | None = option(
        "tokens of the prompt whose first token is timed (default: 128)", type=int, metavar="N"
    )
    why: bool = switch("print the basis of each figure, too")
    json: bool = switch("print one JSON object")
    more: Mapping[str, str] = field(default_factory=dict)
    """Other keys of the build, and options of plug-ins."""


def run(question: Question) -> int:
    """Prints a table, or one JSON object (compiler/quote/records.py); returns 2 if no device holds the model. Raises
    ColdpressError if the model, a device or a setting is refused."""
    from rich.console import Console

    from coldpress.compiler.quote.answers import answer  # the help needs no solver
    from coldpress.compiler.quote.show import show

    quote = answer(question)
    if question.json:
        print(quote.to_json(), end="")
    else:
        show(quote, Console(highlight=False, markup=False), why=question.why)
    return 0 if any(one.fits for one in quote.devices) else 2


COMMAND = with_keys(
    command(Question, run, name="quote", help=__doc__, usage="--device DEVICE [--KEY VALUE ...]", takes_more=True),
    ("model", "device", "dram_budget", "build_dir", "label", "locked"),
)
