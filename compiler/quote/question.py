"""Declares the flags of `coldpress quote`, without what answers it: its help and its completion need no solver."""

from dataclasses import dataclass

from coldpress.runtime.cli.declaration import PLACE, argument, option, switch
from coldpress.runtime.profiles.devices import DEVICE_HELP


@dataclass(frozen=True, kw_only=True)
class Question:
    """The flags of `coldpress quote`; None takes a default that depends on the model or the device."""

    model: str = argument("what model= takes, a build folder such as build/<model>, or an artifact", type=PLACE)
    revision: str | None = option("commit of a hub model, 40 hexadecimal digits", metavar="COMMIT")
    device: str = option(DEVICE_HELP, required=True, metavar="NAME,…|all")
    dram_budget: str | None = option(
        "as dram_budget= takes it (default: each device's); several as 1GB,2GB,4GB quote one build of them all, whose "
        "plans share method, format and KV-cache format",
        metavar="BYTES,…",
    )
    max_ppl_ratio: float | None = option(
        "largest allowed perplexity over the source's (default: 1.05)", type=float, metavar="R"
    )
    context_length: int | None = option(
        "tokens that the KV cache holds (default: the model's, at most 1024)", type=int, metavar="N"
    )
    prompt_tokens: int | None = option(
        "tokens of the prompt whose first token is timed (default: 128)", type=int, metavar="N"
    )
    json: bool = switch("print one JSON object")
