"""A hub model's files at one pinned commit, through huggingface_hub's own cache; offline where HF_HUB_OFFLINE says so.

Only safetensors, their index, config.json, tokenizer and licence files are asked for: pickles and code never arrive.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coldpress.compiler.checkpoint.weight_files import FILE_NAME
from coldpress.schemas.errors import CheckpointError, ColdpressError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
REVISION = re.compile(r"[0-9a-f]{40}")
REACHED_S = 5
"""Seconds within which the hub answers, or is taken for out of reach."""
PATTERNS = [
    "model*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "README.md",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
]


def checkpoint_paths(folder: Path) -> list[Path]:
    """The files of a checkpoint's folder that are read of it, sorted: those that would be asked for of a hub model.

    What has a name that `ingest` takes from no one is left out, so that all of them are names for snakemake, too.
    """
    return [
        path
        for path in sorted(folder.glob("*"))
        if FILE_NAME.fullmatch(path.name)
        and any(path.match(pattern) for pattern in (*PATTERNS, "*.safetensors"))
        and path.is_file()
    ]


def check_dataset(corpus: str, revision: str | None) -> None:
    """Refuses a dataset of the hub (`owner/name` or `owner/name:subset`) without the commit that it is read at.

    Raises:
        ColdpressError: naming the key to give; also where a revision is given for a corpus that has none.
    """
    of_hub = HUB_ID.fullmatch(corpus.partition(":")[0]) is not None and not Path(corpus).expanduser().exists()
    if not of_hub and revision is not None:
        raise ColdpressError(
            f"corpus_revision={revision} has no meaning for the corpus {corpus}, which is no dataset of the hub; leave "
            "it out"
        )
    if of_hub and (revision is None or not REVISION.fullmatch(revision)):
        raise ColdpressError(
            f"the corpus {corpus} is a dataset of the hub and needs corpus_revision=<40 hexadecimal digits>, the "
            f"commit to read, found {revision!r}; look one up on the dataset's page, or give corpus=pydoc or a file"
        )


@dataclass(frozen=True)
class Listed:
    """What the hub's index says of a model at a commit, or the local cache where the hub is not asked."""

    weight_bytes: int
    """Of its safetensors files, as they are stored."""
    missing_bytes: int
    """What is yet to be downloaded."""
    license: str | None
    """That the model card names."""


def listed(hub_id: str, revision: str | None, offline: bool = False) -> Listed:
    """Sizes and licence of a hub model, without fetching a file of it.

    Raises:
        CheckpointError: as `snapshot`; where there is no network, within seconds.
    """
    import huggingface_hub
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    with _one_sentence(hub_id, revision, offline or constants.HF_HUB_OFFLINE):
        index = _index(hub_id, revision, offline or constants.HF_HUB_OFFLINE)
        if index is None:
            # of a partial snapshot huggingface_hub knows that it is one
            cached = huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=PATTERNS, local_files_only=True
            )
            weights = sum(path.stat().st_size for path in Path(cached).glob("*.safetensors"))
            return Listed(weights, 0, None)
    sizes = {file.rfilename: file.size or 0 for file in index.siblings or []}
    wanted = list(filter_repo_objects(sizes, allow_patterns=PATTERNS))
    missing = [name for name in wanted if not isinstance(try_to_load_from_cache(hub_id, name, revision=revision), str)]
    named = (index.card_data or {}).get("license")
    return Listed(
        weight_bytes=sum(sizes[name] for name in wanted if name.endswith(".safetensors")),
        missing_bytes=sum(sizes[name] for name in missing),
        license=named if isinstance(named, str) else None,
    )


def cache_folder() -> Path:
    """Where hub models are downloaded to."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def snapshot(hub_id: str, revision: str | None, offline: bool, patterns: Sequence[str] = PATTERNS) -> Path:
    """The folder of the model's files that match `patterns` in the local cache, downloaded before if need be.

    Raises:
        CheckpointError: if the revision is not pinned, the model is gated or unknown, or it cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub import constants

    offline = offline or constants.HF_HUB_OFFLINE
    with _one_sentence(hub_id, revision, offline):
        from_cache = _index(hub_id, revision, offline) is None
        wanted = list(patterns)
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=wanted, local_files_only=from_cache
            )
        )


def _index(hub_id: str, revision: str | None, offline: bool) -> "ModelInfo | None":
    """The hub's index of a model; None offline, or where the hub is not reached: it is asked once, downloads try again
    and again."""
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    if offline:
        return None
    try:
        return huggingface_hub.HfApi().model_info(hub_id, revision=revision, files_metadata=True, timeout=REACHED_S)
    except (RepositoryNotFoundError, RevisionNotFoundError):  # a gated one among the first
        raise
    except Exception as error:  # of a hub that fails, or the package that connects, which is not always the same
        log.info("the hub is not reached (%s), the local cache is looked at", " ".join(str(error).split())[:200])
        return None


@contextmanager
def _one_sentence(hub_id: str, revision: str | None, offline: bool) -> Iterator[None]:
    """What huggingface_hub raises of a model, as errors about a checkpoint."""
    from huggingface_hub import errors

    if revision is None or not REVISION.fullmatch(revision):
        raise CheckpointError(
            f"the hub model {hub_id} needs a pinned revision, found {revision!r}, expected the 40 hexadecimal digits "
            "of a commit"
        )
    what = f"{hub_id} at revision {revision}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{what} is gated: accept its licence on the hub and log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"the hub model {hub_id} has no revision {revision}; check the commit") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"there is no public hub model {hub_id}; check its name, or log in") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        remedy = "allow the network once, or give a local folder" if offline else "check the network"
        raise CheckpointError(f"{what} is not in the local cache and the hub is not reached; {remedy}") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{what} cannot be fetched ({reason}); try again or give a local folder") from error
