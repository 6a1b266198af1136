"""Prints what a process takes beside its DRAM budget: `python -m coldpress.runtime.cli.process_memory ARTIFACT`.

The bytes are the resident memory of this very process once it has loaded the runtime and opened the artifact and its
tokenizer: the interpreter, libraries, manifest, tables. Weights, caches, buffers and KV cache are not there yet; the
budget counts them.
"""

import sys

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.memory import rss_bytes
from coldpress.runtime.generate.session import Session
from coldpress.runtime.text.tokenizer import TextCodec

LOADED = (Session, TextCodec)
"""Imports of a run of a model."""


def process_bytes(folder: str) -> int:
    artifact = open_artifact(folder)
    codec = TextCodec.of(artifact)
    found = rss_bytes()
    del codec  # it lives up to here
    return found


if __name__ == "__main__":
    print(process_bytes(sys.argv[1]))
