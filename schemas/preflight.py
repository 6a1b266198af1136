"""The result of `preflight`, before the long stages: their needs, the machine's resources, and a small trial run."""

from coldpress.schemas.base import Count, PositiveCount, Record


class StageNeeds(Record):
    """The most memory that one job of a stage takes, and the disk space of the stage."""

    stage: str
    ram_bytes: Count
    disk_bytes: Count
    """All that the stage leaves in the build folder, from every layer."""


class Preflight(Record):
    """Permission for a build to begin; a refused build has no such record."""

    stages: tuple[StageNeeds, ...]
    """Stages in the order of the build; empty where preflight is off."""
    free_ram_bytes: Count
    free_disk_bytes: Count
    calibration_tokens: PositiveCount
    wanted_calibration_tokens: PositiveCount
    license: str | None
    trial_layers: Count
    """Layers of the trial run; 0 if there was none."""
