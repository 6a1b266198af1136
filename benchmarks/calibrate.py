"""`calibrate` at 7B scale against a plain forward pass of transformers over the same layers and tokens.

`python -m benchmarks.calibrate [--shape mistral-7b] [--tokens 8192] [--layers 2 4] [--repeats 3]`. Both run on
the same planted checkpoint in processes of their own, in turn. The plain pass is what a user would write: AutoModel
(layers without the head) from the folder in the dtype that transformers takes by default, that of the weights
(bfloat16), all cores, inference mode, a warm-up, `--batch-blocks` blocks of 256 tokens at a time; its clock runs for
the forward calls alone. Ours runs for the whole stage: reading the layers' weights, forward, counting, writing hidden
states and statistics. Imports are in neither. The last line is {wall_ratio, cpu_ratio, rss_growth, peak_rss_bytes, …}:
medians; rss_growth is the peak memory of the larger number of layers over that of the smaller, of whole processes.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.shared.report import finish, show
from tests.support.usage import Usage, measured

MODULE = "benchmarks.calibrate"
THREADS = 2


def prepare(folder: Path, shape: str, layers: int, tokens: int) -> Path:
    """A planted checkpoint and the records that `calibrate` needs, in a folder of their own."""
    made = folder / f"layers-{layers}"
    made.mkdir()
    checkpoint = made / "model"
    measured(
        "-m", "tests.support.planted", "--shape", shape, "--layers", str(layers), "--output", checkpoint, folder=made
    )
    ingest, corpus = made / "ingest.json", made / "tokenize.json"
    measured("-m", "coldpress.compiler", "ingest", "--model", checkpoint, "--output", ingest, folder=made)
    arguments = ["--model", ingest, "--corpus", checkpoint / "corpus.jsonl", "--calibration-tokens", str(tokens)]
    measured("-m", "coldpress.compiler", "tokenize", *arguments, "--output", corpus, folder=made)
    return made


def worker_calibrate(folder: Path, shards: int) -> dict[str, object]:
    """Runs the stage on one of `shards` parts of the text."""
    from coldpress.compiler.activity.forward import LayerStream
    from coldpress.compiler.io import Workspace, load_record
    from coldpress.compiler.stages import calibrate
    from coldpress.compiler.stages.calibrate import CalibrateConfig
    from coldpress.schemas.corpus import Corpus
    from coldpress.schemas.model import Model

    model, corpus = load_record(folder / "ingest.json", Model), load_record(folder / "tokenize.json", Corpus)
    LayerStream(model)  # imports torch and transformers' modules of the architecture
    config = CalibrateConfig(num_shards=shards)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        wall, cpu = time.perf_counter(), time.process_time()
        found = calibrate.run(config, model, corpus, Workspace(Path(work), "benchmark"), THREADS)
        return {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "dtype": found.compute_dtype,
            "density": found.layers[-1].family("neuron").density,
        }


def worker_plain(folder: Path, batch_blocks: int, dtype: str) -> dict[str, object]:
    """Runs transformers' own model; `dtype` is torch's name, or auto for what transformers takes by itself."""
    import torch
    from transformers import AutoModel

    from coldpress.compiler.io import load_arrays, load_record
    from coldpress.schemas.corpus import Corpus

    torch.set_num_threads(THREADS)
    corpus = load_record(folder / "tokenize.json", Corpus)
    tokens = torch.from_numpy(load_arrays(corpus.split("calibration").arrays, "tokens")["tokens"]).long()
    model = AutoModel.from_pretrained(folder / "model", dtype=dtype).eval()
    with torch.inference_mode():
        model(tokens[:1], use_cache=False)
        wall, cpu = time.perf_counter(), time.process_time()
        for start in range(0, len(tokens), batch_blocks):
            model(tokens[start : start + batch_blocks], use_cache=False)
        return {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "dtype": str(model.dtype).removeprefix("torch."),
        }


def run(folder: Path, *worker: str) -> tuple[Usage, dict[str, float | str]]:
    """What a worker took as a process, and what it says of itself."""
    usage = measured("-m", MODULE, "--worker", *worker, folder=folder)
    return usage, json.loads(usage.stdout.splitlines()[-1])


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Prints the table; gives the figures."""
    few, many = arguments.layers
    small = prepare(folder, arguments.shape, few, arguments.tokens)
    run(small, "calibrate", "--shards", str(max(1, arguments.tokens // 256)))  # compiles loops, warms the page cache
    pairs = []
    for _ in range(arguments.repeats):
        plain = run(small, "plain", "--batch-blocks", str(arguments.batch_blocks))
        pairs.append((plain, run(small, "calibrate")))
    rows = [
        [name, few, figures["dtype"], figures["wall_s"], figures["cpu_s"], usage.peak_rss_bytes / 2**30]
        for pair in pairs
        for name, (usage, figures) in zip(("plain forward", "calibrate"), pair, strict=True)
    ]
    if arguments.float32:
        usage, figures = run(small, "plain", "--batch-blocks", str(arguments.batch_blocks), "--dtype", "float32")
        rows.append(
            ["plain forward", few, "float32", figures["wall_s"], figures["cpu_s"], usage.peak_rss_bytes / 2**30]
        )
    usage, figures = run(prepare(folder, arguments.shape, many, arguments.tokens), "calibrate")
    rows.append(
        ["calibrate", many, figures["dtype"], figures["wall_s"], figures["cpu_s"], usage.peak_rss_bytes / 2**30]
    )
    show(
        f"{arguments.shape}, {arguments.tokens} tokens",
        ["", "layers", "dtype", "wall s", "cpu s", "peak RSS GiB"],
        rows,
    )
    peak = max(ours[0].peak_rss_bytes for _, ours in pairs)
    return {
        "wall_ratio": statistics.median(ours[1]["wall_s"] / plain[1]["wall_s"] for plain, ours in pairs),
        "cpu_ratio": statistics.median(ours[1]["cpu_s"] / plain[1]["cpu_s"] for plain, ours in pairs),
        "plain_dtype": pairs[0][0][1]["dtype"],
        "calibrate_dtype": pairs[0][1][1]["dtype"],
        "rss_growth": usage.peak_rss_bytes / peak,
        "peak_rss_bytes": max(peak, usage.peak_rss_bytes),
    }


def main() -> None:
    """Command line; `--worker` is how it calls itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="mistral-7b")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 4), metavar=("FEW", "MANY"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-blocks", type=int, default=8, help="blocks of a call of the plain pass (default: 8)")
    parser.add_argument("--float32", action="store_true", help="also the plain pass in float32, for comparison")
    parser.add_argument("--worker", choices=("calibrate", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="auto", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker == "calibrate":
        print(json.dumps(worker_calibrate(Path.cwd(), arguments.shards)))
    elif arguments.worker == "plain":
        print(json.dumps(worker_plain(Path.cwd(), arguments.batch_blocks, arguments.dtype)))
    else:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            finish(measure(arguments, Path(folder).resolve()))


if __name__ == "__main__":
    main()
