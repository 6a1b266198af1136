"""Where reading ahead pays by the device's law (ActiveFlow 3, Figs. 16 and 17): the store on simulated flash.

Layers of a 7B's shape in int4, top-k, units in a drawn order. The tokens' requests are drawn; the inputs of successive
layers are as similar as planted (tests/support/alike.py). `share` of the units' bytes is in DRAM, the preload buffer
included. `gain` compares a token without reading ahead with one under the plan that the build makes (`preload=on`).
`law` is the gain that the build expects, which decides `preload=auto`: `auto`. `bound` is the gain if all reads and all
computing ran side by side. `over_one`, without reading ahead, compares groups of one layer with these groups.
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
from tests.support.alike import Alike

CASES = {"relu-10": ("relu", 0.1), "swiglu-50": ("silu", 0.5)}
DEVICES = ("pixel6", "oneplus12", "iphone-a18", "macbook-m1-max")


def judged(shape: Alike, order: Order) -> tuple[Plan, float]:
    """The plan that reads ahead, and the share of a token's time that the build's law expects it to take."""
    asked, best = [], preloading.best
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preloading, "best", lambda run: (asked.append(found := best(run)), found)[1])
        layout = shape.layout("on", [order])
    return layout.plans[0], asked[0][1]


def measure(shapes: list[Alike], num_tokens: int, one_s: float) -> list[dict[str, Any]]:
    """Returns rows of shapes that differ only in the layers' similarity, on which reads on demand do not depend."""
    order = shapes[0].order
    plan = shapes[0].layout(order=[order]).plans[0]
    artifact = shapes[0].artifact(shapes[0].layout(order=[order]))
    plain = shapes[0].decoded(artifact, plan, num_tokens)
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
                "over_one": one_s / plain.token_s,
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
    shares: tuple[float, ...] = option((0.5, 0.95), smoke=(0.5,), full=(0.5, 0.8, 0.95), help="share in DRAM")
    groups: tuple[int, ...] = option((1, 2), smoke=(1,), full=(1, 2, 4), help="layers per group")
    similarity: tuple[float, ...] = option((0.5, 0.95), smoke=(0.95,), full=(0.2, 0.5, 0.8, 0.95), help="of inputs")
    tokens: int = option(3, smoke=1, help="decoded tokens")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].similarity": "planted similarity of successive layers' inputs",
        "rows[].gain": "modelled seconds without reading ahead over those with it",
        "rows[].law": "the gain that the build expects",
        "rows[].auto": "whether preload=auto reads ahead",
        "rows[].bound": "the gain if reads and computing ran side by side",
        "rows[].precision": "share of the units read ahead that were used",
        "rows[].token_s": "modelled seconds of a token without reading ahead",
        "rows[].over_one": "seconds with groups of one layer over these, without reading ahead",
        "rows[].preload_buffer_bytes": "the plan's",
        "rows[].preload_guess": "the plan's",
        "rows[].collapse_gap_bytes": "the plan's",
    }
    over = {"device": "devices", "case": "cases", "share": "shares", "layers_per_group": "groups"}
    full_minutes = 60

    def measure(self, cell: Cell) -> Iterator[Row]:
        """A row per similarity."""
        key = (cell["device"], cell["case"], cell["share"])
        one_s = self.once(key, lambda: self._plain_s(*key))
        profile = load_device(cell["device"])
        shapes = [
            Alike(profile, *CASES[cell["case"]], alike, cell["share"], cell["layers_per_group"])
            for alike in self.options.similarity
        ]
        yield from measure(shapes, self.options.tokens, one_s)

    def _plain_s(self, device: str, case: str, share: float) -> float:
        """Seconds of a token with groups of one layer."""
        shape = Alike(load_device(device), *CASES[case], self.options.similarity[0], share, 1)
        layout = shape.layout(order=[shape.order])
        return shape.decoded(shape.artifact(layout), layout.plans[0], self.options.tokens).token_s


if __name__ == "__main__":
    main("preload_map")
