"""Times `calibrate` at 7B scale against a plain forward pass of transformers over the same layers and tokens.

Both run on the same planted checkpoint, each in its own process, in turn. The plain pass is the one a user would write:
AutoModel (layers without the head) from the folder in the default dtype of transformers, that of the weights
(bfloat16), all cores, inference mode, a warm-up, some blocks of 256 tokens at a time; only the forward calls are timed.
Ours is timed over the whole stage: reading the layers' weights, forward, counting, writing hidden states and
statistics. Neither time includes imports.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option, spread
from benchmarks.harness.apart import apart, peak_rss_bytes

THREADS = 2
BLOCK_TOKENS, BATCH_BLOCKS = 256, 8
"""Tokens of a block; blocks in a call of the plain pass."""
PASSES = ("plain", "calibrate")


@dataclass(frozen=True)
class Options:
    shape: str = option("mistral-7b", smoke="small", help="model whose layers' shape the checkpoint has")
    tokens: int = option(2048, smoke=512, full=8192, help="calibration tokens")
    few: int = option(2, smoke=1, help="layers of the timed checkpoint")
    many: int = option(4, smoke=2, help="layers of the checkpoint for the comparison of memory")
    rounds: int = option(5, smoke=1, help="rounds; each runs both passes in turn")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].layers": "layers of the planted checkpoint",
        "rows[].part": "rounds: both passes in turn; memory: calibrate with more layers",
        "rows[].round": "number of the round",
        "rows[].pass": "plain: transformers' forward; calibrate: the whole stage",
        "rows[].dtype": "dtype of the forward pass",
        "rows[].wall_s": "seconds of wall time: of plain the forward calls, of calibrate the whole stage",
        "rows[].cpu_s": "processor seconds of all threads in that time",
        "rows[].density?": "share of the last layer's neurons that are active, as calibrate counts it",
        "rows[].peak_rss_bytes": "peak resident bytes of the process",
        "wall_ratio": "wall seconds of calibrate over those of the plain pass, taken in each round",
        "cpu_ratio": "processor seconds of calibrate over those of the plain pass, taken in each round",
        "plain_dtype": "dtype in which the plain pass computes",
        "calibrate_dtype": "dtype in which calibrate computes",
        "rss_growth": "peak memory of calibrate with --many layers over that with --few layers",
        "peak_rss_bytes": "largest peak resident bytes of calibrate",
    }
    is_timing = True
    full_minutes = 40

    def cells(self) -> Iterator[Cell]:
        for number in range(self.options.rounds):
            yield {"layers": self.options.few, "part": "rounds", "round": number}
        yield {"layers": self.options.many, "part": "memory", "round": 0}

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per process."""
        layers, part = cell["layers"], cell["part"]
        made = self.once(layers, lambda: self._prepared(layers, part))
        if part == "rounds":
            yield {"pass": "plain"} | apart(self, "plain", made)
        yield {"pass": "calibrate"} | apart(self, "calibrated", made, 1)

    def figures(self, rows: Rows) -> Figures:
        plain, ours = ([row for row in rows if (row["part"], row["pass"]) == ("rounds", kind)] for kind in PASSES)
        ratios = {
            f"{what}_ratio": spread(
                [our[f"{what}_s"] / other[f"{what}_s"] for other, our in zip(plain, ours, strict=True)]
            )
            for what in ("wall", "cpu")
        }
        few, many = (max(row["peak_rss_bytes"] for row in found) for found in (ours, rows[-1:]))
        return ratios | {
            "plain_dtype": plain[0]["dtype"],
            "calibrate_dtype": ours[0]["dtype"],
            "rss_growth": many / few,
            "peak_rss_bytes": max(few, many),
        }

    def _prepared(self, layers: int, part: str) -> str:
        """Returns a checkpoint's folder; before the rounds a first run compiles our loops and fills the page cache."""
        made = str(self.folder / f"layers-{layers}")
        apart(self, "prepare", made, layers)
        if part == "rounds" and self.options.rounds > 1:
            apart(self, "calibrated", made, max(1, self.options.tokens // BLOCK_TOKENS))
        return made

    def prepare(self, made: str, layers: int) -> None:
        """Makes a planted checkpoint and the records that `calibrate` needs."""
        from coldpress.compiler.io import Workspace, save_record
        from coldpress.compiler.stages import ingest, tokenize
        from coldpress.compiler.stages.ingest import IngestConfig
        from coldpress.compiler.stages.tokenize import TokenizeConfig
        from tests.support.planted import plant_of, write

        folder, tokens = Path(made), self.options.tokens
        folder.mkdir()
        checkpoint = write(plant_of(self.options.shape, layers, 0.1, 0), folder / "model", 5 * tokens)
        model = ingest.run(IngestConfig(model=str(checkpoint)), Workspace(folder / "ingest", "benchmark"))
        text = TokenizeConfig(corpus=str(checkpoint / "corpus.jsonl"), calibration_tokens=tokens)
        save_record(model, folder / "ingest.json")
        save_record(tokenize.run(text, model, Workspace(folder / "tokenize", "benchmark")), folder / "tokenize.json")

    def calibrated(self, made: str, shards: int) -> Row:
        """Runs the stage on one of `shards` parts of the text."""
        from coldpress.compiler.activity.forward import LayerStream
        from coldpress.compiler.io import Workspace, load_record
        from coldpress.compiler.stages import calibrate
        from coldpress.compiler.stages.calibrate import CalibrateConfig
        from coldpress.schemas.corpus import Corpus
        from coldpress.schemas.model import Model

        model = load_record(Path(made) / "ingest.json", Model)
        corpus = load_record(Path(made) / "tokenize.json", Corpus)
        LayerStream(model)  # imports torch and transformers' modules of the architecture before the clock starts
        config = CalibrateConfig(num_shards=shards)
        with tempfile.TemporaryDirectory(dir=made) as work:
            wall, cpu = time.perf_counter(), time.process_time()
            found = calibrate.run(config, model, corpus, Workspace(Path(work), "benchmark"), THREADS)
            figures = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            neurons = found.layers[-1].family("neuron")
            assert neurons is not None
            figures |= {"dtype": found.compute_dtype, "density": neurons.density}
            return figures | {"peak_rss_bytes": peak_rss_bytes()}

    def plain(self, made: str) -> Row:
        """Runs transformers' own model in its default dtype."""
        import torch
        from transformers import AutoModel

        from coldpress.compiler.io import load_arrays, load_record
        from coldpress.schemas.corpus import Corpus

        torch.set_num_threads(THREADS)
        corpus = load_record(Path(made) / "tokenize.json", Corpus)
        tokens = torch.from_numpy(load_arrays(corpus.split("calibration").arrays, "tokens")["tokens"]).long()
        model = AutoModel.from_pretrained(Path(made) / "model", dtype="auto").eval()
        with torch.inference_mode():
            model(tokens[:1], use_cache=False)
            wall, cpu = time.perf_counter(), time.process_time()
            for some in tokens.split(BATCH_BLOCKS):
                model(some, use_cache=False)
            return {
                "wall_s": time.perf_counter() - wall,
                "cpu_s": time.process_time() - cpu,
                "dtype": str(model.dtype).removeprefix("torch."),
                "peak_rss_bytes": peak_rss_bytes(),
            }


if __name__ == "__main__":
    main("calibrate")
