"""The training loop of every recipe: AdamW on calibration blocks; validation blocks decide when it ends and what wins.

Threads share blocks of tokens: each block's gradient is computed on one core, and gradients add up in the order of
blocks, so the number of threads changes no bit of the result. The stage's folder holds the state of an interrupted run;
a run that resumes from it ends with the same bytes. Random draws are repeated from the seed, so no random state is
saved.
"""

import bisect
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coldpress.compiler.io import Workspace, load_arrays
from coldpress.compiler.shared_settings import Course
from coldpress.compiler.training.source import Source
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.model import Distillation, DistillationPoint, Model

LOG = logging.getLogger(__name__)
MAX_GRADIENT = 1.0
STATE_S = 300.0
"""Most seconds of work that an interrupted run repeats."""
SHARES = tuple(count / 20 for count in range(10, 20))
"""Shares that are tried of the way from the source's weights to the trained ones."""
RunAll = Callable[..., Iterator[Any]]
KEYS = ("training-0", "training-1")
"""The array files that hold an interrupted run's state, in turns: while one is written the other is complete."""
as_it_is = nullcontext[None]
"""A context in which the student runs unchanged."""


@dataclass
class Switch:
    """Turns masks on and off; the teacher may be the student without them."""

    on: bool = True


@dataclass(frozen=True)
class Lesson:
    teacher: nn.Module
    student: nn.Module
    """Runs under its masks; may be the same model as the teacher."""
    parameters: list[nn.Parameter]
    """float32."""
    weight: Callable[[str], Tensor]
    """Tensor name -> the trained tensor to store."""
    teach: Callable[[bool], None] = field(default=lambda _: None)
    """Called with True before the teacher runs, and with False before the student does."""
    running: Callable[[], AbstractContextManager[None]] = as_it_is
    """Context around every run of the student."""
    masks: Switch = field(default_factory=Switch)
    dense_share: float = 0.0
    """Share of a step's blocks that the student runs without masks."""
    cross_entropy: float = 0.0
    """Share of the loss that is the text's own next tokens; the rest is the teacher's distribution."""
    at_share: Callable[[Sequence[Tensor], float], None] | None = None
    """(values of `parameters`, share): moves the student's weights that share of the way from the source's to those
    values; None if the weights cannot move back."""
    kept_gain: float = 1.0
    """Share of the gain on validation text that must remain when weights are moved back; 1 moves nothing."""
    watched: Callable[[], AbstractContextManager[list[Tensor]]] = field(default=lambda: nullcontext([]))
    """Context around a forward pass of the student and its backward pass, in the thread that runs it; yields what the
    pass adds to the loss, in the order of layers."""


@dataclass
class Progress:
    step: int
    """Updates made so far."""
    curve: list[DistillationPoint]
    losses: list[float]
    """Losses of the steps since the last evaluation."""
    best: list[Tensor]
    since: float = field(default_factory=time.monotonic)

    @property
    def lowest(self) -> DistillationPoint:
        """Returns the best evaluation; of equal ones the first."""
        return min(self.curve, key=lambda point: point.validation_loss)


@dataclass
class States:
    work: Workspace
    turn: int = 0

    def save(self, progress: Progress, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
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

    def load(self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> Progress | None:
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
    progress: Progress, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    for number, (parameter, best) in enumerate(zip(parameters, progress.best, strict=True)):
        moments: Mapping[str, Any] = optimizer.state[parameter]
        yield f"now.{number}", parameter
        yield f"best.{number}", best
        yield f"mean.{number}", moments["exp_avg"]
        yield f"square.{number}", moments["exp_avg_sq"]


def learned(
    course: Course, lesson: Lesson, source: Source, corpus: Corpus, work: Workspace
) -> tuple[Model, Distillation]:
    """Trains the lesson's student and writes `source` with the trained weights; returns the model and the training
    curve. Raises ColdpressError if the loss is not finite."""
    training = load_arrays(corpus.split("calibration").arrays, "tokens")["tokens"]
    validation = load_arrays(corpus.split("validation").arrays, "tokens")["tokens"][: course.shared.validation_blocks]
    states = States(work)
    curve = train(course, lesson, training, validation, states)
    share = move_back(lesson, validation, curve, course.threads)
    written = source.write(lesson.weight, work.folder / "source")
    states.remove()
    return written, Distillation(recipe=course.recipe, curve=curve, share=share)


def train(
    course: Course, lesson: Lesson, training: np.ndarray, validation: np.ndarray, states: States
) -> tuple[DistillationPoint, ...]:
    """Trains the student in place; it ends with the weights of the best evaluation, the one before the first step
    included. Both texts are int token ids [num_blocks, block_tokens]; `validation` decides which weights win. Returns
    every evaluation."""
    optimizer = torch.optim.AdamW(lesson.parameters, lr=course.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    order = np.random.default_rng(course.shared.seed)
    count = min(course.shared.distill_blocks, len(training))
    with _workers(course.threads) as run_all:
        judge = _Judge(lesson, _blocks(validation, lesson), run_all, course.threads)
        progress = states.load(lesson.parameters, optimizer) or _begin(lesson, judge)
        # a resumed run draws the blocks of its past steps again, so that the next ones are the same
        for _ in range(progress.step):
            order.choice(len(training), count, replace=False)
        while progress.step < course.steps and not _tired(progress.curve, course.shared.distill_patience):
            chosen = order.choice(len(training), count, replace=False)
            loss = _set_gradients(lesson, run_all, _blocks(training[chosen], lesson), course.threads)
            _check_finite(loss, progress.step, course)
            nn.utils.clip_grad_norm_(lesson.parameters, MAX_GRADIENT, foreach=False)
            rate = course.learning_rate * 0.5 * (1 + math.cos(math.pi * progress.step / course.steps))
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            progress.step += 1
            progress.losses.append(loss)
            _look(progress, lesson, judge, course, lambda: states.save(progress, lesson.parameters, optimizer))
    with torch.no_grad():
        for parameter, values in zip(lesson.parameters, progress.best, strict=True):
            parameter.copy_(values)
    return tuple(progress.curve)


def move_back(lesson: Lesson, validation: np.ndarray, curve: Sequence[DistillationPoint], threads: int) -> float:
    """Moves a trained student back towards its source, as far as enough of its gain on validation text remains
    (`Lesson.kept_gain`); returns the final share of the way from the source's weights to the trained ones. On the way
    back the gain falls slowly at first, while the loss of dense quality shrinks at once: the gain falls with about the
    square of the distance moved back, the dense loss grows with that of the distance from the source (Wortsman et al.
    2022). The student has the final weights of training."""
    first, lowest = curve[0].validation_kl, min(point.validation_kl for point in curve)
    if lesson.at_share is None or lesson.kept_gain == 1 or lowest >= first:
        return 1.0
    trained, at_share = [parameter.detach().clone() for parameter in lesson.parameters], lesson.at_share
    with _workers(threads) as run_all:
        judge = _Judge(lesson, _blocks(validation, lesson), run_all, threads)

        def keeps_enough(share: float) -> bool:
            at_share(trained, share)
            return first - judge()[0] >= lesson.kept_gain * (first - lowest)

        # bisection finds the least share that keeps enough, as the gain grows with the share
        found = bisect.bisect_left(SHARES, True, key=keeps_enough)
    share = SHARES[found] if found < len(SHARES) else 1.0
    at_share(trained, share)
    LOG.info("distill: weights are left at %.2f of the way from the source's to the trained ones", share)
    return share


def _begin(lesson: Lesson, judge: "_Judge") -> Progress:
    divergence, penalty = judge()
    first = DistillationPoint(step=0, loss=None, validation_kl=divergence, validation_penalty=penalty)
    LOG.info("training: before the first step the KL to the dense model is %.4f nats per token", first.validation_kl)
    return Progress(0, [first], [], [parameter.detach().clone() for parameter in lesson.parameters])


def _look(progress: Progress, lesson: Lesson, judge: "_Judge", course: Course, save: Callable[[], None]) -> None:
    """Evaluates when it is time to; saves the state after an evaluation, or when the last save is long ago."""
    if (
        progress.step % math.ceil(course.steps / course.shared.distill_evaluations) == 0
        or progress.step == course.steps
    ):
        found, loss = judge(), math.fsum(progress.losses) / len(progress.losses)
        point = DistillationPoint(step=progress.step, loss=loss, validation_kl=found[0], validation_penalty=found[1])
        if point.validation_loss < progress.lowest.validation_loss:
            progress.best = [parameter.detach().clone() for parameter in lesson.parameters]
        progress.curve.append(point)
        progress.losses = []
        LOG.info(
            "training: step %d of %d, loss %.4f, validation KL %.4f nats per token",
            *(progress.step, course.steps, loss, found[0]),
        )
    elif time.monotonic() - progress.since < STATE_S:
        return
    save()
    progress.since = time.monotonic()


def _check_finite(loss: float, step: int, course: Course) -> None:
    if not math.isfinite(loss):
        raise ColdpressError(
            f"the loss of {course.stage} is {loss} at step {step + 1}, expected a finite number; lower "
            f"{course.rate_key}, which is {course.learning_rate:g}"
        )


def _tired(curve: list[DistillationPoint], patience: int) -> bool:
    best = min(range(len(curve)), key=lambda at: curve[at].validation_loss)
    return len(curve) - 1 - best >= patience


def loss_of(wanted: Tensor, logits: Tensor, block: Tensor, cross_entropy: float = 0.0) -> Tensor:
    """Returns the mean KL(P_T || P_S) over the tokens of one block in nats (Eq. 10), mixed with the text's own next
    tokens by the share `cross_entropy`. `wanted` are the teacher's log-probabilities, `logits` the student's, [T,
    vocab_size]; `block` is int64 [T], each token but the first the target of the one before it."""
    found = torch.log_softmax(logits, dim=-1)
    divergence = (wanted.exp() * (wanted - found)).sum(dim=-1).mean()
    if not cross_entropy:
        return divergence
    return (1 - cross_entropy) * divergence + cross_entropy * nn.functional.nll_loss(found[:-1], block[1:])


def _logits(model: nn.Module, block: Tensor) -> Tensor:
    return model(input_ids=block[None], use_cache=False).logits[0]


def _taught(lesson: Lesson, run_all: RunAll, blocks: list[Tensor]) -> list[Tensor]:

    def one(block: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.log_softmax(_logits(lesson.teacher, block), dim=-1)

    lesson.teach(True)
    try:
        return list(run_all(one, blocks))
    finally:
        lesson.teach(False)


@dataclass(frozen=True)
class _Judge:
    lesson: Lesson
    blocks: list[Tensor]
    run_all: RunAll
    threads: int

    def __call__(self) -> tuple[float, float]:
        """Returns both in nats per token."""
        found: list[tuple[float, float]] = []

        def one(wanted: Tensor, block: Tensor) -> tuple[float, float]:
            with torch.no_grad(), self.lesson.watched() as added:
                loss = loss_of(wanted, _logits(self.lesson.student, block), block).item()
                return loss, math.fsum(part.item() for part in added)

        for some in _at_a_time(self.blocks, self.threads):
            taught = _taught(self.lesson, self.run_all, some)
            with self.lesson.running():
                found += self.run_all(one, taught, some)
        divergences, penalties = zip(*found, strict=True)
        return math.fsum(divergences) / len(found), math.fsum(penalties) / len(found)


def _set_gradients(lesson: Lesson, run_all: RunAll, blocks: list[Tensor], threads: int) -> float:
    """Sets the mean gradient over `blocks` and returns the mean loss. The first blocks run dense."""

    def one(wanted: Tensor, block: Tensor) -> tuple[float, tuple[Tensor, ...]]:
        with lesson.watched() as added:  # the backward pass may rerun layers, whose hooks must act as before
            loss = loss_of(wanted, _logits(lesson.student, block), block, lesson.cross_entropy)
            loss = sum(tuple(added), loss)
            return loss.item(), torch.autograd.grad(loss, lesson.parameters)

    for parameter in lesson.parameters:
        parameter.grad = torch.zeros_like(parameter)
    losses: list[float] = []
    num_dense = round(lesson.dense_share * len(blocks))
    for masks, part in ((False, blocks[:num_dense]), (True, blocks[num_dense:])):
        for some in _at_a_time(part, threads):
            taught = _taught(lesson, run_all, some)
            lesson.masks.on = masks
            with lesson.running():
                for loss, gradients in run_all(one, taught, some):
                    losses.append(loss)
                    for parameter, gradient in zip(lesson.parameters, gradients, strict=True):
                        assert parameter.grad is not None
                        parameter.grad.add_(gradient, alpha=1 / len(blocks))
    lesson.masks.on = True
    return math.fsum(losses) / len(losses)


def _blocks(tokens: np.ndarray, lesson: Lesson) -> list[Tensor]:
    device = lesson.parameters[0].device
    return [torch.tensor(block, dtype=torch.int64, device=device) for block in tokens]


def _at_a_time(blocks: list[Tensor], threads: int) -> Iterator[list[Tensor]]:
    """Yields as many blocks as run at once, so that memory holds only their logits and gradients."""
    return (blocks[start : start + threads] for start in range(0, len(blocks), threads))


@contextmanager
def _workers(threads: int) -> Iterator[RunAll]:
    """Yields an ordered parallel map; its workers, and the caller, use one core each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(before)
