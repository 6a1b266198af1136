"""Declares the flags of `coldpress quote`, without what answers it: its help and its completion need no solver."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from coldpress.runtime.cli.declaration import PLACE, argument, option, switch
from coldpress.runtime.profiles.devices import DEVICE_HELP


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
