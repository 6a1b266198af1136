"""Maps where reading ahead pays by the device's law (ActiveFlow 3, Figs. 16 and 17): the store on simulated flash.

Layers of a 7B's shape are in int4 with top-k; their units lie in a drawn order. The tokens' requests are drawn; the
inputs of successive layers have a planted similarity (tests/support/similar_layers.py). `share` of the units' bytes is
in DRAM, the preload buffer included. `gain` compares a token without reading ahead with one under the plan that the
build makes (`preload=on`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.harness import Benchmark, Cell, Row, main, option
from coldpress.compiler.stages.plan import preloading
from coldpress.runtime.profiles.devices import load_device
from coldpress.schemas.layout import Plan
from coldpress.schemas.order import Order
from tests.support.similar_layers import SimilarLayers

CASES = {"relu-10": ("relu", 0.1), "swiglu-50": ("silu", 0.5)}
DEVICES = ("pixel6", "oneplus12", "iphone-a18", "macbook-m1-max")


def judged(shape: SimilarLayers, order: Order) -> tuple[Plan, float]:
    """Returns the plan that reads ahead, and the share of a token's time that the build's law expects it to take."""
    asked, best = [], preloading.best
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preloading, "best", lambda run: (asked.append(found := best(run)), found)[1])
        layout = shape.layout("on", [order])
    return layout.plans[0], asked[0][1]


def measure(shapes: list[SimilarLayers], num_tokens: int) -> list[dict[str, Any]]:
    """Returns a row per shape. They differ only in the layers' similarity, on which reads on demand do not depend."""
    first = shapes[0]
    order = first.order
    layout = first.layout(order=[order])
    artifact = first.artifact(layout)
    plain = first.decoded(artifact, layout.plans[0], num_tokens)
    rows = []
    for shape in shapes:
        on, share_of_time = judged(shape, order)
        ahead = shape.decoded(artifact, on, num_tokens)
        rows.append(
            {
                "similarity": shape.similarity,
                "gain": plain.token_s / ahead.token_s,
                "law": 1 / share_of_time,
                "auto": share_of_time < preloading.worth(shape.layout(order=[order]).sections),
                "bound": plain.token_s / max(plain.flash_s, plain.dram_s),
                "precision": ahead.precision,
                "token_s": plain.token_s,
                "preload_buffer_bytes": on.preload_buffer_bytes,
                "preload_guess": on.preload_guess,
                "collapse_gap_bytes": on.collapse_gap_bytes,
            }
        )
    return rows


@dataclass(frozen=True)
class Options:
    devices: tuple[str, ...] = option(("pixel6", "iphone-a18"), smoke=("pixel6",), full=DEVICES, help="device profiles")
    cases: tuple[str, ...] = option(("swiglu-50",), full=tuple(CASES), choices=CASES, help="activation and density")
    shares: tuple[float, ...] = option((0.5, 0.95), smoke=(0.5,), full=(0.5, 0.8, 0.95), help="shares of units in DRAM")
    similarity: tuple[float, ...] = option(
        (0.5, 0.95), smoke=(0.95,), full=(0.2, 0.5, 0.8, 0.95), help="cosines of the MLP inputs of successive layers"
    )
    tokens: int = option(3, smoke=1, help="decoded tokens")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].similarity": "planted cosine between the MLP inputs of successive layers in the text",
        "rows[].gain": "modelled seconds per token without reading ahead over those with it",
        "rows[].law": "gain that the build expects",
        "rows[].auto": "whether preload=auto reads ahead",
        "rows[].bound": "gain if all reads and all computing ran side by side",
        "rows[].precision": "share of the bytes of units read ahead that were requested afterwards",
        "rows[].token_s": "modelled seconds per token without reading ahead",
        "rows[].preload_buffer_bytes": "bytes of the plan's buffer for reading ahead",
        "rows[].preload_guess": "share of the guessed units that the build's plan reads ahead",
        "rows[].collapse_gap_bytes": "gap in bytes over which the plan joins reads",
    }
    over = {"device": "devices", "case": "cases", "share": "shares"}
    full_minutes = 20

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per similarity."""
        profile, case = load_device(cell["device"]), CASES[cell["case"]]
        shapes = [SimilarLayers(profile, *case, each, cell["share"]) for each in self.options.similarity]
        yield from measure(shapes, self.options.tokens)


if __name__ == "__main__":
    main("preload_map")
