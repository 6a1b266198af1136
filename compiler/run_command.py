"""The command line that runs an artifact, as a user may paste it into a shell."""

import shlex
from collections.abc import Sequence

from coldpress.schemas.metrics import Sample

PROGRAM = "coldpress-run"


def run_command(program: Sequence[str], artifact: str, sample: Sample | None) -> str:
    """What makes `artifact` write the sample again; without one, what makes it write at all.

    Args:
        program: How the runtime is called.
        artifact: Its folder, as seen from where the command is run.
        sample: Text that it wrote, with the options.
    """
    command = shlex.join([*program, "generate", artifact])
    if sample is None:
        return f"{command} --prompt-ids 1 --max-new-tokens 32"
    return (
        f"{command} --prompt={shlex.quote(sample.prompt)} --max-new-tokens {sample.max_new_tokens} "
        f"--temperature {sample.temperature} --seed {sample.seed}"
    )
