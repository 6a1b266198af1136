"""Writes an artifact's weights for another engine: the codes as they were quantized.

A build does the same with `--export gguf`. A model that the other engine would compute differently is refused.
"""

import argparse
import json
from pathlib import Path

from coldpress.cli.build import options_of
from coldpress.compiler.stages.export import TARGETS, exported
from coldpress.compiler.stages.export._target import Target
from coldpress.runtime import plugins
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli.command_line import examples_of
from coldpress.runtime.plugins import load
from coldpress.runtime.quantities import show_bytes
from coldpress.schemas.base import Options

EXAMPLES = """
  coldpress export demo.coldpress --output demo.gguf
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `coldpress export`."""
    parser.description, parser.epilog = __doc__, examples_of("export", EXAMPLES)
    parser.add_argument("artifact", metavar="ARTIFACT", help="folder of an artifact (NAME.coldpress)")
    parser.add_argument("--to", default="gguf", metavar="FORMAT", help=f"one of {', '.join(plugins.names(TARGETS))}")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(takes_more=True)


def run(arguments: argparse.Namespace) -> None:
    """Writes the file, whole or not at all.

    Raises:
        ColdpressError: if the other engine would compute another model, or there is no such format.
    """
    options: Options = {**options_of(arguments.more)}
    found = exported(
        open_artifact(arguments.artifact), load(TARGETS, Target, arguments.to), options, arguments.output.absolute()
    )
    if arguments.json:
        print(json.dumps(found.model_dump(mode="json")))
        return
    print(f"{arguments.output}: {show_bytes(found.size_bytes)}, sha256 {found.sha256}")
    if found.rounded:
        print(f"{len(found.rounded)} tensors were rounded again, because the format has no such codes")
