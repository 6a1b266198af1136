"""Opens an artifact's folder, checks everything that a run depends on, and returns its contents.

This is the only reader of artifacts (schemas/FORMAT.md). The order of the checks is fixed: earlier steps bound the work
of later ones, and no tensor is allocated before its size agrees with the manifest and the real file. `flash.img` is not
read here: every read of it checks the checksums of its pages, and `runtime/artifact/integrity.py` checks all of it.
"""

import hashlib
import logging
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from coldpress.runtime.artifact import checks, contents, safe_files, strict_json, tensor_files
from coldpress.runtime.artifact.errors import (
    DigestError,
    FileKindError,
    FileSizeError,
    IdentityError,
    JsonError,
    NonFiniteError,
    SchemaError,
    TableError,
    short,
)
from coldpress.runtime.plugins import load
from coldpress.runtime.sparsity import Selector
from coldpress.runtime.unit_numbers import number_type
from coldpress.schemas import sealed
from coldpress.schemas.experts import ExpertCurve
from coldpress.schemas.families import FamilyName, FormatName
from coldpress.schemas.layout import Plan, Section
from coldpress.schemas.manifest import (
    EXPERTS_FILE,
    FORMAT_MINOR,
    MANIFEST_FILE,
    PREDICTORS_FILE,
    RESIDENT_FILE,
    TABLES_FILE,
    ArtifactFile,
    Manifest,
)

CONFIG_FILE = "config.json"
"""A file that a checkpoint has, and no artifact."""
EXPERTS_BYTES = 1 << 20
OTHER = "give the path of the artifact with that identity, or copy it again from its source"


@dataclass(frozen=True)
class Predictor:
    """One layer's activation predictor: it predicts unit i where (fc2 · relu(fc1 · x))[i] >= threshold."""

    fc1: np.ndarray
    """uint8 [rank, row_bytes], rows of hidden_size values in `format`."""
    fc2: np.ndarray
    """uint8 [units of `neuron`, row_bytes], rows of rank values in `format`; all rows of one expert, then the next."""
    format: FormatName
    threshold: float


@dataclass(frozen=True, eq=False)
class Artifact:
    """An open artifact whose manifest, file sizes, tensor headers and tables have been checked."""

    path: str
    sha256: str
    """Digest of manifest.json: the artifact's identity."""
    manifest: Manifest
    """Without the plans that this runtime cannot serve."""
    plan_numbers: dict[str, int]
    """Plan name -> its place in the manifest as written, unservable plans included: the tables use these numbers."""
    skipped_plans: tuple[str, ...]
    """One sentence about each plan that this runtime cannot serve."""
    folder: safe_files.Folder
    """Files are opened relative to it; copies of this object share it."""
    tables: dict[str, np.ndarray]

    @cached_property
    def resident(self) -> dict[str, np.ndarray]:
        """Returns role -> array, loaded on first use: float32 of the tensor's shape, or codes uint8 [rows, row_bytes].
        Raises `ArtifactError` if the file is damaged or holds numbers that are not finite."""
        arrays = _load_tensors(self.folder, self.manifest, RESIDENT_FILE)
        _check_finite(RESIDENT_FILE, arrays)
        return {tensor.role: arrays[tensor.role] for tensor in self.manifest.resident}

    @cached_property
    def predictors(self) -> dict[int, Predictor]:
        """Returns layer -> predictor, loaded on first use; layers that use all their units have none. Raises
        `ArtifactError` if the file is damaged."""
        if not self.manifest.predictors:
            return {}
        arrays = _load_tensors(self.folder, self.manifest, PREDICTORS_FILE)
        return {
            entry.layer: Predictor(
                arrays[f"{entry.layer}.fc1"], arrays[f"{entry.layer}.fc2"], entry.format, entry.threshold
            )
            for entry in self.manifest.predictors
        }

    @property
    def page_crc32c(self) -> np.ndarray:
        """Returns the CRC-32C of each page of flash.img, uint32 [pages]."""
        return self.tables["page_crc32c"]

    def order(self, section: Section) -> np.ndarray:
        """Returns the unit id at each flash position, unsigned [num_units] (runtime/unit_numbers.py)."""
        return self.tables[f"order.{section.first_layer}.{section.family}"]

    def rank(self, layer: int, family: FamilyName) -> np.ndarray:
        """Returns unit ids by their claim to DRAM, unsigned [num_units]; a plan pins the first `num_pinned`."""
        return self.tables[f"rank.{layer}.{family}"]

    def selector_arrays(self, plan: Plan, layer: int, family: str) -> dict[str, np.ndarray] | None:
        """Returns the arrays that the selector of `plan` stored for a family of a layer, by name. None if the artifact
        has no plan of that name, or its plan has another selector."""
        for listed in self.manifest.plans:
            if (listed.name, listed.method) == (plan.name, plan.method):
                number = self.plan_numbers[listed.name]
                arrays = [array for array in listed.arrays if (array.layer, array.family) == (layer, family)]
                return {array.name: self.tables[contents.selector_tensor(number, array)] for array in arrays}
        return None

    def entry(self, name: str) -> ArtifactFile:
        """Returns the manifest's entry of a file. Raises `KeyError` if the artifact lists no such file."""
        return _entry(self.manifest, name)

    def open(self, name: str, flags: int = 0) -> int:
        """Opens a listed file, checks its kind and size, and returns its descriptor, which the caller closes."""
        return safe_files.open_file(self.folder, name, self.entry(name).size_bytes, flags)

    def read_bytes(self, name: str, max_bytes: int) -> bytes:
        """Reads a whole listed file of at most `max_bytes`, and checks its digest."""
        data, expected = _read_whole(self.open(name), name, max_bytes), self.entry(name).sha256
        found = hashlib.sha256(data).hexdigest()
        if found != expected:
            raise DigestError(name, "the sha256", found, f"{expected}, as the manifest says")
        return data


def _entry(manifest: Manifest, name: str) -> ArtifactFile:
    for entry in manifest.files:
        if entry.path == name:
            return entry
    raise KeyError(name)


def artifact_folder(path: str | Path) -> Path:
    """Returns the folder of an artifact: `path`, or the one artifact in it if it is the folder of a build. Raises
    `FileKindError` for the folder of a checkpoint, or of builds of several artifacts."""
    path = Path(path)
    if (path / MANIFEST_FILE).is_file() and not (path / MANIFEST_FILE).is_symlink():
        return path
    found = sorted(each for each in path.glob("*.coldpress") if (each / MANIFEST_FILE).is_file())
    if len(found) > 1:
        names = ", ".join(short(each.name) for each in found)
        raise FileKindError(str(path), "the artifact", f"one of {names}", "one artifact", "give the path of one")
    if not found and (path / CONFIG_FILE).is_file():
        remedy = f"build it first: coldpress build {path}"
        raise FileKindError(str(path), "the folder", "that of a checkpoint", "an artifact", remedy)
    return found[0] if found else path


def open_artifact(path: str | Path, identity: str | None = None) -> Artifact:
    """Opens and checks an artifact.

    Checked here: the manifest, the presence, kind and size of every file, the headers of the tensor files, and the
    tables. `resident` and `predictors` are loaded when first used, with their digests.

    Args:
        path: The artifact's folder, or that of its build.
        identity: sha256 that its manifest must have; None takes any.

    Raises:
        ArtifactError: a subclass per cause (runtime/artifact/errors.py); the text names file, field, the value found
            and the value expected.
    """
    path = artifact_folder(path)
    folder = safe_files.open_folder(str(path))
    try:
        opened = safe_files.open_file(folder, MANIFEST_FILE)
        data = _read_whole(opened, MANIFEST_FILE, strict_json.MANIFEST.size_bytes)
        found = hashlib.sha256(data).hexdigest()
        if identity not in (None, found):
            raise IdentityError(MANIFEST_FILE, "the artifact's identity", found, f"{identity}", OTHER)
        manifest = _parse_manifest(data)
        plans, skipped = checks.servable_plans(manifest)
        for entry in manifest.files:
            os.close(safe_files.open_file(folder, entry.path, entry.size_bytes))
        for name in (RESIDENT_FILE, PREDICTORS_FILE)[: 1 + bool(manifest.predictors)]:
            with _checked(folder, manifest, name):
                pass
        tables = _load_tensors(folder, manifest, TABLES_FILE)
        _check_tables(manifest, tables)
        _check_finite(TABLES_FILE, tables)
        numbers = {plan.name: number for number, plan in enumerate(manifest.plans)}
        _check_selector_arrays([(numbers[plan.name], plan) for plan in plans], tables)
    except BaseException:
        folder.close()
        raise
    for sentence in skipped:
        logging.getLogger("coldpress").warning("%s: %s", path, sentence)
    usable = manifest.model_copy(update={"plans": plans})
    # the tables of other plans are freed; `manifest` still has all plans, whose numbers are part of the names
    kept = contents.table_tensors(manifest, {plan.name for plan in plans})
    used = {name: _narrowed(name, tables.pop(name)) for name in kept}
    return Artifact(str(path), found, usable, numbers, skipped, folder, used)


def load_curve(artifact: Artifact) -> ExpertCurve | None:
    """Returns what calibration found of a mixture's experts; None if the artifact does not say. Raises `ArtifactError`
    if the file is damaged, or is not about the model's experts."""
    spec = artifact.manifest.model
    if all(entry.path != EXPERTS_FILE for entry in artifact.manifest.files):
        return None
    try:
        curve = ExpertCurve.model_validate_json(artifact.read_bytes(EXPERTS_FILE, EXPERTS_BYTES))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the content"
        raise SchemaError(EXPERTS_FILE, short(field), short(first["msg"]), "a record of schemas/experts.py") from error
    found = (len(curve.lru_misses), len(curve.static_misses), curve.num_experts_per_tok)
    expected = (spec.num_experts, spec.num_experts, spec.num_experts_per_tok)
    if found != expected:
        raise SchemaError(EXPERTS_FILE, "lengths of both curves, and experts of a token", f"{found}", f"{expected}")
    return curve


def _read_whole(opened: int, name: str, max_bytes: int) -> bytes:
    """Reads a file of at most `max_bytes`, and closes it."""
    try:
        size = os.fstat(opened).st_size
        if size > max_bytes:
            raise FileSizeError(name, "the size", f"{size} bytes", f"at most {max_bytes}")
        data = bytearray(size)
        safe_files.read_exactly(opened, name, memoryview(data), 0)
    finally:
        os.close(opened)
    return bytes(data)


def _parse_manifest(data: bytes) -> Manifest:
    values = strict_json.parse(data, partial(JsonError, MANIFEST_FILE, "the text"), strict_json.MANIFEST)
    opened = sealed.unseal(data)
    if opened.stated not in (None, opened.found):
        expected = f"{opened.found}, the sha256 of all other lines"
        raise DigestError(MANIFEST_FILE, sealed.KEY, f"{opened.stated}", expected)
    minor = checks.check_version(values)
    if opened.stated is None:  # only after the version check: manifests of another version may have no seal
        raise SchemaError(MANIFEST_FILE, "the second line", "another one", f"{sealed.KEY}, the sha256 of all others")
    manifest = _validate(opened.body, drop_unknown=minor > FORMAT_MINOR)
    checks.check_manifest(manifest)
    return manifest


def _validate(data: bytes, drop_unknown: bool) -> Manifest:
    """Returns the manifest as a record, without the fields that a newer minor version has added."""
    try:
        return Manifest.model_validate_json(data, extra="ignore" if drop_unknown else "forbid")
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the text"
        raise SchemaError(
            MANIFEST_FILE, field, short(first["input"]), f"what the schema says ({first['msg']})"
        ) from error


@contextmanager
def _checked(
    folder: safe_files.Folder, manifest: Manifest, name: str
) -> Generator[tuple[int, tensor_files.TensorFile]]:
    """Opens a tensor file, checks its header, and yields descriptor and header."""
    size = _entry(manifest, name).size_bytes
    opened = safe_files.open_file(folder, name, size)
    try:
        header = tensor_files.read_header(opened, name, size)
        expected = {
            RESIDENT_FILE: contents.resident_tensors,
            TABLES_FILE: contents.table_tensors,
            PREDICTORS_FILE: contents.predictor_tensors,
        }[name](manifest)
        header.check_contents(expected, exact=manifest.format.minor <= FORMAT_MINOR)
        yield opened, header
    finally:
        os.close(opened)


def _load_tensors(folder: safe_files.Folder, manifest: Manifest, name: str) -> dict[str, np.ndarray]:
    with _checked(folder, manifest, name) as (opened, header):
        return tensor_files.load(opened, header, _entry(manifest, name).sha256)


def _check_tables(manifest: Manifest, tables: dict[str, np.ndarray]) -> None:
    for section in manifest.flash.sections:
        names = [f"order.{section.first_layer}.{section.family}"]
        for name in names + [f"rank.{layer}.{section.family}" for layer in section.layers]:
            ids = tables[name]
            distinct = np.zeros(section.num_units, bool)
            distinct[ids[(ids >= 0) & (ids < section.num_units)]] = True
            if not distinct.all():
                found = f"without unit {int(np.argmin(distinct))}"
                raise TableError(TABLES_FILE, name, found, f"a permutation of {section.num_units} units")


def _check_selector_arrays(numbered: Iterable[tuple[int, Plan]], tables: dict[str, np.ndarray]) -> None:
    for number, plan in numbered:
        kept = load("coldpress.runtime.sparsity", Selector, plan.method).KEPT
        for array in plan.arrays:
            name = contents.selector_tensor(number, array)
            if not kept[array.name].holds(tables[name]):
                expected = ", ".join(f"{low:g} to {high:g}" for low, high in kept[array.name].bounds)
                raise TableError(TABLES_FILE, name, str(tables[name].tolist()), expected)


def _narrowed(name: str, table: np.ndarray) -> np.ndarray:
    """Returns a table as a run keeps it: unit ids in the smallest type that holds them."""
    is_ids = name.startswith(("order.", "rank."))
    return table.astype(number_type(table.size)) if is_ids else table


def _check_finite(file: str, arrays: dict[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            num_bad = int(array.size - np.isfinite(array).sum())
            raise NonFiniteError(
                file, f"tensor {short(name)}", f"holding {num_bad} values of NaN or infinity", "finite numbers"
            )
