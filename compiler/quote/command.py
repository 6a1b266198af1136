"""Says, before any build, what a model will do on a device: whether it fits, how fast it decodes, with what quality.

    coldpress quote mistral-7b --device pixel6
    coldpress quote build/prose7m --device all --json
    coldpress quote prose7m-pixel6.coldpress --device oneplus12 --dram-budget 2GB
    coldpress quote mistral-7b --device pixel6 --dram-budget 2GB,3GB,4GB --method dense --format int4_group32

Every key of a build is a flag here, too: the quote is of the build that they would make.
The model is a name or folder as for `model=`, and only its config.json is read; a build folder, with measured curves
and activations; or an artifact, which carries them. No weight is read. Several budgets are those of one build.
"""

from coldpress.compiler.quote.question import Question
from coldpress.runtime.cli.declaration import command, with_keys


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
