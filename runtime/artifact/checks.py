"""Checks what a manifest must satisfy beyond its schema: arithmetic only, nothing is opened and nothing allocated.

Each function refuses with an error that names the field. The order of `check_manifest` matters: later checks loop over
counts that earlier ones have bounded (a manifest may claim 10^9 layers).
"""

from collections.abc import Callable
from typing import Any

from coldpress.runtime import plugins
from coldpress.runtime.artifact import plan_checks, safe_files, strict_json
from coldpress.runtime.artifact.contents import model_tensors, nbytes, unit_nbytes
from coldpress.runtime.artifact.errors import (
    FeatureError,
    FileNameError,
    ModelError,
    PlanError,
    SchemaError,
    SectionError,
    VersionError,
    short,
)
from coldpress.runtime.routers import router_class
from coldpress.schemas import families as arithmetic
from coldpress.schemas.errors import ColdpressError, clipped
from coldpress.schemas.families import JOINT, FamilyName, UnitFormat, slice_formats, unit_format
from coldpress.schemas.layout import SECTION_ALIGN_BYTES, Plan, Section
from coldpress.schemas.manifest import (
    FLASH_FILE,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FORMAT_NAME,
    LAYER_FORMATS,
    MANIFEST_FILE,
    PAGE_CHECKSUMS,
    PREDICTORS_FILE,
    RESIDENT_FILE,
    ROW_TABLES,
    SLICE_FORMATS,
    TABLES_FILE,
    FamilyFormat,
    Manifest,
    features_of,
)
from coldpress.schemas.model import LATENT_FIELDS, MLP_ROLES, MODEL_FEATURES, ModelSpec, role_shape, rows_on_flash

NEWER = "use a newer runtime, or rebuild the artifact without it"
SPLIT_FORMATS = ("format.int4_2_2", "format.int4_3_1", "format.int8_4_4")
"""Features of artifacts whose codes were cut into high and low bits."""


def check_version(data: Any) -> int:
    """Checks format name, major version and required features, before all else is trusted; returns the minor version.
    Raises `SchemaError`, `VersionError` or `FeatureError` naming both versions, or the feature."""
    form = data.get("format") if strict_json.is_object(data) else None
    if not strict_json.is_object(form) or not all(type(form.get(key)) is int for key in ("major", "minor")):
        raise SchemaError(MANIFEST_FILE, "format", short(form), "an object of name, major and minor")
    if form.get("name") != FORMAT_NAME:
        raise VersionError(MANIFEST_FILE, "format.name", short(form.get("name")), f"'{FORMAT_NAME}'")
    if form["major"] != FORMAT_MAJOR:
        raise VersionError(
            MANIFEST_FILE,
            "the artifact's format version",
            f"{form['major']}.{form['minor']}",
            f"{FORMAT_MAJOR}.x (this runtime reads up to {FORMAT_MAJOR}.{FORMAT_MINOR})",
            "use a runtime of the artifact's major version, or rebuild the artifact",
        )
    _check_features(data.get("features"))
    return form["minor"]


def _check_features(features: Any) -> None:
    required = features.get("required") if strict_json.is_object(features) else None
    if not strict_json.is_array(required) or not all(isinstance(name, str) for name in required):
        raise SchemaError(MANIFEST_FILE, "features.required", short(required), "a list of names")
    known = known_features()
    for name in required:
        if name in SPLIT_FORMATS:
            expected = "formats whose codes are whole: this runtime no longer has codes in two planes"
            raise FeatureError(MANIFEST_FILE, "a required feature", short(name), expected, "build it again")
        if name not in known:
            expected = f"one of {', '.join(known)} (format {FORMAT_MAJOR}.{FORMAT_MINOR})"
            raise FeatureError(MANIFEST_FILE, "a required feature", short(name), expected, NEWER)


def known_features() -> tuple[str, ...]:
    families = [f"family.{name}" for name in arithmetic.FAMILIES]
    formats = [f"format.{name}" for name in plugins.names("coldpress.runtime.quantization")]
    return (PAGE_CHECKSUMS, *families, *formats, LAYER_FORMATS, SLICE_FORMATS, ROW_TABLES, *MODEL_FEATURES)


def servable_plans(manifest: Manifest) -> tuple[tuple[Plan, ...], tuple[str, ...]]:
    """Returns the plans that this runtime can serve, and one sentence about each plan that it cannot.

    A plan can be served if this runtime has its selector, its cache, their options, its draft and its routing. Raises
    `FeatureError` if no plan can be served; the text has the unknown names and the known ones.
    """
    lacking = [_lacking(plan) for plan in manifest.plans]
    plans = tuple(plan for plan, names in zip(manifest.plans, lacking, strict=True) if not names)
    if not plans:
        needed = ", ".join(dict.fromkeys(name for names in lacking for name in names))
        expected = f"the selectors {_known('sparsity')}, the caches {_known('cache')} and the drafts {_known('drafts')}"
        raise FeatureError(MANIFEST_FILE, "each of plans", f"in need of {needed}", expected, NEWER)
    return plans, tuple(
        f"plan {short(plan.name)} is left out: this runtime does not have {clipped(' and '.join(names))}; use "
        "a newer one"
        for plan, names in zip(manifest.plans, lacking, strict=True)
        if names
    )


def _lacking(plan: Plan) -> list[str]:
    wanted = [("selector", plan.method, "sparsity"), ("cache", plan.cache, "cache")]
    optional = ("draft", plan.draft, "drafts"), ("routing", plan.routing, "routing")
    wanted += [(kind, name, folder) for kind, name, folder in optional if name is not None]
    found = [
        f"the {kind} {short(name)}"
        for kind, name, folder in wanted
        if name not in plugins.names(f"coldpress.runtime.{folder}")
    ]
    given = {"selector": plan.options, "cache": plan.cache_options}
    for kind, name, folder in wanted:
        if name in plugins.names(f"coldpress.runtime.{folder}"):
            known = plugins.load_class(f"coldpress.runtime.{folder}", plugins.PluginBase, name).OPTIONS.model_fields
            unknown = [option for option in given.get(kind, {}) if option not in known]
            found += [f"the option {short(option)} of the {kind} '{name}'" for option in unknown]
    return found


def _known(folder: str) -> str:
    return ", ".join(plugins.names(f"coldpress.runtime.{folder}"))


def check_manifest(manifest: Manifest) -> None:
    """Checks the whole manifest, and those of its plans that this runtime can serve. Raises `FieldError`, by cause."""
    plans, _ = servable_plans(manifest)
    _check_file_list(manifest)
    _check_experts(manifest)
    _check_head_norms(manifest)
    _check_sections(manifest)
    families = [entry.family for entry in manifest.families]
    expected = arithmetic.missing_for_decoder(families, manifest.model)
    if expected:
        raise SectionError(MANIFEST_FILE, "families", short(families), expected)
    _check_model(manifest.model)
    _check_predictors(manifest)
    _check_resident(manifest)
    _check_listed_features(manifest)
    names = [plan.name for plan in manifest.plans]
    if len(set(names)) != len(names):
        raise PlanError(MANIFEST_FILE, "plans", f"a list with names {short(names)}", "distinct names")
    facts = plan_checks.Facts(manifest.model_copy(update={"plans": plans}))
    for plan in plans:
        plan_checks.check_plan(facts, plan, f"plans[{names.index(plan.name)}]")


def _check_listed_features(manifest: Manifest) -> None:
    """Requires that the manifest lists every feature that its parts need, so that an old runtime refuses at once."""
    parts = manifest.model, manifest.families, manifest.flash, manifest.resident, manifest.plans
    for name in features_of(*parts).required:
        if name not in manifest.features.required:
            raise FeatureError(MANIFEST_FILE, "features.required", f"a list without {name}", "all that plans need")


def _check_file_list(manifest: Manifest) -> None:
    names = [entry.path for entry in manifest.files]
    safe_files.check_names([*names, MANIFEST_FILE], MANIFEST_FILE)
    needed = [FLASH_FILE, RESIDENT_FILE, TABLES_FILE] + [PREDICTORS_FILE] * bool(manifest.predictors)
    for name in needed:
        if name not in names:
            raise FileNameError(MANIFEST_FILE, "files", f"a list without {name}", "a list with it")


def _check_model(spec: ModelSpec) -> None:
    def require(condition: bool, field: str, expected: str) -> None:
        if not condition:
            raise ModelError(MANIFEST_FILE, f"model.{field}", short(getattr(spec, field)), expected)

    heads = spec.num_attention_heads
    require(heads % spec.num_key_value_heads == 0, "num_key_value_heads", f"a divisor of {heads} attention heads")
    require(spec.rotary_dim <= spec.head_dim, "rotary_dim", f"at most head_dim, {spec.head_dim}")
    rotary = spec.position == "rotary"
    require(spec.rotary_dim % 2 == 0, "rotary_dim", "even")
    require(
        (spec.rotary_dim > 0) == rotary, "rotary_dim", f"{'positive' if rotary else '0'} with {spec.position} positions"
    )
    _check_router(spec)
    _check_latents(spec, require)
    require(spec.rotary_scaling > 0, "rotary_scaling", "positive")
    shared, before = spec.residual == "parallel_shared", spec.norm_placement == "before"
    require(before or not shared, "residual", f"another value with norms {spec.norm_placement} the blocks")
    for token in (spec.bos_token_id, *spec.eos_token_ids):
        field = "bos_token_id" if token == spec.bos_token_id else "eos_token_ids"
        require(token is None or token < spec.vocab_size, field, f"below vocab_size, {spec.vocab_size}")


def _check_latents(spec: ModelSpec, require: Callable[[bool, str, str], None]) -> None:
    if not spec.is_latent:
        for name in LATENT_FIELDS:
            require(getattr(spec, name) == 0, name, "0 without kv_lora_rank")
        return
    require(spec.qk_nope_head_dim > 0, "qk_nope_head_dim", "a positive size with kv_lora_rank")
    require(spec.v_head_dim > 0, "v_head_dim", "a positive size with kv_lora_rank")
    require(spec.num_key_value_heads == 1, "num_key_value_heads", "1 with kv_lora_rank")
    expected = spec.kv_lora_rank + spec.rotary_dim
    require(spec.head_dim == expected, "head_dim", f"{expected}, kv_lora_rank and rotary_dim")
    require(spec.norm == "rms_norm", "norm", "rms_norm with kv_lora_rank")


def _check_router(spec: ModelSpec) -> None:
    try:
        router = router_class(spec)
    except ColdpressError as error:
        raise ModelError(
            MANIFEST_FILE,
            "model.router_scores",
            short(spec.router_scores),
            f"one of {_known('routers')} with its options",
            NEWER,
        ) from error
    flaw = router.flaw(spec)
    if flaw is not None:
        raise ModelError(MANIFEST_FILE, f"model.{flaw[0]}", short(getattr(spec, flaw[0])), flaw[1])


def _check_experts(manifest: Manifest) -> None:
    spec = manifest.model
    if not spec.is_mixture:
        return
    families = [entry.family for entry in manifest.families]
    kept = [role for role in arithmetic.resident_roles(families, spec) if role in MLP_ROLES]
    if "down_proj" in kept:
        expected = "one that holds down_proj: a mixture has it on flash"
        raise SectionError(MANIFEST_FILE, "families", short(families), expected)
    num_kept = len(kept) * spec.num_experts * (spec.num_hidden_layers - len(spec.dense_layers))
    if num_kept > len(manifest.resident):  # bounds the loops over experts
        expected = f"at most {len(manifest.resident)}, the number of resident tensors, of all layers and roles"
        raise SectionError(MANIFEST_FILE, "model.num_experts", str(spec.num_experts), expected)


def _check_head_norms(manifest: Manifest) -> None:
    """Requires that norms of single heads can all be listed; bounds the loops over heads."""
    spec = manifest.model
    if spec.qk_norm != "heads":
        return
    num_norms = (spec.num_attention_heads + spec.num_key_value_heads) * spec.num_hidden_layers
    if num_norms > len(manifest.resident):
        expected = f"at most {len(manifest.resident)}, the number of resident tensors, of all layers and keys"
        raise SectionError(MANIFEST_FILE, "model.num_attention_heads", str(spec.num_attention_heads), expected)


def _check_sections(manifest: Manifest) -> None:
    """Requires each layer and family in exactly one section; sections aligned, in order, without holes or overlaps."""
    flash, spec = manifest.flash, manifest.model
    families = [entry.family for entry in manifest.families]
    if len(set(families)) != len(families) or not families:
        raise SectionError(MANIFEST_FILE, "families", short(families), "one entry for each of the families")
    _check_page(manifest)
    if spec.num_hidden_layers > len(manifest.resident):  # each layer has resident tensors; bounds the loops over layers
        expected = f"at most {len(manifest.resident)}, the number of resident tensors"
        raise SectionError(MANIFEST_FILE, "model.num_hidden_layers", str(spec.num_hidden_layers), expected)
    known = {entry.family: _checked_family(manifest, index) for index, entry in enumerate(manifest.families)}
    having = set(arithmetic.unit_keys(families, spec))
    seen: set[tuple[int, FamilyName]] = set()
    end = 0
    for index, section in enumerate(flash.sections):
        field = f"flash.sections[{index}]"
        inside = section.first_layer <= section.last_layer < spec.num_hidden_layers and section.family in known
        layers = section.layers if inside else range(0)
        keys: set[tuple[int, FamilyName]] = {(layer, section.family) for layer in layers}
        if not keys or keys & seen or not keys <= having:
            expected = f"each layer below {spec.num_hidden_layers} that has units, and family of {families} once"
            raise SectionError(MANIFEST_FILE, field, section.name, expected)
        seen |= keys
        _check_format(section, field, known[section.family])
        _check_section(section, field, end, known[section.family], spec)
        end = section.offset_bytes + section.length_bytes
    if len(seen) != len(having):
        expected = f"{len(having)} layers with units of {len(families)} families"
        raise SectionError(MANIFEST_FILE, "flash.sections", f"a list that covers {len(seen)} of them", expected)
    end = _checked_tables(manifest, end)
    last = -(-end // SECTION_ALIGN_BYTES) * SECTION_ALIGN_BYTES
    if not end <= flash.size_bytes <= last or flash.size_bytes % flash.page_bytes:
        expected = f"whole pages of {flash.page_bytes}, from {end} to {last}"
        raise SectionError(MANIFEST_FILE, "flash.size_bytes", str(flash.size_bytes), expected)


def _check_format(section: Section, field: str, entry: FamilyFormat) -> None:
    """Requires of a section's own format that it is another one than its family's, or one for each slice."""
    if section.format is None:
        return
    known, count = plugins.names("coldpress.runtime.quantization"), len(entry.slices)
    names = slice_formats(section.format, count)
    fits = len(names) == count and {*names} <= {*known} and section.format == unit_format(names)
    if not fits or section.format == entry.format:
        expected = f"one of {', '.join(name for name in known if name != entry.format)}"
        if count > 1:
            expected += f", or {count} of {', '.join(known)} with {JOINT} between, not all the same"
        found = f"{short(section.format)} with {entry.format} in families"
        raise SectionError(MANIFEST_FILE, f"{field}.format", found, expected)


def _check_section(section: Section, field: str, end: int, entry: FamilyFormat, spec: ModelSpec) -> None:
    """Checks the place and sizes of one section; the section before it ends at byte `end`."""
    unit_bytes = _unit_bytes(entry, section.format or entry.format, spec)
    expected = {
        "offset_bytes": -(-end // SECTION_ALIGN_BYTES) * SECTION_ALIGN_BYTES,
        "unit_bytes": unit_bytes,
        "stride_bytes": unit_bytes * len(section.layers),
        "num_units": arithmetic.num_units(section.family, spec),
    }
    for name, value in expected.items():
        if getattr(section, name) != value:
            raise SectionError(MANIFEST_FILE, f"{field}.{name}", str(getattr(section, name)), str(value))


def _checked_tables(manifest: Manifest, end: int) -> int:
    """Checks the places and sizes of the tables; returns where the last one ends, or `end`, where the sections do."""
    spec, allowed = manifest.model, rows_on_flash(manifest.model)
    for index, table in enumerate(manifest.flash.tables):
        field = f"flash.tables[{index}]"
        if table.role not in allowed[index:]:
            expected = " and ".join(allowed[index:]) or "no more matrices that are read by row in this model"
            raise SectionError(MANIFEST_FILE, f"{field}.role", short(table.role), expected)
        known = plugins.names("coldpress.runtime.quantization")
        if table.format not in known:
            raise SectionError(MANIFEST_FILE, f"{field}.format", short(table.format), f"one of {', '.join(known)}")
        num_rows, length = role_shape(spec, table.role)
        expected = {
            "offset_bytes": -(-end // SECTION_ALIGN_BYTES) * SECTION_ALIGN_BYTES,
            "num_rows": num_rows,
            "row_bytes": nbytes(table.format, length),
        }
        for name, value in expected.items():
            if getattr(table, name) != value:
                raise SectionError(MANIFEST_FILE, f"{field}.{name}", str(getattr(table, name)), str(value))
        end = table.offset_bytes + table.length_bytes
    return end


def _check_page(manifest: Manifest) -> None:
    page_bytes = manifest.flash.page_bytes
    if page_bytes & (page_bytes - 1) or not 512 <= page_bytes <= SECTION_ALIGN_BYTES:
        expected = f"a power of two from 512 to {SECTION_ALIGN_BYTES}"
        raise SectionError(MANIFEST_FILE, "flash.page_bytes", str(page_bytes), expected)
    listed = next(entry.size_bytes for entry in manifest.files if entry.path == FLASH_FILE)
    if listed != manifest.flash.size_bytes:
        raise SectionError(MANIFEST_FILE, "flash.size_bytes", str(manifest.flash.size_bytes), f"{listed}, as in files")


def _checked_family(manifest: Manifest, index: int) -> FamilyFormat:
    entry, spec = manifest.families[index], manifest.model
    known = plugins.names("coldpress.runtime.quantization")
    if entry.format not in known:
        raise SectionError(MANIFEST_FILE, f"families[{index}].format", entry.format, f"one of {', '.join(known)}")
    slices = arithmetic.slices(entry.family, spec)
    if entry.slices != slices:
        found = [f"{piece.role} {piece.axis}" for piece in entry.slices]
        expected = ", ".join(f"{piece.role} {piece.axis}" for piece in slices)
        raise SectionError(MANIFEST_FILE, f"families[{index}].slices", short(found), expected)
    size = _unit_bytes(entry, entry.format, spec)
    if entry.unit_bytes != size:
        raise SectionError(MANIFEST_FILE, f"families[{index}].unit_bytes", str(entry.unit_bytes), str(size))
    return entry


def _unit_bytes(entry: FamilyFormat, name: UnitFormat, spec: ModelSpec) -> int:
    return unit_nbytes(name, [arithmetic.slice_shape(piece, spec) for piece in entry.slices])


def _check_predictors(manifest: Manifest) -> None:
    layers = [entry.layer for entry in manifest.predictors]
    num_layers = manifest.model.num_hidden_layers
    if layers != sorted(set(layers)) or (layers and layers[-1] >= num_layers):
        expected = f"ascending layers from 0 to {num_layers - 1}, each at most once"
        raise ModelError(MANIFEST_FILE, "predictors", f"for layers {short(layers)}", expected)
    largest = max(manifest.model.hidden_size, manifest.model.intermediate_size)
    known = plugins.names("coldpress.runtime.quantization")
    for index, entry in enumerate(manifest.predictors):
        if entry.format not in known:
            raise ModelError(MANIFEST_FILE, f"predictors[{index}].format", entry.format, f"one of {', '.join(known)}")
        if entry.rank > largest:
            raise ModelError(MANIFEST_FILE, f"predictors[{index}].rank", str(entry.rank), f"at most {largest}")


def _check_resident(manifest: Manifest) -> None:
    required, optional = model_tensors(manifest)
    for table in manifest.flash.tables:
        del required[table.role]
    found = {tensor.role: tensor for tensor in manifest.resident}
    if len(found) != len(manifest.resident):
        raise ModelError(MANIFEST_FILE, "resident", "a list with a role twice", "distinct roles")
    for role in required:
        if role not in found:
            raise ModelError(MANIFEST_FILE, "resident", f"a list without {role}", f"{role} {list(required[role])}")
    for index, tensor in enumerate(manifest.resident):
        shape = required.get(tensor.role) or optional.get(tensor.role)
        if tensor.shape != shape:
            expected = f"{list(shape)}" if shape else "a tensor that this model has"
            raise ModelError(
                MANIFEST_FILE, f"resident[{index}]", f"{short(tensor.role)} {list(tensor.shape)}", expected
            )
        known = plugins.names("coldpress.runtime.quantization")
        if tensor.format is not None and tensor.format not in known:
            raise ModelError(MANIFEST_FILE, f"resident[{index}].format", tensor.format, f"one of {', '.join(known)}")
        if tensor.format is not None and len(tensor.shape) != 2:
            raise ModelError(MANIFEST_FILE, f"resident[{index}].format", tensor.format, "null, as it is not a matrix")
