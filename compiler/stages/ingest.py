"""ingest: turns a Hugging Face checkpoint or a GGUF file into a checked `Model` record.

Resolves a hub model at a pinned commit, a local folder, or a GGUF file, whose keys become config.json and
tokenizer.json; pickled weights are converted first. Reads config.json and the safetensors headers with our own strict
parsers, checks them against each other, and checks every weight for NaN, infinity and size. Writes a private folder
with the tokenizer and the believed part of the configuration: transformers sees nothing else. Weights stay in their
files; links to them lie beside the private folder, so that no record of a later stage names a place outside the build
folder.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from coldpress.compiler.architectures import _common
from coldpress.compiler.checkpoint.conversion import converted
from coldpress.compiler.checkpoint.gguf_config import source_config_of
from coldpress.compiler.checkpoint.gguf_files import GgufModel, open_gguf
from coldpress.compiler.checkpoint.gguf_tokenizer import tokenizer_of
from coldpress.compiler.checkpoint.headers import read_header
from coldpress.compiler.checkpoint.hub import HUB_ID, snapshot
from coldpress.compiler.checkpoint.private import LINKS
from coldpress.compiler.checkpoint.source_config import check_value, checked_config, with_long_factors
from coldpress.compiler.checkpoint.source_json import read_json, read_object
from coldpress.compiler.checkpoint.source_tokenizer import (
    CHAT_TEMPLATE,
    DECODER,
    EXTRA,
    MAX_SETTINGS_BYTES,
    MAX_TOKENIZER_BYTES,
    SETTINGS,
    TOKENIZER,
    SourceTokenizer,
    Special,
    resolved,
    with_tokens,
)
from coldpress.compiler.checkpoint.tensor_map import match_gguf, match_tensors
from coldpress.compiler.checkpoint.tensors import MAX_CONFIG_BYTES
from coldpress.compiler.checkpoint.weight_files import is_there, kind_of, locate, regular_file, scan, source_file
from coldpress.compiler.io import Workspace, digest, make_folder, replacing, sync_folder
from coldpress.runtime.artifact import strict_json
from coldpress.schemas.base import Record
from coldpress.schemas.config import Key
from coldpress.schemas.errors import CheckpointError
from coldpress.schemas.model import Model, ModelSpec, SourceFile, TensorSource
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

log = logging.getLogger(__name__)

CONFIG = "config.json"
GENERATION = "generation_config.json"
INGEST_BYTES = 700 << 20
"""Memory of a process that has imported transformers and holds blocks of weights."""
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
CARD = "README.md"
MAX_TEXT_BYTES = 1 << 20
OTHERS_MAY_READ = 0o044
LICENSE_FILES = re.compile(r"LICENSE|LICENCE|NOTICE", re.IGNORECASE)
LICENSE_NAME = re.compile(r"[A-Za-z0-9_.\-]{0,99}[A-Za-z0-9_\-]")
FRONT_MATTER_LICENSE = re.compile(r"^license:\s*[\"']?([A-Za-z0-9][A-Za-z0-9.+\-]*)[\"']?\s*$", re.MULTILINE)
SETTINGS_KEYS = {
    *("add_bos_token", "add_eos_token", "add_prefix_space", "chat_template", "clean_up_tokenization_spaces"),
    *("legacy", "model_max_length", "padding_side", "tokenizer_class", "use_default_system_prompt"),
}
GENERATION_KEYS = {"bos_token_id", "eos_token_id"}
SPECIAL_KEYS = re.compile(rf"\w{{1,100}}_token|{'|'.join((DECODER, *EXTRA))}")
BELIEVED = (GENERATION, SETTINGS, SPECIAL_TOKENS)
"""Settings files that a checkpoint may have; only some of their keys are copied."""


class IngestConfig(Record):
    """Settings of `ingest`."""

    model: str = Field(min_length=1, description="folder of a checkpoint, GGUF file, or hub id such as owner/name")
    name: str | None = Field(
        default=None, description="name of the model in records and artifacts; by default the last part of `model`"
    )
    revision: str | None = Field(default=None, description="40-hex commit of a hub model")
    license: str | None = Field(default=None, description="licence; by default what the model card says")
    longrope: Annotated[Literal["short", "long"], Key()] = Field(
        default="short",
        description="longrope's factors: short ones for contexts up to the model's original one, or long ones, with "
        "which transformers reads texts beyond it",
    )
    offline: bool = Field(default=False, description="whether hub models are taken from the local cache only")


@dataclass(frozen=True)
class _Checkpoint:
    folder: Path
    config: dict[str, Any]
    spec: ModelSpec
    tensors: dict[str, TensorSource]
    weight_files: tuple[Path, ...]
    chat_template: tuple[Path, ...]
    """The chat template's file; empty if there is none."""
    licenses: tuple[Path, ...]
    license: str | None
    settings: dict[str, dict[str, Any]]
    """The believed keys of each settings file other than config.json."""
    has_own_settings: bool
    """True if the settings are files of the checkpoint, and not made of a GGUF file's keys."""


def run(config: IngestConfig, work: Workspace) -> Model:
    """Checks the checkpoint and returns its record; writes the private folder `source` into the workspace.

    Raises:
        CheckpointError: naming file and tensor or key, what was found and what was expected.
    """
    with TemporaryDirectory() as translated:
        given, hub_id, gguf = _resolve(config, Path(translated))
        folder = given if gguf else converted(given)
        checkpoint = _check(folder, config.longrope, gguf)
        if is_there(folder, TOKENIZER):
            regular_file(folder, TOKENIZER)
        SourceTokenizer(folder, checkpoint.spec.vocab_size)
        special = _special(checkpoint)
        spec = with_tokens(checkpoint.spec, special, checkpoint.settings[GENERATION])
        files = _scan(checkpoint)
        source = _write_private(checkpoint, special, work.folder / "source")
    weights = [file for file in files if file.name in {path.name for path in checkpoint.weight_files}]
    if special.added is not None:
        SourceTokenizer(source, spec.vocab_size)
    links = _link_weights(checkpoint, work.folder / LINKS)
    license_names = {path.name for path in checkpoint.licenses}
    model = Model(
        spec=spec,
        name=config.name or (hub_id or (gguf.name if gguf else given.resolve().name)).rpartition("/")[2],
        source=hub_id or "local",
        revision=config.revision if hub_id else None,
        license=config.license or checkpoint.license,
        folder=str(source.resolve()),
        tensors={role: _linked(tensor, links) for role, tensor in checkpoint.tensors.items()},
        files=files,
        private_files=tuple(source_file(path) for path in sorted(source.iterdir()) if path.name not in license_names),
        license_files=tuple(source_file(source / path.name) for path in checkpoint.licenses),
        weights_sha256=digest(*(text for file in weights for text in (file.name, file.sha256))),
        num_parameters=sum(int(np.prod(tensor.shape)) for tensor in checkpoint.tensors.values()),
    )
    log.info("ingest: %s, %s with %d parameters", model.name, model.spec.model_type, model.num_parameters)
    return model


def needs(build: "Build") -> StageNeeds:
    """Returns the needs of the stage: it reads every weight once, in blocks; the private folder holds the tokenizer."""
    return StageNeeds(stage="ingest", ram_bytes=INGEST_BYTES, disk_bytes=(1 << 20) + 256 * build.model.spec.vocab_size)


def _resolve(config: IngestConfig, translated: Path) -> tuple[Path, str | None, GgufModel | None]:
    """Returns (folder of the checkpoint, hub id or None, the model if it is in GGUF); writes the settings and the
    tokenizer of a GGUF file into `translated`, as a checkpoint's folder has them."""
    folder = Path(config.model).expanduser()
    if folder.is_dir():
        return folder, None, None
    if folder.exists():
        gguf = open_gguf(folder)
        tokenizer, settings = tokenizer_of(gguf)
        for name, value in {CONFIG: source_config_of(gguf), TOKENIZER: tokenizer, SETTINGS: settings}.items():
            (translated / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
        return translated, None, gguf
    if not HUB_ID.fullmatch(config.model):
        raise CheckpointError(
            f"there is no folder {config.model} and no such file, and it is no hub id such as owner/name; give one"
        )
    return snapshot(config.model, config.revision, config.offline), config.model, None


def _check(folder: Path, longrope: str, gguf: GgufModel | None = None) -> _Checkpoint:
    if not (folder / CONFIG).exists():
        known = kind_of(folder)
        text = f"{folder.name} {known}" if known else f"{CONFIG} is missing in {folder.name}"
        raise CheckpointError(f"{text}, expected a Hugging Face checkpoint")
    raw = read_object(regular_file(folder, CONFIG), MAX_CONFIG_BYTES)
    architecture, believed = checked_config(raw)
    if longrope == "long":
        believed = with_long_factors(believed)
    settings = {name: _optional(folder, name) for name in BELIEVED}
    for key, value in settings[GENERATION].items():
        check_value(key, value, GENERATION)
    source = _common.source_config(architecture.MODULES, believed)
    spec = architecture.spec(source)
    names = architecture.parameters(source, spec)
    if gguf is None:
        located = locate(folder)
        tensors = match_tensors(spec, names, located, architecture.ignored(source, spec), architecture.places(spec))
        weight_files = tuple(sorted({found.path for found in located.values()}))
    else:
        tensors, weight_files = match_gguf(spec, names, gguf), gguf.paths
    return _Checkpoint(
        folder=folder,
        config=believed,
        spec=spec,
        tensors=tensors,
        weight_files=weight_files,
        chat_template=_chat_template(folder),
        licenses=_licenses(folder),
        license=gguf.text("general.license") if gguf else _license(folder),
        settings=settings,
        has_own_settings=gguf is None,
    )


def _licenses(folder: Path) -> tuple[Path, ...]:
    """Checks that each licence file belongs to the checkpoint and has a name that an artifact allows."""
    found: dict[str, Path] = {}
    for name in sorted(path.name for path in folder.iterdir() if LICENSE_FILES.match(path.name) and not path.is_dir()):
        if not LICENSE_NAME.fullmatch(name):
            raise CheckpointError(
                f"the licence file {name[:120]!r} has a name that an artifact cannot have, expected up to 100 letters, "
                "digits, '.', '_' and '-', not ending in '.'; rename it in a copy of the checkpoint"
            )
        path, config = regular_file(folder, name), folder / CONFIG
        if config.stat().st_mode & ~path.stat().st_mode & OTHERS_MAY_READ:  # it may link to a private file
            raise CheckpointError(
                f"the licence file {path.name} has the mode {path.stat().st_mode & 0o777:o} and is hidden from readers "
                f"of {CONFIG}, but would be public in every artifact; give it the mode of {CONFIG}, or remove it"
            )
        if name.casefold() in found:
            raise CheckpointError(
                f"the licence files {found[name.casefold()].name} and {name} differ in letter case alone, and only one "
                "can go into an artifact; rename one in a copy of the checkpoint"
            )
        _check_size(path, MAX_TEXT_BYTES)
        found[name.casefold()] = path
    return tuple(found.values())


def _chat_template(folder: Path) -> tuple[Path, ...]:
    if not is_there(folder, CHAT_TEMPLATE):
        return ()
    path = regular_file(folder, CHAT_TEMPLATE)
    _check_size(path, MAX_TEXT_BYTES)
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{CHAT_TEMPLATE}: not UTF-8 at byte {error.start}, expected text; convert it") from error
    return (path,)


def _check_size(path: Path, limit: int) -> None:
    if path.stat().st_size > limit:
        raise CheckpointError(f"{path.name}: found {path.stat().st_size} bytes, expected at most {limit}")


def _special(checkpoint: _Checkpoint) -> Special:
    folder = checkpoint.folder
    return resolved(
        read_json(folder / TOKENIZER, MAX_TOKENIZER_BYTES, strict_json.TOKENIZER),
        checkpoint.settings[SETTINGS],
        checkpoint.settings[SPECIAL_TOKENS],
        read_object(regular_file(folder, ADDED_TOKENS), MAX_SETTINGS_BYTES) if is_there(folder, ADDED_TOKENS) else {},
    )


def _scan(checkpoint: _Checkpoint) -> tuple[SourceFile, ...]:
    """Returns size and digest of every file of the checkpoint that is used; reads every weight once."""
    files = []
    for number, path in enumerate(checkpoint.weight_files, 1):
        log.info("ingest: reading weights %d/%d", number, len(checkpoint.weight_files))
        files.append(scan(path, list(read_header(path).values())))
    for name in (CONFIG, GENERATION, TOKENIZER, SETTINGS, SPECIAL_TOKENS, ADDED_TOKENS, CHAT_TEMPLATE):
        if checkpoint.has_own_settings and is_there(checkpoint.folder, name):
            files.append(source_file(regular_file(checkpoint.folder, name)))
    return tuple(sorted(files, key=lambda file: file.name))


def _optional(folder: Path, name: str) -> dict[str, Any]:
    """Returns the believed keys of a settings file; empty if the file is missing."""
    if not is_there(folder, name):
        return {}
    raw = read_object(regular_file(folder, name), MAX_SETTINGS_BYTES)
    keys = {GENERATION: GENERATION_KEYS, SETTINGS: SETTINGS_KEYS}.get(name, set())
    return {key: raw[key] for key in sorted(raw) if key in keys or (name != GENERATION and SPECIAL_KEYS.fullmatch(key))}


def _write_private(checkpoint: _Checkpoint, special: Special, target: Path) -> Path:
    tokenizer = regular_file(checkpoint.folder, TOKENIZER)
    _check_size(tokenizer, MAX_TOKENIZER_BYTES)
    shutil.rmtree(target, ignore_errors=True)
    for name, value in {CONFIG: checkpoint.config, **checkpoint.settings, SETTINGS: special.settings}.items():
        if name == CONFIG or value:
            _write(target / name, _as_json(value, indent=2))
    for path in (*checkpoint.chat_template, *checkpoint.licenses):
        _write(target / path.name, path.read_bytes())
    data = tokenizer.read_bytes()
    if special.added is not None:
        log.info("ingest: tokenizer.json gets the tokens that the files beside it add")
        values = read_json(tokenizer, MAX_TOKENIZER_BYTES, strict_json.TOKENIZER)
        data = _as_json({**values, "added_tokens": special.added})
    _write(target / TOKENIZER, data)
    return target


def _as_json(value: Any, indent: int | None = None) -> bytes:
    text = json.dumps(value, indent=indent, sort_keys=indent is not None, ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _link_weights(checkpoint: _Checkpoint, target: Path) -> dict[str, str]:
    """Links to the files of weights in a new folder; returns file -> link."""
    shutil.rmtree(target, ignore_errors=True)
    make_folder(target)
    links: dict[str, str] = {}
    for path in checkpoint.weight_files:
        found, link = path.resolve(), target.resolve() / path.name
        link.symlink_to(os.path.relpath(found, link.parent))
        links[str(found)] = str(link)
    sync_folder(target)
    return links


def _linked(tensor: TensorSource, links: Mapping[str, str]) -> TensorSource:
    scales = tensor.scales and tensor.scales.model_copy(update={"file": links[tensor.scales.file]})
    return tensor.model_copy(update={"file": links[tensor.file], "scales": scales})


def _write(path: Path, data: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def _license(folder: Path) -> str | None:
    if not is_there(folder, CARD):
        return None
    path = regular_file(folder, CARD)
    if path.stat().st_size > MAX_TEXT_BYTES:
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    parts = text.split("---", 2)
    found = FRONT_MATTER_LICENSE.search(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    return found[1] if found else None
