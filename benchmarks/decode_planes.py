"""Measures tokens per second of units in planes on layers of a 7B's shape, from this machine's disk in equal DRAM.

Variants: `dense` in the plain format and in planes; `flash`, which leaves units out, in the plain format; `refine`; and
dense runs in planes that draft, four tokens a pass. All have the same DRAM, a share of what the plain format's whole
model takes: weights, coarse planes, KV cache, bookkeeping and buffers count. Reads bypass the page cache. Dense runs
pin as many units in each layer, and read the next layer ahead. Weights are random. Embeddings of tokens have a part in
common, so that a unit which one token uses is likelier to be used by the next: `shared` is the cosine of two
embeddings, and `hit_rate` what came of it. Selectors are fitted to the signals that such weights give, and to this
machine's law of reads, which is measured first.

Acceptance is planted: the coarse planes draft, so that their time counts, but what is proposed is the token that the
model will choose, with the given probability, else another one; a round draws anew. The densities of `flash` bracket
what loses as much as `refine`: on a real model 0.71 loses 0.011 nats, and 0.05 of `refine` 0.025 (planes.md).
`refine` refines what it names and no more; `refine-10-free` also uses the refinements that are in DRAM, as it does by
default. Every round measures all variants in turn; the first one fills the caches. `over_law` is the time of a token
over the simulator's.
"""

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import Benchmark, Cell, Row, gain, main, option, spread
from coldpress.compiler.cost_model import read_units
from coldpress.compiler.device.measure import measure
from coldpress.runtime.drafts import NO_DRAFT, Checked, Draft, Drafting, Propose
from coldpress.runtime.generate.session import Generation, Session
from coldpress.runtime.generate.statistics import Drafted, drafted
from coldpress.runtime.plan.budget import choose_plan, whole_bytes
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.quantization._planes import whole_format
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import num_units
from coldpress.schemas.layout import placed_parts
from coldpress.schemas.manifest import TABLES_FILE
from coldpress.schemas.metrics import RunMetrics
from tests.support.artifacts import Built, Recipe, build_artifact, change_arrays, change_manifest, random_weights
from tests.support.methods import families_of
from tests.support.shapes import small_device, spec_7b

VOCAB_SIZE, CONTEXT_LENGTH = 1024, 256
SHAPE = {"tie_word_embeddings": False, "max_position_embeddings": CONTEXT_LENGTH}
PROMPT_TOKENS = 8
READ_BUFFER_BYTES = 4 << 20
MEASURED_BYTES = 1 << 30
DRAWN, NUM_BINS = 1 << 18, 4000
"""Signals from which the selectors' histograms are made, and bins of those."""


class Variant(NamedTuple):
    """What is measured beside the others."""

    method: str
    planes: bool
    density: float = 1.0
    acceptance: float | None = None
    """Probability that a draft is right if all before it are; None without drafts."""
    free: bool = True
    """Whether a selector that sees what is in DRAM also uses units that cost no read, as it does by default."""

    @property
    def options(self) -> dict[str, bool]:
        """Returns the selector's options."""
        return {} if self.method == "dense" else {"use_read_units": self.free}


VARIANTS = {
    "dense": Variant("dense", False),
    "dense-planes": Variant("dense", True),
    "flash-50": Variant("flash", False, 0.5),
    "flash-70": Variant("flash", False, 0.7),
    "refine-5": Variant("refine", True, 0.05, free=False),
    "refine-10": Variant("refine", True, 0.1, free=False),
    "refine-20": Variant("refine", True, 0.2, free=False),
    "refine-10-free": Variant("refine", True, 0.1),
    "drafts-60": Variant("dense", True, acceptance=0.6),
    "drafts-85": Variant("dense", True, acceptance=0.85),
}


class Planted:
    """Drafts with coarse planes, but proposes tokens of a text: each one is right with a given probability."""

    def __init__(self, text: Sequence[int], acceptance: float, seed: int) -> None:
        """Takes the whole text, prompt included, that the run will write."""
        self._text, self._acceptance = text, acceptance
        self._random = np.random.default_rng(seed)

    @contextmanager
    def drafting(self, context_length: int, checked: Checked | None = None) -> Generator[Propose]:
        """See `coldpress.runtime.drafts.Drafting`."""
        with load("coldpress.runtime.drafts", Draft, "coarse").drafting(context_length, checked) as computed:

            def propose(ids: Sequence[int], count: int, least_chance: float = 0.0, /) -> list[int]:
                computed(ids, count)
                right = self._text[len(ids) : len(ids) + count]
                wrong = self._random.random(len(right)) >= self._acceptance
                return [(token + int(other)) % VOCAB_SIZE for token, other in zip(right, wrong, strict=True)]

            yield propose


class Artifacts:
    """Writes artifacts of the same weights, in a format in planes and in its plain format."""

    def __init__(
        self, folder: Path, layers: int, shared: float, dram_share: float, planes: str, device: DeviceProfile
    ) -> None:
        """Draws the weights, and writes the plain dense artifact, from which the DRAM of all comes."""
        self._folder, self._planes, self._device = folder, planes, device
        self._spec = spec_7b(layers, VOCAB_SIZE, "silu", **SHAPE)
        random = np.random.default_rng(0)
        self._weights = random_weights(self._spec, random)
        own = random.standard_normal((VOCAB_SIZE, self._spec.hidden_size))
        in_common = random.standard_normal(self._spec.hidden_size)
        # of magnitude 1, so that what layers add to it leaves successive tokens similar
        embeddings = shared**0.5 * in_common + (1 - shared) ** 0.5 * own
        self._weights["embed_tokens.weight"] = embeddings.astype(np.float32)
        self._units: dict[tuple[str, ...], Mapping[tuple[int, str], np.ndarray]] = {}
        self._paths: dict[Variant, Path] = {}
        plain = self._write(VARIANTS["dense"]).manifest
        self.budget_bytes = round(dram_share * whole_bytes(plain, plain.plans[0]))

    def path(self, variant: Variant) -> Path:
        """Returns the artifact of a variant; those that differ in drafts alone share one."""
        same = variant._replace(acceptance=None)
        if same not in self._paths:
            self._fit(same, self._write(same))
        return self._paths[same]

    def _write(self, variant: Variant) -> Built:
        families = families_of(variant.method, self._spec)
        parts = [(layer, family) for layer in range(self._spec.num_hidden_layers) for family in families]
        in_order = {key: np.arange(num_units(key[1], self._spec), dtype=np.int32) for key in parts}
        recipe = Recipe(
            spec=self._spec,
            method=variant.method,
            options=variant.options,
            density=variant.density,
            format=self._planes if variant.planes else whole_format(self._planes),
            cache="static" if variant.method == "dense" else "lfu",
            pinned_share=0.0,
            slots_share=0.05,
            read_buffer_bytes=READ_BUFFER_BYTES,
            collapse_gap_bytes=self._device.flash.break_even_gap_bytes,
            context_length=CONTEXT_LENGTH,
            order=in_order,
            rank=in_order,  # a dense run reads what follows its pinned units
        )
        path = self._folder / f"{recipe.format}-{variant.method}-{variant.density}-{variant.free}"
        built = build_artifact(path, recipe, self._weights, self._units.get(families))
        self._units.setdefault(families, built.units)
        change_manifest(path, lambda manifest: manifest.update(device=self._device.model_dump(mode="json")))
        self._paths[variant] = path
        return built

    def _fit(self, variant: Variant, built: Built) -> None:
        """Fits the selector to the signals of these weights, and to the units that the DRAM will hold."""
        selector, fitted = load("coldpress.runtime.sparsity", Selector, variant.method), dict[str, np.ndarray]()
        plan = choose_plan(built.manifest, self.budget_bytes)
        for part, section in placed_parts(plan, built.manifest.flash.sections):
            signals = np.abs(signals_of(section.family))
            counts, edges = np.histogram(signals, np.linspace(0, signals.max(), NUM_BINS + 1))
            statistics = {
                "magnitude_histogram": counts.astype(np.uint64),
                "magnitude_edges": edges.astype(np.float32),
                "unit_norms": np.ones(section.num_units, np.float32),  # random slices of one length
                "read_units": read_units(self._device.flash, section.unit_bytes, 1),
                "resident_share": np.array([(part.num_pinned + part.cache_slots) / section.num_units]),
            }
            options = options_of(selector, variant.options)
            arrays = selector.fit(section.num_units, variant.density, statistics, options)
            fitted |= {
                f"selector.0.{part.layer}.{part.family}.{name}": array
                for name, array in arrays.items()
                if name in selector.KEPT
            }
        change_arrays(built.path, TABLES_FILE, lambda arrays: arrays.update(fitted))


def signals_of(family: str) -> np.ndarray:
    """Draws a family's signals: inputs, and products of gate and up, are normal with variance 1."""
    first, second = np.random.default_rng(0).standard_normal((2, DRAWN))
    return first if family == "mlp_in" else first / (1 + np.exp(-first)) * second


class Measured(NamedTuple):
    """One variant's run in one round."""

    metrics: RunMetrics
    drafts: Drafted | None = None
    same: bool = True
    """Whether the tokens are those without drafts."""

    @property
    def token_s(self) -> float:
        """Seconds per token."""
        return self.metrics.decode_s / self.metrics.num_tokens


class Runs:
    """The tokens that all variants decode."""

    def __init__(self, num_tokens: int) -> None:
        """Draws given text; a run that drafts writes its own, from the same prompt."""
        self.given = np.random.default_rng(1).integers(3, VOCAB_SIZE, (1, num_tokens + 2))
        self.prompt = self.given[0, :PROMPT_TOKENS].tolist()
        self.num_tokens = num_tokens
        self._text: tuple[int, ...] = ()

    def measured(self, variant: Variant, session: Session, number: int = 0) -> Measured:
        """Runs a variant in round `number`, in which other drafts are right than in other rounds."""
        if variant.acceptance is None:
            return Measured(session.perplexity(self.given, sparse=True).metrics)
        if not self._text:
            off = load("coldpress.runtime.drafts", Draft, NO_DRAFT)
            self._text = self._written(session, off).token_ids
        found = self._written(session, Planted([*self.prompt, *self._text], variant.acceptance, number))
        return Measured(found.metrics, drafted(found.tokens[1:]), found.token_ids == self._text)

    def _written(self, session: Session, draft: Drafting) -> Generation:
        return session.generate(self.prompt, self.num_tokens + 1, ignore_eos=True, draft=draft)


@dataclass(frozen=True)
class Options:
    planes: tuple[str, ...] = option(
        ("int4_2_2",),
        full=("int4_2_2", "int4_3_1"),
        choices=("int4_2_2", "int4_3_1", "int8_4_4"),
        help="format in planes",
    )
    variants: tuple[str, ...] = option(
        tuple(VARIANTS),
        smoke=("dense", "refine-10", "drafts-85"),
        choices=VARIANTS,
        help="what is compared with the first of them; a number is a density or an acceptance, in percent",
    )
    dram_share: float = option(0.8, help="DRAM, as a share of the plain format's whole model with its KV cache")
    shared: float = option(0.5, help="cosine of the embeddings of two tokens")
    layers: int = option(2, full=4, help="layers of the model")
    tokens: int = option(16, smoke=6, help="tokens per round")
    rounds: int = option(5, smoke=2, full=9, help="timed rounds")
    assumed: bool = option(False, smoke=True, help="take round figures for this machine's law instead of measuring it")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].variant": "selector and density, or acceptance of drafts, in percent",
        "rows[].active_bytes": "bytes of the units that a token uses, from flash or DRAM; of refinements, in planes",
        "rows[].token_s": "seconds per token",
        "rows[].tokens_per_s": "tokens per second: 1 over the median of token_s",
        "rows[].over_first": "seconds of the first variant over seconds of this one, taken in each round",
        "rows[].flash_bytes": "bytes read per token",
        "rows[].reads": "reads per token",
        "rows[].hit_rate": "share of requested units that were in DRAM",
        "rows[].dram_bytes": "DRAM in use, of `dram_budget_bytes`",
        "rows[].direct": "whether reads bypassed the page cache",
        "rows[].law_s?": "seconds per token by the law of this machine, simulated; null with drafts, whose computing "
        "is not simulated",
        "rows[].over_law?": "median of token_s over law_s",
        "rows[].acceptance?": "share of the drafts that were accepted; those after a wrong one are not",
        "rows[].tokens_per_pass?": "new tokens per pass of a run that drafts",
        "rows[].same?": "whether all runs that draft wrote the tokens of a run without drafts",
        "rows[].dram_budget_bytes": "DRAM of every variant",
    }
    is_timing = True
    over = {"planes": "planes"}
    full_minutes = 30

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per variant."""
        options = self.options
        device = small_device() if options.assumed else measure("here", self.folder, MEASURED_BYTES, tell)
        place = self.folder / cell["planes"], options.layers, options.shared, options.dram_share
        artifacts, runs = Artifacts(*place, cell["planes"], device), Runs(options.tokens)
        found = rounds_of(artifacts, options.variants, runs, options.rounds)
        first_s = [one.token_s for one in found[options.variants[0]]]
        for name, rounds in found.items():
            law_s = modelled_s(artifacts, VARIANTS[name], runs)
            over_first = gain(first_s, [one.token_s for one in rounds])
            yield {"variant": name, "over_first": over_first, **row_of(artifacts, rounds, law_s)}


def tell(line: str) -> None:
    """Tells what is being measured, and what makes it doubtful."""
    print(line, file=sys.stderr)


def rounds_of(artifacts: Artifacts, names: Sequence[str], runs: Runs, rounds: int) -> dict[str, list[Measured]]:
    """Returns each variant's runs; in every round all of them in turn. A round before them fills the caches."""
    found: dict[str, list[Measured]] = {name: [] for name in names}
    with ExitStack() as opened:
        sessions: dict[Path, Session] = {}
        for variant in [VARIANTS[name] for name in names]:
            path = artifacts.path(variant)
            if path not in sessions:
                sessions[path] = opened.enter_context(session_of(artifacts, variant))
        for number in range(1 + rounds):
            for name in names:
                one = runs.measured(VARIANTS[name], sessions[artifacts.path(VARIANTS[name])], number)
                if number:
                    found[name].append(one)
    return found


def session_of(artifacts: Artifacts, variant: Variant, *, modelled: bool = False) -> Session:
    """Opens a variant's artifact in the DRAM of all; runs that use every unit read the next layer ahead."""
    preload = "on" if variant.method == "dense" else "off"
    path, budget_bytes = artifacts.path(variant), artifacts.budget_bytes
    return Session(path, dram_budget_bytes=budget_bytes, preload=preload, modelled=modelled)


def modelled_s(artifacts: Artifacts, variant: Variant, runs: Runs) -> float | None:
    """Returns the modelled seconds per token of the same tokens in a run of its own, since the clock takes time; None
    for a variant that drafts."""
    if variant.acceptance is not None:
        return None
    with session_of(artifacts, variant, modelled=True) as session:
        runs.measured(variant, session)  # fills the caches
        metrics = runs.measured(variant, session).metrics
    return metrics.modelled_s / metrics.num_tokens


def row_of(artifacts: Artifacts, rounds: Sequence[Measured], law_s: float | None) -> Row:
    """Returns a variant's figures but for its gain."""
    token_s = spread([one.token_s for one in rounds])

    def per_token(figure: str) -> float:
        return sum(getattr(one.metrics, figure) for one in rounds) / sum(one.metrics.num_tokens for one in rounds)

    metrics = rounds[-1].metrics
    return {
        "token_s": token_s,
        "tokens_per_s": 1 / token_s["median"],
        "active_bytes": per_token("active_bytes"),
        "flash_bytes": per_token("read_bytes"),
        "reads": per_token("reads"),
        "hit_rate": metrics.hit_rate,
        "dram_bytes": metrics.dram_used_bytes,
        "dram_budget_bytes": artifacts.budget_bytes,
        "direct": metrics.direct_io,
        "law_s": law_s,
        "over_law": None if law_s is None else token_s["median"] / law_s,
        **drafts_of(rounds),
    }


def drafts_of(rounds: Sequence[Measured]) -> Row:
    """Returns what came of the drafts of all rounds; nothing without drafts."""
    counted = [one.drafts for one in rounds if one.drafts is not None]
    if not counted:
        return {}
    passes, accepted = (sum(getattr(one, name) for one in counted) for name in ("passes", "accepted"))
    return {
        "acceptance": accepted / sum(one.drafted for one in counted),
        "tokens_per_pass": 1 + accepted / passes,
        "same": all(one.same for one in rounds),
    }


if __name__ == "__main__":
    main("decode_planes")
