"""A hub model's files at one pinned commit, through huggingface_hub's own cache; offline where HF_HUB_OFFLINE says so.

Only safetensors, their index, config.json, tokenizer and licence files are asked for: pickles and code never arrive.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from compiler.checkpoint.weight_files import FILE_NAME
from schemas.errors import CheckpointError, ColdpressError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
REVISION = re.compile(r"[0-9a-f]{40}")
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


def snapshot(hub_id: str, revision: str | None, offline: bool, patterns: Sequence[str] = PATTERNS) -> Path:
    """The folder of the model's files that match `patterns` in the local cache, downloaded before if need be.

    Raises:
        CheckpointError: if the revision is not pinned, the model is gated or unknown, or it cannot be reached.
    """
    if revision is None or not REVISION.fullmatch(revision):
        raise CheckpointError(
            f"the hub model {hub_id} needs a pinned revision, found {revision!r}, expected the 40 hexadecimal digits "
            "of a commit"
        )
    from huggingface_hub import constants, errors, snapshot_download

    offline = offline or constants.HF_HUB_OFFLINE
    what = f"{hub_id} at revision {revision}"
    try:
        wanted = list(patterns)
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=wanted, local_files_only=offline))
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
