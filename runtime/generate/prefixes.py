"""Keeps the keys and values of prompts on flash, so that a prompt with the same beginning starts later.

A prefill computes chunks of a fixed number of tokens (PREFILL_CHUNK_TOKENS), counted from the prompt's first token. The
keys and values of each whole chunk are a file, whose name is a digest of the artifact's identity, of all that changes
bits (the format of keys and values, the blocks of the plan's sums, the instruction set, this version) and of all
tokens up to the chunk's last. The rest of a prompt is computed in the same chunks as without the files, so that keys,
values and logits are the same, bit for bit.

A file is written under another name, synced, and renamed: one that is there is whole, whenever the process was killed.
Each ends with a digest of its bytes; a file that does not agree is removed, and its chunk is computed. Beyond the limit
on bytes, those that were used longest ago are removed, the ends of prompts before their beginnings.

The files tell what the prompts were: only their owner may read them.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coldpress.runtime import _native
from coldpress.runtime.decoder.decoder import PREFILL_CHUNK_TOKENS
from coldpress.runtime.decoder.tokens import KvCache
from coldpress.schemas import __version__
from coldpress.schemas.errors import ColdpressError

LOG = logging.getLogger("coldpress")
ENDING, UNFINISHED = ".kv", ".unfinished"


@dataclass
class PrefixTotals:
    restored_tokens: int = 0
    """Tokens of prompts that were read instead of computed."""
    read_bytes: int = 0
    written_bytes: int = 0
    damaged: int = 0
    """Files that did not agree with their digest, and were removed."""


class Prefixes:
    """Prompts' keys and values in a folder; used by one thread at a time."""

    def __init__(self, folder: Path, identity: str, max_bytes: int, chunk_tokens: int = PREFILL_CHUNK_TOKENS) -> None:
        """Makes the folder, and removes what a killed process left unfinished there.

        Args:
            folder: Artifacts may share it.
            identity: sha256 of the artifact's manifest.
            max_bytes: Most bytes of all files in the folder.

        Raises:
            ColdpressError: if the folder cannot be made or written.
        """
        self._folder, self._identity, self._max_bytes = folder, identity, max_bytes
        self._chunk_tokens = chunk_tokens
        self.totals = PrefixTotals()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in folder.glob(f"*{UNFINISHED}"):
                left.unlink(missing_ok=True)
        except OSError as error:
            raise ColdpressError(
                f"{folder}: cannot keep prompts there ({error.strerror}); name another folder"
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ColdpressError(f"{folder}: the folder is not writable, expected one for prompts; name another one")

    def restore(self, cache: KvCache, ids: np.ndarray, arithmetic: str) -> int:
        """Fills an empty cache with the beginning of a prompt, int64 [n], and returns how many of its tokens that were.

        At least one token is left to compute. `arithmetic` is as `Decoder.arithmetic` tells it, when the rest of the
        prompt is computed.
        """
        found = list[Path]()
        for path, place in self._chunks(cache, ids[:-1], arithmetic):
            if not self._read(path, cache, place):
                break
            found.append(path)
            cache.length = place.stop
        for path in reversed(found):  # the beginning is then the last one to be removed
            with suppress(OSError):
                os.utime(path, ns=(time.time_ns(), time.time_ns()))
        self.totals.restored_tokens += cache.length
        return cache.length

    def save(self, cache: KvCache, ids: np.ndarray, arithmetic: str) -> None:
        """Writes the chunks of a prompt, int64 [n], that are not there yet, from its cache as the prefill made it.
        `arithmetic` is as `Decoder.arithmetic` told it when the prompt was computed."""
        try:
            for path, place in self._chunks(cache, ids, arithmetic):
                if not path.exists() and not self._write(path, cache, place):
                    return
        except OSError as error:
            LOG.warning("%s: a prompt is not kept there (%s)", self._folder, error.strerror)

    def kept_bytes(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _chunks(self, cache: KvCache, ids: np.ndarray, arithmetic: str) -> Iterator[tuple[Path, slice]]:
        kind = [
            self._identity,
            __version__,
            _native.cpu(),
            arithmetic,
            str(cache.keys.dtype),
            list(cache.keys.shape[2:]),
        ]
        digest = hashlib.sha256(json.dumps([*kind, self._chunk_tokens]).encode())
        for start in range(0, len(ids) - self._chunk_tokens + 1, self._chunk_tokens):
            place = slice(start, start + self._chunk_tokens)
            digest.update(ids[place].astype("<i8").tobytes())
            yield self._folder / f"{digest.hexdigest()}{ENDING}", place

    def _read(self, path: Path, cache: KvCache, place: slice) -> bool:
        """Reads a chunk into the cache; returns False if there is none, or it is damaged."""
        digest, num_bytes = hashlib.sha256(), 0
        try:
            with path.open("rb", buffering=0) as file:
                for rows in _rows(cache, place):
                    num_bytes += file.readinto(rows) or 0
                    digest.update(rows)
                is_whole = file.read() == digest.digest()
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it is in DRAM twice
        except FileNotFoundError:
            return False
        except OSError as error:
            LOG.warning("%s: cannot be read (%s)", path, error.strerror)
            return False
        self.totals.read_bytes += num_bytes
        if not is_whole:
            self.totals.damaged += 1
            path.unlink(missing_ok=True)
        return is_whole

    def _write(self, path: Path, cache: KvCache, place: slice) -> bool:
        num_bytes = sum(rows.nbytes for rows in _rows(cache, place)) + hashlib.sha256().digest_size
        if not self._make_room(num_bytes):
            return False
        unfinished = path.with_name(f"{path.stem}.{os.getpid()}{UNFINISHED}")
        digest = hashlib.sha256()
        try:
            opened = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(opened, "wb", buffering=0) as file:
                for rows in _rows(cache, place):
                    _write_all(file.fileno(), rows)
                    digest.update(rows)
                _write_all(file.fileno(), memoryview(digest.digest()))
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
        self.totals.written_bytes += num_bytes
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Removes what was used longest ago until there is room; returns False if there can be none."""
        if num_bytes > self._max_bytes:
            return False
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total + num_bytes <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
        return True

    def _files(self) -> list[tuple[int, int, Path]]:
        """Returns (time of the last use in ns, bytes, path) of each file."""
        found = list[tuple[int, int, Path]]()
        for path in self._folder.glob(f"*{ENDING}"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        return found


def _rows(cache: KvCache, place: slice) -> Iterator[memoryview]:
    """Yields the cache's own bytes of the keys, then of the values, of each layer; once, if both are one array."""
    for array in (cache.keys,) if cache.values is cache.keys else (cache.keys, cache.values):
        for layer in range(len(array)):
            yield array[layer, place].data.cast("B")


def _write_all(opened: int, data: memoryview) -> None:
    while data:
        data = data[os.write(opened, data) :]
