"""publish: only what passes its gates takes the final name; whatever else happens, what stands there is whole."""

import functools
import math
import os
import shutil
import signal
from pathlib import Path

import pytest

from coldpress.compiler import publishing
from coldpress.compiler.stages import publish
from coldpress.compiler.stages.publish import PublishConfig, check_gates, logit_limit
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from coldpress.schemas.errors import ArtifactError, ColdpressError, DoesNotFitError
from coldpress.schemas.manifest import MANIFEST_FILE
from coldpress.schemas.metrics import Verification
from tests.support.records import Build, contents, tiny_figures, tiny_verification

REPORTS = ("metrics.json", "report.html", "export.json", "final.gguf")
"""And what was exported."""
GATES = ("max_ppl_ratio", "min_top1_agreement", "max_logit_error")


@pytest.fixture
def build(tmp_path):
    made = Build(tmp_path, name="package/artifact")
    made.package()
    return made


def config_of(folder: Path, **gates) -> PublishConfig:
    paths = {"artifact": folder / "final.coldpress", "metrics": folder / REPORTS[0], "html": folder / REPORTS[1]}
    exported = tuple(str(folder / name) for name in REPORTS[2:])
    return PublishConfig(**{name: str(path) for name, path in paths.items()}, exported=exported, **gates)


def write_reports(folder: Path, text: str) -> None:
    for name in REPORTS:
        (folder / name).write_text(text)


def run(build: Build, **gates):
    package = build.record
    return publish.run(
        config_of(build.folder, **gates), package, tiny_verification(build.plans, package.manifest_sha256)
    )


def test_a_refused_link_leaves_nothing_hidden(tmp_path):
    artifact, taken = tmp_path / "artifact", tmp_path / "beside" / MANIFEST_FILE
    artifact.mkdir()
    (artifact / MANIFEST_FILE).touch()
    taken.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        publishing.point(taken.parent / "artifact", artifact)
    assert list(taken.parent.iterdir()) == [taken]


def test_it_moves_in_one_piece(build, tmp_path):
    before = contents(build.artifact)
    published = run(build)
    assert published == build.record.model_copy(update={"folder": str(tmp_path / "final.coldpress")})
    assert contents(tmp_path / "final.coldpress") == before
    assert not build.artifact.exists()
    for place in (tmp_path, build.artifact.parent):  # what Snakemake is told of
        assert (place / MANIFEST_FILE).is_symlink()
        assert (place / MANIFEST_FILE).samefile(tmp_path / "final.coldpress" / MANIFEST_FILE)
    assert open_artifact(published.folder).sha256 == build.record.manifest_sha256


def test_an_artifact_that_cannot_be_read_is_refused_and_what_stands_stays(build, tmp_path):
    """The sentence is the reader's, whatever error class it has; the earlier artifact keeps its name and reports."""
    earlier = Build(tmp_path / "earlier", num_pinned=5)
    earlier.package()
    shutil.copytree(earlier.artifact, tmp_path / "final.coldpress")
    write_reports(tmp_path, "of the earlier one")
    before = contents(tmp_path / "final.coldpress")
    (build.artifact / "tables.safetensors").rename(tmp_path / "away")
    with pytest.raises(ArtifactError, match=r"tables\.safetensors"):
        run(build)
    assert contents(tmp_path / "final.coldpress") == before
    assert [(tmp_path / name).read_text() for name in REPORTS] == ["of the earlier one"] * len(REPORTS)
    (tmp_path / "away").rename(build.artifact / "tables.safetensors")
    assert contents(Path(run(build).folder)) != before


def test_publishing_again_changes_nothing(build, tmp_path):
    first = run(build)
    write_reports(tmp_path, "of this one")
    before = (tmp_path / "final.coldpress" / MANIFEST_FILE).stat()
    assert run(build) == first
    assert (tmp_path / "final.coldpress" / MANIFEST_FILE).stat() == before
    assert [(tmp_path / name).read_text() for name in REPORTS] == ["of this one"] * len(REPORTS)


def another(build: Build, folder: Path) -> Build:
    """Another artifact, of the same final name, packaged."""
    made = Build(folder / "other", format_name="int4_group32", name="package/artifact")
    made.package()
    return made


def test_a_missed_gate_leaves_nothing_under_the_final_name(build, tmp_path):
    """And loses nothing: the artifact stays where it was packaged, and passes once it is let."""
    with pytest.raises(
        ColdpressError,
        match=r"perplexity is 8\.20, 1\.0250 ± 0\.0020 times the source's 8\.00, expected at most 1\.02 "
        r"\(max_ppl_ratio\); .*set another limit; nothing is published as final\.coldpress$",
    ):
        run(build, max_ppl_ratio=1.02)
    assert not (tmp_path / "final.coldpress").exists()
    assert run(build, max_ppl_ratio=1.03).folder == str(tmp_path / "final.coldpress")


def test_a_gate_that_is_tightened_takes_the_artifact_back(build, tmp_path):
    """Or that an equal artifact of an earlier build passed; what was reported of it is kept."""
    run(build)
    write_reports(tmp_path, "of what is refused now")
    aside = tmp_path / "earlier" / build.record.manifest_sha256[:12]
    with pytest.raises(ColdpressError, match=rf"max_ppl_ratio.*, and the report of it is now in {aside}$"):
        run(build, max_ppl_ratio=1.02)
    assert not (tmp_path / "final.coldpress").exists()
    assert not [name for name in REPORTS if (tmp_path / name).exists()]
    assert [(aside / name).read_text() for name in REPORTS] == ["of what is refused now"] * len(REPORTS)
    assert open_artifact(build.artifact).sha256 == build.record.manifest_sha256
    assert (build.artifact.parent / MANIFEST_FILE).samefile(build.artifact / MANIFEST_FILE)
    run(build)


def test_what_an_earlier_build_left_is_set_aside_with_its_report(build, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(build)
    write_reports(tmp_path, "of the earlier one")
    earlier = contents(tmp_path / "final.coldpress")
    other = another(build, tmp_path)
    aside = tmp_path / "earlier" / build.record.manifest_sha256[:12]
    for _ in range(2):  # a second time, nothing stands there
        with pytest.raises(ColdpressError, match=r"max_ppl_ratio.*nothing is published as final\.coldpress") as caught:
            other_run(other, tmp_path, max_ppl_ratio=1.02)
        assert not (tmp_path / "final.coldpress").exists()
    assert "now in" not in str(caught.value)
    assert contents(aside / "final.coldpress") == earlier
    assert [(aside / name).read_text() for name in REPORTS] == ["of the earlier one"] * len(REPORTS)
    assert not [name for name in REPORTS if (tmp_path / name).exists()]


def other_run(other: Build, folder: Path, **gates):
    """Publishes `other` under the name in `folder`."""
    found = tiny_verification(other.plans, other.record.manifest_sha256)
    return publish.run(config_of(folder, **gates), other.record, found)


@pytest.mark.parametrize("exchange", [True, False])
def test_another_artifact_takes_the_place_and_old_reports_go(build, tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(publishing, "_exchange", lambda first, second: False)
    run(build)
    write_reports(tmp_path, "of the earlier one")
    other = another(build, tmp_path)
    other_run(other, tmp_path)
    assert open_artifact(tmp_path / "final.coldpress").sha256 == other.record.manifest_sha256
    assert not [name for name in REPORTS if (tmp_path / name).exists()]
    assert not other.artifact.exists()
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_artifact_that_was_deleted_must_be_packaged_again(build, tmp_path):
    run(build)
    publishing.remove(tmp_path / "final.coldpress")
    assert not any((place / MANIFEST_FILE).exists() for place in (tmp_path, build.artifact.parent))
    with pytest.raises(ColdpressError, match=r"nothing stands there, the package says [0-9a-f]{12}; run package again"):
        run(build)


def test_figures_of_another_artifact(build):
    found = tiny_verification(build.plans, "f" * 64)
    with pytest.raises(ColdpressError, match=r"the verification is of artifact ffffffffffff, .* run verify again"):
        publish.run(config_of(build.folder), build.record, found)


def test_what_is_no_artifact_is_not_replaced(build, tmp_path):
    (tmp_path / "final.coldpress").mkdir()
    (tmp_path / "final.coldpress" / "thesis.txt").write_text("years of work")
    with pytest.raises(ColdpressError, match="exists and is no artifact"):
        run(build)
    with pytest.raises(ColdpressError, match="max_ppl_ratio"):
        run(build, max_ppl_ratio=1.02)
    assert (tmp_path / "final.coldpress" / "thesis.txt").read_text() == "years of work"


def judged(build: Build, config: PublishConfig, **figures) -> None:
    found = tiny_verification(build.plans, "a" * 64).model_copy(update=figures)
    check_gates(config, found, open_artifact(build.artifact).manifest)


@pytest.mark.parametrize(
    ("figures", "gate"),
    [
        (
            {"ppl_artifact": 16.1},
            r"perplexity is 16\.10, 2\.0125 ± 0\.0020 times the source's 8\.00, expected at most 2 \(max_ppl",
        ),
        ({"top1_agreement": 0.39}, r"agrees with the source on 39\.0% of .* expected at least 0\.4 \(min_top1_agree"),
        ({"max_logit_error": 0.11}, r"off by 0\.1100 of the largest one, expected at most 0\.1 \(max_logit_error\)"),
    ],
)
def test_default_gates(build, figures, gate):
    judged(build, config_of(build.folder))
    with pytest.raises(ColdpressError, match=gate):
        judged(build, config_of(build.folder), **figures)
    judged(build, config_of(build.folder, **dict.fromkeys(GATES, "off")), **figures)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("figure", ["ppl_artifact", "ppl_source", "max_logit_error"])
def test_what_is_no_finite_figure_passes_no_gate(build, figure, value):
    """Not even one that is off; and the record of `verify` can tell of it."""
    found = tiny_verification(build.plans, "a" * 64).model_copy(update={figure: value})
    again = Verification.model_validate_json(found.to_json())
    assert not math.isfinite(getattr(again, figure))
    for gates in ({}, dict.fromkeys(GATES, "off")):
        with pytest.raises(ColdpressError, match=r"nan|inf"):
            judged(build, config_of(build.folder, **gates), **{figure: getattr(again, figure)})


@pytest.mark.parametrize(
    ("figures", "error", "text"),
    [
        (
            {"ppl_ratio": 2.5, "ppl_artifact": 20.0},
            ColdpressError,
            "with plan 1gb the artifact's perplexity is 20.00, 2.5",
        ),
        ({"top1_agreement": 0.2}, ColdpressError, "with plan 1gb it agrees with the source on 20.0%"),
        ({"dram_used_bytes": 10**9 + 1}, DoesNotFitError, "used 1000000001 bytes of DRAM, the budget is 1000000000"),
        ({"simulated_equals_real": False}, ColdpressError, "a simulation of the same tokens makes other reads"),
    ],
)
def test_every_plan_has_to_pass(build, figures, error, text):
    config = config_of(build.folder)
    judged(build, config, plans=(tiny_figures(plan="2gb"), tiny_figures()))
    with pytest.raises(error, match=text):
        judged(build, config, plans=(tiny_figures(plan="2gb"), tiny_figures(**figures)))


def test_all_missed_gates_stand_in_one_sentence(build):
    with pytest.raises(
        ColdpressError, match=r"\(max_ppl_ratio\), and it agrees .*\(min_top1_agreement\); .*set another limit"
    ):
        judged(build, config_of(build.folder), ppl_artifact=100.0, top1_agreement=0.1)


def test_the_widest_format_says_what_rounding_may_cost(build):
    """An artifact of several formats may lose what the coarsest of them does."""
    manifest = open_artifact(build.artifact).manifest
    (family, *_) = manifest.families
    limits = {
        name: load("coldpress.runtime.quantization", Format, name).MAX_LOGIT_ERROR for name in ("fp16", "int4_group32")
    }
    assert limits["fp16"] < limits["int4_group32"]
    for formats in (("fp16", "int4_group32"), ("int4_group32", "fp16")):
        families = tuple(family.model_copy(update={"format": name}) for name in formats)
        mixed = manifest.model_copy(update={"families": families})
        assert logit_limit(config_of(build.folder), mixed) == limits["int4_group32"]
        assert logit_limit(config_of(build.folder, max_logit_error=0.25), mixed) == 0.25
    joint = manifest.flash.sections[0].model_copy(update={"format": "fp16+int4_group32"})
    flash = manifest.flash.model_copy(update={"sections": (joint,)})
    finer = family.model_copy(update={"format": "fp16"})
    mixed = manifest.model_copy(update={"families": (finer,), "flash": flash})
    assert logit_limit(config_of(build.folder), mixed) == limits["int4_group32"]


def test_every_format_says_what_rounding_may_cost():
    limits = {
        name: load("coldpress.runtime.quantization", Format, name).MAX_LOGIT_ERROR
        for name in names("coldpress.runtime.quantization")
    }
    assert limits["fp16"] < limits["int8_group32"] < limits["int4_group32"] < 1


def test_gates_that_are_always_on(build):
    found = tiny_verification(build.plans, "a" * 64)
    over = found.run.model_copy(update={"dram_used_bytes": found.run.dram_budget_bytes + 1})
    with pytest.raises(DoesNotFitError, match=r"used \d+ bytes of DRAM, the budget is \d+"):
        judged(build, config_of(build.folder), run=over)
    with pytest.raises(ColdpressError, match="simulation of the same tokens makes other reads"):
        judged(build, config_of(build.folder), simulated_equals_real=False)


CHANGES = ("fsync", "mkdir", "rename", "symlink", "replace", "unlink", "rmdir")


def killed_at(step: int, action) -> bool:
    """Runs `action` in a child that kills itself at its `step`-th change of the disk; False if it got through."""
    child = os.fork()
    if child == 0:
        try:
            count = iter(range(step))
            for name in CHANGES:
                setattr(os, name, counted(getattr(os, name), count))
            publishing._exchange = counted(publishing._exchange, count)
            action()
        except ColdpressError:
            pass
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def counted(function, count):
    def call(*arguments, **named):
        if next(count, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    return call


@pytest.mark.slow
@pytest.mark.parametrize("passes", [True, False])
def test_killed_at_any_step_what_stands_is_whole_and_a_second_run_ends_as_the_first(build, tmp_path, passes):
    """An earlier artifact stands there; the new one passes, or misses a gate."""
    new, gates = another(build, tmp_path), {} if passes else {"max_ppl_ratio": 1.02}
    whole = [contents(build.artifact), contents(new.artifact)]
    found = tiny_verification(new.plans, new.record.manifest_sha256)
    step, killed = 0, True
    while killed:
        top = tmp_path / str(step)
        final = top / "final.coldpress"
        shutil.copytree(build.artifact, final)
        shutil.copytree(new.artifact, top / "package" / "artifact")
        write_reports(top, "of the earlier one")
        package = new.record.model_copy(update={"folder": str(top / "package" / "artifact")})
        publishes = functools.partial(publish.run, config_of(top, **gates), package, found)
        killed = killed_at(step, publishes)
        if final.exists():
            assert contents(final) in whole
            if contents(final) == whole[1]:
                assert passes
                assert not [name for name in REPORTS if (top / name).exists()]
        if passes:
            publishes()
            assert contents(final) == whole[1]
            assert not Path(package.folder).exists()
        else:
            with pytest.raises(ColdpressError, match="nothing is published"):
                publishes()
            assert not final.exists()
            assert contents(Path(package.folder)) == whole[1]
            assert contents(top / "earlier" / build.record.manifest_sha256[:12] / "final.coldpress") == whole[0]
        assert not list(top.rglob("*.tmp"))
        step += 1
    assert step > 5
