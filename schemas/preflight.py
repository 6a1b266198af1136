"""What `preflight` finds before the long stages: what they need, what there is, and whether a small trial went well."""

from coldpress.schemas.base import Count, PositiveCount, Record


class StageNeeds(Record):
    """The most that one job of a stage takes."""

    stage: str
    ram_bytes: Count
    disk_bytes: Count
    """All that the stage leaves in the build folder, from every layer."""
    runtime_s: Count
    """Seconds after which one job on a slow machine has surely ended."""


class Preflight(Record):
    """The build may begin; a build that may not has no such record."""

    stages: tuple[StageNeeds, ...]
    """In the order of the build; empty where preflight is off."""
    free_ram_bytes: Count
    free_disk_bytes: Count
    calibration_tokens: PositiveCount
    """What the corpus gives."""
    wanted_calibration_tokens: PositiveCount
    license: str | None
    trial_layers: Count
    """Layers of the trial run; 0 where there was none."""
