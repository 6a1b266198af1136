"""Training as a stage was asked for it, with the words of its keys for what users are told."""

from dataclasses import dataclass

from coldpress.compiler.shared_settings import TrainingSetting


@dataclass(frozen=True)
class Course:
    """What stages that train differ in beside the lesson."""

    stage: str
    key: str
    """Of the setting that names the recipe."""
    recipe: str
    without: str
    """The setting that leaves training out."""
    rate_key: str
    """Of the setting that is the first step size."""
    learning_rate: float
    steps: int
    shared: TrainingSetting
    """What all such stages take."""
    threads: int
    """Blocks that run at a time."""
