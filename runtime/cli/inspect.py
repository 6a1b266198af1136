"""Describes an artifact, as text and as data: model, source, files, families, plans.

Reads only the manifest and, of a mixture, what calibration found about its experts.
"""

import os
from collections import Counter
from typing import Any

from coldpress.runtime.artifact.reader import Artifact, load_curve
from coldpress.runtime.dram.bookkeeping import bookkeeping_bytes
from coldpress.runtime.dram.budget import least_budget_bytes, used_bytes, whole_bytes
from coldpress.runtime.dram.experts import warning
from coldpress.runtime.quantities import show_bytes, table
from coldpress.schemas.errors import clipped, printable
from coldpress.schemas.experts import ExpertCurve
from coldpress.schemas.families import slice_formats
from coldpress.schemas.layout import Plan, placed_parts
from coldpress.schemas.manifest import MANIFEST_FILE, FamilyFormat, Manifest
from coldpress.schemas.model import ModelSpec


def describe(artifact: Artifact) -> dict[str, Any]:
    """Returns a summary as JSON-ready data; byte counts are exact."""
    manifest = artifact.manifest
    curve = load_curve(artifact)
    files = {entry.path: entry.size_bytes for entry in manifest.files}
    files[MANIFEST_FILE] = os.stat(MANIFEST_FILE, dir_fd=artifact.folder.descriptor).st_size
    return {
        "artifact": artifact.path,
        "manifest_sha256": artifact.sha256,
        "format": manifest.format.model_dump(),
        "compiler_version": manifest.compiler_version,
        "source": manifest.source.model_dump(),
        "model": manifest.model.model_dump(mode="json"),
        "device": manifest.device.name,
        "files": files,
        "artifact_bytes": sum(files.values()),
        "flash_bytes": manifest.flash.size_bytes,
        "page_bytes": manifest.flash.page_bytes,
        "families": [_family(manifest, entry) for entry in manifest.families],
        "tables": [{**table.model_dump(), "total_bytes": table.length_bytes} for table in manifest.flash.tables],
        "num_predictors": len(manifest.predictors),
        "plans": [_plan(manifest, plan) for plan in manifest.plans],
        "experts": curve and curve.model_dump(mode="json"),
        "warnings": _warnings(manifest, curve),
        "skipped_plans": list(artifact.skipped_plans),
        "inputs": manifest.inputs,
    }


def _warnings(manifest: Manifest, curve: ExpertCurve | None) -> list[str]:
    if curve is None:
        return []
    found = ((plan, warning(curve, plan, manifest.model, manifest.flash.sections)) for plan in manifest.plans)
    return [f"{plan.title}: {words}" for plan, words in found if words]


def _family(manifest: Manifest, entry: FamilyFormat) -> dict[str, Any]:
    sections = [section for section in manifest.flash.sections if section.family == entry.family]
    formats = {layer: name for (layer, family), name in sorted(manifest.unit_formats.items()) if family == entry.family}
    return {
        "family": entry.family,
        "format": entry.format,
        "slices": [f"{piece.role} {piece.axis}" for piece in entry.slices],
        "unit_bytes": entry.unit_bytes,
        "num_sections": len(sections),
        "layers_per_section": max(len(section.layers) for section in sections),
        "num_units": sum(section.num_units * len(section.layers) for section in sections),
        "total_bytes": sum(section.length_bytes for section in sections),
        "other_formats": {str(layer): name for layer, name in formats.items() if name != entry.format},
    }


def _plan(manifest: Manifest, plan: Plan) -> dict[str, Any]:
    placed = placed_parts(plan, manifest.flash.sections)
    names = "name method cache context_length dram_budget_bytes resident_bytes predictor_bytes kv_cache kv_cache_bytes"
    return {name: getattr(plan, name) for name in names.split()} | {
        "read_buffer_bytes": plan.read_buffer_bytes,
        "preload_buffer_bytes": plan.preload_buffer_bytes,
        "routing": plan.routing,
        "draft": plan.draft,
        "draft_tokens": plan.draft_tokens,
        "bookkeeping_bytes": bookkeeping_bytes(manifest),
        "least_budget_bytes": least_budget_bytes(manifest, plan),
        "whole_model_bytes": whole_bytes(manifest, plan),
        "used_bytes": used_bytes(manifest, plan),
        "pinned_bytes": sum(part.num_pinned * section.unit_bytes for part, section in placed),
        "cache_bytes": sum(part.cache_slots * section.unit_bytes for part, section in placed),
        "density": {family: _mean_density(plan, family) for family in (entry.family for entry in manifest.families)},
    }


def _mean_density(plan: Plan, family: str) -> float:
    densities = [part.density for part in plan.parts if part.family == family]
    return sum(densities) / len(densities)


def render(summary: dict[str, Any], spec: ModelSpec) -> str:
    source, form = summary["source"], summary["format"]
    origin = source["source"] + (f" at {source['revision']}" if source["revision"] else "")
    heads = f"{spec.num_attention_heads} heads, {spec.num_key_value_heads} of keys"
    shape = (
        f"{spec.num_hidden_layers} layers, hidden {spec.hidden_size}, intermediate {spec.intermediate_size}, {heads}"
    )
    if spec.is_mixture:
        shape += f", {spec.num_experts_per_tok} of {spec.num_experts} experts a token"
    facts = [
        ("model", f"{source['name']} ({spec.model_type}, {spec.hidden_act}; {shape})"),
        ("source", f"{origin}, licence {source['license'] or 'not stated'}"),
        ("device", summary["device"]),
        ("format", f"{form['name']} {form['major']}.{form['minor']}, compiler {summary['compiler_version']}"),
        ("identity", f"sha256 of {MANIFEST_FILE} {summary['manifest_sha256']}"),
        ("size", f"{show_bytes(summary['artifact_bytes'])} ({summary['artifact_bytes']} bytes)"),
    ]
    return "\n\n".join(
        [
            "\n".join(f"{name:10}{printable(clipped(value, 500))}" for name, value in facts),
            "files\n" + table([(name, str(size)) for name, size in summary["files"].items()], "  "),
            "on flash\n" + table(_family_rows(summary["families"]), "  "),
            *map(_read_by_row, summary["tables"]),
            "plans\n" + table(_plan_rows(summary["plans"]), "  "),
            *summary["skipped_plans"],
            *map(printable, summary["warnings"]),
        ]
    )


def _read_by_row(entry: dict[str, Any]) -> str:
    rows = f"{entry['num_rows']} rows of {entry['row_bytes']} bytes in {entry['format']}"
    return f"read by row from flash\n  {entry['role']}: {rows}, {show_bytes(entry['total_bytes'])}"


def _family_rows(families: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    head = ("family", "format", "units", "unit bytes", "layers", "total", "a unit is")
    return [head] + [
        (
            entry["family"],
            _formats(entry),
            str(entry["num_units"]),
            str(entry["unit_bytes"]),
            str(entry["layers_per_section"]),
            show_bytes(entry["total_bytes"]),
            ", ".join(entry["slices"]),
        )
        for entry in families
    ]


def _formats(entry: dict[str, Any]) -> str:
    others = entry["other_formats"].values()
    size = max((len(slice_formats(name)) for name in others), default=1)
    counts: Counter[str] = Counter(one for name in others for one in slice_formats(name, size))
    kind = "layers" if size == 1 else "matrices"
    found = (f"{count} {kind} {name}" for name, count in sorted(counts.items()) if name != entry["format"])
    return ", ".join([entry["format"], *found])


def _plan_rows(plans: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    head = ("plan", "method", "cache", "context", "budget", "resident", "KV cache", "pinned", "slots", "density")
    return [head] + [
        (
            printable(clipped(plan["name"], 40)),
            plan["method"],
            plan["cache"],
            str(plan["context_length"]),
            *(show_bytes(plan[f"{name}_bytes"]) for name in ("dram_budget", "resident", "kv_cache", "pinned", "cache")),
            " ".join(f"{density:.3f}" for density in plan["density"].values()),
        )
        for plan in plans
    ]
