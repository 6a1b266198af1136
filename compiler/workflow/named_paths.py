"""Checks the values of `--config` that may be paths before anything opens one: the system refuses some names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coldpress.schemas.errors import ColdpressError, clipped

KEYS = ("model", "device", "corpus", "imatrix", "llama_bench", "build_dir")
MAX_NAME_CHARS = 200
"""Length limit of an artifact's name: file systems take 255, and files under construction have longer names."""


def check_paths(values: Mapping[str, Any]) -> None:
    """Refuses names that the system does not accept; a missing path is refused where it is needed. Raises
    ColdpressError naming the key; the text is one sentence."""
    for key in KEYS:
        if values[key] is None:
            continue
        try:
            Path(values[key]).expanduser().stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except RuntimeError as error:  # from expanduser
            raise _refused(key, values[key], "there is no such user, whose folder ~ would be") from error
        except OSError as error:
            raise _refused(key, values[key], f"the system refuses it ({error.strerror})") from error
        except ValueError as error:  # a null byte
            raise _refused(key, values[key], "it holds a null byte") from error


def check_artifact_name(name: str) -> None:
    """Refuses an artifact name that is too long for a file; raises ColdpressError naming the parts of the name."""
    if len(name) > MAX_NAME_CHARS:
        raise ColdpressError(
            f"the artifact's name {clipped(name, 80)} has more than {MAX_NAME_CHARS} characters; it is made of "
            "the names of model, device and label: give a shorter one"
        )


def _refused(key: str, value: str, why: str) -> ColdpressError:
    return ColdpressError(f"{key}={clipped(value, 80)} names no file or folder: {why}; give another path")
