"""Writes small valid artifacts with numpy, without the compiler: random weights, any method and format.

This is not the product's writer (compiler/stages/package): reader and writer are each tested against the format, not
against each other.
"""

import contextlib
import gc
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coldpress.runtime import _native, plugins
from coldpress.runtime.artifact.contents import model_tensors
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.bookkeeping import counted_bytes
from coldpress.runtime.dram.budget import units_whole_bytes
from coldpress.runtime.dram.kv_cache import kv_cache_bytes
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._mixed import format_at
from coldpress.schemas.errors import ArtifactError
from coldpress.schemas.families import (
    Slice,
    num_units,
    slice_formats,
    slice_shape,
    slices,
    unit_keys,
    unit_role,
    used_share,
)
from coldpress.schemas.layout import KvCacheFormat, RowTable, Section, SelectorArray
from coldpress.schemas.manifest import (
    DRAFT_FOLDER,
    FLASH_FILE,
    MANIFEST_FILE,
    PREDICTORS_FILE,
    RESIDENT_FILE,
    TABLES_FILE,
    Manifest,
)
from coldpress.schemas.model import ModelSpec, features_of_model, matrices, rows_on_flash
from tests.support.methods import families_of, kept
from tests.support.shapes import small_device, small_spec

ALIGN = 65536


@dataclass(frozen=True)
class Recipe:
    """What to build; the defaults give a fp16 ReLU artifact whose cache holds an eighth of the units."""

    spec: ModelSpec = field(default_factory=small_spec)
    method: str = "relu"
    options: Mapping[str, Any] = field(default_factory=dict)
    families: tuple[str, ...] | None = None
    """None: the families of the method."""
    format: str = "fp16"
    layer_formats: Mapping[int, str] = field(default_factory=dict)
    """The formats of the layers whose units have another one, or those of their matrices with `+` between."""
    cache: str = "lru"
    page_bytes: int = 4096
    pinned_share: float = 1 / 16
    slots_share: float = 1 / 8
    read_buffer_bytes: int = 32768
    collapse_gap_bytes: int = 4096
    context_length: int = 32
    kv_cache: KvCacheFormat = "fp16"
    predictor_rank: int = 8
    predictor_format: str = "int8_group32"
    predictors: Mapping[int, tuple[np.ndarray, np.ndarray]] | None = None
    """Layer -> fc1, fc2 float32. A unit is used if its score reaches 0.1; a layer without predictor uses all units.
    None: random predictors in all layers."""
    density: float = 0.25
    layers_per_group: int = 1
    grouped: tuple[str, ...] | None = None
    """The families whose layers are grouped, None for all; the others lie layer by layer."""
    rows_on_flash: bool = False
    """Whether token embeddings are read by row from flash, if the head has its own matrix."""
    seed: int = 0
    order: Mapping[tuple[int, str], np.ndarray] | None = None
    rank: Mapping[tuple[int, str], np.ndarray] | None = None
    """(layer, family) -> unit ids, as they lie on flash and from most to least worth pinning. None: random."""

    def unit_format(self, layer: int, family: Any) -> str:
        """Returns the format of a family's units in a layer."""
        return format_at(self.layer_formats.get(layer, self.format), layer, family)


@dataclass(frozen=True)
class Built:
    """An artifact on disk and the data that it was made from."""

    path: Path
    recipe: Recipe
    manifest: Manifest
    weights: Mapping[str, np.ndarray]
    """Role -> float32, before quantization."""
    units: Mapping[tuple[int, str], np.ndarray]
    """(layer, family) -> uint8 [num_units, unit_bytes], unit i at row i."""
    order: Mapping[tuple[int, str], np.ndarray]
    """(first layer of the group, family) -> unit at each flash position."""
    pinned: Mapping[tuple[int, str], np.ndarray]
    """(layer, family) -> the pinned units, which are the first of the rank."""


def build_artifact(
    path: Path,
    recipe: Recipe | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
    units: Mapping[tuple[int, Any], np.ndarray] | None = None,
) -> Built:
    """Writes an artifact of `weights` (role -> float32), or of random weights, to the folder `path`.

    `units` are the codes of an earlier artifact with the same weights and format (`Built.units`), if there is one.
    """
    recipe = recipe or Recipe()
    random = np.random.default_rng(recipe.seed)
    path.mkdir(parents=True)
    weights = random_weights(recipe.spec, random) if weights is None else weights
    families = recipe.families or families_of(recipe.method, recipe.spec)
    units = units or {
        (layer, family): encode_units(weights, recipe, layer, family)
        for layer, family in unit_keys(families, recipe.spec)
    }
    drawn = [{key: random.permutation(len(codes)).astype(np.int32) for key, codes in units.items()} for _ in range(2)]
    order, rank = (given or some for given, some in zip((recipe.order, recipe.rank), drawn, strict=True))
    pinned = {key: ids[: round(recipe.pinned_share * ids.size)] for key, ids in rank.items()}
    order = {key: ids for key, ids in order.items() if key[0] % _group_size(recipe, key[1]) == 0}
    sections = write_flash(path, units, order, recipe)
    tables = write_rows(path, weights, recipe)
    write_tables(path, order, rank, recipe)
    resident = write_resident(path, weights, recipe, families)
    predictors = write_predictors(path, recipe, random)
    manifest = _manifest(path, recipe, families, sections, tables, resident, predictors, pinned)
    write_manifest(path, manifest)
    return Built(path, recipe, Manifest.model_validate_json(json.dumps(manifest)), weights, units, order, pinned)


def _group_size(recipe: Recipe, family: str) -> int:
    return recipe.layers_per_group if recipe.grouped is None or family in recipe.grouped else 1


def random_weights(spec: ModelSpec, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns random tensors of a model by role, scaled to keep activations near 1."""
    nothing_on_flash = Manifest.model_construct(model=spec, families=())
    required, optional = model_tensors(nothing_on_flash)
    has_biases = not spec.norm.startswith("rms_norm")
    biases = {role: shape for role, shape in optional.items() if has_biases and role.endswith("_proj.bias")}
    weights: dict[str, np.ndarray] = {}
    for role, shape in sorted((required | biases).items()):
        scale = 1 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.1
        weights[role] = random.normal(0, scale, shape).astype(np.float32)
        if role.endswith("norm.weight"):
            weights[role] += 1
    for role, base in (("rotary.inv_freq", 10000), ("rotary_local.inv_freq", 100)):
        if role in required:
            weights[role] = (1 / base ** (np.arange(spec.rotary_dim // 2) * 2 / spec.rotary_dim)).astype(np.float32)
    return weights


def encode_slices(weight: np.ndarray, piece: Slice, codec: Format) -> np.ndarray:
    """Returns what each unit has of a matrix, uint8 [num_units, n], unit by unit."""
    if piece.axis in ("row", "column"):
        return codec.encode(np.ascontiguousarray(weight if piece.axis == "row" else weight.T))
    neurons = weight.shape[0 if piece.axis == "rows" else 1]
    size = 256 if neurons % 256 == 0 else 32
    found: list[np.ndarray] = []
    for start in range(0, neurons, size):
        block = weight[start : start + size] if piece.axis == "rows" else weight[:, start : start + size]
        found.append(codec.encode(np.ascontiguousarray(block)).reshape(-1))
    return np.stack(found)


def encode_units(weights: Mapping[str, np.ndarray], recipe: Recipe, layer: int, family: Any) -> np.ndarray:
    """Returns the codes of a family's units in one layer, uint8 [num_units, unit_bytes]."""
    parts: list[np.ndarray] = []
    pieces = slices(family, recipe.spec)
    formats = slice_formats(recipe.unit_format(layer, family), len(pieces))
    for piece, format_name in zip(pieces, formats, strict=True):
        names = [f"layers.{layer}.{name}.weight" for name in matrices(piece.role, recipe.spec)]
        codec = plugins.load("coldpress.runtime.quantization", Format, format_name)
        parts.append(np.concatenate([encode_slices(weights[name], piece, codec) for name in names]))
        assert len(parts[-1]) == num_units(family, recipe.spec)
    return np.concatenate(parts, axis=1)


def write_flash(
    path: Path,
    units: Mapping[tuple[int, str], np.ndarray],
    order: Mapping[tuple[int, str], np.ndarray],
    recipe: Recipe,
) -> list[dict[str, Any]]:
    """Writes flash.img and returns its sections."""
    sections: list[dict[str, Any]] = []
    image = bytearray()
    for (first, family), ids in order.items():
        image += bytes(-len(image) % ALIGN)
        last = min(first + _group_size(recipe, family), recipe.spec.num_hidden_layers) - 1
        codes = np.concatenate([units[layer, family][ids] for layer in range(first, last + 1)], axis=1)
        section: dict[str, Any] = {"first_layer": first, "last_layer": last, "family": family}
        section |= {"offset_bytes": len(image)}
        name = recipe.unit_format(first, family)
        section |= {} if name == recipe.format else {"format": name}
        unit_bytes = units[first, family].shape[1]
        sections.append(section | {"num_units": ids.size, "unit_bytes": unit_bytes, "stride_bytes": codes.shape[1]})
        image += codes.tobytes()
    image += bytes(-len(image) % recipe.page_bytes)
    (path / FLASH_FILE).write_bytes(image)
    return sections


def write_rows(path: Path, weights: Mapping[str, np.ndarray], recipe: Recipe) -> list[dict[str, Any]]:
    """Appends the matrices that are read by row to flash.img, and returns their places."""
    found: list[dict[str, Any]] = []
    image = bytearray((path / FLASH_FILE).read_bytes())
    for role in rows_on_flash(recipe.spec) if recipe.rows_on_flash else ():
        image += bytes(-len(image) % ALIGN)
        chosen = resident_format(role, recipe.format)
        assert chosen is not None
        codes = plugins.load("coldpress.runtime.quantization", Format, chosen).encode(weights[role])
        place = {"role": role, "format": chosen, "offset_bytes": len(image)}
        found.append(place | {"num_rows": codes.shape[0], "row_bytes": codes.shape[1]})
        image += codes.tobytes()
        image += bytes(-len(image) % recipe.page_bytes)
    (path / FLASH_FILE).write_bytes(image)
    return found


def write_tables(
    path: Path,
    order: Mapping[tuple[int, str], np.ndarray],
    rank: Mapping[tuple[int, str], np.ndarray],
    recipe: Recipe,
) -> None:
    """Writes tables.safetensors; flash.img must exist, since the tables hold its checksums."""
    image = np.fromfile(path / FLASH_FILE, np.uint8)
    arrays = {"page_crc32c": _native.crc32c_pages(image, recipe.page_bytes)}
    arrays |= {f"order.{layer}.{family}": ids for (layer, family), ids in order.items()}
    arrays |= {f"rank.{layer}.{family}": ids for (layer, family), ids in rank.items()}
    for (layer, family), ids in rank.items():
        for name, array in kept(recipe.method, ids.size, recipe.density, recipe.options).items():
            arrays[f"selector.0.{layer}.{family}.{name}"] = array
    save_file(arrays, path / TABLES_FILE)


def write_resident(
    path: Path,
    weights: Mapping[str, np.ndarray],
    recipe: Recipe,
    families: tuple[Any, ...],
) -> list[dict[str, Any]]:
    """Writes resident.safetensors and returns the manifest's list of its tensors."""
    on_flash = {piece.role for family in families for piece in slices(family, recipe.spec)}
    on_flash |= {*rows_on_flash(recipe.spec)} if recipe.rows_on_flash else set()
    entries: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for role, values in weights.items():
        if role.endswith(".weight") and {role, unit_role(role, recipe.spec)} & on_flash:
            continue
        chosen = resident_format(role, recipe.format) if values.ndim == 2 else None
        entries.append({"role": role, "format": chosen, "shape": list(values.shape)})
        arrays[role] = (
            plugins.load("coldpress.runtime.quantization", Format, chosen).encode(values) if chosen else values
        )
    save_file(arrays, path / RESIDENT_FILE)
    return entries


def resident_format(role: str, artifact_format: str) -> str | None:
    """Returns the format of a resident matrix, None if it stays float32."""
    if role == "embed_positions.weight" or role.endswith((".router.weight", ".shared_expert_gate.weight")):
        return None
    if role in ("embed_tokens.weight", "lm_head.weight"):
        return "fp16" if artifact_format == "fp16" else "int8_group32"
    return artifact_format


def write_predictors(path: Path, recipe: Recipe, random: np.random.Generator) -> list[dict[str, Any]]:
    """Writes predictors.safetensors where the method needs it and returns the manifest's list."""
    if recipe.method != "predictor":
        return []
    rank, spec = recipe.predictor_rank, recipe.spec
    plugin = plugins.load("coldpress.runtime.quantization", Format, recipe.predictor_format)
    arrays: dict[str, np.ndarray] = {}
    layers = predicted_layers(recipe)
    for layer in layers:
        shapes = (rank, spec.hidden_size), (num_units("neuron", spec), rank)
        given = recipe.predictors[layer] if recipe.predictors else [random.normal(0, 0.2, shape) for shape in shapes]
        for name, values, shape in zip(("fc1", "fc2"), given, shapes, strict=True):
            assert values.shape == shape
            arrays[f"{layer}.{name}"] = plugin.encode(values)
    save_file(arrays, path / PREDICTORS_FILE)
    entry = {"rank": rank, "format": recipe.predictor_format, "threshold": 0.1}
    return [{"layer": layer, **entry} for layer in layers]


def predicted_layers(recipe: Recipe) -> list[int]:
    """Returns the layers that have a predictor if the method uses predictors."""
    return list(range(recipe.spec.num_hidden_layers)) if recipe.predictors is None else sorted(recipe.predictors)


def _manifest(
    path: Path,
    recipe: Recipe,
    families: tuple[Any, ...],
    sections: list[dict[str, Any]],
    tables: list[dict[str, Any]],
    resident: list[dict[str, Any]],
    predictors: list[dict[str, Any]],
    pinned: Mapping[tuple[int, str], np.ndarray],
) -> dict[str, Any]:
    codec = plugins.load("coldpress.runtime.quantization", Format, recipe.format)
    return {
        "format": {"name": "coldpress", "major": 2, "minor": 0},
        "features": _features(recipe, families, resident + tables, sections),
        "compiler_version": "0.1.0",
        "model": recipe.spec.model_dump(mode="json"),
        "source": {"name": "test", "source": "local", "revision": None, "license": None, "weights_sha256": "0" * 64},
        "device": small_device(recipe.page_bytes).model_dump(mode="json"),
        "files": files_of(path),
        "flash": {
            "size_bytes": (path / FLASH_FILE).stat().st_size,
            "page_bytes": recipe.page_bytes,
            "sections": sections,
            **({"tables": tables} if tables else {}),
        },
        "families": [
            {
                "family": family,
                "format": recipe.format,
                "slices": [piece.model_dump() for piece in slices(family, recipe.spec)],
                "unit_bytes": sum(
                    count * codec.nbytes(length)
                    for count, length in (slice_shape(piece, recipe.spec) for piece in slices(family, recipe.spec))
                ),
            }
            for family in families
        ],
        "resident": resident,
        "predictors": predictors,
        "plans": [_plan(path, recipe, families, sections, tables, pinned)],
        "inputs": {},
        "byte_order": "little",
    }


def _features(
    recipe: Recipe, families: tuple[Any, ...], resident: list[dict[str, Any]], sections: list[dict[str, Any]]
) -> dict[str, list[str]]:
    of_sections = {section["format"] for section in sections if "format" in section}
    stored = {recipe.format} | {entry["format"] for entry in resident if entry["format"]} | of_sections
    formats = sorted({name for unit in stored for name in unit.split("+")})
    required = [f"family.{family}" for family in families] + [f"format.{name}" for name in formats]
    required += ["layer-formats"] if of_sections else []
    required += ["row-tables"] if recipe.rows_on_flash and rows_on_flash(recipe.spec) else []
    required += ["slice-formats"] if any("+" in name for name in stored) else []
    required += sorted(features_of_model(recipe.spec))
    optional = [f"cache.{recipe.cache}", f"selector.{recipe.method}"]
    return {"required": ["crc32c-pages", *required], "optional": optional}


def _plan(
    path: Path,
    recipe: Recipe,
    families: tuple[Any, ...],
    sections: list[dict[str, Any]],
    tables: list[dict[str, Any]],
    pinned: Mapping[tuple[int, str], np.ndarray],
) -> dict[str, Any]:
    unit_bytes = {
        (layer, section["family"]): section["unit_bytes"]
        for section in sections
        for layer in range(section["first_layer"], section["last_layer"] + 1)
    }
    predicted = predicted_layers(recipe) if recipe.method == "predictor" else range(recipe.spec.num_hidden_layers)
    parts = [
        {
            "layer": layer,
            "family": family,
            "density": recipe.density if layer in predicted else used_share(family, recipe.spec),
            "num_pinned": int(pinned[layer, family].size),
            "cache_slots": round(recipe.slots_share * num_units(family, recipe.spec)),
        }
        for layer, family in unit_keys(families, recipe.spec)
    ]
    plan = {
        "name": "test",
        "method": recipe.method,
        "options": dict(recipe.options),
        "arrays": [
            {"layer": part["layer"], "family": part["family"], "name": name}
            | {"dtype": array.dtype.name, "shape": array.shape}
            for part in parts
            for name, array in kept(recipe.method, num_units(part["family"], recipe.spec), recipe.density).items()
        ],
        "cache": recipe.cache,
        "context_length": recipe.context_length,
        "resident_bytes": sum(array.nbytes for array in load_file(path / RESIDENT_FILE).values()),
        "predictor_bytes": _predictor_bytes(path),
        "kv_cache": recipe.kv_cache,
        "kv_cache_bytes": kv_cache_bytes(recipe.spec, recipe.context_length, recipe.kv_cache),
        "read_buffer_bytes": max(
            recipe.read_buffer_bytes,  # at least the largest unit with the pages that it touches
            (-(-max(unit_bytes.values()) // recipe.page_bytes) + 1) * recipe.page_bytes,
        ),
        "collapse_gap_bytes": recipe.collapse_gap_bytes,
        "queue_depth": 8,
        "parts": parts,
    }
    slots = sum(
        (part["num_pinned"] + part["cache_slots"]) * unit_bytes[part["layer"], part["family"]] for part in parts
    )
    fixed = sum(plan[name] for name in ("resident_bytes", "predictor_bytes", "kv_cache_bytes", "read_buffer_bytes"))
    layout, arrays = [Section(**section) for section in sections], [SelectorArray(**array) for array in plan["arrays"]]
    image = layout, [RowTable(**table) for table in tables], (path / FLASH_FILE).stat().st_size, recipe.page_bytes
    bookkeeping = counted_bytes(recipe.spec, *image, arrays, {recipe.cache})
    return plan | {"dram_budget_bytes": fixed + slots + bookkeeping}


def _predictor_bytes(path: Path) -> int:
    file = path / PREDICTORS_FILE
    return sum(array.nbytes for array in load_file(file).values()) if file.exists() else 0


def files_of(path: Path) -> list[dict[str, Any]]:
    """Returns the manifest's list of files, from the files in the folder."""
    found = sorted(file for file in path.rglob("*") if file.is_file() and file != path / MANIFEST_FILE)
    return [
        {
            "path": file.relative_to(path).as_posix(),
            "size_bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in found
    ]


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes manifest.json with its digest in the second line."""
    body = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    line = f'  "body_sha256": "{hashlib.sha256(body.encode()).hexdigest()}",\n'
    (path / MANIFEST_FILE).write_text("{\n" + line + body.removeprefix("{\n"), encoding="utf-8")


def change_manifest(path: Path, change: Callable[[dict[str, Any]], Any], relist: bool = False) -> None:
    """Edits the manifest in place and updates its digest; `relist` first updates its list of files."""
    manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    del manifest["body_sha256"]
    if relist:
        manifest["files"] = files_of(path)
    change(manifest)
    write_manifest(path, manifest)


def change_arrays(path: Path, name: str, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Edits a tensor file in place and updates the manifest's digests."""
    arrays = {key: value.copy() for key, value in load_file(path / name).items()}
    change(arrays)
    save_file(arrays, path / name)
    change_manifest(path, lambda manifest: None, relist=True)


def refuse(path, kind, *words):
    """Checks that opening the artifact raises `kind`, that the text names all `words`, and that no file stays open."""
    before = open_descriptors(path)
    with pytest.raises(ArtifactError) as caught:
        open_artifact(path)
    assert caught.type is kind, caught.value
    for word in words:
        assert word in str(caught.value)
    assert "expected" in str(caught.value)
    assert open_descriptors(path) == before


def open_descriptors(path: Path, collect: bool = False) -> int:
    """Returns the number of this process's descriptors of `path` and the files in it.

    Other descriptors do not count, since threads may close them at any time. `collect` first frees the artifacts that
    other tests have left unused.
    """
    if collect:
        gc.collect()
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's, or one that a thread has just closed
            found += Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(path.resolve())
    return found


def add_draft_model(path: Path, draft: Path, draft_tokens: int = 4, certainty: float = 0.0) -> int:
    """Puts the artifact `draft` into the artifact `path` as its draft model, and DRAM for it into every plan; returns
    its bytes."""
    shutil.copytree(draft, path / DRAFT_FOLDER)
    manifest = open_artifact(draft).manifest
    needed = units_whole_bytes(manifest, manifest.plans[0])
    own = {"draft": "model", "draft_tokens": draft_tokens, "draft_bytes": needed, "draft_certainty": certainty}

    def change(changed: dict[str, Any]) -> None:
        for plan in changed["plans"]:
            plan.update(own, dram_budget_bytes=plan["dram_budget_bytes"] + needed)
        changed["features"]["optional"] = sorted({*changed["features"]["optional"], "draft.model"})

    change_manifest(path, change, relist=True)
    return needed
