"""Where reading ahead pays, by the device's law (ActiveFlow 3, Figs. 16 and 17): the runtime's store on modelled flash.

`python -m benchmarks.preload_map [--devices …] [--cases …] [--shares 0.5 …] [--groups 1 2 4] [--similarity …]`.
Eight layers of a 7B's shape in int4, top-k, units in a drawn order; what tokens ask for is drawn, layers' inputs as
alike as planted (tests/support/alike.py), and `share` of the units' bytes is in DRAM, which the preload buffer is part
of. `gain`: seconds of a token without reading ahead over those with it, as the build's law sizes it (`preload=on`);
`law`: what that law expects, which decides `preload=auto`, `auto`; `bound`: if all reads and all computing were
side by side. `over_one`: without reading ahead, what groups of one layer take over what these take. The last line is
{rows: [{device, case, share, layers_per_group, similarity, gain, law, auto, bound, …}]}.
"""

import argparse
import itertools
import json
from typing import Any

import pytest

from benchmarks.shared.report import finish, show
from coldpress.compiler.profiles import PROFILES, load_device
from coldpress.compiler.stages.layout import preloading
from coldpress.schemas.layout import Plan
from coldpress.schemas.order import Order
from tests.support.alike import Alike

CASES = {"relu-10": ("relu", 0.1), "swiglu-50": ("silu", 0.5)}
DEVICES = ("pixel6", "oneplus12", "iphone-a18", "macbook-m1-max")
COLUMNS = ("device", "case", "share", "layers_per_group", "similarity", "gain", "law", "auto", "bound", "precision")


def judged(shape: Alike, order: Order) -> tuple[Plan, float]:
    """The plan that reads ahead, and the share of a token's time that the build's law expects it to take."""
    asked, best = [], preloading.best
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preloading, "best", lambda run: (asked.append(found := best(run)), found)[1])
        layout = shape.layout("on", [order])
    return layout.plans[0], asked[0][1]


def measure(shapes: list[Alike], num_tokens: int, one_s: float | None) -> list[dict[str, Any]]:
    """Rows of shapes that differ in how alike their layers are, on which reads without reading ahead do not hang."""
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
                "over_one": (one_s or plain.token_s) / plain.token_s,
                "preload_buffer_bytes": on.preload_buffer_bytes,
                "preload_guess": on.preload_guess,
                "collapse_gap_bytes": on.collapse_gap_bytes,
            }
        )
    return rows


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=list(DEVICES), metavar="DEVICE")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.8, 0.95])
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 2, 4], metavar="LAYERS")
    parser.add_argument("--similarity", nargs="+", type=float, default=[0.2, 0.5, 0.8, 0.95])
    parser.add_argument("--tokens", type=int, default=3)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for device, case, share in itertools.product(arguments.devices, arguments.cases, arguments.shares):
        profile, one_s = load_device(PROFILES / "devices" / f"{device}.yaml"), None
        for size in arguments.groups:
            shapes = [Alike(profile, *CASES[case], alike, share, size) for alike in arguments.similarity]
            found = measure(shapes, arguments.tokens, one_s)
            one_s = one_s or found[0]["token_s"]
            cell = {"device": device, "case": case, "share": share, "layers_per_group": size}
            rows += [cell | row for row in found]
            for row in rows[-len(found) :]:
                print(json.dumps(row), flush=True)
    show("reading ahead, by the device's law", list(COLUMNS), ([row[name] for name in COLUMNS] for row in rows))
    finish({"rows": rows})


if __name__ == "__main__":
    main()
