"""Checks that the demo model's recipe still works and that the committed model is as described.

Reads coldpress.compiler.stages.tokenize.pydoc, trains a tiny configuration for a few steps into a temporary folder, and
loads demo/model the way any user of transformers would.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coldpress.compiler.stages.tokenize import pydoc as corpus
from demo import train
from demo.tokens import pack

pytestmark = pytest.mark.slow

DEMO = Path(train.__file__).parent
MODEL = DEMO / "model"
FOLDER_LIMIT_BYTES = 9_000_000
# The band demo/README.md states for exact zeros of relu(gate).
ZERO_BAND = (0.85, 0.98)
MEASURED_TOKENS = 6 * 256
TINY = train.Recipe(
    steps=30,
    seed=3,
    context_tokens=32,
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=2,
    warmup_steps=5,
    bfloat16=False,
)
SAMPLE = "Return a list.\n\n    >>> f('naïve', \"日本\")\n\t\x00 <s>"


@pytest.fixture(autouse=True, scope="module")
def kernels_as_found():
    """The recipe asks torch for deterministic kernels; other tests did not."""
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny_texts() -> dict[str, list[str]]:
    """A few kilobytes of each split."""
    return {split: corpus.documents(split)[:8] for split in corpus.SPLITS}


@pytest.fixture(scope="module")
def tiny_run(tiny_texts, tmp_path_factory):
    """A tiny model trained for a few steps: its folder and its figures."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    figures = train.run(TINY, tiny_texts, folder, evaluate_every=10, minutes=math.inf)
    return folder, figures


def test_no_document_or_long_paragraph_is_in_two_splits():
    names, paragraphs = [], []
    for split in corpus.SPLITS:
        for name, text in corpus.named_documents(split):
            names.append(name)
            keys = {" ".join(part.split()) for part in text.split("\n\n")}
            paragraphs += [key for key in keys if len(key) >= corpus.SHORTEST_UNIQUE_CHARS]
    assert len(names) == len(set(names))
    assert len(paragraphs) == len(set(paragraphs))


def test_held_out_splits_have_about_their_sizes():
    sizes = {
        split: sum(len(text.encode("utf-8", "replace")) for text in corpus.documents(split)) for split in corpus.SPLITS
    }
    assert 250_000 < sizes["calibration"] < 600_000
    assert 50_000 < sizes["validation"] < 200_000
    assert 50_000 < sizes["test"] < 200_000
    assert sizes["train"] > 2 * sizes["calibration"]


def test_extraction_is_deterministic_and_the_command_writes_it(tmp_path, capsys):
    first = {split: corpus.documents(split) for split in corpus.SPLITS}
    corpus.corpus.cache_clear()
    assert first == {split: corpus.documents(split) for split in corpus.SPLITS}
    target = tmp_path / "validation.txt"
    assert corpus.main(["--split", "validation", "--output", str(target)]) == 0
    assert "documents" in capsys.readouterr().err
    written = target.read_text(encoding="utf-8")
    assert all(text in written for text in first["validation"])


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="unknown split 'all'"):
        corpus.documents("all")


def test_docstrings_come_in_source_order_and_broken_files_give_none():
    source = b'"""One."""\nclass A:\n    """Two."""\n    def f(self):\n        """Three."""\n'
    assert list(corpus.docstrings(source)) == ["One.", "Two.", "Three."]
    assert list(corpus.docstrings(b'"""One."""\ndef (')) == []


def test_credits_underlines_and_repeats_are_dropped():
    long = "The same paragraph, long enough to count as a copy when it recurs."
    text = f"Title\n=====\n\n{long}\n\nCopyright 1999 Somebody.\n\n{long}"
    assert corpus.unique_paragraphs(text, set()) == f"Title\n\n{long}"


def test_a_few_steps_lower_the_loss(tiny_run):
    _, figures = tiny_run
    losses = [entry["train_loss"] for entry in figures["history"]]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.1
    assert figures["steps"] == TINY.steps


def test_the_same_seed_gives_the_same_weights(tiny_run, tiny_texts, tmp_path):
    _, figures = tiny_run
    again = train.run(TINY, tiny_texts, tmp_path, evaluate_every=10, minutes=math.inf)
    assert again["weights_sha256"] == figures["weights_sha256"]


def test_a_saved_model_loads_and_its_tokenizer_round_trips(tiny_run):
    folder, figures = tiny_run
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float16
    assert model.config.hidden_act == "relu"
    assert sum(p.numel() for p in model.parameters()) == figures["parameters"]
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE


def test_gate_penalty_raises_the_share_of_zeros(tiny_texts):
    """Steering at work: a strongly wanted share of zeros is approached, per layer."""
    found = {}
    for wanted in (0.0, 0.95):
        train.seed_everything(TINY)
        tokenizer = train.train_tokenizer(tiny_texts["train"], 320, 32)
        stream = pack(tokenizer, tiny_texts["train"])
        model = train.build_model(TINY, tokenizer)
        penalty = train.GatePenalty(model, wanted, measure_every=1)
        optimizer = train.make_optimizer(model, TINY)
        generator = torch.Generator().manual_seed(0)
        endless = train.batches(stream, TINY, generator)
        for _, rows in zip(range(30), endless, strict=False):
            train.train_step(model, optimizer, penalty, rows, 3e-3, bfloat16=False)
        found[wanted] = train.zero_shares(model, stream[:2048], 32)
    assert all(high > low for low, high in zip(found[0.0], found[0.95], strict=True))


@pytest.fixture(scope="module")
def committed():
    """The committed model in fp32 and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(MODEL)


def test_the_committed_folder_is_small_and_is_the_one_the_figures_describe():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= FOLDER_LIMIT_BYTES
    figures = json.loads((DEMO / "training.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    assert figures["weights_sha256"] == digest
    assert digest in (DEMO / "README.md").read_text(encoding="utf-8")


def test_the_committed_model_has_the_described_shape(committed):
    model, tokenizer = committed
    config = model.config
    assert config.model_type == "llama"
    assert config.hidden_act == "relu"
    assert config.tie_word_embeddings
    assert (config.num_hidden_layers, config.hidden_size) == (4, 256)
    assert (config.intermediate_size, config.vocab_size) == (1024, len(tokenizer))
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 1)
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE


def test_the_committed_model_is_sparse_and_has_learnt(committed):
    model, tokenizer = committed
    stream = pack(tokenizer, corpus.documents("validation"))[: MEASURED_TOKENS + 1]
    shares = train.zero_shares(model, stream, 256)
    assert min(shares) >= ZERO_BAND[0]
    assert max(shares) <= ZERO_BAND[1]
    assert train.evaluate(model, stream, 256) < 4.0
