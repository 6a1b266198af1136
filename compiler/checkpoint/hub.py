"""Fetches a hub model's files at one pinned commit through huggingface_hub's own cache; offline if HF_HUB_OFFLINE is
set.

Only safetensors, their index, config.json, tokenizer and licence files are requested; pickled weights only of a model
that has no others (compiler/checkpoint/conversion.py converts them). Code never arrives.
"""

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from coldpress.compiler.checkpoint.gguf_files import parts_of
from coldpress.compiler.checkpoint.weight_files import FILE_NAME
from coldpress.schemas.errors import CheckpointError, ColdpressError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import DatasetInfo, ModelInfo

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
REVISION = re.compile(r"[0-9a-f]{40}")
Kind = Literal["model", "dataset"]
REACHED_S = 5
"""Seconds that the hub has to answer before it counts as out of reach."""
PATTERNS = [
    "model*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "README.md",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
]
WEIGHTS = (".safetensors", ".bin")
INSTEAD = {
    "model*.safetensors*": ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    "tokenizer.json": ("vocab.json", "merges.txt"),
}
"""Files of a checkpoint -> those that are taken where it has none."""


def checkpoint_paths(folder: Path) -> list[Path]:
    """Returns the sorted files of a checkpoint's folder that are read: those that would be requested of a hub model.
    Skips names that `ingest` refuses, so that snakemake can handle all of them, too. In place of a folder, one of a
    GGUF model's files gives all of them."""
    if folder.is_file():
        return list(parts_of(folder))
    paths = [path for path in sorted(folder.glob("*")) if FILE_NAME.fullmatch(path.name) and path.is_file()]
    patterns = (*wanted(path.name for path in paths), "*.safetensors")
    return [path for path in paths if any(path.match(pattern) for pattern in patterns)]


def wanted(names: Iterable[str]) -> list[str]:
    """Patterns of the files that are read of a checkpoint with files of these names."""
    found = [Path(name) for name in names if "/" not in name]
    others = [others for usual, others in INSTEAD.items() if not any(path.match(usual) for path in found)]
    return [*PATTERNS, *(pattern for patterns in others for pattern in patterns)]


def is_dataset(corpus: str) -> bool:
    """Tells whether a corpus is a dataset of the hub, `owner/name` or `owner/name:subset`."""
    return HUB_ID.fullmatch(corpus.partition(":")[0]) is not None and not Path(corpus).expanduser().exists()


def check_dataset(corpus: str, revision: str | None) -> None:
    """Refuses a dataset of the hub without the commit to read; raises ColdpressError naming the key to give; also where
    a revision is given for a corpus that has none."""
    of_hub = is_dataset(corpus)
    if not of_hub and revision is not None:
        raise ColdpressError(
            f"corpus_revision={revision} has no meaning for the corpus {corpus}, which is not a dataset of the hub; "
            "leave it out"
        )
    if of_hub and (revision is None or not REVISION.fullmatch(revision)):
        raise ColdpressError(
            f"the corpus {corpus} is a dataset of the hub and needs corpus_revision=<40 hexadecimal digits>, the "
            f"commit to read, found {revision!r}; look one up on the dataset's page, or give corpus=pydoc or a file"
        )


@dataclass(frozen=True)
class Listed:
    """The index of a model at a commit: the hub's, or the local cache's if the hub is not used."""

    weight_bytes: int
    """Its files of weights, as they are stored."""
    missing_bytes: int
    license: str | None


def listed(hub_id: str, revision: str | None) -> Listed:
    """Asks for sizes and licence of a hub model without downloading any file; raises as `snapshot`, within seconds."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    with _one_sentence(hub_id, _pinned(hub_id, revision), constants.HF_HUB_OFFLINE):
        index = _index(hub_id, revision, constants.HF_HUB_OFFLINE)
        if index is None:
            cached = _snapshot(hub_id, revision, None, local_files_only=True)
            return Listed(sum(path.stat().st_size for path in cached.glob("*") if path.suffix in WEIGHTS), 0, None)
    sizes = {file.rfilename: file.size or 0 for file in index.siblings or []}
    taken = list(filter_repo_objects(sizes, allow_patterns=wanted(sizes)))
    missing = [name for name in taken if not isinstance(try_to_load_from_cache(hub_id, name, revision=revision), str)]
    named = (index.card_data or {}).get("license")
    return Listed(
        weight_bytes=sum(sizes[name] for name in taken if name.endswith(WEIGHTS)),
        missing_bytes=sum(sizes[name] for name in missing),
        license=named if isinstance(named, str) else None,
    )


def cache_folder(hub_id: str, kind: Kind = "model") -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, constants.REPO_ID_SEPARATOR.join([f"{kind}s", *hub_id.split("/")]))


def snapshot(hub_id: str, revision: str | None, offline: bool, patterns: Sequence[str] | None = None) -> Path:
    """Returns the folder in the local cache with the model's files that match `patterns`, by default all that are read;
    downloads missing ones. Raises CheckpointError if the revision is not pinned, the model is gated or unknown, or it
    cannot be reached."""
    from huggingface_hub import constants

    offline = offline or constants.HF_HUB_OFFLINE
    with _one_sentence(hub_id, _pinned(hub_id, revision), offline):
        return _snapshot(hub_id, revision, patterns, _index(hub_id, revision, offline) is None)


def _snapshot(hub_id: str, revision: str | None, patterns: Sequence[str] | None, local_files_only: bool) -> Path:
    """Calls huggingface_hub, which notices partial snapshots; again where files lack that others stand in for."""
    import huggingface_hub

    def fetch(patterns: Sequence[str]) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=list(patterns), local_files_only=local_files_only
            )
        )

    if patterns is not None:
        return fetch(patterns)
    folder = fetch(PATTERNS)
    more = wanted(path.name for path in folder.glob("*"))
    return fetch(more) if len(more) > len(PATTERNS) else folder


@functools.cache
def commit_of(hub_id: str, revision: str, kind: Kind = "model") -> str:
    """Returns the commit of a branch or tag of the hub, asked once by a process; without an answer, the one that the
    local cache has. Raises CheckpointError if there is no such branch, the repository is gated or unknown, or it cannot
    be reached."""
    from huggingface_hub import constants

    with _one_sentence(hub_id, revision, constants.HF_HUB_OFFLINE, kind):
        index = _index(hub_id, revision, constants.HF_HUB_OFFLINE, kind)
        ref = cache_folder(hub_id, kind) / "refs" / revision
        found = index.sha if index else ref.read_text(encoding="ascii") if ref.is_file() else None
    if found is None or not REVISION.fullmatch(found):
        raise CheckpointError(
            f"only the hub knows which commit of the {kind} {hub_id} is {revision}, and it cannot be reached; check "
            "the network, or name the commit"
        )
    return found


def _index(hub_id: str, revision: str | None, offline: bool, kind: Kind = "model") -> "ModelInfo | DatasetInfo | None":
    """The hub's index of a repository; None offline or without an answer: asked once, while downloads would retry."""
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if offline:
        return None
    try:
        api = huggingface_hub.HfApi()
        asked = api.model_info if kind == "model" else api.dataset_info
        return asked(hub_id, revision=revision, files_metadata=True, timeout=REACHED_S)
    except (RepositoryNotFoundError, RevisionNotFoundError):  # a gated model raises a subclass of the first
        raise
    except Exception as error:  # the hub's errors, or those of whichever package connects
        log.info("the hub does not answer (%s), the local cache is used", " ".join(str(error).split())[:200])
        return None


def _pinned(hub_id: str, revision: str | None) -> str:
    if revision is None or not REVISION.fullmatch(revision):
        raise CheckpointError(
            f"the hub model {hub_id} needs a pinned revision, found {revision!r}, expected the 40 hexadecimal digits "
            "of a commit"
        )
    return revision


@contextmanager
def _one_sentence(hub_id: str, revision: str, offline: bool, kind: Kind = "model") -> Iterator[None]:
    from huggingface_hub import errors

    what = f"{hub_id} at revision {revision}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{what} is gated: accept its licence on the hub and log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"the hub {kind} {hub_id} has no revision {revision}; check its name") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"there is no public hub {kind} {hub_id}; check its name, or log in") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        remedy = "allow the network once, or give a local folder" if offline else "check the network"
        raise CheckpointError(f"{what} is not in the local cache and the hub cannot be reached; {remedy}") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{what} cannot be fetched ({reason}); try again or give a local folder") from error
