"""Builds the command line that runs an artifact, ready to paste into a shell."""

import shlex
from collections.abc import Sequence

from coldpress.schemas.metrics import Sample

PROGRAM = "coldpress"


def run_command(program: Sequence[str], artifact: str, sample: Sample | None) -> str:
    """Returns the command that makes `artifact`, as seen from where it is run, write the sample again, or any text."""
    command = shlex.join([*program, "generate", artifact])
    if sample is None:
        return f"{command} --prompt-ids 1 --max-new-tokens 32"
    more = f"--max-new-tokens {sample.max_new_tokens} --temperature {sample.temperature} --seed {sample.seed}"
    if sample.is_chat:
        return f"echo {shlex.quote(sample.prompt)} | {shlex.join([*program, 'chat', artifact])} {more}"
    return f"{command} --prompt={shlex.quote(sample.prompt)} {more}"
