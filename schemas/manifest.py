"""manifest.json of an artifact: format 2.0, normative text in FORMAT.md. Its sha256 is the artifact's identity."""

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from coldpress.schemas.base import Count, Extended, Many, PositiveCount, Record, Sha256
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import FamilyName, FormatName, HeadFormat, Slice, UnitFormat, slice_formats
from coldpress.schemas.layout import Layout, Plan, RowTable, Section
from coldpress.schemas.model import ModelSpec, features_of_model
from coldpress.schemas.quantized import ResidentTensor

FORMAT_NAME = "coldpress"
FORMAT_MAJOR = 2
FORMAT_MINOR = 0
LAYER_FORMATS, SLICE_FORMATS = "layer-formats", "slice-formats"
"""The features of an artifact in which some sections have another format than their family, or one for each slice."""
ROW_TABLES = "row-tables"
"""The feature of an artifact with matrices on flash that are read by row."""
PAGE_CHECKSUMS = "crc32c-pages"
"""The feature of every artifact of this version; families, formats, selectors and caches are features by name."""

MAX_PLANS = 64
"""Each plan names every layer and family, so that without a limit checking an artifact could take any time."""

MANIFEST_FILE = "manifest.json"
FLASH_FILE = "flash.img"
RESIDENT_FILE = "resident.safetensors"
TABLES_FILE = "tables.safetensors"
PREDICTORS_FILE = "predictors.safetensors"
CURVES_FILE, TRACE_FILE = "curves.json", "trace.safetensors.zst"
"""Results of `explore`, for quotes on other devices; no run reads them."""
DRAFT_FOLDER = "draft"
DRAFT_MANIFEST = f"{DRAFT_FOLDER}/{MANIFEST_FILE}"
"""The draft model is a whole artifact inside another one; its files are listed like all others."""
EXPERTS_FILE = "experts.json"
"""Curves of how well DRAM serves a mixture's experts (schemas/experts.py), for `inspect`; no run reads them."""


class Format(Record):
    """Name and version of the format; a reader refuses another major version."""

    name: str
    major: Count
    minor: Count


class Features(Record):
    """Names of features; a reader refuses unknown names in `required`, and ignores unknown names in `optional`."""

    required: Many[str]
    optional: Many[str]


class ArtifactFile(Record):
    """A file of the artifact besides the manifest."""

    path: str
    size_bytes: Count
    sha256: Sha256


class FamilyFormat(Record):
    """Encoding of the units of a family; each slice is encoded separately, and slices follow each other."""

    family: FamilyName
    format: FormatName
    slices: Many[Slice]
    unit_bytes: PositiveCount
    """Bytes of units in `format`; a section with a format of its own has other sizes."""


class Source(Record):
    """The checkpoint that was compiled."""

    name: str
    source: str
    revision: str | None
    license: str | None
    weights_sha256: Sha256


class LayerPredictorInfo(Record):
    """A layer's predictor; `<layer>.fc1` and `<layer>.fc2` in predictors.safetensors hold its codes in `format`."""

    layer: Count
    rank: PositiveCount
    format: FormatName
    threshold: float


class FlashImage(Extended):
    """flash.img: its size, its pages, its sections, and the matrices behind them."""

    LATER = ("tables",)

    size_bytes: PositiveCount
    page_bytes: PositiveCount
    sections: Many[Section]
    tables: Many[RowTable] = ()
    """Read by row; empty, which is left out of the file, where there are none."""


class Manifest(Record):
    """The description of an artifact. tables.safetensors holds `page_crc32c` uint32 [pages], per section
    `order.<first layer>.<family>` int32 [num_units] (unit id at each flash position), and per layer and family
    `rank.<layer>.<family>` int32 [num_units] (unit ids by their claim to DRAM, strongest first)."""

    format: Format
    features: Features
    compiler_version: str
    model: ModelSpec
    source: Source
    device: DeviceProfile
    files: Many[ArtifactFile]
    flash: FlashImage
    families: Many[FamilyFormat]
    resident: Many[ResidentTensor]
    predictors: Many[LayerPredictorInfo]
    plans: Many[Plan] = Field(min_length=1, max_length=MAX_PLANS)
    inputs: dict[str, str]
    """Digests of the inputs of the build: config, corpus, calibration tokens."""
    byte_order: Literal["little"] = "little"

    @property
    def head(self) -> HeadFormat | None:
        """Returns how the head is stored; None if in float32."""
        role = self.model.head_role
        found = next((tensor.format for tensor in self.resident if tensor.role == role), None)
        return None if found is None else HeadFormat(role=role, format=found)

    @property
    def unit_formats(self) -> dict[tuple[int, FamilyName], UnitFormat]:
        of_family = {entry.family: entry.format for entry in self.families}
        return {
            (layer, section.family): section.format or of_family[section.family]
            for section in self.flash.sections
            for layer in section.layers
        }


def features_of(
    model: ModelSpec,
    families: Iterable[FamilyFormat],
    flash: FlashImage | Layout,
    resident: Iterable[ResidentTensor],
    plans: Iterable[Plan],
) -> Features:
    """Returns the features that an artifact must list. Page checksums, families, formats, formats by layer and by
    slice, matrices read by row, and the model's extensions are required; selectors, caches and drafts are optional,
    since a reader can leave out the plans that name them."""
    families, plans = tuple(families), tuple(plans)
    stored = {entry.format for entry in families} | {tensor.format for tensor in resident if tensor.format}
    stored |= {table.format for table in flash.tables}
    named = {section.format for section in flash.sections if section.format}
    formats = {name for unit in stored | named for name in slice_formats(unit)}
    required = {f"family.{entry.family}" for entry in families} | {f"format.{name}" for name in formats}
    required |= {LAYER_FORMATS} if named else set()
    required |= {SLICE_FORMATS} if any(len(slice_formats(unit)) > 1 for unit in named) else set()
    required |= {ROW_TABLES} if flash.tables else set()
    required |= features_of_model(model)
    optional = {f"selector.{plan.method}" for plan in plans} | {f"cache.{plan.cache}" for plan in plans}
    optional |= {f"draft.{plan.draft}" for plan in plans if plan.draft is not None}
    return Features(required=(PAGE_CHECKSUMS, *sorted(required)), optional=tuple(sorted(optional)))
