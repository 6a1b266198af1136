"""Counts the memory and disk of passes that measure quality."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coldpress.compiler.activity.choice import REPLAYED_LAYERS
from coldpress.compiler.activity.forward import HEAD_ROWS
from coldpress.compiler.activity.gram_pass import GRAM_TOKENS
from coldpress.compiler.activity.layer_counts import countable_families
from coldpress.compiler.quality.trace import TRACE_TOKENS
from coldpress.compiler.quality.variants import DENSITIES, STRENGTHS, curves_of, routing_curves
from coldpress.compiler.shared_settings import EXACT_ROUTING
from coldpress.schemas.families import Method
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

LOGIT_ARRAYS = 6
"""Arrays of logits, at most 8 bytes a value, that a comparison or a score holds for a block."""


def needs_of_passes(stage: str, build: "Build", methods: Sequence[Method]) -> StageNeeds:
    """Returns the needs of passes that measure all formats and, with `methods`, these selectors and their routing."""
    settings, spec = build.settings["explore"], build.model.spec
    tokens = max(settings["explore_tokens"], build.block_tokens)
    whole = 4 * tokens * spec.hidden_size
    hidden = (2 * len(DENSITIES) + 1) * whole
    rows = min(HEAD_ROWS, spec.vocab_size)
    logits = 8 * LOGIT_ARRAYS * build.threads * build.block_tokens * rows + 2 * 8 * rows * spec.hidden_size
    trace = 2 * REPLAYED_LAYERS * max(TRACE_TOKENS, build.block_tokens) * build.layer_units(countable_families(spec))
    curves = [along for name in methods for along in curves_of(name)]
    num_variants = sum(len(along.densities) for along in curves)
    routing = settings.get("routing", EXACT_ROUTING) if methods else EXACT_ROUTING
    num_routed = len(STRENGTHS) * len(routing_curves(routing, spec))
    figures = tokens * (20 * (num_variants + num_routed) + 16 * len(curves))
    rounding = _rounding_needs(stage, build)
    layer = build.TORCH_BYTES + 3 * build.layer_weights_bytes + build.running_bytes(8)
    return StageNeeds(
        stage=stage,
        ram_bytes=layer + hidden + logits + trace + rounding.ram_bytes,
        disk_bytes=trace + whole + figures + rounding.disk_bytes,
    )


def _rounding_needs(stage: str, build: "Build") -> StageNeeds:
    if not build.has("gram"):
        return StageNeeds(stage=stage, ram_bytes=0, disk_bytes=0)
    spec = build.model.spec
    tokens = min(GRAM_TOKENS, build.num_tokens)
    running = build.running_bytes(8, 12) + 2 * 4 * tokens * spec.hidden_size
    return StageNeeds(
        stage=stage,
        ram_bytes=max(running + sum(build.gram_bytes), 3 * max(build.gram_bytes) + 4 * 4 * build.largest_of_layer),
        disk_bytes=spec.num_hidden_layers * sum(build.gram_bytes),
    )
