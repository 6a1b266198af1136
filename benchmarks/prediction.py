"""Measures how well a build and a quote predict this machine's speed, on its disk and under the caps of other devices.

This machine is measured first, as `python -m coldpress.compiler.device measure` does, once as it is and once under the
kernel's caps of each device (benchmarks/shared/emulated.py). Each model is built for each disk with one plan per DRAM
budget, by its validation text. Then it decodes test text under the caps; seconds of single tokens count after the first
ones, which fill the caches. The text is given, since a model's own text repeats itself.

The median of these seconds is compared with three predictions: of the build's folder, of the artifact with the curves
and signals that it carries, and of config.json alone. All budgets are quoted at once by the quick search. A band is the
quote's interval. `simulated_error` is the simulator's error with the same plan on the same test text: the law's part of
the error, without the parts of the choice and of the text. Builds and quotes run before, one on each core.
"""

import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import spearmanr

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.builds import MODELS, SHORT, artifact_in, build, settings
from benchmarks.shared.emulated import OTHER_BYTES, SAMPLE_BYTES, apart_under_caps
from benchmarks.speculative import texts
from coldpress.compiler.device.measure import measure
from coldpress.compiler.io import load_record, save_record
from coldpress.compiler.quote.decide import Asked, device_quotes
from coldpress.compiler.quote.records import Figure
from coldpress.compiler.quote.sources import find
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plan.budget import used_bytes
from coldpress.runtime.profiles.devices import load_device, read_device
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.layout import Plan
from coldpress.schemas.plans import Plans
from tests.support import warm

HOST = "host"
MODELLED = "pixel6"
"""The profile used without `--measured`, since measuring takes a quarter of a minute."""
SCALE = 0.25
"""Share of the rates of emulated devices: less than the disk gives, so that the caps are equal in every process. A
profile that was measured under other caps than the tokens would be off by as much."""
MEASURING_BYTES = 2 << 30
"""Memory of a process that measures the machine."""
PROMPT_TOKENS, WARM_TOKENS = 16, 16
MAX_PPL_RATIO = 1.05
CONTEXT_LENGTH = 128
PREDICTIONS = {"build": "its build's folder", "artifact": "the artifact", "config": "config.json alone"}


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        ("prose7m",),
        smoke=("tinystories656k",),
        full=("tinystories656k", "tinystories656k-relu", "prose7m", "prose7m-relu"),
        choices=[name for name in MODELS if name != "demo"],
        help="models",
    )
    disks: tuple[str, ...] = option(
        (HOST, "pixel6", "oneplus12"), smoke=(HOST,), help="host for this disk, or devices that are emulated"
    )
    budgets: tuple[str, ...] = option(
        ("60%", "70%", "80%", "100%"), smoke=("100%",), help="DRAM budgets, shares of the weights"
    )
    measured: bool = option(True, smoke=False, help="measure this machine; else its profile is that of MODELLED")
    text: int = option(1024, smoke=128, full=4096, help="tokens of calibration text, a quarter for the rest")
    tokens: int = option(80, smoke=24, help="tokens that are decoded of each text")
    texts: int = option(4, smoke=1, help="texts")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].budget": "DRAM budget, a share of the weights",
        "rows[].method": "selector of the build",
        "rows[].measured_tokens_per_s": "tokens per second by the median of single tokens",
        "rows[].simulated_error?": "the simulator's tokens per second on test text over the measured ones, less 1",
        **{
            f"rows[].{name}_error": f"tokens per second predicted from {source} over measured ones, less 1"
            for name, source in PREDICTIONS.items()
        },
        **{
            f"rows[].{name}_in_band": f"whether the measured speed is in the interval predicted from {source}"
            for name, source in PREDICTIONS.items()
        },
        "median_error": "median size of build_error",
        "worst_error": "largest size of build_error",
        "coverage": "share of the rows with build_in_band",
        "rank_correlation?": "Spearman's correlation of predicted and measured speeds; null for fewer than three rows",
        "quote_median_error": "median size of artifact_error",
        "config_median_error": "median size of config_error",
        "num_cells": "number of rows: models, disks and budgets",
    }
    is_timing = True
    needs_data = True
    needs_root = True
    over = {"model": "models", "disk": "disks"}
    full_minutes = 40

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per budget."""
        model, disk = cell["model"], cell["disk"]
        path, plans, quotes = self.once(model, lambda: self._predicted(model))[disk]
        manifest, plan_names = open_artifact(path).manifest, [plan.name for plan in plans]
        memory_bytes = max(used_bytes(manifest, plan) for plan in plans) + OTHER_BYTES
        told = self._on(disk, memory_bytes, "in_process", str(path), plan_names, model)
        simulated = decoded(path, plan_names, self._texts(model), read_device(self._profile(disk)))
        quoted = {name: quote.result() for name, quote in quotes.items()}
        for number, (budget, plan) in enumerate(zip(self.options.budgets, plans, strict=True)):
            row = {
                "budget": budget,
                "method": plan.method,
                "measured_tokens_per_s": 1 / statistics.median(told[number]["token_s"]),
                "simulated_error": told[number]["decode_s"] / simulated[number]["modelled_s"] - 1,
            }
            for name, speeds_of in quoted.items():
                row |= _errors(name, speeds_of[number], row["measured_tokens_per_s"])
            yield row

    def figures(self, rows: Rows) -> Figures:
        errors = {name: [abs(row[f"{name}_error"]) for row in rows] for name in PREDICTIONS}
        measured = [row["measured_tokens_per_s"] for row in rows]
        predicted = [(1 + row["build_error"]) * speed for row, speed in zip(rows, measured, strict=True)]
        rank = float(spearmanr(measured, predicted)[0]) if len(rows) > 2 else None  # type: ignore[arg-type]
        return {
            "median_error": statistics.median(errors["build"]),
            "worst_error": max(errors["build"]),
            "coverage": statistics.fmean(row["build_in_band"] for row in rows),
            "rank_correlation": rank,
            "quote_median_error": statistics.median(errors["artifact"]),
            "config_median_error": statistics.median(errors["config"]),
            "num_cells": len(rows),
        }

    def _profile(self, disk: str) -> Path:
        """Returns the path of the profile of this machine, as it is or under the kernel's caps of a device."""
        path = self.folder / f"{disk}-here.json"
        if path.exists():
            return path
        if self.options.measured:
            found = DeviceProfile.model_validate_json(self._on(disk, MEASURING_BYTES, "measured", disk))
        else:
            found = load_device(MODELLED).model_copy(update={"name": path.stem})
        save_record(found, path)
        return path

    def measured(self, disk: str) -> str:
        """Returns the profile of this machine with its disk as it is in this process, as JSON."""
        return measure(f"{disk}-here", self.folder, SAMPLE_BYTES, lambda _: None).to_json()

    def _on(self, disk: str, memory_bytes: int, method: str, *asked: Any) -> Any:
        """Runs a method: in a process of its own under the caps of the disk, or here for this machine's own disk."""
        if disk == HOST:
            return getattr(self, method)(*asked)
        return apart_under_caps(self, method, disk, SCALE, memory_bytes, *asked)[0]

    def _settings(self, model: str, profile: Path) -> dict[str, Any]:
        return settings(model, str(profile)) | {
            "dram_budget": ",".join(self.options.budgets),
            "method": "auto",
            "context_length": CONTEXT_LENGTH,
            "max_ppl_ratio": MAX_PPL_RATIO,
            "calibration_tokens": self.options.text,
            "evaluation_tokens": self.options.text // 4,
            "block_tokens": min(256, self.options.text // 4),
            "search_tokens": SHORT["search_tokens"],
            "preflight": "off",
        }

    def _texts(self, model: str) -> list[list[int]]:
        return texts(model, PROMPT_TOKENS + self.options.tokens)[: self.options.texts]

    def in_process(self, path: str, plan_names: Sequence[str], model: str) -> list[dict[str, Any]]:
        """Returns the result of `decoded` on real flash."""
        return decoded(Path(path), plan_names, self._texts(model))

    def _predicted(self, model: str) -> dict[str, "Predicted"]:
        """Builds a model for each disk and begins to quote it, on both cores; the disks are measured before, alone."""
        shared, profiles = self.folder / model, {disk: self._profile(disk) for disk in self.options.disks}
        told = {disk: self._settings(model, profile) for disk, profile in profiles.items()}
        build(shared, "--until", "explore", "device", **told[self.options.disks[0]])
        # a folder has one build at a time; the copies lie beside it, since rules know their inputs by relative paths
        folders = {disk: shutil.copytree(shared, self.folder / f"{model}-{disk}", symlinks=True) for disk in profiles}
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), _use_servers, (warm.ready(),)) as pool:
            builds = {disk: pool.submit(packaged, folders[disk], one) for disk, one in told.items()}
            # leaving the pool waits for the quotes
            return {disk: _quoting(pool, model, builds[disk].result(), profiles[disk]) for disk in profiles}


class Predicted(NamedTuple):
    """A build, and the speeds that are predicted for it."""

    artifact: Path
    plans: Sequence[Plan]
    """As in the options, the smallest budget first."""
    quotes: Mapping[str, Future[list[Figure]]]
    """By one of PREDICTIONS, the tokens per second of each plan."""


def _use_servers(name: str) -> None:
    """Forks the builds of a process of the pool from the servers of the benchmark's own process."""
    os.environ[warm.SERVERS] = name


def packaged(folder: Path, config: dict[str, Any]) -> Path:
    """Builds an artifact on one core and returns the device's build folder."""
    return build(folder, "--until", "package", cores=1, **config)


def _quoting(pool: ProcessPoolExecutor, model: str, built: Path, profile: Path) -> Predicted:
    """Begins to quote the budgets of a build by each source."""
    path, plans = artifact_in(built), load_record(built / "plan.json", Plans).plans[::-1]
    sources = {"build": built.parent, "artifact": path, "config": settings(model)["model"]}
    assert sources.keys() == PREDICTIONS.keys()
    budgets = ",".join(str(plan.dram_budget_bytes) for plan in plans)
    quotes = {
        name: pool.submit(speeds, str(source), profile, budgets, built / f"quote-{name}")
        for name, source in sources.items()
    }
    return Predicted(path, plans, quotes)


def speeds(source: str, profile: Path, budgets: str, folder: Path) -> list[Figure]:
    """Returns the quoted tokens per second with each DRAM budget of one build, the smallest first; scratch files go to
    `folder`."""
    folder.mkdir(exist_ok=True)
    found = find(source, None, folder)
    asked = Asked(budgets, MAX_PPL_RATIO, CONTEXT_LENGTH, quick=True, with_steps=False)
    quotes = device_quotes(found, read_device(profile), asked)
    return [one.figures["tokens_per_s"] for one in reversed(quotes)]


def _errors(name: str, speed: Figure, measured: float) -> Row:
    low, value, high = speed.low, speed.value, speed.high
    assert low is not None
    assert value is not None
    assert high is not None
    return {f"{name}_error": value / measured - 1, f"{name}_in_band": low <= measured <= high}


def decoded(
    path: Path, plan_names: Sequence[str], blocks: Sequence[Sequence[int]], device: DeviceProfile | None = None
) -> list[dict[str, Any]]:
    """Decodes texts after their first tokens, under each plan of an artifact; with a device, seconds are modelled.

    Returns:
        For each plan `token_s`: seconds of each token after WARM_TOKENS; `decode_s` and `modelled_s`: of all decoded
        tokens.
    """
    plans = {plan.name: plan for plan in open_artifact(path).manifest.plans}
    return [_under(path, plans[name], blocks, device) for name in plan_names]


def _under(path: Path, plan: Plan, blocks: Sequence[Sequence[int]], device: DeviceProfile | None) -> dict[str, Any]:
    token_s: list[float] = []
    with Session(path, plan=plan, device=device, modelled=device is not None) as session:
        for block in blocks:
            session.decoder.begin(len(block))
            session.decoder.prefill(np.array(block[:PROMPT_TOKENS]))
            for token in block[PROMPT_TOKENS:]:
                start = time.perf_counter()
                session.decoder.decode(token)
                token_s.append(time.perf_counter() - start)
        modelled_s = session.store.metrics(len(token_s), sum(token_s), 0.0, 0.0).modelled_s
    warm = [seconds for part in np.split(np.array(token_s), len(blocks)) for seconds in part[WARM_TOKENS:].tolist()]
    return {"token_s": warm, "decode_s": sum(token_s), "modelled_s": modelled_s}


if __name__ == "__main__":
    main("prediction")
