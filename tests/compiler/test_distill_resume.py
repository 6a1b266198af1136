"""distill: what it tells while it runs, when it ends, and that a run that was killed ends with the same bytes."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.io import Workspace
from coldpress.compiler.stages.distill import run
from coldpress.compiler.training import loop
from coldpress.schemas.errors import ColdpressError
from tests.support.distilling import QUICK, corpus_at, model_at, top_k
from tests.support.statistics import workspace

SHORT = QUICK.model_copy(update={"distill_steps": 6, "distill_evaluations": 3})


class Killed(BaseException):
    """What no handler catches."""


def dying(after: int):
    """`Workspace.save` that ends the process once `after` states are written."""
    whole, count = Workspace.save, 0

    def save(self: Workspace, key: str, arrays: Mapping[str, np.ndarray]):
        nonlocal count
        if key.startswith("training"):
            count += 1
        if count > after:
            self.begin(key).write_bytes(b"half")  # as a kill while it writes leaves it
            raise Killed
        return whole(self, key, arrays)

    return save


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["self", "lora"])
@pytest.mark.parametrize("after", [1, 2])
def test_a_killed_run_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recipe: str, after: int
) -> None:
    caplog.set_level("INFO")
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    sparsity, config = top_k(model, tmp_path), SHORT.model_copy(update={"recipe": recipe})
    whole = run(config, model, corpus, sparsity, workspace(tmp_path / "whole"), 1)
    with monkeypatch.context() as patched:
        patched.setattr(Workspace, "save", dying(after))
        with pytest.raises(Killed):
            run(config, model, corpus, sparsity, workspace(tmp_path / "killed"), 1)
    caplog.clear()
    resumed = run(config, model, corpus, sparsity, workspace(tmp_path / "killed"), 2)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.distillation == whole.distillation
    assert f"resumes at step {2 * after}," in caplog.text
    assert not list((tmp_path / "killed").glob("training*"))


@pytest.mark.slow
def test_a_state_of_other_settings_is_not_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    sparsity = top_k(model, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Workspace, "save", dying(1))
        with pytest.raises(Killed):
            run(SHORT, model, corpus, sparsity, Workspace(tmp_path / "d", "before"), 1)
    other = run(SHORT, model, corpus, sparsity, Workspace(tmp_path / "d", "after"), 1)
    assert other.weights_sha256 == run(SHORT, model, corpus, sparsity, workspace(tmp_path / "e"), 1).weights_sha256


@pytest.mark.slow
def test_states_are_also_saved_between_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    sparsity = top_k(model, tmp_path)
    whole = run(SHORT, model, corpus, sparsity, workspace(tmp_path / "whole"), 1)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "STATE_S", 0.0)
        patched.setattr(Workspace, "save", dying(3))
        with pytest.raises(Killed):
            run(SHORT, model, corpus, sparsity, workspace(tmp_path / "killed"), 1)
    assert run(SHORT, model, corpus, sparsity, workspace(tmp_path / "killed"), 1).weights_sha256 == whole.weights_sha256


def test_the_curve_is_told_and_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    distilled = run(SHORT, model, corpus, top_k(model, tmp_path), workspace(tmp_path / "d"), 1)
    assert distilled.distillation is not None
    curve = distilled.distillation.curve
    assert [point.step for point in curve] == [0, 2, 4, 6]
    assert [point.loss is None for point in curve] == [True, False, False, False]
    for point in curve[1:]:
        line = f"step {point.step} of 6, loss {point.loss:.4f}, validation KL {point.validation_kl:.4f}"
        assert line in caplog.text
    assert curve[-1].validation_kl < curve[0].validation_kl


def test_training_ends_when_validation_text_gains_nothing(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    config = QUICK.model_copy(
        update={"distill_steps": 20, "distill_evaluations": 10, "distill_patience": 2, "learning_rate": 0.3}
    )
    distilled = run(config, model, corpus, top_k(model, tmp_path, 0.5), workspace(tmp_path / "d"), 1)
    assert distilled.distillation is not None
    curve = distilled.distillation.curve
    best = min(range(len(curve)), key=lambda at: curve[at].validation_kl)
    assert len(curve) == best + 3
    assert curve[-1].step < 20


def test_a_loss_that_is_no_number_is_told(tmp_path: Path) -> None:
    model, corpus = model_at(tmp_path), corpus_at(tmp_path)
    config = QUICK.model_copy(update={"learning_rate": 1e30, "distill_patience": 20})
    with pytest.raises(ColdpressError, match=r"loss of distill is nan at step 2.*lower learning_rate.*1e\+30"):
        run(config, model, corpus, top_k(model, tmp_path), workspace(tmp_path / "d"), 1)
