"""draft: measures how often a draft model guesses the model's next token (LLM in a flash 5.2).

Both see validation text. A guess is right if the draft's likeliest token is the model's likeliest, whatever the text
goes on with: a greedy run that wrote this text would accept the same share of greedy drafts. A run's own text is easier
to guess, so that drafts bring more than this says. The device's law gives the seconds of a guess, with all of the draft
model's units in DRAM.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from coldpress.compiler.activity.source_logits import SourceLogits
from coldpress.compiler.checkpoint.private import private_folder
from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.publishing import standing
from coldpress.compiler.steps import Steps
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import holds_everything, units_whole_bytes
from coldpress.runtime.generate.draft_model import likeliest
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import pass_seconds
from coldpress.runtime.text.tokenizer import TOKENIZER_FILE
from coldpress.schemas.base import Record
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.drafter import Drafter
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model
from coldpress.schemas.package import Package
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
NUM_TOKENS = 2048
"""Validation tokens that guesses are compared on, in whole blocks, at least two."""


class DraftConfig(Record):
    """Settings of `draft`: none."""


def run(
    config: DraftConfig,
    model: Model,
    corpus: Corpus,
    draft_corpus: Corpus,
    draft_package: Package,
    work: Workspace,
    threads: int = 1,
) -> Drafter:
    """Compares the guesses of the artifact `draft_package` with the model's choices.

    Args:
        draft_corpus: The draft model's tokens of the same text.

    Raises:
        ColdpressError: if the two models have other ids for the same text or other special tokens.
    """
    folder = standing(draft_package)
    _check_same_tokens(model, corpus, draft_corpus, folder)
    blocks = load_arrays(corpus.split("validation").arrays, "tokens")["tokens"]
    blocks = blocks[: max(2, NUM_TOKENS // blocks.shape[1])]
    manifest = open_artifact(folder).manifest
    dram_bytes = units_whole_bytes(manifest, manifest.plans[0])
    with Session(folder, dram_budget_bytes=dram_bytes) as session:
        plan = session.plan
        blocks = blocks[:, : plan.context_length]
        guesses, certainty = _guesses(session, blocks, model.spec.vocab_size)
    assert holds_everything(plan, manifest.flash.sections), "a draft model is built with all of its weights in DRAM"
    source = SourceLogits(model, blocks, threads, "draft, model")
    right = np.stack([guesses[block] == source(block).argmax(axis=1) for block in range(len(blocks))])
    LOG.info("draft: %.3f of %d tokens are guessed by %s", right.mean(), right.size, manifest.source.name)
    return Drafter(
        name=manifest.source.name,
        dram_bytes=dram_bytes,
        token_s=pass_seconds(session.artifact, plan, 1)[0],
        num_tokens=right.size,
        arrays=work.once("guesses", lambda: {"right": right, "certainty": certainty}),
    )


def needs(build: "Build") -> StageNeeds:
    """Counts a layer's weights, hidden states and the logits of a block; the draft model is taken to be as large as a
    third of the model."""
    tokens = max(NUM_TOKENS, 2 * build.block_tokens)
    logits = 4 * 4 * build.block_tokens * build.model.spec.vocab_size
    hidden = 2 * 4 * tokens * build.model.spec.hidden_size
    held = build.layer_weights_bytes + build.head_bytes + build.running_bytes(8) + hidden + logits
    return StageNeeds(stage="draft", ram_bytes=build.TORCH_BYTES + held + build.code_bytes // 3, disk_bytes=5 * tokens)


def _guesses(session: Session, blocks: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the likeliest token after each token of `blocks` int32 [num_blocks, block_tokens], int64 of the same
    shape, and its probability, float32."""
    tokens, certainty = list[np.ndarray](), list[np.ndarray]()
    steps = Steps("draft, guesses", blocks.size, "tokens")

    def keep(logits: np.ndarray) -> None:
        best, probabilities = likeliest(logits[:, :vocab_size])
        tokens.append(best)
        certainty.append(probabilities.astype(np.float32))
        steps.add(len(logits))

    session.perplexity(blocks, sparse=False, on_logits=keep)
    return np.concatenate(tokens).reshape(blocks.shape), np.concatenate(certainty).reshape(blocks.shape)


def _check_same_tokens(model: Model, corpus: Corpus, draft_corpus: Corpus, folder: Path) -> None:
    remedy = "take a draft model of the same family"
    ours, theirs = (one.split("validation").arrays.sha256 for one in (corpus, draft_corpus))
    if ours != theirs:
        raise ColdpressError(
            f"the draft model has other token ids than {model.name} for the same text, expected the same; {remedy}"
        )
    special = [_special_tokens(path) for path in (private_folder(model) / "tokenizer.json", folder / TOKENIZER_FILE)]
    for number, text in special[0].items():
        if special[1].get(number) != text:
            found = special[1].get(number, "no special token")
            raise ColdpressError(
                f"the draft model's token {number} is {found!r}, expected the special token {text!r} of {model.name}; "
                f"{remedy}"
            )


def _special_tokens(file: Path) -> dict[int, str]:
    """Returns the special tokens of a tokenizer.json by their ids; none without the file."""
    if not file.is_file():
        return {}
    added = Tokenizer.from_file(str(file)).get_added_tokens_decoder()
    return {number: token.content for number, token in added.items() if token.special}
