"""Checks a DRAM budget against what must be in DRAM before any unit is cached, and says what would do instead."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from coldpress.compiler.candidates import AUTO, families_for, formats_for, own_options
from coldpress.compiler.cost_model import kv_cache_bytes, parse_share, read_buffer_bytes, resident_tensors, tensor_bytes
from coldpress.compiler.dense_run import dense_run
from coldpress.compiler.needs import Build
from coldpress.compiler.sections import asked_budget_bytes, bookkeeping_bytes, least_budget, make_sections
from coldpress.runtime.plan.kv_cache import formats_of
from coldpress.runtime.quantities import show_bytes
from coldpress.schemas.errors import DoesNotFitError
from coldpress.schemas.families import FamilyName, FormatName
from coldpress.schemas.layout import KvCacheFormat

LEAST_CONTEXT = 256
"""Shortest context that is proposed."""


class Need(NamedTuple):
    """The least DRAM of one way to build."""

    build: Build
    method: str
    format: FormatName
    kv_cache: KvCacheFormat
    asked_bytes: int
    """The smallest of the asked budgets; a share counts in these formats."""
    parts: dict[str, int]
    """Bytes by use."""

    @property
    def least_bytes(self) -> int:
        """The bytes of all uses."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the asked budget holds them."""
        return self.least_bytes <= self.asked_bytes

    @property
    def least(self) -> str:
        """The value of dram_budget that would do: bytes, and a percentage if one does."""
        shape = (self.format, self.build.context_length, self.kv_cache, self.build.page_bytes, self.build.caches)
        return least_budget(self.least_bytes, self.build.model, *shape)


def least_needs(build: Build) -> Iterator[Need]:
    """Yields the least DRAM of each selector, format and format of keys and values that the build may take."""
    asked = build.settings["allocate"]["dram_budget"]
    shape = build.model, build.context_length
    for kv_cache, name in product(build.kv_caches, build.formats):
        budgets = asked_budget_bytes(asked, shape[0], name, shape[1], kv_cache, build.page_bytes, build.caches)
        kept = {f"KV cache of {shape[1]:,} tokens": kv_cache_bytes(build.model.spec, shape[1], kv_cache)}
        for method in build.methods:
            yield Need(build, method, name, kv_cache, budgets[-1], _tensors(build, method, name, len(budgets)) | kept)


def _tensors(build: Build, method: str, name: FormatName, num_plans: int) -> dict[str, int]:
    model, page_bytes = build.model, build.page_bytes
    options = own_options(method, build.options) if build.method == AUTO else build.options
    families: tuple[FamilyName, ...] = families_for(method, options, model.spec)
    sections = make_sections(model.spec, families, name, build.layers_per_group)
    sizes = {one.role: tensor_bytes(one.role, one.shape, name) for one in resident_tensors(model, families, name)}
    head = sum(size for role, size in sizes.items() if not role.startswith("layers."))
    return {
        "head and what else is outside of layers": head,
        "tensors of layers": sum(sizes.values()) - head,
        "bookkeeping": bookkeeping_bytes(model.spec, sections, name, method, build.caches, page_bytes, num_plans),
        "read buffer": read_buffer_bytes(model.spec, name, families, 0, page_bytes),
    }


def check(build: Build) -> None:
    """Refuses a budget that nothing fits.

    Raises:
        DoesNotFitError: with the uses of DRAM, the least budget and its speed, and changes with which the asked one
            would do.
    """
    needs = list(least_needs(build))
    if any(need.fits for need in needs):
        return
    closest = min(needs, key=lambda need: need.least_bytes / need.asked_bytes)
    uses = ", ".join(f"{show_bytes(size)} {name}" for name, size in closest.parts.items())
    others = [f"{words} ({show_bytes(need.least_bytes)})" for words, need in _remedies(build) if need.fits]
    instead = f"; with the budget as it is, {' or '.join(others)} would do" if others else ""
    raise DoesNotFitError(
        f"a DRAM budget of {closest.asked_bytes:,} bytes was asked for{_share_of(closest)}, {closest.least_bytes:,} "
        f"are needed before any unit is cached, in {closest.format}: {uses}; raise dram_budget to at least "
        f"{closest.least}{_speed(closest)}{instead}"
    )


def _share_of(need: Need) -> str:
    asked = str(need.build.settings["allocate"]["dram_budget"])
    shares = [one.strip() for one in asked.split(",") if parse_share(one) is not None]
    return f" ({shares[-1]} of the weights and the KV cache in {need.format} and {need.kv_cache})" if shares else ""


def _speed(need: Need) -> str:
    """Returns the speed of a dense run with the least budget, for a sentence; empty where none fits it."""
    build = need.build
    run = dense_run(build.model, need.format, build.context_length, need.least_bytes, build.device, need.kv_cache)
    return f", which gives about {1 / run.token_s:.3g} tokens/s on {build.device.name}" if run is not None else ""


def _remedies(build: Build) -> Iterator[tuple[str, Need]]:
    """Yields changes of one setting, in words, each with the need that comes closest to the asked budget."""
    own = build.settings["allocate"]
    contexts, length = list[int](), build.context_length // 2
    while length >= LEAST_CONTEXT:
        contexts.append(length)
        length //= 2
    changes: dict[str, list[object]] = {
        "kv_cache": [name for name in formats_of(build.model.spec) if own["kv_cache"] not in (name, AUTO)],
        "format": [name for name in formats_for(AUTO) if own["format"] not in (name, AUTO)],
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
