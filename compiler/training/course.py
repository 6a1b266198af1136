"""One run of training as the user configured it, with the names of its settings for messages."""

from dataclasses import dataclass

from coldpress.compiler.shared_settings import TrainingSetting


@dataclass(frozen=True)
class Course:
    """The settings in which training stages differ, apart from the lesson."""

    stage: str
    key: str
    """Name of the setting that names the recipe."""
    recipe: str
    without: str
    """The setting that turns training off."""
    rate_key: str
    """Name of the setting for the first step size."""
    learning_rate: float
    steps: int
    shared: TrainingSetting
    """Settings that all training stages share."""
    threads: int
