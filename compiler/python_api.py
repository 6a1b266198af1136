"""`coldpress.build` and `coldpress.quote`: the compiler as two functions of Python."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from coldpress.compiler.quote.answers import answer
from coldpress.compiler.quote.command import Question
from coldpress.compiler.quote.records import Quote
from coldpress.compiler.workflow import settings
from coldpress.compiler.workflow.progress import shorten
from coldpress.schemas.errors import ColdpressError


def build(
    model: str | Path,
    device: str,
    *,
    progress: Callable[[str], object] | None = None,
    cores: int | str | None = None,
    **config: str | int | float | bool,
) -> Path:
    """Compiles a model for a device, and returns the artifact's folder.

    It runs `snakemake --config model=… device=… …` in another process, as on the command line: steps whose results are
    there are skipped, and an interrupted build goes on.

    Args:
        model: A name of profiles/models, a folder with a checkpoint, or owner/name of a hub model.
        device: A name of profiles/devices, or a file.
        progress: Called with one line for each finished step.
        cores: Cores of this machine that jobs share; None for snakemake's own choice.
        config: Other keys of `--config`, such as dram_budget="3GB".

    Raises:
        ColdpressError: for an unknown key or value, before anything runs; or with the sentence of the step that failed.
    """
    given = {"model": str(model), "device": device, **{key: str(value) for key, value in config.items()}}
    resolved = settings.resolve(given)
    told = [] if cores is None else ["--cores", str(cores)]
    start = time.monotonic()
    clock = iter(lambda: time.monotonic() - start, None)
    with started(given, told) as process:
        assert process.stdout
        lines = shorten((line.rstrip("\n") for line in process.stdout), clock)
        last, code = "", 0
        while True:
            try:
                last = next(lines)
            except StopIteration as ended:
                code = ended.value
                break
            if progress:
                progress(last)
    if code or process.returncode:
        raise ColdpressError(last.removeprefix("error: ") or f"snakemake ended with code {process.returncode}")
    return resolved.artifact


def started(config: Mapping[str, str], told: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Starts snakemake with the rules of this checkout and further words of its command line, `told`; all that it says
    is on the process's standard output.

    Raises:
        ColdpressError: if this installation has no rules.
    """
    snakefile = settings.ROOT / "Snakefile"
    if not snakefile.is_file():
        raise ColdpressError(
            f"there is no Snakefile in {settings.ROOT}, because only the package is installed; build in a checkout "
            "of coldpress (make env)"
        )
    words = [f"{key}={value}" for key, value in config.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "snakemake", "--snakefile", str(snakefile), *told, "--config", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


def quote(
    model: str | Path,
    device: str,
    *,
    dram_budget: str | int | None = None,
    prompt_tokens: int | None = None,
    **keys: str | int | float | bool,
) -> Quote:
    """Predicts speed and quality of a model on devices without building it: the records of `coldpress quote`.

    Args:
        model: What `build` takes, a build folder, or an artifact.
        device: One name or file, several with commas between them, or `all`.
        dram_budget: One budget, or several with commas between them; None for each device's.
        prompt_tokens: Tokens of the prompt whose first token is timed.
        keys: Other keys of the build, such as `method`, `format`, `revision`, `max_ppl_ratio` and `context_length`.

    Raises:
        ColdpressError: if the model, a device or a setting is refused.
    """
    question = Question(
        model=str(model),
        device=device,
        dram_budget=None if dram_budget is None else str(dram_budget),
        prompt_tokens=prompt_tokens,
        more={key: str(value) for key, value in keys.items()},
    )
    return answer(question)
