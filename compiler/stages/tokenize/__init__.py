"""tokenize: blocks of calibration, validation and test tokens from disjoint text, and the task of each token.

Reads the corpus (compiler/stages/tokenize/text.py assigns documents to splits) and the model's own tokenizer. Documents
are joined with two newlines and cut into blocks of equal length. Each block begins with the beginning-of-sequence token
if the tokenizer asks for one, as a prompt does.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from coldpress.compiler.checkpoint.private import private_folder
from coldpress.compiler.checkpoint.source_tokenizer import SourceTokenizer, bos_of
from coldpress.compiler.io import Workspace, save_arrays
from coldpress.compiler.shared_settings import SeedSetting
from coldpress.compiler.stages.tokenize.rows import ChatTemplate, TextRows
from coldpress.compiler.stages.tokenize.text import MAX_TEXT_BYTES, SHARES, Documents, read_corpus
from coldpress.schemas.base import PositiveCount
from coldpress.schemas.config import BRANCH_PATTERN, Key
from coldpress.schemas.corpus import SPLITS, Corpus, Split, TokenBlocks
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

log = logging.getLogger(__name__)

SEPARATOR = "\n\n"
MAX_CHARS_PER_TOKEN = 16
"""A token of ordinary text has 3 to 6 characters."""
MIN_TEXT_CHARS = 1 << 20
"""Even a small calibration sees more than the first articles of a dataset."""
MAX_TASKS = 256
"""With more names than this, the field holds something other than tasks; every count is stored per task."""


class TokenizeConfig(SeedSetting):
    """Settings of `tokenize`."""

    corpus: Annotated[str, Key()] = Field(
        default="pydoc",
        min_length=1,
        description="pydoc, a .txt, .jsonl, .json (each also .gz or .zst) or .parquet file, a folder of them, or a hub "
        "dataset such as owner/name:subset",
    )
    corpus_field: Annotated[str | None, Key(default="the first known layout that a record has")] = Field(
        default=None,
        min_length=1,
        description="field of the corpus's records that holds the text, or several that make it up, as question+answer",
    )
    corpus_revision: Annotated[str | None, Key(default="the profile's, or main")] = Field(
        default=None,
        pattern=BRANCH_PATTERN,
        description="the commit that a hub dataset is read at, or a branch, which the first build pins to a commit",
    )
    calibration_tokens: Annotated[PositiveCount, Key()] = Field(
        default=8192,
        description="most tokens of calibration text; more for sharper statistics, fewer for a quick build",
    )
    evaluation_tokens: Annotated[PositiveCount, Key()] = Field(
        default=4096, description="most tokens of validation text, and of test text; more where quality must be certain"
    )
    block_tokens: Annotated[PositiveCount, Key()] = Field(
        default=256,
        description="tokens of a block, cut to the model's context where that is shorter; longer for texts that "
        "depend on what came long before",
    )


def run(config: TokenizeConfig, model: Model, work: Workspace) -> Corpus:
    """Returns the blocks of each split: `tokens` int32 [num_blocks, block_tokens], and `tasks` of the same shape if any
    are named.

    Raises:
        ColdpressError: if the corpus is missing or empty, or a split is too short for one block.
    """
    folder = private_folder(model)
    fields = tuple(config.corpus_field.split("+")) if config.corpus_field else ()
    rows = TextRows(fields, ChatTemplate(folder).render)
    documents = read_corpus(config.corpus, config.seed, config.corpus_revision, _wanted_chars(config), rows)
    block_tokens = min(config.block_tokens, model.spec.max_position_embeddings)
    tokenizer = SourceTokenizer(folder, model.spec.vocab_size)
    bos = bos_of(folder, model.spec, tokenizer)
    if block_tokens - (bos is not None) < 2:
        raise ColdpressError(f"blocks of {block_tokens} tokens leave nothing to predict; raise block_tokens")
    splits = tuple(_split(config, documents, split, tokenizer, block_tokens, bos, work) for split in SPLITS)
    return Corpus(
        name=documents.name, revision=config.corpus_revision, text_sha256=documents.text_sha256, splits=splits
    )


def needs(build: "Build") -> StageNeeds:
    settings = build.settings["tokenize"]
    tokens = settings["calibration_tokens"] + 2 * settings["evaluation_tokens"]
    text = 4 * max(MIN_TEXT_CHARS, MAX_CHARS_PER_TOKEN * tokens)
    ram_bytes = build.TORCH_BYTES + build.BLOCK_BYTES + text
    return StageNeeds(stage="tokenize", ram_bytes=ram_bytes, disk_bytes=8 * tokens)


def _wanted_chars(config: TokenizeConfig) -> int:
    """Returns how much text of each split of a dataset surely gives the wanted tokens, if the text is ordinary."""
    share = {split: SHARES[split] / sum(SHARES.values()) for split in SPLITS}
    tokens = max(config.calibration_tokens / share["calibration"], config.evaluation_tokens / share["test"])
    return min(MAX_TEXT_BYTES, max(MIN_TEXT_CHARS, int(tokens * MAX_CHARS_PER_TOKEN)))


def _split(
    config: TokenizeConfig,
    documents: Documents,
    split: Split,
    tokenizer: SourceTokenizer,
    block_tokens: int,
    bos: int | None,
    work: Workspace,
) -> TokenBlocks:
    wanted_tokens = config.calibration_tokens if split == "calibration" else config.evaluation_tokens
    wanted = max(1, wanted_tokens // block_tokens)
    texts = documents.splits[split]
    blocks, places = make_blocks(texts, tokenizer, wanted, block_tokens, bos)
    if not len(blocks):
        raise ColdpressError(
            f"the corpus {documents.name} is too short: its {split} text has less than one block of {block_tokens} "
            "tokens; give more text or smaller block_tokens"
        )
    if len(blocks) < wanted:
        log.info("tokenize: %s has %d blocks of %d tokens, %d wanted", split, len(blocks), block_tokens, wanted)
    found = {"tokens": blocks}
    names = [documents.tasks.get(text) for text in texts[: 1 + int(places.max())]]
    tasks = sorted({name for name in names if name is not None})
    if len(tasks) > MAX_TASKS:
        log.info("tokenize: %s names %d tasks, more than %d: they are left out", split, len(tasks), MAX_TASKS)
        tasks = []
    if tasks:
        numbers = np.array([-1 if name is None else tasks.index(name) for name in names], np.int16)
        found["tasks"] = numbers[places]
    arrays = save_arrays(work.folder / f"{split}.safetensors", found)
    return TokenBlocks(
        split=split, arrays=arrays, num_blocks=len(blocks), block_tokens=block_tokens, tasks=tuple(tasks)
    )


def make_blocks(
    documents: Iterable[str], tokenizer: SourceTokenizer, num_blocks: int, block_tokens: int, bos: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenizes as many documents as are needed, and cuts them into blocks of `block_tokens` tokens. Each block begins
    with `bos`, if there is one. Returns token ids and the numbers of their documents, both int32 [at most num_blocks,
    block_tokens]."""
    payload = block_tokens - (bos is not None)
    ids: list[int] = []
    places: list[np.ndarray] = []
    for place, document in enumerate(documents):
        found = tokenizer.encode(document + SEPARATOR)
        ids += found
        places.append(np.full(len(found), place, np.int32))
        if len(ids) >= num_blocks * payload:
            break
    count = min(num_blocks, len(ids) // payload)
    blocks = np.array(ids[: count * payload], np.int32).reshape(count, payload)
    documents_of = np.concatenate([*places, np.empty(0, np.int32)])[: count * payload].reshape(count, payload)
    if bos is None:
        return blocks, documents_of
    return np.insert(blocks, 0, bos, axis=1), np.insert(documents_of, 0, documents_of[:, 0], axis=1)
