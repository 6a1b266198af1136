"""Measures drafts from coarse planes: the same tokens, accepted drafts, and seconds of a 7B by the law of devices.

Each model has its units in planes, and a quarter of the refinements in DRAM; every token uses all of them. Codes are
rounded to nearest (`rtn`), or chosen for both planes by calibration text (`nested`), which needs a text of the model's
kind and no experts. It continues texts of the kind that it knows greedily, without drafts and with drafts from its own
coarse planes. Acceptance is that of the real model; seconds are those of a 7B with that acceptance, against the fastest
dense run of the plain format in the same DRAM. A pass reads once, and its tokens share the passing of weights
(runtime/store/computing.py). A run stops drafting below the chance with which another draft pays by its device's law
(`law_chance`); here several are measured.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from benchmarks.shared.cases import case_of
from benchmarks.shared.grams import gram_of
from benchmarks.shared.published.cells import LLAMA_2_7B
from benchmarks.speculative import source, texts
from coldpress.compiler.cost_model import dense_footprint_bytes
from coldpress.compiler.dense_run import MOST_DRAFTS, dense_run, draft_costs
from coldpress.compiler.rounding._matrix import NEAREST, Rounding
from coldpress.compiler.rounding._weights import Algorithm
from coldpress.runtime.drafts import Checked, Draft, Drafting, Propose
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.speculation import Costs
from coldpress.runtime.plugins import load, names
from coldpress.runtime.profiles.devices import device_names, load_device
from coldpress.runtime.quantization._planes import planes_of, whole_format
from coldpress.schemas.families import WHOLE_MLP, slices
from tests.support.artifacts import Recipe, build_artifact
from tests.support.hf import load_hf, roles_of, spec_of

MODELS = ("prose7m", "relu-demo", "prose7m-relu", "tinystories-mixtral-8x", "tinystories656k", "stories260k")
PLANES = tuple(name for name in names("coldpress.runtime.quantization") if planes_of(name))
CORRECTED = ("prose7m", "prose7m-relu", "tinystories656k")
"""Models whose codes are chosen by calibration text, too."""
PROMPT_TOKENS, CONTEXT_LENGTH, CALIBRATION_BLOCKS = 48, 1024, 32


class Until:
    """A draft that makes no further one once all that it has made are right with a lower chance, whatever they cost."""

    def __init__(self, draft: Draft, least_chance: float) -> None:
        self._draft, self._least_chance = draft, least_chance

    @contextmanager
    def drafting(self, context_length: int, checked: Checked | None = None) -> Generator[Propose]:
        """See `coldpress.runtime.drafts.Drafting`."""
        with self._draft.drafting(context_length, checked) as propose:
            yield lambda ids, count, _=0.0, /: propose(ids, count, self._least_chance)


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(
        MODELS[:4], smoke=("stories260k",), full=MODELS, choices=MODELS, help="models whose drafts are checked"
    )
    planes: tuple[str, ...] = option(
        ("int4_2_2", "int4_3_1"), smoke=("int4_2_2",), full=PLANES, choices=PLANES, help="formats in planes"
    )
    codes: tuple[str, ...] = option(("rtn", "nested"), choices=("rtn", "nested"), help="how codes are chosen")
    least_chances: tuple[float, ...] = option(
        (0.0, 0.2, 0.4, 0.6),
        smoke=(0.4,),
        help="chances below which no further draft is made; 0 makes as many as may be",
    )
    dram_share: float = option(0.8, help="DRAM of the 7B, as a share of its weights and KV cache in the plain format")
    new_tokens: int = option(108, smoke=8, full=400, help="new tokens of each of two texts")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].model": "model",
        "rows[].planes": "format in planes",
        "rows[].codes": "how codes are chosen",
        "rows[].least_chance": "chance below which no further draft is made",
        "rows[].device": "profile whose law gives the seconds",
        "rows[].same": "whether both texts are those without drafts",
        "rows[].acceptance": "share of drafts that the model accepts, of those before and at the first wrong one",
        "rows[].drafts_per_pass": "drafts per pass",
        "rows[].tokens_per_pass": "new tokens per pass",
        "rows[].law_chance?": "chance below which a 7B's run stops on this device; null where the coarse planes alone "
        "exceed the DRAM",
        "rows[].gain?": "tokens per second of a 7B over its dense run in the same DRAM; null where the coarse planes "
        "alone exceed the DRAM",
        "identical": "share of runs with the tokens of runs without drafts",
        "tokens": "number of tokens that were written with drafts",
        "gain.*.*?": "by codes and device: gain of the first model by its best format, with the chance nearest to the "
        "law's; 1 where no drafts are better",
    }
    needs_data = True
    over = {"model": "models", "planes": "planes", "codes": "codes"}
    full_minutes = 120

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per chance and device."""
        name, planes, codes = cell["model"], cell["planes"], cell["codes"]
        if codes != NEAREST.name and name not in CORRECTED:
            return
        path, prompts = built(self.folder, name, planes, codes), texts(name, PROMPT_TOKENS)
        off, coarse = (load("coldpress.runtime.drafts", Draft, draft) for draft in ("off", "coarse"))

        def runs(draft: Drafting):
            with Session(path) as session:
                many = {"ignore_eos": True, "draft": draft, "draft_tokens": MOST_DRAFTS}
                return [session.generate(ids, self.options.new_tokens, **many) for ids in prompts]

        plain = runs(off)
        for least_chance in self.options.least_chances:
            found = runs(Until(coarse, least_chance))
            tokens = [token for run in found for token in run.tokens[1:]]
            counts = [token.drafted for token in tokens if token.leads]
            num_accepted = sum(token.accepted for token in tokens)
            accepted = Counter(token.pass_number for token in tokens if token.accepted)
            ended = sum(accepted[token.pass_number] < token.drafted for token in tokens if token.leads)
            acceptance = num_accepted / max(1, num_accepted + ended)
            for device in device_names():
                law = Law.of(device, planes, self.options.dram_share)
                yield {
                    "least_chance": least_chance,
                    "device": device,
                    "same": all(one.token_ids == other.token_ids for one, other in zip(plain, found, strict=True)),
                    "acceptance": acceptance,
                    "drafts_per_pass": sum(counts) / len(counts),
                    "tokens_per_pass": len(tokens) / len(counts),
                    "law_chance": law and law.least_chance(acceptance),
                    "gain": law and law.gain(counts, len(tokens)),
                }

    def figures(self, rows: Rows) -> Figures:
        first = [row for row in rows if row["model"] == self.options.models[0] and row["gain"] is not None]
        runs = {(row["model"], row["planes"], row["codes"], row["least_chance"]): row["same"] for row in rows}

        def best(codes: str, device: str) -> float | None:
            of_planes: dict[str, list[Row]] = {}
            for row in first:
                if (row["codes"], row["device"]) == (codes, device):
                    of_planes.setdefault(row["planes"], []).append(row)
            gains = [min(found, key=_from_law)["gain"] for found in of_planes.values()]
            return max(1.0, *gains) if gains else None

        return {
            "identical": sum(runs.values()) / max(1, len(runs)),
            "tokens": 2 * self.options.new_tokens * len(runs),
            "gain": {codes: {device: best(codes, device) for device in device_names()} for codes in self.options.codes},
        }


def built(folder: Path, name: str, planes: str, codes: str) -> Path:
    """Builds a dense artifact in planes, a quarter of whose refinements fit in DRAM; returns its path."""
    path = folder / f"{name}-{planes}-{codes}"
    if path.exists():
        return path
    model = load_hf(source(name))
    spec = spec_of(model.config)
    context_length = min(CONTEXT_LENGTH, spec.max_position_embeddings)
    recipe = Recipe(spec=spec, method="dense", density=1.0, format=planes, context_length=context_length)
    units = None if codes == NEAREST.name else units_by(folder / name, name, planes, codes)
    return build_artifact(path, recipe, roles_of(model, spec), units).path


def units_by(folder: Path, name: str, planes: str, codes: str) -> dict[tuple[int, str], np.ndarray]:
    """Returns the codes of each layer's units, uint8 [num_units, bytes of both planes], chosen by calibration text."""
    fit = "fit", slice(0, CALIBRATION_BLOCKS)
    case = case_of(name, folder, dict.fromkeys(("calibration", "validation", "test"), fit))
    rounding = Rounding(load("coldpress.compiler.rounding", Algorithm, codes), gram_of(case))
    found: dict[tuple[int, str], np.ndarray] = {}
    for layer in range(case.model.spec.num_hidden_layers):
        parts = [
            rounding.codes(case.model, f"layers.{layer}.{piece.role}.weight", piece.axis, planes)
            for piece in slices(WHOLE_MLP, case.model.spec)
        ]
        found[layer, WHOLE_MLP] = np.concatenate(parts, axis=1)
    return found


def _from_law(row: Row) -> float:
    """Returns how far a row's chance is from the law's."""
    return abs(row["least_chance"] - row["law_chance"])


@dataclass(frozen=True)
class Law:
    """Seconds of a 7B on a device: of its fastest dense run, and of drafts and passes in the same DRAM."""

    dense_s: float
    costs: Costs

    @staticmethod
    @cache
    def of(device: str, planes: str, dram_share: float) -> "Law | None":
        """Returns the law; None where the coarse planes do not fit."""
        profile, whole = load_device(device), whole_format(planes)
        dram_bytes = round(dram_share * dense_footprint_bytes(LLAMA_2_7B, whole, CONTEXT_LENGTH))
        plain = dense_run(LLAMA_2_7B, whole, CONTEXT_LENGTH, dram_bytes, profile)
        costs = draft_costs(LLAMA_2_7B, planes, CONTEXT_LENGTH, dram_bytes, profile)
        return Law(plain.token_s, costs) if plain is not None and costs.pass_s else None

    def least_chance(self, acceptance: float) -> float:
        """Returns the chance below which a run stops drafting."""
        return self.costs.least_chance(self.costs.best(MOST_DRAFTS, acceptance), acceptance)

    def gain(self, counts: Sequence[int], num_tokens: int) -> float:
        """Returns the speed of `num_tokens` in passes of so many drafts, over that of the dense run."""
        return self.dense_s * num_tokens / sum(self.costs.pass_s[n] + n * self.costs.draft_s for n in counts)


if __name__ == "__main__":
    main("self_draft")
