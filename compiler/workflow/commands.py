"""Builds the command lines of rules: a stage, its settings, and its rule's named inputs as flags of the same names."""

import functools
import shlex
from collections.abc import Callable
from typing import Any

from coldpress.compiler.code_digest import stage_digest
from coldpress.compiler.job import parameters_of
from coldpress.compiler.workflow.settings import BuildConfig, flags
from coldpress.runtime.cli.command_line import flag

ARRAYS = "arrays"
"""Name of the input, and of the output, that is no record: folders of array files."""
Parameter = Callable[[Any], str]
"""A function of the wildcards, for a rule's `params`."""


def job(stage: str, more: str = "") -> str:
    """Returns the shell command of a stage's rule, for Snakemake to fill in; `more` are flags for paths that are not
    records. The rule has the `params` of its stage."""
    taken = parameters_of(stage)
    words = [
        "OMP_NUM_THREADS={threads} {sys.executable:q} -m coldpress.compiler",
        stage,
        "{params.settings} {params.records} --code {params.code} --build {FOLDER:q} --output {output[0]:q}",
        *(["--layers {params.layers}"] if "layers" in taken else []),
        *(["--threads {threads}"] if "threads" in taken else []),
        *([more] if more else []),
        "2> {log:q}",
    ]
    return " ".join(words)


def params(config: BuildConfig, stage: str, **facts: Any) -> dict[str, Any]:
    """Returns the params of a stage's rule, by name. A changed digest of its code, or a changed text of its settings,
    reruns it. A fact replaces the setting of its name; None leaves it out, for a path that is in the rule's command.
    The settings are a function, because Snakemake would take braces in a plain text for wildcards."""
    text = flags(config, stage, **facts)
    found = {"code": code(config, stage), "settings": lambda wildcards: text, "records": records}
    return found | ({"layers": layers} if "layers" in parameters_of(stage) else {})


def records(wildcards: Any, input: Any) -> str:
    """Returns a rule's records as flags; leaves out records that this build does not have."""
    return " ".join(f"{flag(name)} {shlex.join(files)}" for name, files in named_records(input).items())


def named_records(input: Any) -> dict[str, list[str]]:
    """Returns parameter -> files for a rule's named inputs, without the folders of array files, and without inputs that
    this build does not have."""
    named = {name: [files] if isinstance(files, str) else list(files) for name, files in input.items()}
    return {name: files for name, files in named.items() if files and name != ARRAYS}


def layers(wildcards: Any) -> list[int]:
    """Returns the layer numbers of a chunk such as 004-007."""
    first, last = map(int, wildcards.chunk.split("-"))
    return list(range(first, last + 1))


def code(config: BuildConfig, module: str) -> str:
    """Returns the digest of the code that decides a stage's result in this build: a changed digest reruns its rule."""
    return _digest(module, tuple(config.plugins().items()))


@functools.cache
def _digest(module: str, plugins: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    return stage_digest(module, dict(plugins))


def shard(config: BuildConfig, stage: str) -> Parameter:
    text, count = flags(config, stage), config["calibration_shards"]
    return lambda wildcards: f"{text} --shard {wildcards.shard} --num-shards {count}"
