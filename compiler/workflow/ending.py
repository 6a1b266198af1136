"""Ends a snakemake run: with the summary of what was built, from the records in its folder, or with why it was not.

The summary is printed when the process ends, after everything that snakemake prints and even with `--quiet all`. A run
that finds nothing to do calls no hook of the workflow, so this module listens to snakemake's log.

Beyond the documented interface it takes the message of a run with nothing to do, and of `workflow` what was asked for
(`dag_settings`, `dryrun`, `is_main_process`) and the logs of the jobs that did not finish (`dag.needrun_jobs()`):
`onerror` is told only snakemake's own log.
"""

import atexit
import contextlib
import logging
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from snakemake.common import NOTHING_TO_BE_DONE_MSG
from snakemake.logging import logger

from coldpress.compiler.block_statistics import with_error
from coldpress.compiler.headline import at_most, headline, pays, warning
from coldpress.compiler.io import load_record
from coldpress.compiler.run_command import PROGRAM, run_command
from coldpress.compiler.stages.tokenize.text import PYDOC
from coldpress.compiler.workflow.last_words import NOTE, REFUSAL, REFUSED, Mark, last_words, marks, no_room, not_built
from coldpress.compiler.workflow.settings import BuildConfig
from coldpress.runtime.cli.summary import process, whole_model
from coldpress.runtime.plugins import load
from coldpress.runtime.quantities import show_bytes
from coldpress.runtime.quantization._mixed import in_words
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.device import UNCOMPUTED
from coldpress.schemas.errors import ColdpressError, printable
from coldpress.schemas.metrics import Metrics, PlanDrafts, PlanFigures, Protocol, Sample
from coldpress.schemas.package import Exported, Package
from coldpress.schemas.sparsity import Tried

UP_TO_DATE = "everything is up to date"
WIDTH = 100
"""Columns of the first sentence."""


class Ending(logging.Handler):
    """Prints the last lines of a run: summaries, or why builds failed."""

    def __init__(
        self, workflow: Any, builds: Mapping[str, BuildConfig], called_from: Path, checked: Callable[..., str]
    ) -> None:
        """Starts listening; `checked` calls a function, and ends the process with its error's sentence if it raises."""
        super().__init__(logging.INFO)
        self._workflow, self._builds, self._called_from, self._checked = workflow, builds, called_from, checked
        self._before: dict[Path, Mark] = {}
        self._published = {
            name: _time_of(build.target_folder / "publish.json") if build.artifact.exists() else None
            for name, build in builds.items()
        }
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == NOTHING_TO_BE_DONE_MSG and self._is_whole():
            self._say(f"{UP_TO_DATE}\n")

    def begin(self) -> None:
        self._before = marks(self._logs())

    def built(self) -> None:
        if self._is_whole():
            self._say("")

    def failed(self) -> None:
        """Ends the process with the sentences of the jobs that failed."""
        self._fetch_logs()
        unfinished, failed = self._logs(), []
        for name, build in self._builds.items():
            # a build's own jobs, and those that all builds of its model share
            own = build.target_folder, build.folder / "logs"
            logs = {log: rule for log, rule in unfinished.items() if any(map(log.is_relative_to, own))}
            if logs:
                self._note_earlier(name, build)
                failed.append((name, *self._last_words(logs, build.folder)))
        if len(self._builds) == 1 or not failed:  # or it was no job of a build that failed
            sentence, code = failed[0][1:] if failed else last_words(unfinished, self._before)
        else:
            for name, why, _ in failed:
                print(not_built(name, why), file=sys.stderr)
            names = ", ".join(name for name, *_ in failed)
            sentence, code = f"{REFUSAL}{len(failed)} of {len(self._builds)} builds failed: {names}", REFUSED
        print(sentence, file=sys.stderr, flush=True)
        sys.exit(code)

    def _last_words(self, logs: Mapping[Path, str], folder: Path) -> tuple[str, int]:
        """Returns the last line of a build and its exit code; on a full disk no job could write a sentence."""
        line, code = last_words(logs, self._before)
        full = no_room(folder) if code != REFUSED else None
        return (full, REFUSED) if full else (line, code)

    def _say(self, before: str) -> None:
        folders = {name: build.target_folder for name, build in self._builds.items()}
        with contextlib.chdir(self._called_from):
            text = self._checked(show, *folders.values()) if len(folders) == 1 else self._checked(show_all, folders)
        atexit.register(print, before + text, flush=True)

    def _note_earlier(self, name: str, build: BuildConfig) -> None:
        published = self._published[name]
        if published is not None and _time_of(build.target_folder / "publish.json") == published:
            shown = os.path.relpath(build.artifact, self._called_from)
            print(f"{NOTE}{shown} is of an earlier build and was left as it is, with its report", file=sys.stderr)

    def _is_whole(self) -> bool:
        """Tells whether the user asked for whole builds, not for a part or a dry run."""
        asked = self._workflow.dag_settings
        partial = set(asked.targets) - {"all"} or asked.target_jobs or asked.until or asked.omit_from
        return self._workflow.is_main_process and not self._workflow.dryrun and not partial

    def _fetch_logs(self) -> None:
        for job in self._workflow.dag.needrun_jobs():
            for path in job.log:
                if path.is_storage and not Path(path).exists() and path.storage_object.exists():
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    path.storage_object.retrieve_object()

    def _logs(self) -> Mapping[Path, str]:
        """Returns log -> rule for the unfinished jobs."""
        jobs = self._workflow.dag.needrun_jobs()
        return {Path(path).absolute(): job.rule.name for job in jobs for path in job.log}


def _time_of(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def show(folder: Path) -> str:
    """Returns the screen for a build folder; raises ColdpressError if a record is missing or is of another artifact."""
    metrics, package = load_record(folder / "metrics.json", Metrics), load_record(folder / "publish.json", Package)
    if metrics.artifact_sha256 != package.manifest_sha256:
        raise ColdpressError(
            f"{folder / 'metrics.json'} is of artifact {metrics.artifact_sha256[:12]}, what stands there is "
            f"{package.manifest_sha256[:12]}; delete the file and run the build again"
        )
    artifact = _shown(Path(package.folder))
    places = [
        ("artifact", f"{artifact}, {show_bytes(metrics.artifact_bytes)}"),
        ("identity", package.manifest_sha256),
        ("text", corpus_of(metrics.protocol)),
        *exported(folder, package.manifest_sha256),
        ("report", str(_shown(folder / "report.html"))),
    ]
    return (
        f"\n{_warning(metrics)}{metrics.model} on {metrics.device}: {metrics.method}, "
        f"{in_words(metrics.beside(metrics.format))}\n\n"
        f"{textwrap.fill(headline(metrics, metrics.device), WIDTH)}\n\n{_written(metrics.sample)}"
        f"{_table(places)}\n\n{_table(rows(metrics))}\n\n  run it\n"
        f"  {run_command(_runtime(), str(artifact), metrics.sample)}"
        f"{_chat_commands(str(artifact)) if metrics.sample and metrics.sample.is_chat else ''}"
    )


def _chat_commands(artifact: str) -> str:
    return "".join(f"\n  {shlex.join([*_runtime(), command, artifact])}" for command in ("chat", "serve"))


def show_all(folders: Mapping[str, Path]) -> str:
    """Sums up each of several builds, by name; raises ColdpressError if a record is missing."""
    found = {name: load_record(folder / "metrics.json", Metrics) for name, folder in folders.items()}
    return "\n\n".join(
        f"{name}\n{_indented(_warning(metrics) + textwrap.fill(headline(metrics, metrics.device), WIDTH))}\n"
        f"    {_shown(folders[name] / 'report.html')}"
        for name, metrics in found.items()
    )


def _warning(metrics: Metrics) -> str:
    words = warning(metrics)
    return f"{textwrap.fill(words, WIDTH)}\n\n" if words else ""


def _written(sample: Sample | None) -> str:
    if sample is None:
        return ""
    names = ("question", "answer") if sample.is_chat else ("prompt", "continuation")
    parts = zip(names, (sample.prompt, sample.text), strict=True)
    return "".join(f"  {name}\n{_indented(words)}\n\n" for name, words in parts)


def _indented(words: str) -> str:
    return textwrap.indent("\n".join(map(printable, words.split("\n"))), "    ")


def corpus_of(protocol: Protocol) -> str:
    """Names the corpus, which the artifact's identity depends on."""
    own = "; the documentation of this Python, so another Python gives another identity"
    return f"{protocol.corpus}, sha256 {protocol.text_sha256[:12]}{own if protocol.corpus == PYDOC else ''}"


def exported(folder: Path, identity: str) -> list[tuple[str, str]]:
    """Returns a row for the exported file of this artifact, if there is one."""
    record = folder / "export.json"
    found = load_record(record, Exported) if record.exists() else None
    if found is None or found.artifact_sha256 != identity or not Path(found.file).exists():
        return []
    rounded = f", {len(found.rounded)} tensors rounded again" if found.rounded else ""
    return [("exported", f"{_shown(Path(found.file))}, {show_bytes(found.size_bytes)}{rounded}")]


def rows(metrics: Metrics) -> list[tuple[str, str]]:
    return [
        ("DRAM", f"{show_bytes(metrics.resident_bytes)} fixed, of a budget of {show_bytes(metrics.budget_bytes)}"),
        ("process", process(min(metrics.budget_bytes, metrics.whole_model_bytes), metrics.process_bytes)),
        ("the whole model", whole_model(metrics.whole_model_bytes, metrics.budget_bytes)),
        (
            "read from flash",
            f"{show_bytes(metrics.flash_bytes_per_token)} in {metrics.reads_per_token:.1f} reads per token",
        ),
        ("cache hit rate", f"{metrics.hit_rate:.1%}"),
        (
            "perplexity",
            f"{with_error(metrics.ppl_artifact, metrics.ppl_artifact_error, 2)}; of the source "
            f"{with_error(metrics.ppl_source, metrics.ppl_source_error, 2)}; ratio "
            f"{with_error(metrics.ppl_ratio, metrics.ppl_ratio_error, 4)}",
        ),
        (
            "from",
            f"{metrics.num_measured_blocks} of {metrics.num_test_blocks} blocks of test text, "
            f"{metrics.num_test_tokens:,} tokens; ± is the standard error over blocks",
        ),
        ("speed here", speed_here(metrics)),
        (f"on {metrics.device}", modelled_speed(metrics)),
        ("dense, same DRAM", dense(metrics)),
        ("does it pay?", pays(metrics)),
        *plans(metrics),
        *drafts(metrics.drafts),
        *tried(metrics.tried, metrics.budget_bytes),
        *beyond_estimate(metrics),
    ]


def plans(metrics: Metrics) -> list[tuple[str, str]]:
    return [
        (
            f"plan {plan.plan}",
            f"{plan.method} at density {plan.density:.2f}, {plan.cache}: "
            f"{at_most(metrics, format(plan.modelled_tokens_per_s, '.0f'))} tokens/s, simulated; {_reads(plan)}; "
            f"perplexity × {with_error(plan.ppl_ratio, plan.ppl_ratio_error, 4)}",
        )
        for plan in metrics.plans
    ]


def drafts(found: Sequence[PlanDrafts]) -> list[tuple[str, str]]:
    return [
        (
            f"drafts, {each.plan}",
            f"{each.draft}: {sum(each.accepted)} of {sum(each.drafted)} accepted, {each.tokens_per_pass:.2f} tokens "
            f"per pass; the tokens are {'those' if each.same_tokens else 'not those'} without drafts",
        )
        for each in found
    ]


def _reads(plan: PlanFigures) -> str:
    if plan.holds_everything:
        return "the whole model fits"
    return f"{show_bytes(plan.flash_bytes_per_token)} in {plan.reads_per_token:.1f} reads, {plan.hit_rate:.1%} hits"


def speed_here(metrics: Metrics) -> str:
    """Returns the measured speed, with its spread where several blocks were decoded."""
    spread = "; ± is the standard deviation over blocks" if math.isfinite(metrics.tokens_per_s_deviation) else ""
    speed = with_error(metrics.tokens_per_s, metrics.tokens_per_s_deviation, 0)
    return f"{speed} tokens/s, measured at this machine's present load{spread}"


def modelled_speed(metrics: Metrics) -> str:
    """Returns the simulated speed, with how far such figures may be off, or what an upper bound counts."""
    if metrics.modelled_error is None:
        return f"at most {metrics.modelled_tokens_per_s:.0f} tokens/s ({UNCOMPUTED})"
    speed = with_error(metrics.modelled_tokens_per_s, metrics.modelled_tokens_per_s * metrics.modelled_error, 0)
    return f"{speed} tokens/s, simulated; ± is how far such figures were off on measured machines"


def dense(metrics: Metrics) -> str:
    """Returns the figures of a dense build in the same DRAM, and how this artifact compares."""
    if metrics.dense is None or metrics.gain_over_dense is None:
        return "a dense run with attention in DRAM does not fit"
    run, gain = metrics.dense, metrics.gain_over_dense
    speed = at_most(metrics, f"{run.tokens_per_s:.0f}")
    figures = f"{speed} tokens/s, {show_bytes(run.flash_bytes_per_token)} in {run.reads_per_token} reads"
    if load("coldpress.runtime.sparsity", Selector, metrics.method).is_whole:
        return f"{figures} per token; this artifact is dense"
    is_whole = any(plan.density >= 1 for plan in metrics.plans[:1])  # with room for all that smaller budgets leave out
    pays = "" if gain >= 1 or is_whole else ": sparsity does not pay here, build with method=dense"
    return (
        f"a build with method=dense, simulated: {figures} per token, perplexity {metrics.ppl_dense:.2f}; "
        f"this artifact is {gain:.2f} times as fast{pays}"
    )


def tried(found: Sequence[Tried], budget_bytes: int) -> list[tuple[str, str]]:
    """Returns why `auto` took its method, then a line for each method that it judged and one for those it skipped."""
    if not found:
        return []
    judged = [
        f"{entry.method}: {1 / entry.token_s:.0f} tokens/s, estimated; {', '.join(_at(entry))}".rstrip("; ")
        for entry in found
        if entry.token_s
    ]
    skipped = [f"{entry.method} {_why_skipped(entry, budget_bytes)}" for entry in found if entry.skipped is not None]
    lines = [*judged, *(["; ".join(skipped)] if skipped else [])]
    took = [("auto took", f"{found[0].method}: {found[0].reason}")] if found[0].reason else []
    return [*took, *(("auto tried" if number == 0 else "", line) for number, line in enumerate(lines))]


def beyond_estimate(metrics: Metrics) -> list[tuple[str, str]]:
    """Returns a row if test text loses more than `auto` estimated for its choice, by more than two standard errors."""
    expected = metrics.tried[0].ppl_ratio if metrics.tried else None
    if expected is None or not metrics.ppl_ratio - 2 * metrics.ppl_ratio_error > expected:
        return []
    ratio = with_error(metrics.ppl_ratio, metrics.ppl_ratio_error, 3)
    found = f"perplexity × {ratio} on test text, where auto expected × {expected:.3f}"
    return [("more is lost", f"{found}; with max_ppl_ratio=<most> a build that exceeds it is refused")]


def _at(entry: Tried) -> list[str]:
    sparse = entry.density is not None and entry.density < 1
    return [
        *([in_words(entry.beside(entry.format))] if entry.format else []),
        *([str(entry.cache)] if entry.cache and sparse else []),
        *([f"density {entry.density:.2f}"] if sparse else []),
        *([f"perplexity × {entry.ppl_ratio:.3f}"] if entry.ppl_ratio is not None else []),
    ]


def _why_skipped(entry: Tried, budget_bytes: int) -> str:
    if entry.needed_bytes is not None:
        return f"needs {show_bytes(entry.needed_bytes)} of {show_bytes(budget_bytes)}"
    return f"was skipped: {(entry.skipped or '').partition(';')[0]}"


def _runtime() -> list[str]:
    """Returns the words that call the runtime here: its name where the environment is active, else its path."""
    beside = Path(sys.executable).with_name(PROGRAM)
    if not beside.is_file():
        return [str(_shown(Path(sys.executable))), "-m", "coldpress"]
    return [PROGRAM] if os.environ.get("VIRTUAL_ENV") == sys.prefix else [str(_shown(beside))]


def _table(lines: list[tuple[str, str]]) -> str:
    return "\n".join(f"  {name:18s}{value}" for name, value in lines)


def _shown(path: Path) -> Path:
    """Returns the path, relative if below the current folder. Keeps links: an environment's interpreter is one."""
    absolute = path.absolute()
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute
