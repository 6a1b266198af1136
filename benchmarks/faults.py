"""Tests whether packaging and publishing survive every failing system call on a file of the build, one at a time.

`python -m coldpress.compiler package` and `publish` run under strace on the records of a tiny model, into a folder that
is empty or holds another artifact. Two kinds of calls count: those that change or open something there, and those that
read or look at something there or at the build's other files. An injection is one run in which one of these calls gives
one error number. A sample takes the kinds of stage, call and error number in turn.

An injection is torn if an artifact or record is then neither absent (where there was none), nor as it was, nor complete
and new. It is untidy unless the run ended with code 2 and one sentence, its last line, or with code 0 and everything in
place (as where a temporary file could not be removed), or if a hidden file is left after the next run. It is completed
after if a run without faults then ends with the same files as an undisturbed one, or if everything is as it was before.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, main, option
from coldpress.compiler.io import save_record
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError
from tests.support.records import Build, contents, tiny_verification

SHARES_OF_ALL = 100
"""Cells of a run with all injections."""
FULL, FORBIDDEN = ("EIO", "ENOSPC"), ("EACCES", "EIO")
"""Errors of a disk that is full, and of a folder that is not ours; either disk may also fail."""
ERRORS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("write", "pwrite64", "fsync", "fdatasync", "fallocate", "sendfile"), FULL),
    **dict.fromkeys(("openat", "mkdir"), ("EACCES", *FULL)),
    **dict.fromkeys(("rename", "renameat", "renameat2"), ("EACCES", *FULL, "EXDEV")),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), FORBIDDEN),
    "ftruncate": ("EIO",),
    "copy_file_range": (*FULL, "EXDEV"),
    "flock": ("ENOLCK", "EIO"),
    "link": (*FORBIDDEN, "EXDEV"),
}
"""System call that changes or opens something -> the errors it may give in the output folder."""
READ_ERRORS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("openat", "newfstatat", "statx"), FORBIDDEN),
    **dict.fromkeys(("read", "pread64", "preadv", "fstat", "getdents64"), ("EIO",)),
    "mmap": ("ENOMEM",),
}
"""System call that reads or looks -> the errors it may give in the output folder and on the build's other files."""
ARTIFACTS = ("package", "final.coldpress")
LINE = re.compile(r"(\d+) +(\w+)\(")
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Subject:
    """One stage, run from one initial state of its output folder."""

    name: str
    command: tuple[str, ...]
    before: Path
    """Folder with the initial state of the output folder."""
    out: Path
    """The output folder."""
    after: Mapping[str, str]
    """Relative path -> sha256 of what an undisturbed run leaves."""
    sources: tuple[Path, ...]
    """Folders of the stage's inputs."""

    def reset(self) -> None:
        """Restores the initial state of the output folder."""
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self.before, self.out, symlinks=True)  # the link to the manifest says where the artifact is

    def run(self, *tracer: str) -> subprocess.CompletedProcess[str]:
        """Runs the stage's process, under `tracer` if given."""
        return subprocess.run(
            (*tracer, *self.command),
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def trace(self, inject: str | None = None) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Runs the stage under strace; returns (its process, strace's lines)."""
        log = self.out.parent / "strace.txt"
        injection = ("-e", f"inject={inject}") if inject else ()
        tracer = ("strace", "-f", "--seccomp-bpf", "-y", "-s", "0", "-o", str(log))
        calls = ",".join(f"?{call}" for call in {**ERRORS, **READ_ERRORS})
        done = self.run(*tracer, "-e", f"trace={calls}", *injection)
        return done, log.read_text().splitlines()


@dataclass(frozen=True)
class Injection:
    """Gives `error` to the `number`-th `call` of every thread that makes so many."""

    subject: Subject
    call: str
    number: int
    error: str


def prepare(root: Path) -> Iterator[Subject]:
    """Makes the records of two builds, and yields the four subjects."""
    new, old = Build(root / "new"), Build(root / "old", num_pinned=5)
    old.package()
    out = root / "out"
    inputs, flags = root / "inputs", list[str]()
    sources = (inputs, root / "new")
    for name in ("model", "corpus", "sparsity", "device", "layout", "plans", "order", "placement", "quantized"):
        found = getattr(new, name)
        records: tuple[Record, ...] = found if isinstance(found, tuple) else (found,)
        paths = [inputs / f"{name}-{number}.json" for number in range(len(records))]
        for record, path in zip(records, paths, strict=True):
            save_record(record, path)
        flags += [f"--{name}", *map(str, paths)]
    stage = (sys.executable, "-m", "coldpress.compiler")
    package = (*stage, "package", *flags, "--artifact", str(out / "package"), "--output", str(out / "package.json"))
    for beginning in ("nothing", "another"):
        before = root / f"package-{beginning}"
        before.mkdir()
        if beginning == "another":
            shutil.copytree(old.artifact, before / "package")
        yield undisturbed(f"package over {beginning}", package, before, out, sources)
        packaged = root / f"publish-{beginning}"
        shutil.copytree(out, packaged, symlinks=True)
        if beginning == "another":
            shutil.copytree(old.artifact, packaged / "final.coldpress")
            (packaged / "metrics.json").write_text("{}\n")
        verification = inputs / "verify.json"
        save_record(tiny_verification(new.plans, new.package().manifest_sha256), verification)
        publish = (
            *(*stage, "publish", "--artifact", str(out / "final.coldpress"), "--metrics", str(out / "metrics.json")),
            *("--html", str(out / "report.html"), "--exported", json.dumps([str(out / "final.gguf")])),
            *("--package", str(out / "package.json"), "--output", str(out / "publish.json")),
            *("--verification", str(verification)),
        )
        yield undisturbed(f"publish over {beginning}", publish, packaged, out, sources)


def undisturbed(name: str, command: tuple[str, ...], before: Path, out: Path, sources: tuple[Path, ...]) -> Subject:
    """Returns a subject; leaves `out` as the undisturbed run left it."""
    subject = Subject(name, command, before, out, {}, sources)
    subject.reset()
    done = subject.run()
    if done.returncode:
        raise ColdpressError(f"{name}: the undisturbed run ended with {done.returncode}: {done.stderr}")
    return replace(subject, after=contents(out))


def places(subject: Subject) -> Iterator[Injection]:
    """Yields all injections: a call and number that concern the folders in every thread that gets so far."""
    subject.reset()
    _, lines = subject.trace()
    counts: Counter[tuple[str, str]] = Counter()
    possible: defaultdict[tuple[str, int], list[tuple[str, ...]]] = defaultdict(list)
    for line in lines:
        if found := LINE.match(line):
            thread, call = found.groups()
            counts[thread, call] += 1
            possible[call, counts[thread, call]].append(errors_of(subject, call, line))
    for (call, number), errors in sorted(possible.items()):
        for error in errors[0]:
            if all(error in others for others in errors):
                yield Injection(subject, call, number, error)


def errors_of(subject: Subject, call: str, line: str) -> tuple[str, ...]:
    """Returns the errors that the call in strace's `line` may give; none if it concerns no file of the build."""
    if str(subject.out) in line:
        return tuple(dict.fromkeys((*ERRORS.get(call, ()), *READ_ERRORS.get(call, ()))))
    return READ_ERRORS.get(call, ()) if any(str(folder) in line for folder in subject.sources) else ()


def sampled(found: list[Injection], count: int, seed: int) -> list[Injection]:
    """Returns `count` injections, their kinds (stage, call and error) in turn; all if it is 0."""
    turns: Counter[tuple[str, str, str]] = Counter()
    ranked: list[tuple[int, Injection]] = []
    for index in np.random.default_rng(seed).permutation(len(found)):
        kind = (found[index].subject.name, found[index].call, found[index].error)
        ranked.append((turns[kind], found[index]))
        turns[kind] += 1
    return [injection for _, injection in sorted(ranked, key=lambda entry: entry[0])[: count or None]]


def whole(subject: Subject, found: Mapping[str, str]) -> bool:
    """Returns whether each record and artifact is as it was or as it should be; absent counts where it was absent.

    An artifact may also be the one that had the other name, since a move exchanges them.
    """
    before = contents(subject.before)
    stood = [files for files in (part(before, name) for name in ARTIFACTS) if files]
    return all(
        part(found, name) in [part(before, name), part(subject.after, name), *(stood if name in ARTIFACTS else ())]
        for name in (*ARTIFACTS, "package.json", "publish.json")
    )


def part(files: Mapping[str, str], name: str) -> dict[str, str]:
    """Returns the files that are `name` or lie below it, by their path after `name`."""
    return {path[len(name) :]: digest for path, digest in files.items() if f"{path}/".startswith(f"{name}/")}


def visible(files: Mapping[str, str]) -> dict[str, str]:
    """Returns the files without a hidden part in their path."""
    return {path: digest for path, digest in files.items() if not any(p.startswith(".") for p in path.split("/"))}


def attempt(injection: Injection) -> Row:
    """Runs one injection and returns its outcome."""
    subject = injection.subject
    named = {"stage": subject.name, "call": injection.call, "number": injection.number, "error": injection.error}
    subject.reset()
    done, lines = subject.trace(f"{injection.call}:error={injection.error}:when={injection.number}")
    if not any("(INJECTED)" in line for line in lines):
        return named | {"missed": True}
    said = done.stderr.splitlines()
    sentences = [line for line in said if line.startswith("error: ")]
    refused = done.returncode == 2 and len(sentences) == 1 and said[-1] == sentences[0]
    found = contents(subject.out)
    fine = done.returncode == 0 and visible(found) == subject.after
    torn = not whole(subject, visible(found))
    again = subject.run() if everything(subject.out) != everything(subject.before) else None
    complete = again is None or (again.returncode == 0 and visible(contents(subject.out)) == subject.after)
    left = [path for path in subject.out.rglob(".*") if path.name.endswith(".tmp")]
    untidy = not (refused or fine) or "Traceback" in done.stderr or bool(left)
    ended = f"{done.returncode}: {said[-1] if said else ''}".replace(str(subject.out.parent), "…")
    if torn or untidy or not complete:
        after = again.stderr[-300:] if again else ""
        print(named, ended, left, after, done.stderr[-1500:], file=sys.stderr, flush=True)
    return named | {"missed": False, "ended": ended, "torn": torn, "untidy": untidy, "completed_after": complete}


def everything(folder: Path) -> dict[str, str]:
    """Returns relative path -> sha256 of every file, or "" for a folder."""
    return {str(path.relative_to(folder)): "" for path in folder.rglob("*")} | contents(folder)


@dataclass(frozen=True)
class Options:
    sample: int = option(40, smoke=2, full=0, help="number of injections; 0: all that are possible")
    stages: int = option(4, smoke=1, help="first N of: package, publish into nothing; both over another artifact")
    seed: int = option(0, help="seed of the sample of injections")
    jobs: int = option(2, smoke=1, help="injections that run at a time")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].share": "number of the cell, which runs a share of the injections",
        "rows[].stage": "stage and first content of its output folder: nothing or another artifact",
        "rows[].call": "system call that fails",
        "rows[].number": "how often a thread makes the call until it fails, this time included",
        "rows[].error": "name of the error number that the call gives",
        "rows[].places": "possible injections in all stages; a run tries a sample, or all with --sample 0",
        "rows[].missed": "whether the run never made the call, so that nothing failed",
        "rows[].ended?": "exit code and last line of the run",
        "rows[].torn?": "whether an artifact or record is neither as before, nor complete, nor still absent",
        "rows[].untidy?": "whether the run ended neither in order nor with one sentence, or hidden files stay for good",
        "rows[].completed_after?": "whether the next run, without faults, completes the files, or nothing had changed",
        "injections": "injections whose call was made and failed",
        "missed": "injections whose call was never made",
        "torn": "injections after which an artifact or record is torn",
        "untidy": "injections with an untidy end",
        "completed_after": "injections after which the next run completes the files, or nothing had changed",
    }
    programs = ("strace",)
    full_minutes = 60

    def cells(self) -> Iterator[Cell]:
        sample = self.options.sample
        for share in range(-(-sample // self.options.jobs) or SHARES_OF_ALL):
            yield {"share": share}

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per injection; each job takes a free folder."""
        free, num_places, chosen = self.once("folders", self.prepared)

        def attempt_somewhere(injection: Injection) -> Row:
            subjects = free.get()
            try:
                return attempt(replace(injection, subject=subjects[injection.subject.name]))
            finally:
                free.put(subjects)

        of_cell = chosen[cell["share"] :: sum(1 for _ in self.cells())]
        with ThreadPoolExecutor(self.options.jobs) as pool:
            for row in pool.map(attempt_somewhere, of_cell):
                yield row | {"places": num_places}

    def prepared(self) -> tuple[SimpleQueue[Mapping[str, Subject]], int, list[Injection]]:
        """Returns (each job's subjects by name, the number of possible injections, the chosen injections)."""
        free: SimpleQueue[Mapping[str, Subject]] = SimpleQueue()
        found: list[Injection] = []
        for job in range(self.options.jobs):
            made = itertools.islice(prepare(self.folder / str(job)), self.options.stages)
            subjects = {subject.name: subject for subject in made}
            found = found or [injection for subject in subjects.values() for injection in places(subject)]
            free.put(subjects)
        return free, len(found), sampled(found, self.options.sample, self.options.seed)

    def figures(self, rows: Rows) -> Figures:
        met = [row for row in rows if not row["missed"]]
        return {
            "injections": len(met),
            "missed": len(rows) - len(met),
            **{name: sum(row[name] for row in met) for name in ("torn", "untidy", "completed_after")},
        }


if __name__ == "__main__":
    main("faults")
