"""Checks a DRAM budget against what must be in DRAM before any unit is cached, and says what would do instead."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from coldpress.compiler import candidates, cost_model
from coldpress.compiler.candidates import ATTENTION, AUTO, DENSE
from coldpress.compiler.dense_run import dense_run
from coldpress.compiler.kept_codes import keeping
from coldpress.compiler.needs import Build
from coldpress.compiler.quality.variants import head_formats
from coldpress.compiler.sections import Whole, bookkeeping_bytes, make_sections
from coldpress.runtime.dram.kv_cache import formats_of
from coldpress.runtime.quantities import show_bytes
from coldpress.runtime.quantization._mixed import coarsest
from coldpress.schemas.base import Options
from coldpress.schemas.device import flash_seconds
from coldpress.schemas.errors import DoesNotFitError
from coldpress.schemas.families import (
    FamilyName,
    FormatName,
    Formats,
    HeadFormat,
    kept_of,
    of_layers,
    unit_keys,
    with_own,
)

LEAST_CONTEXT = 256
"""Shortest context that is proposed."""


class Need(NamedTuple):
    """The least DRAM of one way to build."""

    build: Build
    whole: Whole
    """The bytes that a share counts, in the formats of the layers and of the KV cache."""
    asked_bytes: int
    """The smallest of the asked budgets."""
    parts: dict[str, int]
    """Bytes by use."""
    families: tuple[FamilyName, ...]
    """What lies on flash."""

    @property
    def least_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.least_bytes <= self.asked_bytes


def least_needs(build: Build, heads: Sequence[FormatName | None] = (None,)) -> Iterator[Need]:
    """Yields the least DRAM of each selector, format and format of keys and values that the build may take, beside each
    of some formats of the head; None: the one that goes with the layers'."""
    asked, role = build.settings["allocate"]["dram_budget"], build.model.spec.head_role
    length = build.context_length
    for kv_cache, name, own in product(build.kv_caches, build.formats, heads):
        head = None if own is None else HeadFormat(role=role, format=own)
        formats = with_own(name, head, kept_of(keeping(build.model, name)))
        whole = Whole(build.model, name, length, kv_cache, build.page_bytes, build.caches)
        budgets = tuple(whole.budgets(asked))
        kept = {f"KV cache of {length:,} tokens": cost_model.kv_cache_bytes(build.model.spec, length, kv_cache)}
        for method in build.methods:
            for options in _options(build, method):
                families: tuple[FamilyName, ...] = candidates.families_for(method, options, build.model.spec)
                parts = _tensors(build, method, families, formats, len(budgets)) | kept
                yield Need(build, whole, budgets[-1], parts, families)


def _options(build: Build, method: str) -> list[Options]:
    """Returns the options that the choice may give a selector: a dense run may stream attention, too."""
    if build.method != AUTO:
        return [build.options]
    own = candidates.own_options(method, build.options)
    if method != DENSE:
        return [own]
    streamed = candidates.with_attention(build.options, build.model.spec, build.layers_per_group)
    return [own] if streamed is None else [own, streamed]


def _tensors(
    build: Build, method: str, families: tuple[FamilyName, ...], formats: Formats, num_plans: int
) -> dict[str, int]:
    model, page_bytes, name = build.model, build.page_bytes, coarsest(formats)
    sections = make_sections(model.spec, families, of_layers(formats), build.layers_per_group)
    tensors = cost_model.resident_tensors(model, families, formats)
    sizes = {one.role: cost_model.tensor_bytes(one.role, one.shape, formats) for one in tensors}
    head = sum(size for role, size in sizes.items() if not role.startswith("layers."))
    return {
        "head and what else is outside of layers": head,
        "tensors of layers": sum(sizes.values()) - head,
        "bookkeeping": bookkeeping_bytes(model.spec, sections, name, method, build.caches, page_bytes, num_plans),
        "read buffer": cost_model.read_buffer_bytes(model.spec, formats, families, 0, page_bytes),
    }


def check(build: Build) -> None:
    """Refuses a budget that nothing fits, by a DoesNotFitError with the uses of DRAM, the least budget and its speed,
    and changes with which the asked one would do."""
    candidates.check_format(build.settings["allocate"]["format"], build.model.spec)
    needs = list(least_needs(build))
    # what a smaller head loses is measured later, so that `allocate` refuses it if it must
    smaller = least_needs(build, head_formats(build.model.spec)) if build.method == AUTO else ()
    if any(need.fits for need in (*needs, *smaller)):
        return
    closest = min(needs, key=lambda need: need.least_bytes / need.asked_bytes)
    uses = ", ".join(f"{show_bytes(size)} {name}" for name, size in closest.parts.items())
    others = [f"{words} ({show_bytes(need.least_bytes)})" for words, need in _remedies(build) if need.fits]
    instead = f"; with the budget as it is, {' or '.join(others)} would do" if others else ""
    raise DoesNotFitError(
        f"a DRAM budget of {closest.asked_bytes:,} bytes was asked for{_share_of(closest)}, {closest.least_bytes:,} "
        f"are needed before any unit is cached, in {closest.whole.format}: {uses}; raise dram_budget to at least "
        f"{closest.whole.budget_for(closest.least_bytes)}{_speed(closest)}{instead}"
    )


def _share_of(need: Need) -> str:
    asked = str(need.build.settings["allocate"]["dram_budget"])
    shares = [one.strip() for one in asked.split(",") if cost_model.parse_share(one) is not None]
    return (
        f" ({shares[-1]} of the weights and the KV cache in {need.whole.format} and {need.whole.kv_cache})"
        if shares
        else ""
    )


def _speed(need: Need) -> str:
    device, (model, name, length, kv_cache, *_) = need.build.device, need.whole
    if (run := dense_run(model, name, length, need.least_bytes, device, kv_cache)) is not None:
        return f", which gives about {1 / run.token_s:.3g} tokens/s on {device.name}"
    if not set(ATTENTION) <= set(need.families):
        return ""
    num_bytes = cost_model.flash_bytes(need.families, model.spec, name)
    seconds = flash_seconds(device.flash, len(unit_keys(need.families, model.spec)), num_bytes)
    return f", which gives at most {1 / seconds:.3g} tokens/s on {device.name}, as attention is read from flash, too"


def _remedies(build: Build) -> Iterator[tuple[str, Need]]:
    own, spec = build.settings["allocate"], build.model.spec
    contexts, length = list[int](), build.context_length // 2
    while length >= LEAST_CONTEXT:
        contexts.append(length)
        length //= 2
    changes: dict[str, list[object]] = {
        "kv_cache": [name for name in formats_of(spec) if own["kv_cache"] not in (name, AUTO)],
        "format": [name for name in candidates.compared_formats(AUTO, spec) if own["format"] not in (name, AUTO)],
        "context_length": [*contexts],
    }
    for name, values in changes.items():
        for value in values:
            settings = {**build.settings, "allocate": {**own, name: value}}
            found = list(least_needs(replace(build, settings=settings)))
            best = min(found, key=lambda need: need.least_bytes / need.asked_bytes)
            if best.fits:
                yield f"{name}={value}", best
                break
