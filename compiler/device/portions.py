"""Measures what real reads cost beside the device's time: for each request that reads, and for each portion of it.

Dense models decode from a real file and keep no unit in DRAM. Threads sleep and wake, and the processor idles, as in
any run that reads: neither simulated flash nor reads that follow each other show that. One model reads small layers at
once, from the file and from simulated flash; the difference is a request's cost. Another one reads the same bytes once
in few portions and once in many; the cost of a portion is the one by which the law gives the measured difference.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from coldpress.compiler.checkpoint.shapes import Shapes
from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.device import host
from coldpress.compiler.device.tiny import FORMAT, decoder, gated_model, in_memory, measured_token_s
from coldpress.compiler.seconds import Reading
from coldpress.runtime.artifact.reader import Artifact
from coldpress.runtime.decoder.decoder import Decoder
from coldpress.runtime.flash import Reader, direct, simulated
from coldpress.runtime.store.computing import NOTHING, Arrival, Weights, fetch_seconds
from coldpress.runtime.store.planner import Strided
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import WHOLE_MLP
from coldpress.schemas.figure import Figure

NUM_LAYERS, HIDDEN_SIZE = 4, 256
SMALL, LARGE = (gated_model(NUM_LAYERS, HIDDEN_SIZE, size) for size in (256, 2048))
UNIT_BYTES = unit_bytes(WHOLE_MLP, LARGE.spec, FORMAT)
"""Bytes of a unit of both models."""
WHOLE_BUFFER_BYTES = 1 << 20
"""Read buffer that holds a small layer in each half."""
FEW_BUFFER_BYTES, MANY_BUFFER_BYTES = 2 << 20, 256 << 10
"""Read buffers, of two halves each: a large layer's units arrive in 2 portions, and in 16."""
FILE_BYTES = 8 << 20
ROUNDS, TOKENS = 15, 4
COSTS_S = np.linspace(0.0, 2e-3, 401)
"""Costs that are tried."""


class Costs(NamedTuple):
    """Seconds of reads beside the device's own."""

    waking_s: float
    """Of a request that reads."""
    portion_s: float
    """Of each portion of its reads."""


def costs(device: DeviceProfile, folder: Path) -> Costs:
    """Returns the costs on this machine, by the medians of several rounds.

    Args:
        device: The profile so far: flash and computing, without these costs.
        folder: On the storage that artifacts will lie on.

    Raises:
        ColdpressError: as `host.sample`.
    """
    with host.sample(folder, FILE_BYTES) as reader, np.errstate(all="ignore"):
        decoders = (
            _decoder(SMALL, device, reader, WHOLE_BUFFER_BYTES, simulated.Plugin),
            _decoder(SMALL, device, reader, WHOLE_BUFFER_BYTES, direct.Plugin),
            *(_decoder(LARGE, device, reader, size, direct.Plugin) for size in (FEW_BUFFER_BYTES, MANY_BUFFER_BYTES)),
        )
        rounds = [[measured_token_s(each, TOKENS, time.perf_counter) for each in decoders] for _ in range(ROUNDS + 1)]
    simulated_s, real_s, few_s, many_s = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
    portion_s = cost_of(device, many_s - few_s)
    return Costs(waking_of(device, portion_s, real_s - simulated_s), portion_s)


def waking_of(device: DeviceProfile, portion_s: float, difference_s: float) -> float:
    """Returns the cost of a request that reads, if a token with small layers takes `difference_s` more with a real file
    than with simulated flash, which takes no time."""
    reads = _arrival(device, SMALL, WHOLE_BUFFER_BYTES)
    modelled_s = _request_s(device, SMALL, portion_s, reads) - _request_s(device, SMALL, portion_s, NOTHING)
    return max(0.0, difference_s / NUM_LAYERS - modelled_s)


def cost_of(device: DeviceProfile, difference_s: float) -> float:
    """Returns the cost of a portion, if a token takes `difference_s` more with many portions than with few."""
    few, many = (_arrival(device, LARGE, size) for size in (FEW_BUFFER_BYTES, MANY_BUFFER_BYTES))
    modelled = [
        NUM_LAYERS * (_request_s(device, LARGE, cost, many) - _request_s(device, LARGE, cost, few))
        for cost in COSTS_S.tolist()
    ]
    return float(np.interp(difference_s, modelled, COSTS_S))


def _decoder(
    model: Shapes,
    device: DeviceProfile,
    reader: host.Reader,
    buffer_bytes: int,
    flash: Callable[[Artifact, int], Reader],
) -> Decoder:
    plan = {"method": "dense", "cache": "static", "read_buffer_bytes": buffer_bytes}
    artifact = in_memory(model, device, (WHOLE_MLP,), 1.0, 0.0, **plan).reading(reader.descriptor, reader.checksums)
    return decoder(artifact, flash(artifact, device.flash.queue_depth.value))


def _arrival(device: DeviceProfile, model: Shapes, buffer_bytes: int) -> Arrival:
    units = Strided(0, UNIT_BYTES, UNIT_BYTES)
    return Reading(device.flash, units, 0, buffer_bytes).reads(np.arange(model.spec.intermediate_size)).arrival


def _request_s(device: DeviceProfile, model: Shapes, portion_s: float, reads: Arrival) -> float:
    """Returns the modelled seconds of a layer's request, if a portion costs `portion_s`."""
    assert device.compute is not None
    figure = Figure(value=portion_s, source="tried")
    device = device.model_copy(update={"compute": device.compute.model_copy(update={"portion_s": figure})})
    num_bytes = model.spec.intermediate_size * UNIT_BYTES
    return fetch_seconds(device, Weights(FORMAT, num_bytes), reads, 0, num_bytes, 0)
