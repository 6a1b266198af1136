"""Records the requests of a run to its store, in order: enough to replay every cache and read decision without a model.

On disk a trace is one safetensors file without metadata, with n events in the order in which they happened:

- `kind` uint8 [n]: 0 a family was streamed, 1 units were fetched, 2 a new context began, 3 the tokens of the
  fetches since the last such event are decoded, 4 units were preloaded, 5 token embeddings were read from flash.
- `token` int32 [n]: 0 for the prefill and for a new context; for what is fetched or preloaded, the first token that it
  is for, counted from 1; for the end of tokens, the number of tokens decoded so far.
- `layer` int32 [n]; `family` uint8 [n], an index into the names.
- `names` uint8: families in ASCII, joined by spaces.
- `start` int64 [n + 1]: event e has the units `ids[start[e] : start[e + 1]]`, ascending; only kinds 0, 1 and 4 have
  units, and kind 5 has rows. A streamed family without units was streamed whole.
- `ids` int32 [m + 1]: unit ids, and a 0 at the end, so that it is never empty.
- `kept` uint8 [m + 1]: 1 if the unit may stay in the cache, 0 if it is used once and dropped.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]  its path is a bare PathLike

from coldpress.runtime.artifact import tensor_files
from coldpress.runtime.artifact.errors import TensorFileError, short
from coldpress.runtime.store.facts import Key, Observer, PreloadFacts, Purpose, RequestFacts, RowFacts
from coldpress.schemas.families import FAMILIES

STREAM, FETCH, RESET, END, PRELOAD, ROWS = 0, 1, 2, 3, 4, 5
NO_IDS = np.empty(0, np.int32)
REMEDY = "record the trace again"


@dataclass(frozen=True)
class Event:
    kind: int
    """RESET, END and ROWS concern the whole store; their layer is 0, and their family has no meaning."""
    token: int
    layer: int
    family: str
    ids: np.ndarray
    """int32 ascending; empty unless units or rows were fetched or preloaded, or some of a family were streamed."""
    kept: np.ndarray | None = None
    """The ids that may stay in the cache, int32 ascending; None for all."""


@dataclass
class Recorder(Observer):
    events: list[Event] = field(default_factory=list[Event])
    num_tokens: int = 0
    """Tokens decoded so far."""
    max_tokens: int | None = None
    """Recording stops after this many tokens; None records all."""

    @property
    def full(self) -> bool:
        return self.max_tokens is not None and self.num_tokens >= self.max_tokens

    def request(self, facts: RequestFacts) -> None:
        self.fetch(*facts.key, facts.ids, facts.may_stay)

    def preloaded(self, facts: PreloadFacts) -> None:
        self.preload(*facts.key, facts.ids)

    def rows(self, facts: RowFacts) -> None:
        token = 0 if facts.purpose is Purpose.STREAM else self.num_tokens + 1
        self._add(Event(ROWS, token, 0, next(iter(FAMILIES)), facts.ids))

    def stream(self, key: Key, ids: np.ndarray | None) -> None:
        self._add(Event(STREAM, 0, *key, NO_IDS if ids is None else ids.copy()))

    def reset(self) -> None:
        self._add(Event(RESET, 0, 0, next(iter(FAMILIES)), NO_IDS))

    def fetch(self, layer: int, family: str, ids: np.ndarray, kept: np.ndarray | None = None) -> None:
        """Notes that some units were requested; those of `kept`, or all, may stay in the cache."""
        stay = None if kept is None or kept.size == ids.size else kept.copy()
        self._add(Event(FETCH, self.num_tokens + 1, layer, family, ids.copy(), stay))

    def preload(self, layer: int, family: str, ids: np.ndarray) -> None:
        self._add(Event(PRELOAD, self.num_tokens + 1, layer, family, ids.copy()))

    def end_tokens(self, count: int, num_evicted: int = 0) -> None:
        self._add(Event(END, self.num_tokens + count, 0, next(iter(FAMILIES)), NO_IDS))
        self.num_tokens += count

    def _add(self, event: Event) -> None:
        if not self.full:
            self.events.append(event)

    def save(self, path: Path) -> None:
        ids = np.concatenate([*(event.ids for event in self.events), np.zeros(1, np.int32)])  # no tensor may be empty
        names = sorted({event.family for event in self.events})
        arrays = {
            "token": np.array([event.token for event in self.events], np.int32),
            "layer": np.array([event.layer for event in self.events], np.int32),
            "family": np.array([names.index(event.family) for event in self.events], np.uint8),
            "names": np.frombuffer((" ".join(names) or " ").encode(), np.uint8),
            "kind": np.array([event.kind for event in self.events], np.uint8),
            "start": np.cumsum([0, *(event.ids.size for event in self.events)], dtype=np.int64),
            "ids": ids.astype(np.int32),
            "kept": np.concatenate([*(_is_kept(event) for event in self.events), np.ones(1, bool)]).astype(np.uint8),
        }
        save_file(arrays, path)


def load_trace(path: Path) -> tuple[Event, ...]:
    """Reads the events of a trace file. Raises `ArtifactError` if the file is not a valid trace."""
    name = str(path)
    with path.open("rb") as file:
        header = tensor_files.read_header(file.fileno(), name, os.fstat(file.fileno()).st_size, REMEDY)
        shapes = {tensor.name: tensor.shape for tensor in header.tensors}
        sizes = [shapes.get(key, (1,))[0] for key in ("token", "ids", "names")]
        header.check_contents(_contents(*sizes), exact=True)
        arrays = tensor_files.load(file.fileno(), header)
    num_ids = sizes[1]
    start, inside = arrays["start"], np.ones(num_ids - 1, bool)
    if start[0] != 0 or (np.diff(start) < 0).any() or start[-1] != num_ids - 1:
        raise TensorFileError(name, "start", "out of order", f"rising counts from 0 to {num_ids - 1}", REMEDY)
    inside[start[start < num_ids - 1]] = False  # the first id of an event may be below the last one of the event before
    if (np.diff(arrays["ids"][:-1], prepend=np.int32(0))[inside] <= 0).any() or arrays["ids"].min() < 0:
        raise TensorFileError(name, "ids", "out of order", "ascending ids within each event", REMEDY)
    families = bytes(arrays["names"]).decode("ascii", "replace").split()
    unknown = [family for family in families if family not in FAMILIES]
    if unknown:
        raise TensorFileError(name, "names", short(unknown[0]), f"some of {', '.join(FAMILIES)}", REMEDY)
    if arrays["family"].max() >= len(families) or arrays["kind"].max() > ROWS:
        raise TensorFileError(name, "family or kind", "unknown", f"an index into {', '.join(families)}; 0 to 5", REMEDY)
    counted = arrays["token"][np.isin(arrays["kind"], (FETCH, END, PRELOAD))]
    if (np.diff(counted, prepend=np.int32(1)) < 0).any():
        raise TensorFileError(name, "token", "out of order", "tokens from 1 on, none after a later one", REMEDY)
    return tuple(_events(arrays, families))


def _is_kept(event: Event) -> np.ndarray:
    return np.ones(event.ids.size, bool) if event.kept is None else np.isin(event.ids, event.kept)


def _contents(num_events: int, num_ids: int, num_letters: int) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    columns = {"token": "<i4", "layer": "<i4", "family": "u1", "kind": "u1"}
    return {name: (np.dtype(kind), (num_events,)) for name, kind in columns.items()} | {
        "start": (np.dtype("<i8"), (num_events + 1,)),
        "ids": (np.dtype("<i4"), (num_ids,)),
        "names": (np.dtype("u1"), (num_letters,)),
        "kept": (np.dtype("u1"), (num_ids,)),
    }


def _events(arrays: dict[str, np.ndarray], families: list[str]) -> Iterator[Event]:
    columns = (arrays[name].tolist() for name in ("token", "layer", "family", "kind"))
    rows = cast(Iterable[tuple[int, int, int, int]], zip(*columns, strict=True))
    for index, (token, layer, family, kind) in enumerate(rows):
        start, stop = arrays["start"][index : index + 2].tolist()
        ids, stays = arrays["ids"][start:stop], arrays["kept"][start:stop].astype(bool)
        yield Event(kind, token, layer, families[family], ids, None if stays.all() else ids[stays])
