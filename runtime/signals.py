"""Simulates a text whose units the artifact's selector chooses anew, under any cache, budget and device.

An artifact may carry a trace of signals (schemas/curves.py): vectors of a few layers for the tokens of validation text.
From them the selector chooses as it does in a run, with what the simulated cache holds at that moment; a recorded trace
of units has the choices of the cache that it was recorded with. The traced layers stand for all. Caches begin with the
units most worth DRAM, and the first tokens only warm them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load  # pyright: ignore[reportUnknownVariableType]  its dtypes are bare

from coldpress.runtime import plugins
from coldpress.runtime.artifact.byte_planes import unpack
from coldpress.runtime.artifact.errors import NonFiniteError, TensorFileError
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.decoder.selection import Selection
from coldpress.runtime.simulate import by_signals, simulate_choices, times_traced, token_seconds_of
from coldpress.runtime.sparsity import used_experts
from coldpress.runtime.store.preload_room import reads_on
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import BLOCKS, WHOLE_MLP, Signal, activity_of, num_experts, num_units, signal_of
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import TRACE_FILE
from coldpress.schemas.model import ModelSpec

MAX_BYTES = 1 << 30
"""Most bytes of a trace, before compression and after."""
WARM_TOKENS = 32
"""Tokens that are not counted, or half of the text if that is less."""


@dataclass(frozen=True)
class Signals:
    num_tokens: int
    layers: tuple[int, ...]
    """Layers that have every signal which the artifact's families need."""
    arrays: Mapping[tuple[int, Signal], np.ndarray]
    """float16 [num_tokens, n]."""


@dataclass(frozen=True)
class Decided:
    token_s: float
    """Modelled."""
    hit_rate: float
    reads: float
    read_bytes: float


def has_signals(artifact: Artifact) -> bool:
    return any(entry.path == TRACE_FILE for entry in artifact.manifest.files)


def load_signals(artifact: Artifact) -> Signals:
    """Returns the signals that an artifact carries. Raises `ColdpressError` if it carries none, or not those that its
    families need, `ArtifactError` if the file is damaged."""
    if not has_signals(artifact):
        raise ColdpressError(
            f"{artifact.path} has no {TRACE_FILE}, from which its selector could choose anew; build it with "
            "method=auto, or replay a trace with --trace"
        )
    try:
        found: dict[str, np.ndarray] = load(unpack(artifact.read_bytes(TRACE_FILE, MAX_BYTES), MAX_BYTES))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        expected = "safetensors, compressed by zstandard in two planes"
        raise TensorFileError(TRACE_FILE, "the content", f"what cannot be read ({error})", expected) from error
    spec = artifact.manifest.model
    lengths = _lengths(artifact)
    layers = tuple(
        layer for layer in range(spec.num_hidden_layers) if all(f"{layer}.{signal}" in found for signal in lengths)
    )
    if not layers:
        raise ColdpressError(
            f"{TRACE_FILE} of {artifact.path} has no layer with all of {', '.join(lengths)}, which the selector needs "
            "to choose anew; replay a trace with --trace"
        )
    arrays: dict[tuple[int, Signal], np.ndarray] = {
        (layer, signal): found[f"{layer}.{signal}"] for layer in layers for signal in lengths
    }
    num_tokens = next(iter(arrays.values())).shape[:1]
    for (layer, signal), array in arrays.items():
        _check(f"tensor {layer}.{signal}", array, (*num_tokens, lengths[signal]))
    return Signals(num_tokens[0], layers, arrays)


def _lengths(artifact: Artifact) -> dict[Signal, int]:
    spec, found = artifact.manifest.model, dict[Signal, int]()
    for family in (entry.family for entry in artifact.manifest.families):
        seen, activity = signal_of(family, spec), activity_of(family, spec)
        found[seen] = num_units(family, spec) if seen == activity else spec.hidden_size
        if num_experts(family, spec) > 1:
            # it says which experts a token uses; blocks have no entry each
            found[activity] = num_units(WHOLE_MLP if family == BLOCKS else family, spec)
    return found


def _check(field: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    found, expected = f"{array.dtype.name} {list(array.shape)}", f"float16 {list(shape)}"
    if found != expected or len(array) < 2:
        raise TensorFileError(TRACE_FILE, field, found, f"{expected}, of two tokens at least")
    if not np.isfinite(array).all():
        raise NonFiniteError(TRACE_FILE, field, "a number that is not finite", "finite numbers")


def decide(artifact: Artifact, plan: Plan, signals: Signals) -> Decided:
    """Returns the figures of a token while the plan's selector chooses from `signals`. Raises `ColdpressError` if the
    plan preloads, for which signals of all layers are needed, or its cache must know the requests to come."""
    _check_plan(artifact, plan)
    spec, selection = artifact.manifest.model, Selection(artifact, plan)
    traced = plan.model_copy(update={"parts": tuple(part for part in plan.parts if part.layer in signals.layers)})
    keys = [(part.layer, part.family) for part in traced.parts]
    seen = {key: signals.arrays[key[0], signal_of(key[1], spec)] for key in keys}
    choose = by_signals(selection.method, selection.arrays, seen, _experts(signals, keys, spec))
    fill = {
        (part.layer, part.family): np.sort(
            artifact.rank(part.layer, part.family)[: part.num_pinned + part.cache_slots]
        ).astype(np.int32)
        for part in traced.parts
        if part.cache_slots
    }
    num_warm = min(WARM_TOKENS, signals.num_tokens // 2)
    (found,) = simulate_choices(artifact, traced, choose, [range(signals.num_tokens)], num_warm, fill)
    times = times_traced(artifact.manifest, traced)
    return Decided(
        token_s=token_seconds_of(artifact.manifest, traced, found),
        hit_rate=found.hit_rate,
        reads=times * found.reads / found.num_tokens,
        read_bytes=times * found.read_bytes / found.num_tokens,
    )


def _check_plan(artifact: Artifact, plan: Plan) -> None:
    if plan.preload_buffer_bytes and not reads_on(plan, artifact.manifest.flash.sections):
        raise ColdpressError(
            f"the {plan.title} preloads, and the artifact has signals of some layers only, from which no layer can "
            "guess for the next; add --preload off"
        )
    if plugins.load_class("coldpress.runtime.cache", CachePolicy, plan.cache).looks_ahead:
        raise ColdpressError(
            f"the cache '{plan.cache}' must know all requests to come, and the selector has yet to choose them; replay "
            "a trace with --trace, or choose another cache"
        )


def _experts(signals: Signals, keys: list[tuple[int, str]], spec: ModelSpec) -> dict[tuple[int, str], np.ndarray]:
    return {
        (layer, family): used_experts(signals.arrays[layer, activity_of(family, spec)], num_experts(family, spec))
        for layer, family in keys
        if num_experts(family, spec) > 1
    }
