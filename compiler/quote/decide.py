"""Quotes a model on one device: searches as `allocate` does, at the asked budget and at a few others.

If the user names a method, only that is quoted, with the density that a build would give it.

Several budgets are quoted as one build of them all, since the plans of an artifact share flash.img.

Speeds come from replayed tokens (compiler/seconds.py). The interval of tokens/s spans the 5th to the 95th percentile of
single tokens, widened by the law's median misfit on the device's own points, by the further error seen on whole tokens,
and by SAME_KIND if curves and signals come from another model.
"""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coldpress.compiler.candidates import AUTO, caches_for
from coldpress.compiler.io import Workspace
from coldpress.compiler.quote.costs import build_costs
from coldpress.compiler.quote.drafted import drafted_speed
from coldpress.compiler.quote.first_token import first_token
from coldpress.compiler.quote.records import DeviceQuote, Estimate, QuotedChoice, Step
from coldpress.compiler.quote.reference import kind_of, real_like
from coldpress.compiler.quote.sources import QuoteSource, expert_shares
from coldpress.compiler.search import Judged, Space
from coldpress.compiler.search.budgets import searched_together
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.dram_shares import asked_budgets_of
from coldpress.compiler.search.floor import Floor
from coldpress.compiler.search.judge import Searched, searched
from coldpress.compiler.search.replay import setting_of
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.seconds import TokenCost
from coldpress.runtime.cli.command_line import flag
from coldpress.runtime.device_profiles.devices import PROFILES
from coldpress.runtime.dram import experts
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.plugins import load
from coldpress.runtime.quantities import show_number
from coldpress.runtime.quantization._mixed import format_fields
from coldpress.runtime.sparsity import Selector
from coldpress.runtime.store import computing
from coldpress.schemas.device import OF_TOKENS, UNCOMPUTED, DeviceProfile
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import of_layers, without_kept
from coldpress.schemas.memory import OverBudgetError
from coldpress.schemas.sparsity import Sparsity

WHY_WIDE = f"fit to the device's storage, and whole tokens ± {OF_TOKENS:.0%}"
SAME_KIND = 0.3
"""Widening of intervals where signals decide and are those of another model: an assumption. Its only
check, against the model that the signals come from, is in docs/experiments/speed.md."""
NUM_STEPS, FEW_STEPS = 6, 4
"""Budgets between the least and the most DRAM that are tried, too; few where a quote is a guess."""
FOLLOWED = 2
"""Selectors besides dense that are judged at other budgets than the asked one."""
CLEARLY = 1.1
"""Least speed-up for which a larger budget is named."""
NEARLY = 0.9
"""The recommended budget is the smallest one with this share of the speed with the most DRAM."""
PROMPT_TOKENS = 128
"""Assumed prompt length if none is given: a question plus the chat template."""
QUICK_CACHES = ("static", "lfu")

Tell = Callable[[str], None]


@dataclass(frozen=True)
class QuoteSettings:
    """Settings of the quote itself; the model's source has those of the build."""

    quick: bool
    """Search less; see `_quick`."""
    with_steps: bool
    """Also try other budgets, if only one is asked for."""
    prompt_tokens: int = PROMPT_TOKENS


class Quoting:
    def __init__(
        self,
        source: QuoteSource,
        device: DeviceProfile,
        asked: QuoteSettings,
        tell: Tell = lambda _: None,
        file: Path | None = None,
    ) -> None:
        """Takes one device; printed commands name `file`, its profile, if it is not in profiles/devices. Raises
        ColdpressError if a setting is refused, two budgets are equal, or one exceeds the device's DRAM."""
        self._source, self._device, self._asked, self._tell = source, device, asked, tell
        self._named = device.name if file is None or file.parent == PROFILES else str(file)
        self._config = AllocateConfig.model_validate({"dram_budget": device.dram_budget_bytes.value, **source.settings})
        self._budgets = tuple(asked_budgets_of(self._config, source.model, device).values())
        work, caches = Workspace(source.folder, "quote"), caches_for(self._config.cache)
        self._inputs = AllocationInputs(
            source.model, source.activations, device, work, None, 1, source.curves, len(self._budgets), caches
        )
        self._floor = Floor(source.curves, source.max_ppl_ratio or math.inf)

    def quotes(self) -> tuple[DeviceQuote, ...]:
        """Returns the quote of each DRAM budget, the largest first."""
        self._tell(f"{self._device.name}: searching")
        found = searched_together(self._config, self._inputs, self._floor, self._budgets, self._narrowed)
        least = self._least_bytes()
        refused = next((one.refusal for one in reversed(found) if one.best is None), None)
        return tuple(self._quote(one, least, refused) for one in found)

    def _quote(self, found: Searched, least: int, refused: ColdpressError | None) -> DeviceQuote:
        judge, best = found.judge, found.best
        budget_bytes = judge.dram_budget_bytes if best is None else judge.budget_bytes(best.candidate)
        tries_others = self._asked.with_steps and len(self._budgets) == 1
        steps = self._steps(found, budget_bytes, least) if tries_others else ()
        words = "buffers, tensors that stay in DRAM, and the KV cache"
        figures = {"least_dram_bytes": Estimate(value=least, basis=words)}
        figures |= self._recommended(steps)
        shared = {"device": self._device.name, "dram_budget_bytes": budget_bytes, "steps": steps}
        if refused is not None or found.best is None:
            refusal = str(found.refusal) if found.best is None else f"a build of all budgets is refused: {refused}"
            return DeviceQuote(fits=False, refusal=refusal, figures=figures, next_budget=_next(steps, 0), **shared)
        division, tokens = found.judge.tokens(found.best.candidate)
        return DeviceQuote(
            fits=True,
            choice=_choice(found.best, "; ".join(filter(None, (self._reason(found), self._of_experts(division))))),
            bound="flash" if _flash_share(tokens) >= 0.5 else "DRAM" if self._device.compute is None else "computing",
            figures={**figures, **self._figures(found.best, division, tokens)},
            next_budget=_next(steps, budget_bytes),
            tried=found.tried,
            **shared,
        )

    def _reason(self, found: Searched) -> str:
        if self._config.method != AUTO:
            return "as asked for"
        assert found.best is not None
        if self._source.basis == "measured" or not found.best.is_whole or found.best.holds_everything:
            return found.tried[0].reason or ""
        return "every weight is used, since what leaving some out would lose is unknown"

    # Searching

    def _searched(self, budget_bytes: int, narrowed: Callable[[Space], Space]) -> Searched:
        config = self._config.model_copy(update={"dram_budget": budget_bytes})
        return searched(config, self._inputs, self._floor, narrowed)

    def _narrowed(self, space: Space) -> Space:
        own = self._allowed(space)
        return _quick(own) if self._asked.quick and self._config.method == AUTO else own

    def _allowed(self, space: Space) -> Space:
        """Returns the part of a space that a build may take: the named method, if there is one; and for a model that
        was not measured, formats whose loss is known."""
        if self._source.basis != "measured":
            known = {self._config.format, *(loss.format for loss in self._source.curves.formats)}
            space = replace(space, formats=tuple(name for name in space.formats if name in known))
        if self._config.method == AUTO:
            return space
        method, density = self._config.method, self._config.density
        return replace(space, methods=(method,), densities=lambda *_: (density,), streams_attention=(False,))

    def _least_bytes(self) -> int:
        """Returns the least DRAM that any candidate needs without cached units, as refusals of one byte state it."""
        nothing = self._searched(1, lambda space: replace(self._narrowed(space), caches=space.caches[:1]))
        needed = [one.needed_bytes for one in nothing.judged if one.needed_bytes is not None]
        needed += [one.needed_bytes for one in nothing.judge.refusals.values() if isinstance(one, OverBudgetError)]
        return min(needed)

    def _steps(self, found: Searched, budget: int, least: int) -> tuple[Step, ...]:
        followed = self._followed(found)
        self._tell(f"{self._device.name}: the most DRAM")
        most = self._device.dram_bytes.value
        top = self._searched(most, followed).best
        if top is None:
            return ()
        most = min(most, top.dram_bytes)
        num_steps = NUM_STEPS if self._source.basis == "measured" else FEW_STEPS
        ratio = (most / least) ** (1 / num_steps)
        grid = {round(least * ratio**step) for step in range(1, num_steps)} if ratio > 1 else set[int]()
        best: dict[int, Judged | None] = {most: top, budget: found.best}
        for number, size in enumerate(sorted(grid), start=1):
            self._tell(f"{self._device.name}: budget {number} of {len(grid)}")
            best[size] = self._searched(size, followed).best
        own = 1 / found.best.token_s if found.best else 0.0
        return tuple(
            Step(
                dram_budget_bytes=size,
                tokens_per_s=1 / one.token_s,
                method=one.candidate.method,
                **format_fields(without_kept(one.candidate.format)),
                ratio=1 / one.token_s / own if own else 0.0,
            )
            for size, one in sorted(best.items())
            if one is not None
        )

    def _followed(self, found: Searched) -> Callable[[Space], Space]:
        built = sorted((one for one in found.judged if one.refusal is None), key=lambda one: one.token_s)
        fastest = dict.fromkeys(one.candidate.method for one in built if not one.is_whole)

        def narrowed(space: Space) -> Space:
            space = self._allowed(space)
            dense, *others = space.methods if self._config.method != AUTO else _quick(space).methods
            methods = (dense, *([name for name in fastest if name in others] or others)[:FOLLOWED])
            best = {one.candidate.method: of_layers(one.candidate.format) for one in reversed(built)}
            formats = {best[name] for name in methods if name in best} or set(space.formats)
            return replace(
                _quick(space),
                methods=methods,
                formats=tuple(name for name in space.formats if name in formats),
                caches=QUICK_CACHES[:1],
            )

        return narrowed

    # Figures

    def _recommended(self, steps: tuple[Step, ...]) -> dict[str, Estimate]:
        if not steps:
            return {}
        enough = next(one for one in steps if one.tokens_per_s >= NEARLY * steps[-1].tokens_per_s)
        words = f"more DRAM gains at most {1 / NEARLY - 1:.0%}"
        return {"recommended_dram_bytes": Estimate(value=enough.dram_budget_bytes, basis=words)}

    def _figures(self, best: Judged, division: Sparsity, tokens: list[TokenCost]) -> dict[str, Estimate]:
        return {
            **self._speed(tokens, division),
            "first_token_s": self._cold(division),
            "ppl_ratio": self._quality(best, division),
            **build_costs(self._source, self._device, division, self._budgets),
            "token_energy_j": Estimate(value=None, basis="unknown: the device's profile has no figure of energy"),
            **self._drafted(division),
        }

    def _drafted(self, division: Sparsity) -> dict[str, Estimate]:
        """Returns the speed with the draft model, which no other figure has; empty without one."""
        draft, model = self._source.draft, self._source.model
        return {} if draft is None else {"drafted_tokens_per_s": drafted_speed(model, draft, division, self._device)}

    def _speed(self, tokens: list[TokenCost], division: Sparsity) -> dict[str, Estimate]:
        borrowed = self._source.basis != "measured" and not division.is_whole
        wide = self._device.modelled_error + (SAME_KIND if borrowed else 0.0)
        token_s = np.array([token.token_s for token in tokens])
        slow, middle, fast = (float(np.percentile(token_s, share)) for share in (95, 50, 5))
        counted = f"{len(tokens)} replayed tokens" if len(tokens) > 1 else "one token, since all read the same"
        if self._device.compute is None:
            words, interval = f"model, the median of {counted}: {UNCOMPUTED}", {}
        else:
            words = f"model, ± {wide:.0%} around the 5th to 95th percentile of {counted} ({WHY_WIDE}"
            words += f"; the zeros of another model ± {SAME_KIND:.0%})" if borrowed else ")"
            interval = {"low": 1 / slow / (1 + wide), "high": (1 + wide) / fast}
        hits, misses = (sum(getattr(token, name) for token in tokens) for name in ("hits", "misses"))
        mean = {name: float(np.mean([getattr(token, name) for token in tokens])) for name in ("reads", "read_bytes")}
        each = f"the mean of {counted}"
        return {
            "tokens_per_s": Estimate(
                value=1 / middle, is_most=not interval, basis=words, verify=self._build_command(), **interval
            ),
            "token_flash_bytes": Estimate(value=mean["read_bytes"], basis=each),
            "token_reads": Estimate(value=mean["reads"], basis=each),
            "hit_rate": Estimate(value=hits / (hits + misses) if hits + misses else None, basis=each),
            "flash_share": Estimate(
                value=_flash_share(tokens), basis="seconds of reads over seconds of a token, at most 1"
            ),
        }

    def _of_experts(self, division: Sparsity) -> str | None:
        model, curve = self._source.model, self._source.activations.experts
        if curve is None:
            return None
        setting = setting_of(division, model, self._device, range(model.spec.num_hidden_layers))
        return experts.warning(curve, setting.plan, model.spec, setting.sections)

    def _cold(self, division: Sparsity) -> Estimate:
        model, tokens, wide = self._source.model, self._asked.prompt_tokens, self._device.modelled_error
        layers = range(model.spec.num_hidden_layers)
        shares = expert_shares(self._source.curves, model.spec) if self._source.basis == "measured" else None
        found = first_token(setting_of(division, model, self._device, layers), tokens, shares)
        words = (
            f"model: load what stays in DRAM, {show_number(found.load_s)} s, then read a prompt of {tokens} tokens "
            f"({computing.basis(self._device)}); the interval computes {FEW_TOKENS} tokens of a chunk one by one, or "
            f"all of them, ± {wide:.0%} ({WHY_WIDE})"
        )
        return Estimate(
            value=found.expected_s, low=found.least_s / (1 + wide), high=found.most_s * (1 + wide), basis=words
        )

    def _quality(self, best: Judged, division: Sparsity) -> Estimate:
        """Returns the perplexity ratio to expect, with the curve's largest standard error nearby and that of formats;
        no value for a model that was not measured."""
        if self._source.basis != "measured":
            words = f"unknown until built ({self._elsewhere(best, division)})"
            return Estimate(value=None, basis=words, verify=self._build_command())
        errors = [
            point.ppl_ratio_error or 0.0
            for curve in self._source.curves.of(best.candidate.method)
            for point in curve.points
            if abs(point.density - best.density) <= 0.1
        ]
        error, ratio, formats = max(errors, default=0.0), best.ppl_ratio, best.candidate.format
        shape = formats, best.candidate.method
        error += self._floor.most_format_ratio(*shape) - self._floor.format_ratio(*shape)
        low, high = (None, None) if ratio is None else (max(1.0, ratio - error), ratio + error)
        words = f"{self._source.basis}: {self._source.basis_in_words}; ± its standard errors"
        return Estimate(value=ratio, low=low, high=high, basis=words, verify=self._build_command())

    def _elsewhere(self, best: Judged, division: Sparsity) -> str:
        spec, found = self._source.model.spec, []
        real, kind = real_like(self._source.model.num_parameters), kind_of(spec)
        loss = self._source.curves.format_loss(of_layers(division.formats), self._floor.family(division.method))
        if loss is not None:
            name = loss.format if isinstance(loss.format, str) else "formats by matrix"
            found.append(f"{real.in_words} in {name}: {loss.ppl_ratio:.2f}")
        if kind is not None and any(curve.method == division.method for curve in kind.curves):
            borrowed = self._source.curves.model_copy(update={"curves": kind.curves, "formats": ()})
            ratio = Floor(borrowed, math.inf).ratio(division.method, division.formats, best.density)
            size = f"a {kind.num_parameters / 1e6:.0f}M model of this kind, density {best.density:.2f}"
            found += [] if ratio is None else [f"{size}: {ratio:.2f}"]
        return "; ".join(found) or "no such model was measured"

    def _build_command(self) -> str:
        keys = {"device": self._named, **self._source.given}
        flags = [f"{flag(key)} {shlex.quote(value)}" for key, value in keys.items() if key != "model"]
        return " ".join(["coldpress build", shlex.quote(keys["model"]), *flags])


def _quick(space: Space) -> Space:
    """Narrows a space to what is quick to search: the lowest density of each selector, two caches, and no selector that
    sees residency."""

    def sees(name: str) -> bool:
        return load("coldpress.runtime.sparsity", Selector, name).SEES_RESIDENCY

    return replace(
        space,
        methods=tuple(name for name in space.methods if not sees(name)),
        caches=tuple(name for name in space.caches if name in QUICK_CACHES),
        densities=lambda method, format_name: space.densities(method, format_name)[:1],
    )


def _choice(best: Judged, reason: str) -> QuotedChoice:
    one = best.candidate
    return QuotedChoice(
        method=one.method,
        **format_fields(without_kept(one.format)),
        kv_cache=one.kv_cache,
        cache=one.cache,
        density=min(1.0, best.density),
        reason=reason,
    )


def _flash_share(tokens: list[TokenCost]) -> float:
    return min(1.0, sum(token.flash_s for token in tokens) / sum(token.token_s for token in tokens))


def _next(steps: tuple[Step, ...], budget: int) -> Step | None:
    larger = [one for one in steps if one.dram_budget_bytes > budget]
    return next((one for one in larger if one.ratio == 0 or one.ratio >= CLEARLY), None)
