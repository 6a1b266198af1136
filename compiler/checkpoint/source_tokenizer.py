"""The model's tokenizer: tokenizer.json through the `tokenizers` package, the token that starts each block of text, and
the special tokens, as transformers resolves them from the files around tokenizer.json.

It uses none of transformers' tokenizer classes, which the runtime does not have, so that both give the same ids.
tokenizer_config.json names bos_token and its like; special_tokens_map.json and added_tokens.json count where it has no
`added_tokens_decoder`. A token that tokenizer.json lacks is added to it, under the next free id, and has that id in
every prompt. So the tokenizer decides which ids begin and end a text; config.json is asked where it says nothing.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.compiler.checkpoint.source_json import read_json, read_object
from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import short
from coldpress.runtime.text.process import LimitedEngine
from coldpress.runtime.text.template import text_of
from coldpress.schemas.errors import ArtifactError, CheckpointError
from coldpress.schemas.model import ModelSpec

log = logging.getLogger(__name__)

Json = Mapping[str, Any]
DECODER = "added_tokens_decoder"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
EXTRA = ("extra_special_tokens", "additional_special_tokens")
MAX_TEXT = 1000
TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
"""Newer checkpoints have it; older ones have the template in their settings."""
MAX_TOKENIZER_BYTES = strict_json.TOKENIZER.size_bytes
MAX_SETTINGS_BYTES = 16 << 20
SAMPLE = "The quick brown fox jumps over the lazy dog 12 times or 345; a naïve façade costs 6 €.\n" * 20


class SourceTokenizer:
    """The tokenizer of a checkpoint; it encodes texts in a process with limits."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Reads the tokenizer. Raises CheckpointError if the file is missing, not strict JSON, no tokenizer, exceeds
        its limits on a short text, or has ordinary tokens without a row in the embeddings; added ones may lack it, as
        `encode` says."""
        from tokenizers import Tokenizer

        path = folder / TOKENIZER
        if not path.is_file():
            raise CheckpointError(f"{TOKENIZER} is missing in the checkpoint; write it with save_pretrained")
        read_json(path, MAX_TOKENIZER_BYTES, strict_json.TOKENIZER)
        self._limited = LimitedEngine()
        try:
            self._limited.load(path.read_bytes())
        except ArtifactError as error:
            told = str(error).removeprefix("tokenizer/").removesuffix("; rebuild the artifact")
            raise CheckpointError(f"{told}; give a checkpoint with another tokenizer") from error
        self._encoded(SAMPLE, special=True)
        self._tokenizer = Tokenizer.from_file(str(path))  # for its names alone: it is one, by the process with limits
        self._vocab_size = vocab_size
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder() if max(ids.values(), default=-1) >= vocab_size else {}
        largest = max((number for number in ids.values() if number not in added), default=-1)
        if largest < 0 or largest >= vocab_size:
            raise CheckpointError(
                f"{TOKENIZER}: its largest token id is {largest}, expected ids from 0 to {vocab_size - 1}, the rows of "
                "the embeddings"
            )

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Returns the ids of a text; with `special` also those that the post-processor adds. Raises CheckpointError if
        the tokenizer fails on the text, as a checkpoint's patterns can, or exceeds its limits; if a token of the text
        has no row in the embeddings."""
        ids = self._encoded(text, special)
        if max(ids, default=0) >= self._vocab_size:
            raise CheckpointError(
                f"{TOKENIZER}: the text has the token {short(self._tokenizer.id_to_token(max(ids)))}, which has no row "
                f"in the embeddings ({self._vocab_size} rows); take it out of the text"
            )
        return ids

    def _encoded(self, text: str, special: bool) -> list[int]:
        try:
            return self._limited.encode(text, special)
        except ArtifactError as error:
            raise CheckpointError(
                f"{TOKENIZER}: it fails on {len(text):,} characters of ordinary text, or takes too much time or "
                "memory; give a checkpoint with another tokenizer"
            ) from error


def bos_of(folder: Path, spec: ModelSpec, tokenizer: SourceTokenizer) -> int | None:
    """Returns the id that starts each block of text, or None: the same as at the start of a prompt
    (runtime/text/tokenizer.py). The tokenizer's own post-processor adds it, or tokenizer_config.json asks for it with
    `add_bos_token`."""
    settings = read_object(folder / SETTINGS, MAX_SETTINGS_BYTES) if (folder / SETTINGS).is_file() else {}
    bos = spec.bos_token_id
    if bos is None or settings.get("add_bos_token") is True:
        return bos
    ids = tokenizer.encode("a", special=True)
    return bos if len(ids) > 1 and ids[0] == bos else None


@dataclass(frozen=True)
class Special:
    settings: dict[str, Any]
    """tokenizer_config.json with every named token."""
    added: list[dict[str, Any]] | None
    """`added_tokens` of tokenizer.json; None if they are those that it has."""
    ids: dict[str, int]


def resolved(tokenizer: Json, settings: Json, special: Json, added: Json) -> Special:
    """Resolves the special tokens; `special` (special_tokens_map.json) and `added` (added_tokens.json, text -> id) are
    empty without a file. Raises CheckpointError if a token is none, or a file gives it another id than
    tokenizer.json."""
    given = {} if DECODER in settings else {key: value for key, value in special.items() if value}
    found = {**settings, **given}
    extra = next((found[key] for key in EXTRA if found.get(key)), [])
    extra = extra if isinstance(extra, dict | list) else [extra]
    named = {
        key: value for key, value in found.items() if key.endswith("_token") and isinstance(value, str | dict) and value
    }
    named |= extra if isinstance(extra, dict) else {}
    if "bos_token" not in named:
        found.pop("add_bos_token", None)
    texts = {name: _token(name, value)["content"] for name, value in named.items()}
    tokens, known, vocabulary = _listed(tokenizer), _ids(tokenizer), len(_vocabulary(tokenizer))
    before = dict(tokens)
    for place, number, value in _wanted(found, added, named, extra):
        token = _token(place, value)
        text = token["content"]
        token["special"] = token["special"] or text in texts.values()
        if text not in known:
            free = max([vocabulary, *(1 + entry["id"] for entry in tokens.values())])
            if number not in (None, free):
                raise CheckpointError(
                    f"{place}: the token {short(text)} has the id {number}, expected {free}, the next after those of "
                    "tokenizer.json, which lacks it; load and save the tokenizer with transformers"
                )
            known[text] = free
        elif text in tokens and number is None:
            continue
        tokens[text] = {"id": known[text], **token}
    entries = sorted(tokens.values(), key=lambda entry: entry["id"])
    ids = {name: known[text] for name, text in texts.items()}
    return Special(found, None if tokens == before else entries, ids)


def with_tokens(spec: ModelSpec, special: Special, generation: Json) -> ModelSpec:
    """Returns the spec with the ids that begin and end a text: the tokenizer's, and those that config.json and
    generation_config.json have beside them. Says in a line which of these the tokenizer contradicts, and which have no
    row in the embeddings."""
    ids, said = special.ids, {"config.json": spec.eos_token_ids}
    said["generation_config.json"] = _common.eos_ids(generation.get("eos_token_id"))
    bos, eos = ids.get("bos_token", spec.bos_token_id), ids.get("eos_token")
    if spec.bos_token_id is not None and bos != spec.bos_token_id:
        log.warning("config.json: bos_token_id is %d, the tokenizer's is %d, which is taken", spec.bos_token_id, bos)
    ends = [] if eos is None else [eos]
    for file, given in said.items():
        if eos is None or eos in given or not given:
            ends += given
            continue
        wrong = [token for token in given if token in (ids.get("bos_token"), ids.get("unk_token"))]
        rest = [token for token in given if token not in wrong]
        log.warning(
            "%s: eos_token_id is %s, the tokenizer's is %d: texts end at %s", file, list(given), eos, [eos, *rest]
        )
        ends += rest
    beyond = sorted({token for token in (bos, *ends) if token is not None and token >= spec.vocab_size})
    if beyond:
        log.warning("the special tokens %s have no row in the embeddings, and are not used", beyond)
    return spec.model_copy(
        update={
            "bos_token_id": None if bos in beyond else bos,
            "eos_token_ids": tuple(dict.fromkeys(token for token in ends if token not in beyond)),
        }
    )


def _wanted(settings: Json, added: Json, named: Json, extra: Any) -> Iterator[tuple[str, int | None, Any]]:
    """Yields (file or setting, id or None, token) in the order in which transformers adds tokens."""
    if DECODER in settings:
        decoder = settings[DECODER]
        if not isinstance(decoder, dict) or not all(number.isdecimal() for number in decoder):
            raise CheckpointError(f"tokenizer_config.json: {DECODER} is {short(decoder)}, expected ids and tokens")
        for number in sorted(decoder, key=int):
            yield f"tokenizer_config.json: {DECODER}", int(number), decoder[number]
    else:
        if not all(type(number) is int and number >= 0 for number in added.values()):
            raise CheckpointError(f"added_tokens.json: found {short(added)}, expected tokens and ids")
        names = {text_of(value) for value in (*named.values(), *extra)}
        for text, number in sorted(added.items(), key=lambda entry: entry[1]):
            is_special = text in names
            yield "added_tokens.json", number, {"content": text, "special": is_special, "normalized": not is_special}
    for name, value in named.items():
        yield f"tokenizer_config.json: {name}", None, value
    for value in () if isinstance(extra, dict) else extra:
        yield "tokenizer_config.json: extra_special_tokens", None, value


def _token(place: str, value: Any) -> dict[str, Any]:
    token = value if isinstance(value, dict) else {"content": value, "special": True}
    text, flags = token.get("content"), {key: token[key] for key in FLAGS if key in token}
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TEXT or not all(type(v) is bool for v in flags.values()):
        raise CheckpointError(
            f"{place} is {short(value)}, expected the text of a token, or its content and the flags {', '.join(FLAGS)}"
        )
    flags = {**dict.fromkeys(FLAGS, False), "normalized": not flags.get("special", False), **flags}
    return {"content": text, **flags}


def _vocabulary(tokenizer: Json) -> Json | list[Any]:
    found = (tokenizer.get("model") or {}).get("vocab")
    return found if isinstance(found, dict | list) else {}


def _listed(tokenizer: Json) -> dict[str, dict[str, Any]]:
    entries = tokenizer.get("added_tokens") or []
    return {entry["content"]: dict(entry) for entry in entries}


def _ids(tokenizer: Json) -> dict[str, int]:
    found = _vocabulary(tokenizer)
    known = {piece[0]: at for at, piece in enumerate(found)} if isinstance(found, list) else dict(found)
    return known | {text: entry["id"] for text, entry in _listed(tokenizer).items()}
