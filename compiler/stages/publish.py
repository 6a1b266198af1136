"""publish: gives an artifact its final name, if the figures that `verify` measured are good enough.

The only stage that touches final names. It compares figures with gates, which can be set or turned off; three checks
cannot: figures are finite, reads are as simulated, and DRAM stays within the budget. An artifact that passes moves to
its final name in one step (compiler/publishing.py). If it misses a gate, nothing stands under that name (`withdraw`).
"""

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from coldpress.compiler.block_statistics import with_error
from coldpress.compiler.headline import remedies
from coldpress.compiler.io import make_folder, sync_folder
from coldpress.compiler.publishing import check_verified, identity, move, point, remove, remove_leftovers, standing
from coldpress.compiler.shared_settings import MAX_PPL_RATIO, Off, PositiveFloat, QualitySetting
from coldpress.runtime import plugins
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.quantization import Format
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.base import Share
from coldpress.schemas.config import Key
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.families import slice_formats
from coldpress.schemas.manifest import Manifest
from coldpress.schemas.metrics import PlanFigures, Verification
from coldpress.schemas.package import Package
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

LOG = logging.getLogger(__name__)
EARLIER = "earlier"
"""Folder beside the artifact for an earlier build's results; one folder per identity below it."""
WORST_PPL_RATIO = 2.0
"""The `max_ppl_ratio` where nobody gives one: an artifact beyond it is broken, whatever was built. Beyond 1.05 its
summary begins with a warning (compiler/headline.py)."""


class PublishConfig(QualitySetting):
    """Settings of `publish`."""

    artifact: str = Field(description="final name of the artifact, a folder that ends in .coldpress")
    metrics: str = Field(description="path of metrics.json, which tells of what stands under the final name")
    html: str = Field(description="path of the report, likewise")
    exported: tuple[str, ...] = Field(
        description="paths of all that `export` may have made of it, likewise, as JSON: the record, and a file a format"
    )
    min_top1_agreement: Annotated[Share | Off, Key()] = Field(
        default=0.4, description="least allowed share of tokens whose likeliest successor is the source's, or off"
    )
    max_logit_error: Annotated[PositiveFloat | Off | None, Key(default="the format says by itself")] = Field(
        default=None, description="largest allowed error of dense logits, as a share of the largest logit, or off"
    )


def run(config: PublishConfig, package: Package, verification: Verification) -> Package:
    """Publishes an artifact that passes; the returned record says where.

    Raises:
        ColdpressError: if the figures are of another artifact, a gate is missed, or the final name is taken by
            something that is not an artifact.
        DoesNotFitError: if the run took more DRAM than the budget.
        ArtifactError: if the reader refuses the artifact, naming the place.
    """
    check_verified(verification.artifact_sha256, package)
    target = Path(config.artifact).absolute()
    reports = tuple(Path(path).absolute() for path in (config.metrics, config.html, *config.exported))
    folder = standing(package, target)
    manifest = open_artifact(folder).manifest  # raises before any gate is judged, so an unreadable one replaces nothing
    remove_leftovers(target)  # of a killed run
    try:
        check_gates(config, verification, manifest)
    except ColdpressError as error:
        clause = withdraw(package, target, reports)
        if identity(Path(package.folder)):  # also after a run that was killed before it could say so
            point(Path(package.folder), Path(package.folder))
        raise type(error)(f"{error}; {clause}") from error
    _log_figures(verification)
    if identity(target) != package.manifest_sha256:
        _remove(reports)  # they describe the artifact that is replaced now
    if folder.absolute() == target:
        remove(Path(package.folder))  # the replaced artifact, which a killed run left after the exchange
    else:
        move(folder, target)
    for place in (Path(package.folder), target):
        point(place, target)
    return package.model_copy(update={"folder": str(target)})


def needs(build: "Build") -> StageNeeds:
    return StageNeeds(stage="publish", ram_bytes=build.PYTHON_BYTES, disk_bytes=0)


def check_gates(config: PublishConfig, found: Verification, manifest: Manifest) -> None:
    """Refuses an artifact whose figures miss a gate; a figure that is not finite passes none.

    Raises:
        DoesNotFitError: if the run took more DRAM than the budget.
        ColdpressError: if the simulation differs, or a quality figure misses its gate.
    """
    for run in (found.run, *found.plans):
        used, budget = run.dram_used_bytes, run.dram_budget_bytes
        if used > budget:
            raise DoesNotFitError(f"the run used {used} bytes of DRAM, the budget is {budget}; raise dram_budget")
    if not all(run.simulated_equals_real for run in (found, *found.plans)):
        raise ColdpressError(
            "a simulation of the same tokens makes other reads than the real run, expected equal ones; the artifact or "
            "the runtime is at fault: rebuild, and report it if it stays"
        )
    missed = list(_missed_quality(config, found, found))
    error, max_error = found.max_logit_error, logit_limit(config, manifest)
    if not (math.isfinite(error) and (max_error == "off" or error <= max_error)):
        missed.append(
            f"its dense logits are off by {error:.4f} of the largest one, expected {_expected('at most', max_error)} "
            "(max_logit_error)"
        )
    for plan in found.plans[1:]:
        missed += [f"with plan {plan.plan} {clause}" for clause in _missed_quality(config, plan, found)]
    if missed:
        raise ColdpressError(
            f"{', and '.join(missed)}; {', or '.join([*_remedies(config, found, manifest), 'set another limit'])}"
        )


def _remedies(config: PublishConfig, found: Verification, manifest: Manifest) -> Sequence[str]:
    most = MAX_PPL_RATIO if config.max_ppl_ratio in (None, "off") else config.max_ppl_ratio
    of_format = found.ppl_dense / found.ppl_source
    whole = all(plugins.load("coldpress.runtime.sparsity", Selector, one.method).is_whole for one in manifest.plans)
    name = manifest.families[0].format
    return remedies(name, found.ppl_ratio, of_format, is_whole=whole, most=most)


def logit_limit(config: PublishConfig, manifest: Manifest) -> float | Off:
    """Returns the user's limit, else the widest rounding error that the formats of units and head allow."""
    if config.max_logit_error is not None:
        return config.max_logit_error
    units = {entry.format for entry in manifest.families}
    units |= {section.format for section in manifest.flash.sections if section.format}
    formats = {name for unit in units for name in slice_formats(unit)}
    formats |= {manifest.head.format} if manifest.head else set()
    return max(plugins.load("coldpress.runtime.quantization", Format, name).MAX_LOGIT_ERROR for name in formats)


def _missed_quality(config: PublishConfig, of: Verification | PlanFigures, found: Verification) -> Iterator[str]:
    ratio, most = of.ppl_ratio, WORST_PPL_RATIO if config.max_ppl_ratio is None else config.max_ppl_ratio
    if not (math.isfinite(ratio) and (most == "off" or ratio <= most)):
        yield (
            f"the artifact's perplexity is {of.ppl_artifact:.2f}, {with_error(ratio, of.ppl_ratio_error, 3)} "
            f"times the source's {found.ppl_source:.2f}, expected {_expected('at most', most)} (max_ppl_ratio)"
        )
    if not (config.min_top1_agreement == "off" or of.top1_agreement >= config.min_top1_agreement):
        yield (
            f"it agrees with the source on {of.top1_agreement:.1%} of the likeliest tokens, expected "
            f"{_expected('at least', config.min_top1_agreement)} (min_top1_agreement)"
        )


def _expected(bound: str, limit: float | Off) -> str:
    return "a finite figure" if limit == "off" else f"{bound} {limit:g}"


def withdraw(package: Package, target: Path, reports: tuple[Path, ...]) -> str:
    """Removes any artifact from the final name; returns a clause that says what became of it.

    The refused artifact goes back where `package` wrote it; if an earlier build had published it, its report and its
    exported file are set aside. The artifact of another build is set aside whole, its reports first, so that after a
    kill the next run can finish the rest.
    """
    found, clause = identity(target), f"nothing is published as {target.name}"
    if found is None:
        _remove(reports)
        return clause
    aside = target.parent / EARLIER / found[:12]
    if found == package.manifest_sha256:
        has_reports = any(report.exists() for report in reports)
        if has_reports:
            _set_aside(reports, aside)
        move(target, Path(package.folder))
        return f"{clause}, and the report of it is now in {aside}" if has_reports else clause
    _set_aside(reports, aside)
    move(target, aside / target.name)
    return f"{clause}, and what an earlier build had left there is now in {aside}"


def _set_aside(reports: tuple[Path, ...], aside: Path) -> None:
    make_folder(aside)
    found = [report for report in reports if report.exists()]
    for report in found:
        report.replace(aside / report.name)
    for folder in (aside, *sorted({report.parent for report in found})):
        sync_folder(folder)


def _remove(reports: tuple[Path, ...]) -> None:
    """Deletes reports; a stale one would describe the wrong artifact."""
    found = [report for report in reports if report.exists()]
    for report in found:
        report.unlink()
    for folder in {report.parent for report in found}:
        sync_folder(folder)


def _log_figures(found: Verification) -> None:
    LOG.info(
        "publish: perplexity %s times the source's, %.1f %% of the likeliest tokens are, logits are off by %.4f",
        with_error(found.ppl_ratio, found.ppl_ratio_error, 4),
        100 * found.top1_agreement,
        found.max_logit_error,
    )
