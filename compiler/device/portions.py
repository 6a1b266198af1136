"""Measures what a portion of a request's reads costs, from the wait for it to the beginning of the next one.

A dense model decodes from a real file and keeps no unit in DRAM. It reads the same bytes once in few portions and once
in many. Threads sleep and wake, and the processor idles, as in any run that reads: neither simulated flash nor reads
that follow each other show that. The cost is the one by which the law gives the measured difference.
"""

import statistics
import time
from pathlib import Path

import numpy as np

from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.device import host
from coldpress.compiler.device.tiny import FORMAT, decoder, gated_model, in_memory, measured_token_s
from coldpress.compiler.seconds import Reading
from coldpress.runtime.decoder.decoder import Decoder
from coldpress.runtime.flash import direct
from coldpress.runtime.store.computing import Arrival, Weights, fetch_seconds
from coldpress.runtime.store.planner import Strided
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import WHOLE_MLP
from coldpress.schemas.figure import Figure

NUM_LAYERS, HIDDEN_SIZE, INTERMEDIATE_SIZE = 4, 256, 2048
MODEL = gated_model(NUM_LAYERS, HIDDEN_SIZE, INTERMEDIATE_SIZE)
UNIT_BYTES = unit_bytes(WHOLE_MLP, MODEL.spec, FORMAT)
FEW_BUFFER_BYTES, MANY_BUFFER_BYTES = 2 << 20, 256 << 10
"""Read buffers, of two halves each: a layer's units arrive in 2 portions, and in 16."""
FILE_BYTES = 8 << 20
ROUNDS, TOKENS = 15, 4
COSTS_S = np.linspace(0.0, 2e-3, 401)


def portion_cost(device: DeviceProfile, folder: Path) -> float:
    """Returns the seconds of a portion on this machine, by the medians of several rounds; `folder` is on the storage of
    artifacts.

    Raises:
        ColdpressError: as `host.sample`.
    """
    with host.sample(folder, FILE_BYTES) as reader, np.errstate(all="ignore"):
        few, many = (_decoder(device, reader, size) for size in (FEW_BUFFER_BYTES, MANY_BUFFER_BYTES))
        rounds = [
            [measured_token_s(each, TOKENS, time.perf_counter) for each in (few, many)] for _ in range(ROUNDS + 1)
        ]
    few_s, many_s = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
    return cost_of(device, many_s - few_s)


def cost_of(device: DeviceProfile, difference_s: float) -> float:
    """Returns the cost of a portion, if a token takes `difference_s` more with many portions than with few."""
    few, many = (_arrival(device, size) for size in (FEW_BUFFER_BYTES, MANY_BUFFER_BYTES))
    modelled = [
        NUM_LAYERS * (_request_s(device, cost, many) - _request_s(device, cost, few)) for cost in COSTS_S.tolist()
    ]
    return float(np.interp(difference_s, modelled, COSTS_S))


def _decoder(device: DeviceProfile, reader: host.Reader, buffer_bytes: int) -> Decoder:
    plan = {"method": "dense", "cache": "static", "read_buffer_bytes": buffer_bytes}
    artifact = in_memory(MODEL, device, (WHOLE_MLP,), 1.0, 0.0, **plan).reading(reader.descriptor, reader.checksums)
    return decoder(artifact, direct.Plugin(artifact, device.flash.queue_depth.value))


def _arrival(device: DeviceProfile, buffer_bytes: int) -> Arrival:
    units = Strided(0, UNIT_BYTES, UNIT_BYTES)
    return Reading(device.flash, units, 0, buffer_bytes).reads(np.arange(INTERMEDIATE_SIZE)).arrival


def _request_s(device: DeviceProfile, cost_s: float, reads: Arrival) -> float:
    assert device.compute is not None
    figure = Figure(value=cost_s, source="tried")
    device = device.model_copy(update={"compute": device.compute.model_copy(update={"portion_s": figure})})
    num_bytes = INTERMEDIATE_SIZE * UNIT_BYTES
    return fetch_seconds(device, Weights(FORMAT, num_bytes), reads, 0, num_bytes, 0)
