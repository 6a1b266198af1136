"""Measures the fixed seconds of a request, a layer and a token: all that is not spent in matrix products.

Tiny models decode, so that their products take no time. Decoder, selector and store are the runtime's; flash is
simulated, and no file is written. The models differ in their number of layers, in the requests of a layer, and in
whether requests hit the cache, so that differences between their tokens give each cost. Processor time is measured,
because other work on the machine lengthens wall time.
"""

import statistics
import time
from dataclasses import dataclass

import numpy as np

from coldpress.compiler.device.tiny import decoder, gated_model, in_memory, measured_token_s
from coldpress.runtime.decoder.decoder import Decoder
from coldpress.runtime.flash import simulated
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FamilyName

FEW_LAYERS, MANY_LAYERS = 2, 12
ROUNDS, TOKENS = 15, 10
TWO: tuple[FamilyName, ...] = ("mlp_in", "mlp_mid")
FOUR: tuple[FamilyName, ...] = ("attn_in", "attn_out", *TWO)
"""The families of a layer; each is one request."""


@dataclass(frozen=True)
class Costs:
    """Seconds of processor time: medians of several rounds, and the largest spread between rounds."""

    request_s: float
    reading_s: float
    layer_s: float
    token_s: float
    spread: float


def call_costs(device: DeviceProfile) -> Costs:
    """Returns the fixed seconds on this machine; `device` gives pages and queue depth of the simulated flash."""
    cases: dict[str, Decoder] = {
        "few layers": _decoder(device, FEW_LAYERS, TWO),
        "many layers": _decoder(device, MANY_LAYERS, TWO),
        "requests": _decoder(device, MANY_LAYERS, FOUR),
        "reads": _decoder(device, MANY_LAYERS, TWO, slots=1 / 8),
    }
    with np.errstate(all="ignore"):
        rounds = [
            {name: measured_token_s(each, TOKENS, time.thread_time) for name, each in cases.items()}
            for _ in range(ROUNDS + 1)
        ][1:]
    samples = {name: [found[name] for found in rounds] for name in cases}
    token_s = {name: statistics.median(each) for name, each in samples.items()}
    more = {name: token_s[name] - token_s["many layers"] for name in ("requests", "reads")}
    request_s = more["requests"] / (MANY_LAYERS * (len(FOUR) - len(TWO)))
    layer_s = (token_s["many layers"] - token_s["few layers"]) / (MANY_LAYERS - FEW_LAYERS)
    return Costs(
        request_s=max(0.0, request_s),
        reading_s=max(0.0, more["reads"] / (MANY_LAYERS * len(TWO))),
        layer_s=max(0.0, layer_s - len(TWO) * request_s),
        token_s=max(0.0, token_s["few layers"] - FEW_LAYERS * layer_s),
        spread=max((max(each) - min(each)) / statistics.median(each) for each in samples.values()),
    )


def _decoder(
    device: DeviceProfile, num_layers: int, families: tuple[FamilyName, ...], slots: float | None = None
) -> Decoder:
    """Returns a decoder whose cache holds `slots` of the units, or that has all units in DRAM (None)."""
    artifact = in_memory(
        gated_model(num_layers),
        device,
        families,
        0.5,
        slots,
        method="topk",
        options={"attention": families == FOUR},
        cache="static" if slots is None else "lru",
        read_buffer_bytes=64 * device.flash.page_bytes.value,
    )
    return decoder(artifact, simulated.Plugin(artifact, device.flash.queue_depth.value))
