"""report: writes one self-contained HTML page about the finished artifact, and metrics.json with its figures.

Reads the records of the stages whose decisions the figures show, and the measurements of `verify`; measures nothing
itself. The speed on the device is the simulator's, and the page compares it with a dense run in the same DRAM (design,
section 6). The page works offline: inline styles, inline SVG, no scripts, no links.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from coldpress.compiler.io import replacing
from coldpress.compiler.llama_bench import llama_cpp_runs
from coldpress.compiler.publishing import check_verified
from coldpress.compiler.shared_settings import SeedSetting
from coldpress.compiler.stages.report.figures import make_metrics
from coldpress.compiler.stages.report.page import render
from coldpress.compiler.stages.report.page_charts import ChartInputs
from coldpress.schemas.activations import Activations
from coldpress.schemas.config import Key
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curves
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.layout import Layout
from coldpress.schemas.metrics import Metrics, Verification
from coldpress.schemas.model import Model
from coldpress.schemas.order import Order
from coldpress.schemas.package import Package
from coldpress.schemas.placement import Placement
from coldpress.schemas.plans import Plans
from coldpress.schemas.predictors import Predictors
from coldpress.schemas.preflight import StageNeeds
from coldpress.schemas.sparsity import Sparsity

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build


class ReportConfig(SeedSetting):
    """Settings of `report`."""

    html: str = Field(description="path of the HTML page to write")
    llama_bench: Annotated[str | None, Key(default="none")] = Field(
        default=None,
        min_length=1,
        description="a file of `llama-bench -o json`, whose decoding speeds the report shows beside the artifact's",
    )


def run(
    config: ReportConfig,
    model: Model,
    corpus: Corpus,
    device: DeviceProfile,
    activations: Activations,
    sparsity: Sparsity,
    placement: Placement,
    order: tuple[Order, ...],
    predictors: Predictors | None,
    layout: Layout,
    plans: Plans,
    package: Package,
    verification: Verification,
    curves: Curves | None = None,
) -> Metrics:
    """Writes the page to `config.html` and returns the figures.

    Raises:
        ColdpressError: if the verification is of another artifact, or the file of llama-bench cannot be read.
    """
    check_verified(verification.artifact_sha256, package)
    metrics = make_metrics(model, device, sparsity, layout, plans, package, verification, curves)
    if config.llama_bench is not None:
        metrics = metrics.model_copy(update={"llama_cpp": llama_cpp_runs(Path(config.llama_bench))})
    of_weights = (activations, sparsity, placement, order, predictors)
    inputs = ChartInputs(model, device, *of_weights, layout, plans, package, verification, corpus, config.seed)
    with replacing(Path(config.html)) as temporary:
        temporary.write_text(render(metrics, inputs), encoding="utf-8")
    return metrics


def needs(build: "Build") -> StageNeeds:
    """Counts the figures of all layers, and the bits of one."""
    bits = build.layer_units(build.families) * build.num_tokens // 4
    return StageNeeds(stage="report", ram_bytes=build.PYTHON_BYTES + build.BLOCK_BYTES + bits, disk_bytes=0)
