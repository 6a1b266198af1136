"""Measures how well a build and a quote predict this machine's speed, on its disk and under the caps of other devices.

This machine is measured first, as `coldpress device measure` does, once as it is and once under the
kernel's caps of each device (benchmarks/shared/emulated.py). Each model is built for each disk with one plan per DRAM
budget, by its validation text. Then come rounds. A round measures the machine anew and decodes test text right after,
in one process under the caps; seconds of single tokens count after the first ones, which fill the caches. The text is
given, since a model's own text repeats itself.

A machine whose speed drifts is as fast in both halves of a round. So a round's error compares the median of its seconds
with what is predicted for the profile of this round, and a row has the median of the errors and their range. At the end
of a round the kernels are measured again. A round in which their speed changed by more than DRIFT is repeated, a few
times for each disk at most; if too few rounds are steady, the steadiest ones count, and `drift` says so.

There are three predictions: of the build's folder, of the artifact with the curves and signals that it carries, and of
config.json alone. All budgets are quoted at once by the quick search. A quote searches anew for each profile, and what
runs was built for the first one; so a round counts for a source only if the quote chooses as it does for the first
profile. A band is the quote's interval. `simulated_error` is the simulator's error with the same plan on the same test
text: the law's part of the error, without the parts of the choice and of the text. Quotes and simulations run after the
rounds of a disk, on both cores.
"""

import multiprocessing
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import spearmanr

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option, spread
from benchmarks.shared.builds import MODELS, SHORT, artifact_in, build, settings
from benchmarks.shared.emulated import OTHER_BYTES, SAMPLE_BYTES, apart_under_caps
from benchmarks.speculative import texts
from coldpress.compiler.device.host import kernel_rates
from coldpress.compiler.device.measure import measure
from coldpress.compiler.io import load_record, save_record
from coldpress.compiler.quote.decide import QuoteSettings, Quoting
from coldpress.compiler.quote.records import DeviceQuote
from coldpress.compiler.quote.sources import find
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.device_profiles.devices import load_device, read_device
from coldpress.runtime.dram.budget import used_bytes
from coldpress.runtime.generate.session import Session
from coldpress.schemas.compute import Compute
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.layout import Plan
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.plans import Plans

HOST = "host"
MODELLED = "pixel6"
"""The profile used without `--measured`, since measuring takes a quarter of a minute."""
SCALE = 0.25
"""Share of the rates of emulated devices: less than the disk gives, so that the caps are equal in every process. A
profile that was measured under other caps than the tokens would be off by as much."""
MEASURING_BYTES = 2 << 30
"""Memory of a process that measures the machine, and then decodes."""
DRIFT = 0.1
"""Largest change of the kernels' speed within a steady round, as a share."""
MORE_ROUNDS = 2
"""Rounds of a disk that are repeated at most."""
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
        choices=[name for name in MODELS if name != "relu-demo"],
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
    rounds: int = option(3, smoke=1, full=5, help="rounds of each disk that count")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].budget": "DRAM budget, a share of the weights",
        "rows[].method": "selector of the build",
        "rows[].rounds": "rounds that count",
        "rows[].repeated": "rounds that do not count, since the kernels' speed changed more in them",
        "rows[].drift?": "largest change of the kernels' speed within a round that counts; null without `measured`",
        "rows[].measured_tokens_per_s": "tokens per second by the median of single tokens; median and range of rounds",
        "rows[].simulated_error?": "the simulator's tokens per second on test text over the measured ones, less 1; "
        "median and range of rounds",
        **{
            f"rows[].{name}_error?": f"tokens per second predicted from {source} over measured ones, less 1; median "
            f"and range of {name}_rounds, null without any"
            for name, source in PREDICTIONS.items()
        },
        **{
            f"rows[].{name}_in_band?": f"whether the measured speed is in the interval predicted from {source}, by the "
            f"medians of its ends over measured speeds; null without {name}_rounds"
            for name, source in PREDICTIONS.items()
        },
        **{
            f"rows[].{name}_rounds": f"rounds in which {source} is quoted with the method, format and cache of the "
            "quote for the first profile; the others compare two plans and do not count"
            for name, source in PREDICTIONS.items()
        },
        "median_error?": "median size of a row's build_error; null without any",
        "worst_error?": "largest size of a row's build_error",
        "coverage?": "share of the rows with build_in_band",
        "rank_correlation?": "Spearman's correlation of predicted and measured speeds; null for fewer than three rows",
        "quote_median_error?": "median size of artifact_error",
        "config_median_error?": "median size of config_error",
        "num_cells": "number of rows: models, disks and budgets",
    }
    is_timing = True
    needs_data = True
    needs_root = True
    over = {"model": "models", "disk": "disks"}
    full_minutes = 90

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per budget."""
        model, disk = cell["model"], cell["disk"]
        built = self.once(model, lambda: self._builds(model))[disk]
        tried = self._rounds(model, disk, built)
        rounds = sorted(tried, key=lambda one: one.drift or 0.0)[: self.options.rounds]
        predicted = self._predicted(model, disk, built, [one.profile for one in rounds])
        for number, (budget, plan) in enumerate(zip(self.options.budgets, built.plans, strict=True)):
            measured = [1 / statistics.median(one.told[number]["token_s"]) for one in rounds]
            row = {
                "budget": budget,
                "method": plan.method,
                "rounds": len(rounds),
                "repeated": len(tried) - len(rounds),
                "drift": rounds[-1].drift,
                "measured_tokens_per_s": spread(measured),
                "simulated_error": spread(
                    [
                        one.told[number]["decode_s"] / other[number]["modelled_s"] - 1
                        for one, other in zip(rounds, predicted.simulated, strict=True)
                    ]
                ),
            }
            for name, quotes in predicted.quotes.items():
                row |= _errors(name, [each[number] for each in quotes], measured)
            yield row

    def figures(self, rows: Rows) -> Figures:
        errors = {
            name: [abs(row[f"{name}_error"]["median"]) for row in rows if row[f"{name}_rounds"]] for name in PREDICTIONS
        }
        counted = [row for row in rows if row["build_rounds"]]
        measured = [row["measured_tokens_per_s"]["median"] for row in counted]
        predicted = [(1 + row["build_error"]["median"]) * speed for row, speed in zip(counted, measured, strict=True)]
        rank = float(spearmanr(measured, predicted)[0]) if len(counted) > 2 else None  # type: ignore[arg-type]
        return {
            "median_error": _median(errors["build"]),
            "worst_error": max(errors["build"], default=None),
            "coverage": statistics.fmean(row["build_in_band"] for row in counted) if counted else None,
            "rank_correlation": rank,
            "quote_median_error": _median(errors["artifact"]),
            "config_median_error": _median(errors["config"]),
            "num_cells": len(rows),
        }

    def _profile(self, disk: str) -> Path:
        """Returns the path of the first profile of this machine, as it is or under the kernel's caps of a device."""
        path = self.folder / f"{disk}-here.json"
        if not path.exists():
            save_record(DeviceProfile.model_validate_json(self._on(disk, MEASURING_BYTES, "measured", disk)), path)
        return path

    def measured(self, disk: str) -> str:
        """Returns the profile of this machine with its disk as it is in this process, as JSON."""
        name = f"{disk}-here"
        if not self.options.measured:
            return load_device(MODELLED).model_copy(update={"name": name}).to_json()
        return measure(name, self.folder, SAMPLE_BYTES, lambda _: None).to_json()

    def _rounds(self, model: str, disk: str, built: "Built") -> "list[Round]":
        """Returns rounds until enough of them are steady, or MORE_ROUNDS were repeated."""
        found: list[Round] = []
        plan_names = [plan.name for plan in built.plans]
        memory_bytes = max(MEASURING_BYTES, OTHER_BYTES + max(used_bytes(built.manifest, plan) for plan in built.plans))
        while len(found) < self.options.rounds + MORE_ROUNDS:
            told = self._on(disk, memory_bytes, "one_round", disk, str(built.artifact), plan_names, model)
            profile = self.folder / f"{disk}-round-{len(found)}.json"
            save_record(DeviceProfile.model_validate_json(told["profile"]), profile)
            found.append(Round(profile, told["told"], told["drift"]))
            if sum((one.drift or 0.0) <= DRIFT for one in found) == self.options.rounds:
                break
        return found

    def one_round(self, disk: str, path: str, plan_names: Sequence[str], model: str) -> dict[str, Any]:
        """Returns the fields of a `Round`, JSON-ready; the disk is as it is in this process."""
        profile = self.measured(disk)
        told = decoded(Path(path), plan_names, self._texts(model))
        compute = DeviceProfile.model_validate_json(profile).compute if self.options.measured else None
        return {"profile": profile, "told": told, "drift": drift_since(compute) if compute else None}

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

    def _builds(self, model: str) -> "dict[str, Built]":
        """Builds a model for each disk, on both cores; the disks are measured before, alone."""
        shared, profiles = self.folder / model, {disk: self._profile(disk) for disk in self.options.disks}
        told = {disk: self._settings(model, profile) for disk, profile in profiles.items()}
        build(shared, "--until", "explore", "device", **told[self.options.disks[0]])
        # a folder has one build at a time; the copies lie beside it, since rules know their inputs by relative paths
        folders = {disk: shutil.copytree(shared, self.folder / f"{model}-{disk}", symlinks=True) for disk in profiles}
        with ThreadPoolExecutor(2) as pool:  # a thread waits for a build, which has processes of its own
            begun = pool.map(lambda disk: build(folders[disk], "--until", "package", cores=1, **told[disk]), profiles)
            return dict(zip(profiles, map(built_in, begun), strict=True))

    def _predicted(self, model: str, disk: str, built: "Built", profiles: Sequence[Path]) -> "Predicted":
        """Returns what is predicted for rounds of a disk with these profiles."""
        sources = {"build": built.folder.parent, "artifact": built.artifact, "config": settings(model)["model"]}
        assert sources.keys() == PREDICTIONS.keys()
        budgets = ",".join(str(plan.dram_budget_bytes) for plan in built.plans)
        names, blocks = [plan.name for plan in built.plans], self._texts(model)
        devices = [self._profile(disk), *profiles]
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            quotes = {
                name: [
                    pool.submit(quoted, str(source), device, budgets, built.folder / f"quote-{name}-{number}")
                    for number, device in enumerate(devices)
                ]
                for name, source in sources.items()
            }
            simulated = [pool.submit(decoded, built.artifact, names, blocks, device) for device in profiles]
            return Predicted(
                {name: [one.result() for one in each] for name, each in quotes.items()},
                [one.result() for one in simulated],
            )


class Built(NamedTuple):
    """A build for one disk."""

    folder: Path
    """The device's build folder."""
    artifact: Path
    manifest: Manifest
    plans: Sequence[Plan]
    """As in the options, the smallest budget first."""


class Round(NamedTuple):
    """The machine and its tokens, measured right after one another."""

    profile: Path
    told: list[dict[str, Any]]
    """The result of `decoded` on real flash."""
    drift: float | None
    """Change of the kernels' speed from the profile to the end, as a share; None if the profile is not measured."""


class Quoted(NamedTuple):
    """What one DRAM budget is quoted."""

    low: float
    tokens_per_s: float
    high: float
    choice: tuple[str, ...]
    """Selector, format, format of the KV cache, and cache."""


class Predicted(NamedTuple):
    """What is predicted for the rounds of a disk."""

    quotes: Mapping[str, Sequence[Sequence[Quoted]]]
    """By one of PREDICTIONS the quotes of each budget, for the first profile and for that of each round."""
    simulated: Sequence[Sequence[Mapping[str, Any]]]
    """For each round the simulated result of `decoded`."""


def built_in(folder: Path) -> Built:
    """Returns the build in a device's build folder."""
    path = artifact_in(folder)
    return Built(folder, path, open_artifact(path).manifest, load_record(folder / "plan.json", Plans).plans[::-1])


def quoted(source: str, device: Path, budgets: str, folder: Path) -> list[Quoted]:
    """Returns what each DRAM budget of one build is quoted, the smallest first; scratch files go to `folder`."""
    folder.mkdir(exist_ok=True)
    asked = QuoteSettings(quick=True, with_steps=False)
    keys = {"dram_budget": budgets, "max_ppl_ratio": str(MAX_PPL_RATIO), "context_length": str(CONTEXT_LENGTH)}
    quotes = Quoting(find(source, keys, folder), read_device(device), asked).quotes()
    return [_quoted(one) for one in reversed(quotes)]


def _quoted(quote: DeviceQuote) -> Quoted:
    choice = quote.choice
    assert choice is not None, quote.refusal
    speed = quote.figures["tokens_per_s"]
    assert speed.low is not None
    assert speed.value is not None
    assert speed.high is not None
    chosen = choice.method, choice.format, choice.kv_cache, choice.cache
    return Quoted(speed.low, speed.value, speed.high, chosen)


def drift_since(before: Compute) -> float:
    """Measures the kernels again; returns by which share the median of them is faster or slower than `before`."""
    ratios = [
        rounds.median / one.bytes_per_s for one, (_, _, rounds) in zip(before.rates.value, kernel_rates(), strict=True)
    ]
    ratio = statistics.median(ratios)
    return max(ratio, 1 / ratio) - 1


def _errors(name: str, quotes: Sequence[Quoted], measured: Sequence[float]) -> Row:
    """Returns the errors of one source's quotes: the first is for the first profile, the others are of the rounds."""
    first, *others = quotes
    pairs = [(one, speed) for one, speed in zip(others, measured, strict=True) if one.choice == first.choice]
    if not pairs:
        return {f"{name}_error": None, f"{name}_in_band": None, f"{name}_rounds": 0}
    low = statistics.median(one.low / speed for one, speed in pairs)
    high = statistics.median(one.high / speed for one, speed in pairs)
    return {
        f"{name}_error": spread([one.tokens_per_s / speed - 1 for one, speed in pairs]),
        f"{name}_in_band": low <= 1 <= high,
        f"{name}_rounds": len(pairs),
    }


def _median(errors: Sequence[float]) -> float | None:
    return statistics.median(errors) if errors else None


def decoded(
    path: Path, plan_names: Sequence[str], blocks: Sequence[Sequence[int]], profile: Path | None = None
) -> list[dict[str, Any]]:
    """Decodes texts after their first tokens, under each plan of an artifact; with a profile, seconds are modelled.

    Returns:
        For each plan `token_s`: seconds of each token after WARM_TOKENS; `decode_s` and `modelled_s`: of all decoded
        tokens.
    """
    plans = {plan.name: plan for plan in open_artifact(path).manifest.plans}
    device = read_device(profile) if profile else None
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
