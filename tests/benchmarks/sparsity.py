"""Perplexity of every selector at equal density of the MLP, in the form of DIP's Table 1.

`python -m tests.benchmarks.sparsity [--models prose7m …] [--methods dip …] [--lora-steps N] [--fit]`. Density counts
all matrices of the MLP: a method that needs the gate in full spends a third of it there. Thresholds and norms are
fitted on calibration text; what is scored is test text. `--fit` searches DIP's division of densities (B.1) on
validation text instead and prints the line through the best ones. DIP and CATS are shown with adapters, too, which the
build's own `distill` trains on text of their own. The last line is {rows: [{model, method, lora, density, ppl}]}, where
`density` is what the text used; `asked` is what was asked for.
"""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compiler import distill, ingest
from compiler._io import Workspace, save_arrays
from compiler.activity.calibration_pass import PassConfig, count_activity
from compiler.activity.forward import LayerStream
from compiler.activity.layer_counts import Activity
from compiler.activity.unit_statistics import fit_all
from compiler.distill import DistillConfig
from compiler.evaluate import Score, Sparse, evaluate
from compiler.ingest import IngestConfig
from runtime._plugins import load, options_of
from schemas.activations import Activations
from schemas.corpus import SPLITS, Corpus, TokenBlocks
from schemas.model import Model
from schemas.sparsity import Sparsity
from tests.benchmarks._report import finish, show
from tests.support.data import find_data_folder
from tests.support.statistics import sparsity_of

DENSITIES = (0.6, 0.5, 0.4)
SEARCHED = (0.3, 0.4, 0.5, 0.6, 0.7)
"""Densities that DIP's division is searched for."""
BLOCK_TOKENS = 256
CALIBRATION_BLOCKS, VALIDATION_BLOCKS, TEST_BLOCKS = 64, 16, 64
TRAINING_BLOCKS = 512
"""Of the text behind those, what adapters are trained on."""
ADAPTED = ("DIP", "CATS")
"""Rows that are shown with adapters, too (DIP, Tables 1 and 3)."""
LORA_RATE = 1e-3
COUNTED = ("mlp_in", "mlp_mid", "up_down", "gate_down")
METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "GLU (oracle)": ("glu", {"oracle": True}),
    "gate (oracle)": ("gate", {"oracle": True}),
    "up (oracle)": ("up", {"oracle": True}),
    "gate": ("gate", {}),
    "CATS": ("cats", {}),
    "up": ("up", {}),
    "top-k, one density": ("topk", {}),
    "threshold (TEAL)": ("threshold", {}),
    "WINA": ("wina", {}),
    "DIP": ("dip", {}),
}
"""Row -> the selector and its options."""
MODELS = {
    "prose7m": "wikitext-2",
    "tinystories656k": "tinystories",
    "stories260k": "tinystories",
    "prose7m-relu": "wikitext-2",
}
"""Model -> the corpus that it is calibrated and scored on."""


@dataclass(frozen=True)
class Case:
    """A model with its text."""

    model: Model
    stream: LayerStream
    splits: Mapping[str, np.ndarray]


def texts(corpus: Path) -> Mapping[str, str]:
    """Calibration and test text; WikiText's marks of a tokenized text are taken out."""
    if corpus.name == "wikitext-2":
        return {
            name: _plain((corpus / f"{file}.txt").read_text()) for name, file in (("fit", "valid"), ("test", "test"))
        }
    return {name: _stories(corpus / f"{file}.jsonl") for name, file in (("fit", "calib"), ("test", "eval"))}


def _plain(text: str) -> str:
    for mark, plain in ((" <unk>", ""), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")):
        text = text.replace(mark, plain)
    return text


def _stories(path: Path) -> str:
    return "\n\n".join(json.loads(line)["text"] for line in path.read_text().splitlines())


def splits_of(folder: Path, corpus: Path) -> dict[str, np.ndarray]:
    """Token blocks int32 [n, BLOCK_TOKENS] of calibration, validation, training and test text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = texts(corpus)
    counts = {"fit": CALIBRATION_BLOCKS + VALIDATION_BLOCKS + TRAINING_BLOCKS, "test": TEST_BLOCKS}
    ids: dict[str, np.ndarray] = {}
    for name, count in counts.items():
        text = found[name][: 16 * count * BLOCK_TOKENS]
        encoded = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        whole = min(count, encoded.size // BLOCK_TOKENS)
        ids[name] = encoded[: whole * BLOCK_TOKENS].reshape(whole, BLOCK_TOKENS)
    fit = ids["fit"][: CALIBRATION_BLOCKS + VALIDATION_BLOCKS]
    return {
        "calibration": fit[:-VALIDATION_BLOCKS],
        "validation": fit[-VALIDATION_BLOCKS:],
        "training": ids["fit"][len(fit) :],
        "test": ids["test"],
    }


def case_of(name: str, folder: Path) -> Case:
    """The model, and its text in blocks."""
    data = find_data_folder()
    if data is None:
        raise SystemExit("no real test data: set COLDPRESS_TEST_DATA to its folder")
    source = data / "models" / name
    model = ingest.run(IngestConfig(model=str(source)), Workspace(folder / "ingest", "benchmark"))
    stream = LayerStream(model, len(os.sched_getaffinity(0)))
    return Case(model, stream, splits_of(source, data / "corpora" / MODELS[name]))


def corpus_of(case: Case, folder: Path, calibration: str) -> Corpus:
    """The text as the build's stages take it, with the named part as calibration text."""
    parts = {**case.splits, "calibration": case.splits[calibration]}
    splits = tuple(
        TokenBlocks(
            split=split,
            arrays=save_arrays(folder / f"{calibration}-{split}.safetensors", {"tokens": parts[split]}),
            num_blocks=len(parts[split]),
            block_tokens=BLOCK_TOKENS,
        )
        for split in SPLITS
    )
    return Corpus(name="benchmark", text_sha256="0" * 64, splits=splits)


def calibrated(case: Case, folder: Path) -> Activations:
    """One pass over the calibration text."""
    work, corpus = Workspace(folder / "calibrate", "benchmark"), corpus_of(case, folder, "calibration")
    return count_activity(PassConfig(), case.model, corpus, COUNTED, Activity(frozenset()), work, case.stream.threads)


def family_density(method: str, oracle: bool, density: float) -> float | None:
    """Density of what a method prunes, so that all three matrices have `density`; None where it cannot."""
    whole = 0 if oracle else {"gate": 1, "cats": 1, "up": 1, "glu": 2}.get(method, 0)
    found = (3 * density - whole) / (3 - whole)
    return found if found > 0 else None


def chosen(
    case: Case, activations: Activations, method: str, options: dict[str, Any], density: float
) -> tuple[Sparse, Sparsity] | None:
    """The method at a density of the whole MLP, to evaluate and as a record; None where it is out of reach."""
    selector, oracle = load("runtime.sparsity", method), bool(options.get("oracle"))
    own = options_of(selector, {key: value for key, value in options.items() if key != "oracle"})
    asked = family_density(method, oracle, density)
    if asked is None:
        return None
    families = selector.families(case.model.spec, own)
    divided = selector.densities(False) == "divided"
    shares = selector.divide(asked, case.model.spec, own) if divided else dict.fromkeys(families, asked)
    layers = case.model.spec.num_hidden_layers
    per_layer = {name: (share,) * layers for name, share in shares.items()}
    arrays = fit_all(selector, own, per_layer, case.model, activations)
    asked_for = sparsity_of(method, per_layer).model_copy(update={"options": own.model_dump()})
    return Sparse(selector, families, arrays, oracle), asked_for


def score(
    case: Case, activations: Activations, method: str, options: dict[str, Any], density: float, split: str
) -> Score | None:
    """What the method costs; None where it does not reach the density."""
    found = chosen(case, activations, method, options, density)
    return None if found is None else evaluate(case.stream, case.splits[split], found[0])


def adapted(case: Case, activations: Activations, label: str, density: float, folder: Path, steps: int) -> Score | None:
    """As `score` on test text, of the model whose pruned matrices were adapted (DIP 4), by the build's own stage."""
    found = chosen(case, activations, *METHODS[label], density)
    if found is None:
        return None
    sparse, sparsity = found
    arrays = {f"{key[0]}.{key[1]}.{name}": array for key, part in sparse.arrays.items() for name, array in part.items()}
    sparsity = sparsity.model_copy(update={"arrays": save_arrays(folder / "selector.safetensors", arrays)})
    config = DistillConfig(recipe="lora", steps=steps, learning_rate=LORA_RATE, dense_share=0.0, device="cpu")
    work = Workspace(folder / f"{label}-{density}", "benchmark")
    corpus = corpus_of(case, folder, "training")
    student = distill.run(config, case.model, corpus, sparsity, work, case.stream.threads)
    return evaluate(LayerStream(student, case.stream.threads), case.splits["test"], sparse)


def rows_of(
    name: str, case: Case, activations: Activations, methods: list[str], folder: Path, lora_steps: int
) -> Iterator[dict[str, Any]]:
    """A row per method and density, with and without adapters, the dense model first."""
    nll, count = case.stream.nll(case.splits["test"])
    common = {"model": name, "lora": False}
    yield {**common, "method": "dense", "asked": 1.0, "density": 1.0, "ppl": math.exp(nll / count)}
    for label in methods:
        for density in DENSITIES:
            scores = {False: score(case, activations, *METHODS[label], density, "test")}
            if label in ADAPTED and lora_steps:
                scores[True] = adapted(case, activations, label, density, folder, lora_steps)
            for lora, found in scores.items():
                if found is not None:
                    row = {"model": name, "method": label, "lora": lora, "asked": density}
                    row |= {"density": found.mlp_density, "ppl": found.ppl}
                    print(json.dumps(row), flush=True)
                    yield row


def fit_dip(case: Case, activations: Activations) -> dict[str, Any]:
    """The line through the best divisions (B.1): logit of the inputs' density over logit of the MLP's."""
    tried: list[tuple[float, float, float]] = []
    for density in SEARCHED:
        for inputs in np.arange(0.2, 1.0, 0.05):
            glu = 3 * density - 2 * inputs
            if 0.02 <= glu <= 1:
                options = {"input_density": float(inputs), "glu_density": float(glu)}
                found = score(case, activations, "dip", options, density, "validation")
                assert found is not None
                tried.append((density, float(inputs), found.ppl))
                print(json.dumps({"density": density, "inputs": round(float(inputs), 3), "ppl": found.ppl}), flush=True)
    best = [
        min((entry for entry in tried if entry[0] == at), key=lambda entry: entry[2])
        for at in (0.3, 0.4, 0.5, 0.6, 0.7)
    ]
    x, y = (np.array([math.log(entry[i] / (1 - entry[i])) for entry in best]) for i in (0, 1))
    slope, offset = np.polyfit(x, y, 1)
    return {"best": best, "slope": float(slope), "offset": float(offset)}


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["prose7m", "tinystories656k"], choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--lora-steps", type=int, default=60, metavar="N", help="updates of adapters; 0: none")
    parser.add_argument("--fit", action="store_true", help="search DIP's division of densities on validation text")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    fitted: dict[str, Any] = {}
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            case = case_of(name, Path(folder))
            activations = calibrated(case, Path(folder))
            if arguments.fit:
                fitted[name] = fit_dip(case, activations)
            else:
                rows += rows_of(name, case, activations, arguments.methods, Path(folder), arguments.lora_steps)
    if arguments.fit:
        finish(fitted)
        return
    for row in rows:
        row["label"] = row["method"] + (" + LoRA" if row["lora"] else "")
    cells = {(row["model"], row["label"], row["asked"]): row["ppl"] for row in rows}
    found = dict.fromkeys((row["model"], row["label"]) for row in rows)
    table = [[*key, *(cells.get((*key, at), cells.get((*key, 1.0), math.nan)) for at in DENSITIES)] for key in found]
    show("perplexity on test text, by density of the MLP", ["model", "method", *map(str, DENSITIES)], table)
    finish({"rows": rows})


if __name__ == "__main__":
    main()
