"""Models drafts from coarse planes in a run that refines: a pass that checks them refines each token's own units.

Seconds are those of a 7B by each device's law, with signals drawn with a small model's statistics (quotes draw the
same). Under one DRAM budget it compares `refine` alone with its faster cache, `refine` with drafts, which needs the
cache `static`, and the fastest dense run, with drafts or without. Drafts have the best fixed number per pass. A pass
reads what any of its tokens chooses, and computes as if each used all of that. The share of accepted drafts is given; a
dense run accepts fewer, since it is farther from its coarse planes. Tokens refine what they choose alone
(`use_read_units=false`). A budget that the coarse planes exceed has no rows.
"""

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.plan_search import source_of
from coldpress.compiler.cost_model import dense_footprint_bytes
from coldpress.compiler.dense_run import MOST_DRAFTS, dense_run, draft_costs
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages.allocate import AllocateConfig, Inputs
from coldpress.compiler.stages.allocate._division import divided
from coldpress.compiler.stages.allocate._replay import Replays
from coldpress.runtime.flash import simulated
from coldpress.runtime.generate.speculation import Costs
from coldpress.runtime.profiles.devices import device_names, load_device
from coldpress.runtime.quantization._planes import whole_format
from coldpress.runtime.simulate import on_device, times_traced
from coldpress.runtime.store import resident
from coldpress.runtime.store.clock import Clock
from coldpress.runtime.store.computing import in_pass
from coldpress.runtime.store.store import Store
from coldpress.schemas.errors import DoesNotFitError
from coldpress.schemas.sparsity import Sparsity

SHAPE, CONTEXT_LENGTH = "llama-7b-shape", 1024
CACHES = ("static", "lfu")
"""The policies that `refine` alone is compared with; the first is the one that drafts need."""
PLANES = ("int4_2_2", "int4_3_1")


@dataclass(frozen=True)
class Options:
    devices: tuple[str, ...] = option(
        ("pixel6", "macbook-m1-max", "infinix-zero30"),
        smoke=("pixel6",),
        full=tuple(device_names()),
        choices=device_names(),
        help="device profiles",
    )
    planes: tuple[str, ...] = option(PLANES[:1], full=PLANES, choices=PLANES, help="formats in planes")
    dram_shares: tuple[float, ...] = option(
        (0.8, 0.9), smoke=(0.8,), help="DRAM, as a share of weights and KV cache in the plain format"
    )
    shares: tuple[float, ...] = option((0.05, 0.1, 0.2), smoke=(0.1,), help="shares of the units that tokens refine")
    acceptances: tuple[float, ...] = option(
        (0.7, 0.8, 0.9), smoke=(0.8,), help="shares of drafts that refine accepts, of those that are looked at"
    )
    dense_accepts_less: float = option(0.05, help="by how much the share that a dense run accepts is smaller")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].share": "share of the units that a token refines",
        "rows[].acceptance": "share of drafts that refine accepts",
        "rows[].alone_s": "modelled seconds of a token of refine without drafts, with the faster cache",
        "rows[].drafts_s": "the same with drafts, one or more per pass",
        "rows[].draft_tokens": "the best number of drafts per pass, at least 1",
        "rows[].dense_s": "the same of the fastest dense run, with drafts or without",
        "over_alone.*?": "by device: most that drafts give refine, as speed with them over speed without; null where "
        "nothing fits",
        "over_both.*?": "by device: the same over the faster of refine without drafts and the dense run",
    }
    over = {"device": "devices", "planes": "planes", "dram_share": "dram_shares"}
    full_minutes = 15

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per share and acceptance."""
        source, device = self.once(SHAPE, lambda: source_of(SHAPE, self.folder)), load_device(cell["device"])
        planes, whole = cell["planes"], whole_format(cell["planes"])
        dram_bytes = round(cell["dram_share"] * dense_footprint_bytes(source.model, whole, CONTEXT_LENGTH))
        work = Workspace(self.folder, "plan")
        inputs = Inputs(source.model, source.activations, device, work, None, 2, source.curves)
        replays = Replays(inputs, 1.0)
        plain = dense_run(source.model, whole, CONTEXT_LENGTH, dram_bytes, device)
        assert plain is not None
        dense = draft_costs(source.model, planes, CONTEXT_LENGTH, dram_bytes, device)
        for share in self.options.shares:
            asked = AllocateConfig(
                method="refine",
                options={"use_read_units": False},
                format=planes,
                density=share,
                density_allocation="uniform",
                dram_budget=dram_bytes,
                context_length=CONTEXT_LENGTH,
            )
            try:
                static, other = (divided(asked.model_copy(update={"cache": name}), inputs) for name in CACHES)
            except DoesNotFitError as error:
                print(f"{planes}: {error}", file=sys.stderr)
                return
            alone_s = min(replays.of(one).token_s for one in (static, other))
            costs = costs_of(replays, static)
            for acceptance in self.options.acceptances:
                count = min(range(1, MOST_DRAFTS + 1), key=lambda count: costs.token_s(count, acceptance))
                accepted = acceptance - self.options.dense_accepts_less
                drafted = dense.token_s(dense.best(MOST_DRAFTS, accepted), accepted)
                yield {
                    "share": share,
                    "acceptance": acceptance,
                    "alone_s": alone_s,
                    "drafts_s": costs.token_s(count, acceptance),
                    "draft_tokens": count,
                    "dense_s": min(plain.token_s, drafted),
                }

    def figures(self, rows: Rows) -> Figures:
        def most(device: str, *others: str) -> float | None:
            own = [row for row in rows if row["device"] == device]
            return max((min(row[name] for name in others) / row["drafts_s"] for row in own), default=None)

        devices = self.options.devices
        return {
            "over_alone": {device: most(device, "alone_s") for device in devices},
            "over_both": {device: most(device, "alone_s", "dense_s") for device in devices},
        }


def costs_of(replays: Replays, division: Sparsity) -> Costs:
    """Returns the costs of drafts from coarse planes, and of passes of 1, 2, ... tokens that each choose their units,
    where the cache admits nothing."""
    setting, choose, windows, num_warm, _ = replays._run(division, None)
    artifact, plan = setting.artifact, setting.plan
    keys, pass_s = [(part.layer, part.family) for part in plan.parts], list[float]()
    for num_tokens in range(1, MOST_DRAFTS + 2):
        manifest = on_device(artifact, in_pass(artifact.manifest.device, num_tokens)).manifest
        clock, num_passes = Clock(manifest, plan), 0
        store = Store(artifact, plan, simulated.Plugin(artifact, plan.queue_depth), clock)
        clock.start()
        for window in windows:
            counted = window[num_warm:]
            for first in range(0, len(counted) - num_tokens + 1, num_tokens):
                for key in keys:
                    residency = store.residency(key)
                    chosen = [choose(key, token, residency) for token in counted[first : first + num_tokens]]
                    deque(store.submit(key, np.unique(np.concatenate(chosen))), maxlen=0)
                store.end_tokens(num_tokens)
                num_passes += 1
        requests_s = times_traced(manifest, plan) * clock.fetch_s / num_passes
        pass_s.append(requests_s + resident.token_seconds(manifest, plan))
    return Costs(resident.draft_seconds(artifact.manifest, plan), pass_s)


if __name__ == "__main__":
    main("refined_drafts")
