"""layout: computes the offsets of flash.img (compiler/sections.py), which all plans of an artifact share, from the
model's shape, the families and the format that `allocate` chose, and the device's page size."""

from typing import TYPE_CHECKING

from coldpress.compiler.sections import image_bytes, make_sections, row_tables
from coldpress.schemas.base import Record
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.layout import Layout
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build


class LayoutConfig(Record):
    """Settings of `layout`."""


def run(config: LayoutConfig, model: Model, sparsity: Sparsity, device: DeviceProfile) -> Layout:
    sections = make_sections(model.spec, sparsity.families, sparsity.formats, sparsity.layers_per_group)
    tables = row_tables(model.spec, sections, sparsity.formats)
    return Layout(
        page_bytes=device.flash.page_bytes.value,
        sections=sections,
        tables=tables,
        flash_bytes=image_bytes(sections, tables),
    )


def needs(build: "Build") -> StageNeeds:
    return StageNeeds(stage="layout", ram_bytes=build.PYTHON_BYTES + build.BLOCK_BYTES, disk_bytes=0)
