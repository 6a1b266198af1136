"""How well the law of computing predicts this machine: modelled over measured seconds of decoded tokens.

The machine is measured as `python -m coldpress.compiler.device measure` does, with other weights and other shapes than
those that are decoded then; nothing is fitted to a model. Small real models read text that they have not seen, with all
units in DRAM and with a share of them. The same law with DRAM bandwidth alone, as for a profile without rates, stands
beside it. A busy machine slows the tokens and not the costs, which are processor time: read the ratio with the load.
"""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.benchmark import Benchmark, Cell, Row, option
from benchmarks.harness.command import main
from benchmarks.speculative import build, texts
from coldpress.compiler.device.measure import measure
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plan.budget import fixed_bytes, refit
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.layout import Plan
from coldpress.schemas.metrics import RunMetrics

MODELS = ("demo", "stories260k", "tinystories656k", "prose7m", "prose7m-relu")
COSTS = {
    "request_s": "seconds of a request beside its products",
    "reading_s": "seconds of a request that reads, in addition",
    "layer_s": "seconds of a layer beside its requests",
    "token_s": "seconds of a token beside its layers",
}
FILE_BYTES = 64 << 20
"""Of the file that the disk is measured with."""


@dataclass(frozen=True)
class Options:
    """What is decoded."""

    models: tuple[str, ...] = option(("demo", "prose7m"), smoke=("demo",), full=MODELS, choices=MODELS, help="models")
    shares: tuple[float, ...] = option((1.0, 0.3), smoke=(1.0,), help="shares of the units in DRAM")
    tokens: int = option(96, smoke=24, help="tokens of the text")
    rounds: int = option(5, smoke=2, help="passes over it; the fastest counts")


class Plugin(Benchmark[Options]):
    """Measures the machine, then decodes."""

    keys = {
        "rows[].model": "model",
        "rows[].share": "share of the units in DRAM",
        "rows[].load": "load of the machine per core",
        "rows[].measured_s": "measured seconds of a token, the least of the rounds",
        "rows[].modelled_s": "modelled seconds of a token",
        "rows[].ratio": "modelled over measured",
        "rows[].processor_ratio": "modelled over the decoding thread's processor time, which other work lengthens less",
        "rows[].bandwidth_ratio": "the same where computing is DRAM bandwidth alone",
        "worst_ratio": "the ratio farthest from 1",
        **{f"rows[].{name}": f"{meaning}, measured here" for name, meaning in COSTS.items()},
    }
    is_timing = True
    needs_data = True
    over = {"model": "models", "share": "shares"}
    full_minutes = 6

    def measure(self, cell: Cell) -> Iterator[Row]:
        """One row."""
        device = self.once("machine", lambda: measure("host", self.folder, FILE_BYTES, lambda _: None))
        name = cell["model"]
        path = self.folder / name
        path = path if path.exists() else build(self.folder, name)
        plan = _plan(path, cell["share"])
        blocks = np.array(texts(name, self.options.tokens)[:1])
        runs = [_run(path, plan, blocks) for _ in range(self.options.rounds)]
        num_tokens = runs[0][0].num_tokens
        measured_s, processor_s = (
            min(each) / num_tokens for each in zip(*((m.decode_s, s) for m, s in runs), strict=True)
        )
        modelled_s, bandwidth_s = (
            _run(path, plan, blocks, known)[0].modelled_s / num_tokens
            for known in (device, device.model_copy(update={"compute": None}))
        )
        yield {
            "load": os.getloadavg()[0] / (os.cpu_count() or 1),
            "measured_s": measured_s,
            "modelled_s": modelled_s,
            "ratio": modelled_s / measured_s,
            "processor_ratio": modelled_s / processor_s,
            "bandwidth_ratio": bandwidth_s / measured_s,
            **_costs(device),
        }

    def figures(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        """The ratio that is farthest from 1."""
        return {"worst_ratio": max((row["ratio"] for row in rows), key=lambda ratio: abs(math.log(ratio)))}


def _costs(device: DeviceProfile) -> dict[str, float]:
    assert device.compute is not None
    found = {name: getattr(device.compute, name) for name in COSTS}
    return {name: figure.value for name, figure in found.items()}


def _plan(path: Path, share: float) -> Plan:
    manifest = open_artifact(path).manifest
    plan, units = manifest.plans[0], sum(section.length_bytes for section in manifest.flash.sections)
    return refit(manifest, plan, fixed_bytes(manifest, plan) + int(share * units) + (1 << 20) * (share >= 1))


def _run(path: Path, plan: Plan, blocks: np.ndarray, device: DeviceProfile | None = None) -> tuple[RunMetrics, float]:
    """Decodes the text sparsely: metrics, and this thread's processor seconds; with a device, seconds are modelled."""
    with Session(path, plan=plan, device=device, modelled=device is not None) as session:
        session.perplexity(blocks, sparse=True)
        start = time.thread_time()
        found = session.perplexity(blocks, sparse=True).metrics
        return found, time.thread_time() - start


if __name__ == "__main__":
    main("computing")
