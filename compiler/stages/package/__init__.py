"""package: writes artifacts; no other stage does. Streams the units to flash.img in flash order, then all other files.

Reads all records of a build; writes the folder that schemas/FORMAT.md describes, whole or not at all, under a temporary
name: `verify` works on it there, `publish` moves it to its final name. Same records, same bytes: nothing depends on
time, host, path, cores or chunks. Its counterpart is runtime/artifact/reader.py, which opens the folder once before it
becomes visible.
"""

import errno
import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from coldpress.compiler.cost_model import unit_bytes
from coldpress.compiler.provenance import provenance
from coldpress.compiler.publishing import point, publishing, standing
from coldpress.compiler.stages.package import joined
from coldpress.compiler.stages.package.documents import DocumentInputs, input_digests, write_documents
from coldpress.compiler.stages.package.flash import write_flash
from coldpress.compiler.stages.package.hashing import Written
from coldpress.runtime import _native
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.schemas import __version__
from coldpress.schemas.base import Record
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curves
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import DoesNotFitError
from coldpress.schemas.families import slices
from coldpress.schemas.layout import Layout
from coldpress.schemas.manifest import (
    DRAFT_FOLDER,
    FLASH_FILE,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FORMAT_NAME,
    MANIFEST_FILE,
    PREDICTORS_FILE,
    RESIDENT_FILE,
    TABLES_FILE,
    FamilyFormat,
    FlashImage,
    Format,
    LayerPredictorInfo,
    Manifest,
    Source,
    features_of,
)
from coldpress.schemas.model import Model
from coldpress.schemas.order import Order
from coldpress.schemas.package import Package
from coldpress.schemas.placement import Placement
from coldpress.schemas.plans import Plans
from coldpress.schemas.predictors import Predictors
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.quantized import Quantized
from coldpress.schemas.sealed import seal
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

SLACK_BYTES = 64 << 20
"""Room for tokenizer, documents, tables and the file system's own structures in the check before writing."""


class PackageConfig(Record):
    """Settings of `package`."""

    artifact: str = Field(description="folder to write the artifact to")


def run(
    config: PackageConfig,
    model: Model,
    corpus: Corpus,
    sparsity: Sparsity,
    device: DeviceProfile,
    layout: Layout,
    plans: Plans,
    order: tuple[Order, ...],
    placement: Placement,
    quantized: tuple[Quantized, ...],
    predictors: Predictors | None,
    curves: Curves | None = None,
    draft_package: Package | None = None,
) -> Package:
    """Writes the artifact; replaces an existing one, and leaves it untouched if anything fails.

    Raises:
        ColdpressError: if the records do not belong together, or the path is taken by something else.
        DoesNotFitError: if the disk has too little room.
        ArtifactError: if the reader refuses the written artifact, naming the field.
    """
    inputs = DocumentInputs(
        model=model,
        corpus=corpus,
        sparsity=sparsity,
        device=device,
        layout=layout,
        plans=plans,
        order=order,
        placement=placement,
        codes=joined.join_codes(quantized, model, sparsity.format),
        predictors=joined.check_predictors(predictors, model) if predictors else (),
        curves=None if curves is None else curves.with_losses_of(sparsity.curves),
    )
    target = Path(config.artifact).absolute()
    plan = plans.largest_plan
    drafted = draft_package if any(one.draft_bytes for one in plans.plans) else None
    needed_bytes = layout.flash_bytes + plan.resident_bytes + plan.predictor_bytes + SLACK_BYTES
    needed_bytes += drafted.artifact_bytes if drafted else 0
    _check_room(target, needed_bytes)
    try:
        with publishing(target) as folder:
            package = _write(folder, target, inputs, standing(drafted) if drafted else None)
            open_artifact(folder)
        point(target, target)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DoesNotFitError(
            f"no space left for {target.name} on its disk, which needs about {needed_bytes} bytes; free some "
            "or choose another build_dir"
        ) from error
    return package


def needs(build: "Build") -> StageNeeds:
    held = 2 * max(build.largest_section_bytes, *build.shared_code_bytes)
    disk_bytes = build.code_bytes + build.predictor_bytes + build.OVERHEAD_BYTES
    return StageNeeds(stage="package", ram_bytes=build.PYTHON_BYTES + build.BLOCK_BYTES + held, disk_bytes=disk_bytes)


def _check_room(target: Path, needed_bytes: int) -> None:
    existing = next(path for path in target.parents if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise DoesNotFitError(
            f"{target.name} needs {needed_bytes} bytes of disk, {free_bytes} are free; free some or choose "
            "another build_dir"
        )


def _write(folder: Path, target: Path, inputs: DocumentInputs, draft: Path | None) -> Package:
    written = Written(folder)
    order_of, page_crc32c = joined.unit_orders(inputs.order), list[np.ndarray]()

    def add_checksums(block: np.ndarray) -> None:  # whole pages in every block but the last
        page_crc32c.append(_native.crc32c_pages(block, inputs.layout.page_bytes))

    with ThreadPoolExecutor(1) as beside:  # one SHA-256 cannot use two cores, two files can
        tensors = beside.submit(_write_tensors, written, inputs)
        with written.new(FLASH_FILE, add_checksums) as file:
            write_flash(file, inputs.layout, inputs.codes, order_of)
        tensors.result()
    checksums = np.concatenate(page_crc32c)
    with written.new(TABLES_FILE) as file:
        tables = joined.tables_to_write(
            inputs.layout, inputs.plans, order_of, inputs.placement, inputs.sparsity, checksums
        )
        joined.write_tensors(file, tables)
    if draft is not None:
        for file in sorted(path for path in draft.rglob("*") if path.is_file()):
            written.copy(file, f"{DRAFT_FOLDER}/{file.relative_to(draft).as_posix()}")
    digests = input_digests(inputs)
    write_documents(written, inputs, digests)
    manifest = seal(make_manifest(inputs, written, digests).to_json()).encode()
    written.add(MANIFEST_FILE, manifest)
    plan = inputs.plans.largest_plan
    return Package(
        folder=str(target),
        manifest_sha256=hashlib.sha256(manifest).hexdigest(),
        artifact_bytes=sum(file.size_bytes for file in written.files),
        flash_bytes=inputs.layout.flash_bytes,
        resident_bytes=plan.resident_bytes,
        predictor_bytes=plan.predictor_bytes,
        provenance=provenance(),
    )


def _write_tensors(written: Written, inputs: DocumentInputs) -> None:
    with written.new(RESIDENT_FILE) as file:
        joined.write_tensors(file, joined.resident_to_write(inputs.codes))
    if inputs.predictors:
        with written.new(PREDICTORS_FILE) as file:
            joined.write_tensors(file, joined.predictors_to_write(inputs.predictors))


def make_manifest(inputs: DocumentInputs, written: Written, digests: dict[str, str]) -> Manifest:
    model, layout, format_name = inputs.model, inputs.layout, inputs.sparsity.format
    families = tuple(
        FamilyFormat(
            family=family,
            format=format_name,
            slices=slices(family, model.spec),
            unit_bytes=unit_bytes(family, model.spec, format_name),
        )
        for family in inputs.sparsity.families
    )
    return Manifest(
        format=Format(name=FORMAT_NAME, major=FORMAT_MAJOR, minor=FORMAT_MINOR),
        features=features_of(model.spec, families, layout, inputs.codes.resident, inputs.plans.plans),
        compiler_version=__version__,
        model=model.spec,
        source=Source(
            name=model.name,
            source=model.source,
            revision=model.revision,
            license=model.license,
            weights_sha256=model.weights_sha256,
        ),
        device=inputs.device,
        files=tuple(sorted(written.files, key=lambda file: file.path)),
        flash=FlashImage(
            size_bytes=layout.flash_bytes, page_bytes=layout.page_bytes, sections=layout.sections, tables=layout.tables
        ),
        families=families,
        resident=inputs.codes.resident,
        predictors=tuple(
            LayerPredictorInfo(layer=entry.layer, rank=entry.rank, format=entry.format, threshold=entry.threshold)
            for entry in inputs.predictors
        ),
        plans=inputs.plans.plans,
        inputs=digests,
    )
