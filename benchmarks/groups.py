"""Layers that lie together on flash (`layers_per_group`), read on demand: the same tokens, and what reading them costs.

`python -m benchmarks.groups [--device pixel6] [--model prose7m] [--tokens 64]`. The model is built with top-k at
half of the units, once per group size, and generates from the same prompt. The last line is {n: {tokens_equal,
reads_per_token, bytes_per_token, tokens_per_s}}, n being the layers of a group; tokens_equal compares with n = 1, and
tokens_per_s is modelled for the device. A read of one layer's units has those of the others between them, so on demand
groups only cost; what they are for is reading ahead for several layers at once (ActiveFlow 3, Fig. 9).
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.end_to_end import MODELS, settings
from benchmarks.shared.report import finish, show
from coldpress.runtime.generate.session import Generation, Session
from coldpress.runtime.text.tokenizer import TextCodec
from tests.support.pipeline import build

GROUPS = (1, 2, 4)
PROMPT = "The history of the river begins with"
CHOSEN = {"method": "topk", "density": 0.5, "max_ppl_ratio": "off", "min_top1_agreement": "off"}


def measure(model: str, device: str, layers_per_group: int, num_tokens: int, folder: Path) -> Generation:
    """What the artifact of a build of its own generates."""
    label = f"of-{layers_per_group}"
    config = settings(model, device) | CHOSEN | {"layers_per_group": layers_per_group, "label": label}
    (artifact,) = build(folder, **config).glob("*.coldpress")
    session = Session(artifact, modelled=True)
    prompt = TextCodec(session.artifact).encode(PROMPT)
    return session.generate(prompt, max_new_tokens=num_tokens)


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="pixel6")
    parser.add_argument("--model", default="prose7m", choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    rows: dict[int, dict[str, object]] = {}
    first: tuple[int, ...] = ()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for size in GROUPS:
            found = measure(arguments.model, arguments.device, size, arguments.tokens, Path(folder))
            first, metrics = first or found.token_ids, found.metrics
            rows[size] = {
                "tokens_equal": found.token_ids == first,
                "reads_per_token": metrics.reads / metrics.num_tokens,
                "bytes_per_token": metrics.read_bytes / metrics.num_tokens,
                "tokens_per_s": metrics.modelled_tokens_per_s,
            }
    columns = list(rows[1])
    show(
        f"layer groups, {arguments.model}", ["n", *columns], ([str(size), *row.values()] for size, row in rows.items())
    )
    finish({str(size): row for size, row in rows.items()})


if __name__ == "__main__":
    main()
