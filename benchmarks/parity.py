"""Compares the artifact with `transformers` on every small real model, a random one of every architecture, and real
models in GGUF: same tokens, same logits, same perplexity.

Each model is compiled with the dense selector, so that only formats and our arithmetic can differ. In fp16 the figures
are greedy tokens read from flash, and the largest difference of logits on the test text over the largest logit: against
`transformers` as it is, and with its weights, keys and values rounded to fp16, as the artifact stores them (at most
1e-3). In other formats they are perplexity over the source's, and over that of the same codes run densely in
`transformers` (equal to 0.1 %). The jobs of a build are forked from a process that has imported the libraries.

Each greedy token must be the first choice of `transformers` after the same tokens. Where two logits are closer than
the errors of both, rounding decides: such a token is a near tie. Near ties are counted, and no other difference is
allowed.

A GGUF file is compared in fp16 alone, with what `transformers` decodes it to, and so is the folder that `transformers`
writes of it. Of the file itself also every tensor must be equal, and the token ids of texts that hurt tokenizers must
be llama.cpp's.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.harness.apart import apart
from benchmarks.shared.builds import MODELS, artifact_in, build, settings
from benchmarks.shared.real_models import MODELS as REAL_MODELS
from benchmarks.shared.real_models import file_of
from coldpress.compiler.checkpoint.tensors import read_role
from coldpress.compiler.io import load_arrays, load_record
from coldpress.runtime.generate.session import Session
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.metrics import Verification
from coldpress.schemas.model import Model
from tests.support import warm
from tests.support.dense_codes import perplexity, with_codes
from tests.support.hard_texts import HARD_TEXTS, around
from tests.support.hf import all_logits, load_hf, role_of, roles_of
from tests.support.llama_library import LlamaLibrary
from tests.support.models import MODEL_TYPES, write_model

FORMATS = ("fp16", "int8_group32", "int4_group32")
PROMPT_TOKENS, BLOCK_TOKENS = 16, 128
RANDOM = {f"random-{kind}": kind for kind in MODEL_TYPES}
"""Tiny random models, one of each architecture, with as many layers as it takes for all their kinds."""
RANDOM_LAYERS = 12
EXPORTED = ("stories260k", "prose7m")
"""Small models whose GGUF file the product writes first; it refuses tokenizers that lack tokens of bytes."""
FORMS = ("gguf", "folder")
FILE_TEXT = {"calibration_tokens": 1024, "evaluation_tokens": 1024}
"""Less text than a build's: a real model takes long, and only `verify` reads it."""


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("stories260k", "tinystories656k-relu", "prose7m"),
        smoke=("stories260k",),
        full=(*MODELS, *RANDOM),
        choices=(*MODELS, *RANDOM),
        help="models to build from folders",
    )
    files: tuple[str, ...] = option(
        EXPORTED[:1],
        full=(*EXPORTED, *REAL_MODELS),
        choices=(*EXPORTED, *REAL_MODELS),
        help="models to build from GGUF files, in fp16",
    )
    forms: tuple[str, ...] = option(
        FORMS, smoke=FORMS[:1], choices=FORMS, help="of a model in GGUF: the file, the folder that transformers writes"
    )
    formats: tuple[str, ...] = option(FORMATS, smoke=(FORMATS[0], FORMATS[2]), choices=FORMATS, help="weight formats")
    new_tokens: int = option(64, smoke=16, help="greedy tokens that are compared in fp16")
    test_tokens: int = option(1024, smoke=256, help="test tokens for the perplexities")
    short: bool = option(False, smoke=True, help="calibrate and verify on less text")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].model": "name of the model",
        "rows[].ppl_source": "perplexity of the checkpoint in transformers",
        "rows[].tokens_equal?": "fp16: whether greedy tokens equal those of transformers, but for near ties",
        "rows[].near_ties?": "fp16: greedy tokens that transformers puts behind another by less than twice the error",
        "rows[].max_logit_error?": "fp16: largest change of a dense logit by packing, over the largest logit",
        "rows[].half_keys_error?": "fp16: the same against transformers with weights, keys and values in fp16",
        "rows[].tensors?": "GGUF: tensors of the file",
        "rows[].tensors_equal?": "GGUF: those whose values equal transformers', bit for bit",
        "rows[].texts?": "GGUF: texts that both engines tokenized",
        "rows[].texts_equal?": "GGUF: those whose token ids equal llama.cpp's",
        "rows[].over_source?": "other formats: perplexity of the artifact over ppl_source",
        "rows[].over_codes?": "other formats: perplexity of the artifact over that of the same codes in transformers",
        "max_logit_error?": "largest max_logit_error of all models",
        "half_keys_error?": "largest half_keys_error of all models",
        "near_ties": "near ties of all models",
        "tokens_equal": "whether tokens_equal holds for all models",
        "farthest_over_codes?": "over_codes that is farthest from 1",
    }
    needs_data = True
    extra = "llama: xllamacpp"
    over = (
        {"model": "models", "format": "formats"},
        {"model": "files", "form": "forms", "format": FORMATS[:1]},
    )
    full_minutes = 60

    def measure(self, cell: Cell) -> Iterator[Row]:
        model, form = cell["model"], cell["format"]
        config = self._of_file(model, cell["form"]) if "form" in cell else self._settings(model)
        config |= {"method": "dense", "format": form, "label": form}
        until = "verify" if form == "fp16" else "package"
        top = build(self.folder / cell.get("form", "") / model, "--until", until, **config)
        yield apart(self, "compared", str(top), form, run=warm.run)

    def _of_file(self, model: str, form: str) -> dict[str, Any]:
        """Returns the snakemake settings of a GGUF file, or of the folder that transformers writes of it."""
        file = self.once(model, lambda: file_of(model, self.folder / "made" / model, build))
        folder = self.folder / "sources" / model
        if form == "folder" and not folder.exists():
            apart(self, "write_folder", str(file), str(folder), run=warm.run)
        config = settings(model if model in EXPORTED else "prose7m", short=self.options.short) | FILE_TEXT
        return config | {"model": folder if form == "folder" else file, "dram_budget": "100%"}

    def write_folder(self, file: str, folder: str) -> None:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(Path(file).parent, gguf_file=Path(file).name).save_pretrained(folder)
        load_hf(Path(file)).half().save_pretrained(folder)

    def _settings(self, model: str) -> dict[str, Any]:
        """Returns the snakemake settings of a model; writes it if it is random."""
        if model not in RANDOM:
            return settings(model, short=self.options.short)
        folder = self.folder / "sources" / model
        write_model(folder, RANDOM[model], num_hidden_layers=RANDOM_LAYERS, dtype="float16")
        return settings("stories260k", short=self.options.short) | {"model": folder, "dram_budget": "100%"}

    def figures(self, rows: Rows) -> Figures:
        ratios = [row["over_codes"] for row in rows if "over_codes" in row]
        errors = {
            name: max((row[name] for row in rows if name in row), default=None)
            for name in ("max_logit_error", "half_keys_error")
        }
        return errors | {
            "near_ties": sum(row.get("near_ties", 0) for row in rows),
            "tokens_equal": all(row.get("tokens_equal", True) for row in rows),
            "farthest_over_codes": max(ratios, key=lambda ratio: abs(ratio - 1), default=None),
        }

    def compared(self, folder: str, form: str) -> Row:
        """Returns the figures of the artifact in a build folder."""
        top = Path(folder)
        record = load_record(top.parent / "ingest.json", Model)
        blocks = load_arrays(load_record(top.parent / "tokenize.json", Corpus).split("test").arrays)["tokens"]
        blocks = blocks[: self.options.test_tokens // BLOCK_TOKENS, :BLOCK_TOKENS]
        file = Path(next(iter(record.tensors.values())).file).resolve()
        is_gguf = file.suffix == ".gguf"
        source = load_hf(file if is_gguf else file.parent)
        ppl_source = perplexity(source, blocks)
        with Session(artifact_in(top)) as session:
            if form == "fp16":
                error = load_record(top / "verify.json", Verification).max_logit_error
                found = of_file(file, record, source, session) if is_gguf else {}
                found |= {"ppl_source": ppl_source, "max_logit_error": error}
                return found | self._as_it_is(session, source, blocks, error)
            ppl = session.perplexity(blocks, sparse=True).perplexity
            over_codes = ppl / perplexity(with_codes(session, record), blocks)
        return {"ppl_source": ppl_source, "over_source": ppl / ppl_source, "over_codes": over_codes}

    def _as_it_is(self, session: Session, source: Any, blocks: np.ndarray, error: float) -> Row:
        """Returns the figures of weights as the artifact stores them: the source's matrices are rounded to fp16, except
        those whose codes it keeps; `error` is `max_logit_error`."""
        prompt = blocks[0][:PROMPT_TOKENS].tolist()
        found = list(session.generate(prompt, self.options.new_tokens, ignore_eos=True).token_ids)
        ties, equal = near_ties(source, prompt, found, error)
        exact = _kept_codes(session)
        for name, tensor in source.named_parameters():
            if tensor.ndim > 1 and role_of(name) not in exact:  # vectors are kept in float32
                tensor.data = tensor.data.half().float()
        session.decoder.begin(len(blocks[0]))
        halved = all_logits(source, blocks[0].tolist(), half_keys=True)
        off = np.abs(session.decoder.prefill(blocks[0].astype(np.int64)) - halved).max()
        return {"tokens_equal": equal, "near_ties": ties, "half_keys_error": float(off / np.abs(halved).max())}


def _kept_codes(session: Session) -> set[str]:
    """Returns the roles of matrices whose codes a GGUF file gave, which are not rounded to fp16."""
    manifest = session.artifact.manifest
    stored = [*manifest.resident, *manifest.flash.tables]
    return {tensor.role for tensor in stored if tensor.format not in (None, "fp16")}


def of_file(file: Path, record: Model, source: Any, session: Session) -> Row:
    """Returns the figures of a GGUF file's tensors and token ids."""
    expected = roles_of(source, record.spec)
    equal = [np.array_equal(read_role(record, role), expected[role]) for role in record.tensors]
    engine, codec = LlamaLibrary(file, 64, record.spec.vocab_size), TextCodec(session.artifact)
    special = json.loads((Path(record.folder) / "tokenizer.json").read_bytes())["added_tokens"]
    texts = [*HARD_TEXTS, *(text for token in special for text in around(token["content"]))]
    same = [codec.encode(text) == engine.tokenize(text) for text in texts]
    engine.close()
    return {"tensors": len(equal), "tensors_equal": sum(equal), "texts": len(same), "texts_equal": sum(same)}


def near_ties(source: Any, prompt: list[int], tokens: list[int], error: float) -> tuple[int, bool]:
    """Compares greedy `tokens` with what `transformers` chooses after the same tokens.

    Args:
        source: transformers' model.
        prompt: What the tokens follow.
        tokens: The artifact's greedy continuation.
        error: The artifact's largest error of a logit, over the largest logit; measured on other text.

    Returns:
        How many tokens are not transformers' first choice, and whether all of them are near ties: two logits are closer
        than the errors of both.
    """
    logits = all_logits(source, prompt + tokens[:-1])[len(prompt) - 1 :]
    margins = logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]
    return int((margins > 0).sum()), bool(margins.max() <= 2 * error * np.abs(logits).max())


if __name__ == "__main__":
    main("parity")
