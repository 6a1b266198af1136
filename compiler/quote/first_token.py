"""Models the first token after a start with nothing in DRAM: loading, then the dense passes that take the prompt.

The runtime's own store reads, on simulated flash: pinned units first, then all units once for each chunk of the prompt
(runtime/simulate.py). A pass computes with units while it reads, as a request does (runtime/store/computing.py); the
resident weights of a layer have their turn between two passes, and the head is for the last token alone. The start of
the process itself is not counted.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from coldpress.compiler.cost_model import kv_cache_bytes, stored_format, tensor_bytes
from coldpress.compiler.seconds import Setting
from coldpress.runtime.decoder.decoder import PREFILL_CHUNK_TOKENS
from coldpress.runtime.kernels import FEW_TOKENS
from coldpress.runtime.plan.budget import choose_plan
from coldpress.runtime.simulate import Opening, simulate_opening
from coldpress.runtime.store import computing, resident
from coldpress.runtime.store.computing import Weights
from coldpress.runtime.store.reads import MAX_READ_BYTES
from coldpress.schemas.device import flash_seconds

MATRIX_SHARE = 0.5
"""Seconds of a matrix's product with many tokens over those of as many products with one: 0.51 for 128 tokens and 0.40
for 512, int4 on two cores (`benchmarks.prefill` over `benchmarks.kernels`). Profiles have no rate of it."""


class Products(NamedTuple):
    """The products with one token that a chunk of a prompt takes as long as."""

    least: float
    """A chunk of more than FEW_TOKENS takes no less time than FEW_TOKENS, which are computed one by one."""
    expected: float
    most: float
    """Matrices are multiplied only where that is faster."""


class FirstToken(NamedTuple):
    """Seconds to the first token."""

    least_s: float
    expected_s: float
    most_s: float
    load_s: float
    """The part that loading takes, before the prompt's tokens."""


def first_token(setting: Setting, prompt_tokens: int) -> FirstToken:
    """Returns the seconds to a prompt's first token.

    Args:
        setting: With the parts of all layers; with room for every unit, all are loaded, as in a run.
        prompt_tokens: Tokens of the prompt.
    """
    plan = choose_plan(setting.manifest)
    setting = replace(setting, plan=plan)
    opening = simulate_opening(setting.artifact, plan)
    stored_bytes = plan.resident_bytes + plan.predictor_bytes
    flash = setting.device.flash.issuing(plan.queue_depth)
    load_s = opening.load_s + float(flash_seconds(flash, math.ceil(stored_bytes / MAX_READ_BYTES), stored_bytes))
    chunks = [min(PREFILL_CHUNK_TOKENS, prompt_tokens - at) for at in range(0, prompt_tokens, PREFILL_CHUNK_TOKENS)]
    products = [products_of(chunk) for chunk in chunks]
    least, expected, most = (
        load_s + _prompt_s(setting, opening, prompt_tokens, counts) for counts in zip(*products, strict=True)
    )
    return FirstToken(least, expected, most, load_s)


def products_of(num_tokens: int) -> Products:
    """Returns the products that a chunk of `num_tokens` takes as long as; see runtime/kernels."""
    least = min(num_tokens, FEW_TOKENS)
    return Products(least, num_tokens if num_tokens == least else max(least, MATRIX_SHARE * num_tokens), num_tokens)


def _prompt_s(setting: Setting, opening: Opening, prompt_tokens: int, products: tuple[float, ...]) -> float:
    """Returns the seconds of a prompt whose chunks take as long as so many products with one token each."""
    device, manifest, spec = setting.device, setting.manifest, setting.model.spec
    kv_cache = kv_cache_bytes(spec, prompt_tokens, setting.plan.kv_cache)
    computed = resident.computed_bytes(manifest, setting.plan.model_copy(update={"kv_cache_bytes": kv_cache}))
    head_s = _head_s(setting)
    layers_s = computing.dense_seconds(device, computed) - head_s
    calls_s = computing.token_seconds(device) + spec.num_hidden_layers * computing.layer_seconds(device)
    units = resident.chosen_from(manifest)
    total = head_s
    for count in products:
        total += calls_s + count * layers_s
        for key, flash_s in opening.pass_s.items():
            used = round(count * units[key].num_bytes)
            total += computing.fetch_seconds(device, Weights(units[key].format, used), flash_s, used, 0)
    return total


def _head_s(setting: Setting) -> float:
    """Returns the seconds of the head's product with one token."""
    role = "embed_tokens.weight" if setting.model.spec.tie_word_embeddings else "lm_head.weight"
    size = tensor_bytes(role, setting.model.tensors[role].shape, setting.format)
    return computing.weight_seconds(setting.device, stored_format(role, setting.format), size)
