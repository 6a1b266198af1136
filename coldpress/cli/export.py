"""Writes an artifact's weights for another engine: the codes as they were quantized.

A build does the same with `--export gguf`. A model that the other engine would compute differently is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coldpress.compiler.stages.export import TARGETS, Target, exported
from coldpress.runtime import plugins
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli.declaration import FILE, PLACE, argument, command, option, switch
from coldpress.runtime.quantities import show_bytes
from coldpress.schemas.base import Options

EXAMPLES = """
  coldpress export demo.coldpress --output demo.gguf
"""


@dataclass(frozen=True, kw_only=True)
class Export:
    artifact: str = argument("folder of an artifact (NAME.coldpress)", type=PLACE)
    to: str = option(f"one of {', '.join(plugins.names(TARGETS))}", default="gguf", metavar="FORMAT")
    output: Path = option("the file to write", required=True, type=FILE, metavar="FILE")
    json: bool = switch("print one JSON object")
    more: Mapping[str, str] = field(default_factory=dict)


def run(flags: Export) -> None:
    """Writes the file whole; raises ColdpressError for an unknown format, or if the engine would compute otherwise."""
    options: Options = {**flags.more}
    found = exported(
        open_artifact(flags.artifact), plugins.load(TARGETS, Target, flags.to), options, flags.output.absolute()
    )
    if flags.json:
        print(json.dumps(found.model_dump(mode="json")))
        return
    print(f"{flags.output}: {show_bytes(found.size_bytes)}, sha256 {found.sha256}")
    if found.rounded:
        print(f"{len(found.rounded)} tensors were rounded again, because the format has no such codes")


COMMAND = command(Export, run, name="export", help=__doc__, examples=EXAMPLES, takes_more=True)
