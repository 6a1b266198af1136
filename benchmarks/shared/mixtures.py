"""What benchmarks of mixtures of experts share."""

from pathlib import Path

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.plan.budget import least_budget_bytes


def share_budget_bytes(artifact: Path, share: float) -> int:
    """Returns the DRAM budget under which a share of the experts' bytes is in DRAM."""
    manifest = open_artifact(artifact).manifest
    units = sum(section.num_units * section.unit_bytes for section in manifest.flash.sections)
    return least_budget_bytes(manifest, manifest.plans[0]) + round(share * units)
