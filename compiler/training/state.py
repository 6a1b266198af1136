"""Saves the state of an interrupted training run, so that the next run continues as if nothing had happened.

Two array files take turns, guarded by the stage's fingerprint: while one is written the other is complete. Random draws
are repeated from the seed, so no random state is saved.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from coldpress.compiler.io import Workspace, load_arrays
from coldpress.schemas.model import DistillationPoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

LOG = logging.getLogger(__name__)
KEYS = ("training-0", "training-1")


@dataclass
class Progress:
    step: int
    """Updates made so far."""
    curve: list[DistillationPoint]
    losses: list[float]
    """Losses of the steps since the last evaluation."""
    best: "list[Tensor]"
    since: float = field(default_factory=time.monotonic)

    @property
    def lowest(self) -> DistillationPoint:
        """Returns the best evaluation; of equal ones the first."""
        return min(self.curve, key=lambda point: point.validation_loss)


@dataclass
class States:
    work: Workspace
    turn: int = 0

    def save(self, progress: Progress, parameters: "list[nn.Parameter]", optimizer: "torch.optim.Optimizer") -> None:
        """Writes the progress over the older of the two states."""
        arrays = {
            "step": np.array([progress.step], np.int64),
            "curve": np.array(
                [
                    (p.step, np.nan if p.loss is None else p.loss, p.validation_kl, p.validation_penalty)
                    for p in progress.curve
                ]
            ),
            "losses": np.array(progress.losses, np.float64),
        }
        arrays |= {name: tensor.detach().cpu().numpy() for name, tensor in _tensors(progress, parameters, optimizer)}
        self.work.save(KEYS[self.turn], arrays)
        self.turn = 1 - self.turn

    def load(self, parameters: "list[nn.Parameter]", optimizer: "torch.optim.Optimizer") -> Progress | None:
        """Restores parameters and moments from the later state; returns None if there is none."""
        import torch

        files = {key: found for key in KEYS if (found := self.work.current(key)) is not None}
        if not files:
            return None
        steps = {key: int(load_arrays(file, "step")["step"][0]) for key, file in files.items()}
        latest = max(steps, key=lambda key: steps[key])
        self.turn = 1 - KEYS.index(latest)
        arrays = load_arrays(files[latest])
        best: list[Tensor] = []
        with torch.no_grad():
            for number, parameter in enumerate(parameters):
                saved = {
                    name: torch.from_numpy(arrays[f"{name}.{number}"]) for name in ("now", "best", "mean", "square")
                }
                parameter.copy_(saved["now"])
                best.append(saved["best"].to(parameter.device))
                moments = {"exp_avg": saved["mean"], "exp_avg_sq": saved["square"]}
                state = {name: moment.to(parameter.device) for name, moment in moments.items()}
                optimizer.state[parameter] = {"step": torch.tensor(float(steps[latest])), **state}
        LOG.info("training: resumes at step %d, where an earlier run was interrupted", steps[latest])
        return Progress(steps[latest], _curve(arrays), arrays["losses"].tolist(), best)

    def remove(self) -> None:
        for key in KEYS:
            self.work.remove(key)


def _curve(arrays: Mapping[str, np.ndarray]) -> list[DistillationPoint]:
    return [
        DistillationPoint(
            step=int(step), loss=None if np.isnan(loss) else loss, validation_kl=found, validation_penalty=penalty
        )
        for step, loss, found, penalty in arrays["curve"].tolist()
    ]


def _tensors(
    progress: Progress, parameters: "list[nn.Parameter]", optimizer: "torch.optim.Optimizer"
) -> "Iterator[tuple[str, Tensor]]":
    for number, (parameter, best) in enumerate(zip(parameters, progress.best, strict=True)):
        moments: Mapping[str, Any] = optimizer.state[parameter]
        yield f"now.{number}", parameter
        yield f"best.{number}", best
        yield f"mean.{number}", moments["exp_avg"]
        yield f"square.{number}", moments["exp_avg_sq"]
