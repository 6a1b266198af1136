"""Activations that orders are compared on: planted 7B layers, and every small real model with an MLP to skip parts of.

Each source has a text to fit on, more of the same text, and another text (Ripple Fig. 15). Planted layers are not run:
a word's input to a layer of such a checkpoint is its normalised embedding (tests/support/planted.py), so a layer's
activations are one product.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coldpress.compiler.io import Workspace, load_arrays, save_arrays
from coldpress.compiler.stages import calibrate, ingest, recalibrate, tokenize
from coldpress.compiler.stages.calibrate import CalibrateConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.recalibrate import RecalibrateConfig
from coldpress.compiler.stages.tokenize import TokenizeConfig
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.families import FamilyName, num_units
from coldpress.schemas.model import Model, ModelSpec
from tests.support.data import data_folder
from tests.support.planted import Shape, plant_of
from tests.support.statistics import model_of, sparsity_of

FIT_TOKENS, TEST_TOKENS = 8192, 2048
TOP_K_DENSITY = 0.5
AS_A_7B = ", units of a 7B"
PLANTED = {"planted 3%": 0.03, "planted 10%": 0.10, "planted 50%": 0.50}
"""Source -> density."""
PROSE = ("corpora/wikipedia/wiki_demo.txt", "corpora/wikitext-2/test.txt")
STORIES = ("corpora/tinystories/calib.jsonl", "corpora/tinyshakespeare/input.txt")
MODELS = {
    "prose7m-relu": PROSE,
    "tinystories656k-relu": STORIES,
    "tinystories-opt-0.9m": STORIES,
    "prose7m": PROSE,
    "tinystories656k": STORIES,
    "stories260k": STORIES,
}
"""Model: the text it is fitted on, and another one."""


@dataclass(frozen=True)
class Text:
    """Packed activations uint8 [num_units, num_tokens / 8]."""

    bits: np.ndarray
    num_tokens: int


@dataclass(frozen=True)
class Source:
    """One family of one layer."""

    model: str
    layer: int
    family: FamilyName
    density: str
    spec: ModelSpec
    fit: Text
    tests: dict[str, Text]


def at_7b_size(source: Source) -> Source:
    """The same activations, of units as long as a 7B model's: a layer of the small ones is read within one latency."""
    spec = source.spec.model_copy(update={"hidden_size": 4096, "intermediate_size": 14336})
    return replace(source, model=source.model + AS_A_7B, spec=spec)


def sources_of(name: str, folder: Path) -> Sequence[Source]:
    """A planted layer, or the middle layer of a real model: each family that its method may skip parts of, as it is and
    with units of a 7B's size."""
    if name in PLANTED:
        return [planted_source(PLANTED[name])]
    found = _sources_of(name, data_folder(), MODELS[name], folder)
    return [*found, *map(at_7b_size, found)]


def planted_source(density: float) -> Source:
    """One layer of the Mistral-7B shape."""
    plant = plant_of("mistral-7b", 1, density)
    rng = np.random.default_rng(1)
    texts = {
        "fit": planted_words(plant.shape, FIT_TOKENS, 0.2, 128, rng),
        "same": planted_words(plant.shape, TEST_TOKENS, 0.2, 128, rng),
        "other": planted_words(plant.shape, TEST_TOKENS, 0.5, 32, rng),
    }
    rows, theta = plant.deciding_rows(0)
    embeddings = plant.embeddings()
    found: dict[str, Text] = {}
    for name, words in texts.items():
        inputs = embeddings[words]
        inputs /= inputs.square().mean(1, keepdim=True).sqrt()
        active = (rows @ inputs.T > theta[:, None]).numpy()
        found[name] = Text(np.packbits(active, axis=1, bitorder="little"), len(words))
    spec = model_of(1, plant.shape.hidden_size, plant.shape.intermediate_size, head_dim=128).spec
    fit = found.pop("fit")
    return Source("planted mistral-7b", 0, "neuron", f"{density:.0%}", spec, fit, found)


def planted_words(
    shape: Shape, num_tokens: int, strays: float, document_tokens: int, rng: np.random.Generator
) -> np.ndarray:
    """Words of documents that keep to a topic of their own, but for a share of `strays`; int64 [num_tokens]."""
    topics = np.repeat(rng.integers(shape.num_topics, size=-(-num_tokens // document_tokens)), document_tokens)
    topics = topics[:num_tokens]
    stray = rng.random(num_tokens) < strays
    topics[stray] = rng.integers(shape.num_topics, size=stray.sum())
    words_per_topic = (shape.vocab_size - 3) // shape.num_topics
    return topics + shape.num_topics * rng.integers(1, words_per_topic, size=num_tokens)


def _sources_of(name: str, data: Path, corpora: tuple[str, str], folder: Path) -> Sequence[Source]:
    model = ingest.run(IngestConfig(model=str(data / "models" / name)), Workspace(folder / "ingest", "benchmark"))
    layer = model.spec.num_hidden_layers // 2
    fitted = _activations(model, layer, data / corpora[0], FIT_TOKENS + TEST_TOKENS, folder / "0")
    other = _activations(model, layer, data / corpora[1], TEST_TOKENS, folder / "1")
    found: list[Source] = []
    for family, text in fitted.items():
        num_tokens = text.num_tokens - TEST_TOKENS
        fit = Text(np.ascontiguousarray(text.bits[:, : num_tokens // 8]), num_tokens)
        same = Text(np.ascontiguousarray(text.bits[:, num_tokens // 8 :]), TEST_TOKENS)
        density = np.bitwise_count(fit.bits).sum() / (len(fit.bits) * num_tokens)
        tests = {"same": same, "other": other[family]}
        found.append(Source(name, layer, family, f"{density:.0%}", model.spec, fit, tests))
    return found


def _activations(model: Model, layer: int, corpus: Path, num_tokens: int, folder: Path) -> dict[FamilyName, Text]:
    """Activity of one layer's families: exact zeros, or the top half."""
    tokens = tokenize.run(
        TokenizeConfig(corpus=str(corpus), calibration_tokens=num_tokens, evaluation_tokens=256, block_tokens=128),
        model,
        Workspace(folder / "tokenize", "benchmark"),
    )
    exact = model.spec.hidden_act == "relu"
    config = CalibrateConfig()
    found = calibrate.run(config, model, tokens, Workspace(folder / "calibrate", "benchmark"), 2)
    if not exact:
        shares = (TOP_K_DENSITY,) * model.spec.num_hidden_layers
        sparsity = sparsity_of("topk", {"mlp_in": shares, "mlp_mid": shares})
        topk = load("coldpress.runtime.sparsity", Selector, "topk")
        arrays = {
            f"{layer}.{family}.{name}": array
            for family in sparsity.families
            for name, array in topk.fit(num_units(family, model.spec), TOP_K_DENSITY, {}, topk.OPTIONS()).items()
            for layer in range(model.spec.num_hidden_layers)
        }
        sparsity = sparsity.model_copy(update={"arrays": save_arrays(folder / "selector.safetensors", arrays)})
        work = Workspace(folder / "recalibrate", "benchmark")
        found = recalibrate.run(RecalibrateConfig(), model, tokens, sparsity, found, work, 2)
    entry = next(entry for entry in found.layers if entry.layer == layer)
    num_tokens = found.num_tokens // 8 * 8
    read = {part.family: load_arrays(part.arrays) for part in entry.families}
    return {
        family: Text(arrays["bits"][:, : num_tokens // 8], num_tokens)
        for family, arrays in read.items()
        if "bits" in arrays  # calibration also counts families that this model's selectors do not choose from by zeros
    }
