"""Runs settings of an artifact on the same passages in turn; each step adds one change, which may be kept.

A passage fills the caches before a setting is measured. The bounds of the gains are returned with the times.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from benchmarks.harness import Gain, Row, gain, spread
from benchmarks.shared import unbundled
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli import ladder
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import FETCH, Event, Recorder
from coldpress.schemas.device import DeviceProfile, flash_seconds
from coldpress.schemas.layout import Plan
from coldpress.schemas.metrics import RunMetrics

FILLING_TOKENS, DENSE_TOKENS = 16, 6
LEAST_S = 1e-6


@dataclass(frozen=True)
class Placed(ladder.LadderSetting):
    """A setting, its artifact, and the image that its units are read from, if not the artifact's."""

    path: Path
    image: Path | None


@dataclass(frozen=True)
class Measured:
    """Figures of a passage, per decoded token."""

    token_s: float
    reads_per_token: float
    read_bytes_per_token: float
    hit_rate: float
    flash_s_per_token: float
    modelled_flash_s_per_token: float
    """Seconds by the device's own law, at its own rates."""


@dataclass
class Trace:
    """Requests of a setting: in the passage that fills the caches, and in the first one after it."""

    first: Sequence[Event] = ()
    then: Sequence[Event] = ()
    num_tokens: int = 0


Run = Callable[[np.ndarray], Measured]
"""Decodes a passage."""


@contextmanager
def opened(setting: Placed, filling: np.ndarray, device: DeviceProfile, trace: Trace) -> Iterator[Run]:
    """Opens a setting, with caches filled by a passage."""
    recorder, depth, is_dense = Recorder(), setting.plan.queue_depth, setting.plan.method == "dense"
    session = Session(
        setting.path, plan=setting.plan, flash=setting.flash, recorder=recorder, device=device, modelled=True
    )
    with session:
        apart = None
        if setting.image:
            apart = unbundled.Flash(session.artifact, depth, setting.image, lambda: is_decoding(recorder))
            device_of_store: Any = session.store._device
            device_of_store.flash = apart

        def decode(passage: np.ndarray) -> RunMetrics:
            recorder.events = []
            if apart:
                apart.forget()
            cut = passage[: DENSE_TOKENS + 2] if is_dense else passage  # in a dense run every token is like every other
            return session.perplexity(cut[None], sparse=True).metrics

        def run(passage: np.ndarray) -> Measured:
            found = decode(passage)
            if not trace.then:
                trace.then, trace.num_tokens = recorder.events, found.num_tokens
            return measured(found, apart, device, depth)

        decode(filling)
        trace.first, trace.then = recorder.events, ()
        yield run


def measured(found: RunMetrics, apart: unbundled.Flash | None, device: DeviceProfile, depth: int) -> Measured:
    """Returns the figures of a run; a device whose slices lie apart counts its own reads."""
    reads, read_bytes, modelled_s, moved_s = found.reads, found.read_bytes, found.modelled_flash_s, 0.0
    if apart:
        reads, read_bytes, moved_s = apart.reads, apart.read_bytes, apart.moved_s
        modelled_s = float(flash_seconds(device.flash.issuing(depth), reads, read_bytes))
    count = found.num_tokens
    return Measured(
        token_s=(found.decode_s - moved_s) / count,
        reads_per_token=reads / count,
        read_bytes_per_token=read_bytes / count,
        hit_rate=found.hit_rate,
        flash_s_per_token=found.flash_s / count,
        modelled_flash_s_per_token=modelled_s / count,
    )


def is_decoding(recorder: Recorder) -> bool:
    """Returns whether the store's latest request was for single units."""
    return bool(recorder.events) and recorder.events[-1].kind == FETCH


class Climb:
    """Measures settings on the same passages of a document."""

    def __init__(self, device: DeviceProfile, passages: np.ndarray, num_tokens: int) -> None:
        """Takes passages: the first fills caches; `num_tokens` of each other one are a round."""
        self._device, self.trace = device, Trace()
        self._filling, self._passages = passages[0, : FILLING_TOKENS + 2], passages[1:, : num_tokens + 2]

    def rounds(self, *settings: Placed) -> list[list[Measured]]:
        """Returns the figures of each setting in every round, settings in turn; traces the first setting."""
        with ExitStack() as stack:
            traces = [self.trace, *(Trace() for _ in settings[1:])]
            runs = [
                stack.enter_context(opened(setting, self._filling, self._device, trace))
                for setting, trace in zip(settings, traces, strict=True)
            ]
            found = [[run(passage) for run in runs] for passage in self._passages]
        return [list(of_setting) for of_setting in zip(*found, strict=True)]

    def steps(self, first: Placed, changes: Sequence[tuple[str, ladder.Change]]) -> Iterator[tuple[Row, Placed]]:
        """Yields the row and the setting of every step, each measured in turn with the best setting before it."""
        (found,) = self.rounds(first)
        best, lowest = first, row_of(found)["tokens_per_s"]
        yield {"name": "naive", "gain": None, "total_gain": 1.0, "kept": True, **row_of(found)}, first
        for name, change in changes:
            print(name, file=sys.stderr, flush=True)
            setting = cast("Placed", change(best))
            before, after = self.rounds(best, setting)
            gained = gain_of(before, after)
            kept = gained["low"] > 1 or name.startswith(ladder.GROUND)
            best = setting if kept else best
            total = row_of(after if kept else before)["tokens_per_s"] / lowest
            yield {"name": name, "gain": gained, "total_gain": total, "kept": kept, **row_of(after)}, setting


def row_of(rounds: Sequence[Measured]) -> Row:
    """Returns the medians over the rounds, and the spread of time."""
    found = {one.name: median(getattr(each, one.name) for each in rounds) for one in fields(Measured)}
    return found | {
        "token_s": spread([each.token_s for each in rounds]),
        "tokens_per_s": 1 / found["token_s"],
    }


def gain_of(before: Sequence[Measured], after: Sequence[Measured], name: str = "token_s") -> Gain:
    """Returns how many times less time a token takes, formed in each round; no time counts as a microsecond."""
    return gain(
        [max(LEAST_S, getattr(each, name)) for each in before], [max(LEAST_S, getattr(each, name)) for each in after]
    )


def least_bytes(path: Path, plan: Plan, trace: Trace) -> float:
    """Returns the bytes of units that a token must read whatever a cache of the same memory holds (Belady)."""
    parts = tuple(
        part.model_copy(update={"num_pinned": 0, "cache_slots": part.num_pinned + part.cache_slots})
        for part in plan.parts
    )
    plan = plan.model_copy(update={"cache": "belady", "cache_options": {}, "parts": parts})
    found = simulate(open_artifact(path), plan, trace.then, before=trace.first)
    return found.used_bytes / trace.num_tokens


def gains(
    earlier: Sequence[Measured], serial: Sequence[Measured], best: Sequence[Measured], least_s: float
) -> dict[str, Any]:
    """Returns the gains of the layout over the `earlier` one and of overlapping, each with its upper bound. `least_s`
    is a token's least time on flash."""
    before, after = row_of(earlier), row_of(serial)
    token_s, flash_s = before["token_s"]["median"], before["flash_s_per_token"]
    serial_s, read_s = after["token_s"]["median"], after["flash_s_per_token"]
    return {
        "layout": gain_of(earlier, serial),
        "layout_bound": token_s / max(LEAST_S, token_s - flash_s + least_s),
        "layout_flash": gain_of(earlier, serial, "flash_s_per_token"),
        "layout_flash_bound": flash_s / max(LEAST_S, least_s),
        "layout_modelled": before["modelled_flash_s_per_token"] / max(LEAST_S, after["modelled_flash_s_per_token"]),
        "overlap": gain_of(serial, best),
        "overlap_bound": serial_s / max(read_s, serial_s - read_s),
    }


def best_before(found: Sequence[tuple[Row, Placed]], name: str | None = None) -> Placed:
    """Returns the last kept setting before the step whose name begins with `name`; of all steps if it is None."""
    earlier = takewhile(lambda step: name is None or not step[0]["name"].startswith(name), found)
    return [setting for row, setting in earlier if row["kept"]][-1]
