"""Counts the DRAM bytes, by format, that every token reads besides its units.

Half the KV cache is the mean over a full context. In a mixture only the resident experts that a token uses count.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from coldpress.runtime.artifact.contents import layout_bytes, nbytes, resident_tensors
from coldpress.runtime.dram.budget import holds_tables
from coldpress.runtime.store import computing
from coldpress.runtime.store.facts import Key
from coldpress.schemas.device import flash_seconds
from coldpress.schemas.families import FAMILIES, WHOLE_MLP, UnitFormat, layers_of, used_share
from coldpress.schemas.layout import Plan, RowTable
from coldpress.schemas.manifest import LayerPredictorInfo, Manifest
from coldpress.schemas.model import MLP_ROLES, ModelSpec, matrices
from coldpress.schemas.predictors import LayerPredictor, matrix_shapes

LOOKUP_TABLES = ("embed_tokens.weight", "embed_positions.weight")
"""Tables from which a token reads one row, unless the embedding is also the head."""
Bytes = Counter[UnitFormat | None]
"""Bytes by format; None is float32, and keys and values."""


def computed_bytes(manifest: Manifest, plan: Plan) -> Bytes:
    """Returns the bytes of DRAM that a token reads besides units: resident weights, predictors, half the KV cache."""
    spec, sizes = manifest.model, _sizes(manifest)
    layers = layers_of(WHOLE_MLP, spec)
    mlp = (name for layer in layers for role in MLP_ROLES for name in _named(layer, role, spec))
    in_part = {*mlp, *LOOKUP_TABLES[spec.tie_word_embeddings :]}
    found: Bytes = Counter()
    for role, (format_name, size) in sizes.items():
        if role not in in_part:
            found[format_name] += size
    for layer in layers:
        found += _multiplied_bytes(sizes, spec, layer, MLP_ROLES)
    found[None] += plan.kv_cache_bytes // 2
    return found + _predicting_bytes(manifest, plan)


def bytes_before(manifest: Manifest, plan: Plan) -> dict[Key, Bytes]:
    """Returns, for each layer's first request for MLP units, the bytes of resident weights and KV cache used before it.
    Bytes used later in a layer, and the head's, are not counted."""
    families = [entry.family for entry in manifest.families]
    first = next((name for name in families if set(FAMILIES[name].roles) & set(MLP_ROLES)), None)
    if first is None:
        return {}
    spec, sizes = manifest.model, _sizes(manifest)
    early = [*spec.attention_roles, *spec.expanding_matrices, *(role for role in MLP_ROLES if role != "down_proj")]
    shared = _predicting_bytes(manifest, plan)
    shared[None] += plan.kv_cache_bytes // 2
    of_layer: Bytes = Counter({name: size // spec.num_hidden_layers for name, size in shared.items()})
    return {(layer, first): _multiplied_bytes(sizes, spec, layer, early) + of_layer for layer in layers_of(first, spec)}


def seconds_before(manifest: Manifest, plan: Plan) -> dict[Key, float]:
    """Returns, for each layer's first request for MLP units, the seconds in which preloads run before it."""
    device = manifest.device
    before, layer_s = bytes_before(manifest, plan), computing.layer_seconds(device)
    return {key: computing.dense_seconds(device, num_bytes) + layer_s for key, num_bytes in before.items()}


def token_seconds(manifest: Manifest, plan: Plan) -> float:
    """Returns the seconds of a token besides its requests: computing, and its rows of matrices on flash."""
    device = manifest.device
    besides_s = computing.token_seconds(device) + manifest.model.num_hidden_layers * computing.layer_seconds(device)
    return computing.dense_seconds(device, computed_bytes(manifest, plan)) + besides_s + row_seconds(manifest, plan)


def row_seconds(manifest: Manifest, plan: Plan, num_tokens: int = 1) -> float:
    """Returns the seconds of reading the rows of tokens together, of each matrix that is read by row; nothing else
    runs meanwhile."""
    tables, page_bytes = manifest.flash.tables, manifest.flash.page_bytes
    # a plan without parts stands for one that reads
    if not tables or (plan.parts and holds_tables(manifest, plan)):
        return 0.0
    flash = manifest.device.flash.issuing(plan.queue_depth)
    num_bytes = num_tokens * sum(row_read_bytes(table, page_bytes) for table in tables)
    return float(flash_seconds(flash, num_tokens * len(tables), num_bytes))


def row_read_bytes(table: RowTable, page_bytes: int) -> float:
    """Returns the bytes of whole pages that a row lies in, in the mean over all rows."""
    return table.row_bytes + page_bytes - math.gcd(table.row_bytes, page_bytes)


def scored_bytes(spec: ModelSpec, predictors: Iterable[LayerPredictor | LayerPredictorInfo]) -> Bytes:
    """Returns the bytes of predictors that a token multiplies; of each second matrix only the rows of its experts."""
    used = used_share(WHOLE_MLP, spec)
    total: Bytes = Counter()
    for entry in predictors:
        shapes = matrix_shapes(spec, entry.rank).values()
        first, second = (rows * nbytes(entry.format, columns) for rows, columns in shapes)
        total[entry.format] += first + round(used * second)
    return total


def chosen_from(manifest: Manifest) -> dict[Key, computing.Weights]:
    formats = manifest.unit_formats
    return {
        (layer, section.family): computing.Weights(
            formats[layer, section.family],
            round(used_share(section.family, manifest.model) * section.num_units * section.unit_bytes),
        )
        for section in manifest.flash.sections
        for layer in section.layers
    }


_Sizes = Mapping[str, tuple[UnitFormat | None, int]]
"""Role of a resident tensor -> its format and bytes."""


def _sizes(manifest: Manifest) -> _Sizes:
    layout = resident_tensors(manifest)
    return {
        tensor.role: (tensor.format, layout_bytes({tensor.role: layout[tensor.role]})) for tensor in manifest.resident
    }


def _named(layer: int, role: str, spec: ModelSpec) -> list[str]:
    return [f"layers.{layer}.{name}.weight" for name in matrices(role, spec)]


def _multiplied_bytes(sizes: _Sizes, spec: ModelSpec, layer: int, roles: Iterable[str]) -> Bytes:
    """Returns the bytes of a layer's resident matrices that a token multiplies; of experts only those it uses."""
    found: Bytes = Counter()
    for role in roles:
        held = [sizes[name] for name in _named(layer, role, spec) if name in sizes]
        share = used_share(WHOLE_MLP, spec) if role in MLP_ROLES else 1.0
        for format_name in {format_name for format_name, _ in held}:
            found[format_name] += round(share * sum(size for kind, size in held if kind == format_name))
    return found


def _predicting_bytes(manifest: Manifest, plan: Plan) -> Bytes:
    return scored_bytes(manifest.model, manifest.predictors if plan.predictor_bytes else ())
