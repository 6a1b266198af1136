"""Every system call of packaging and publishing that is about a file of the build is made to fail, one at a time.

`python -m benchmarks.faults [--sample 40 | --all] [--seed 0] [--jobs 1]`, on Linux with strace. The records of a
tiny model are made once a job. `python -m coldpress.compiler package` and `publish` then run under strace, into a
folder where nothing stands and into one where another artifact does. Counted are their calls that change or open
something there, and those that read or look at something there or at what the build has left elsewhere. An injection is
one run in which one of these calls gives one error number. A sample takes the kinds of stage, call and error number in
turn.

An injection is `torn` if an artifact or record is then neither absent (where there was none), nor as it was, nor whole
as it should be. It is `untidy` if the run did not end with code 2 and one sentence, its last line, nor with code 0 and
all in place (as where a temporary file could not be removed), or if something hidden is left after the next run. It is
counted in `completed_after` if a run without faults then ends with the same files as an undisturbed one, or if all is
as it was before the undisturbed one. `missed` are injections that met no such call. The
last line is {injections, missed, torn, untidy, completed_after}.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.shared.report import finish, show
from coldpress.compiler.io import save_record
from coldpress.schemas.base import Record
from tests.support.records import Build, contents, tiny_verification

REPORT_EVERY = 100
ERRORS: Mapping[str, tuple[str, ...]] = {
    "openat": ("EACCES", "EIO", "ENOSPC"),
    "mkdir": ("EACCES", "EIO", "ENOSPC"),
    "write": ("EIO", "ENOSPC"),
    "pwrite64": ("EIO", "ENOSPC"),
    "fsync": ("EIO", "ENOSPC"),
    "fdatasync": ("EIO", "ENOSPC"),
    "ftruncate": ("EIO",),
    "fallocate": ("EIO", "ENOSPC"),
    "copy_file_range": ("EIO", "ENOSPC", "EXDEV"),
    "sendfile": ("EIO", "ENOSPC"),
    "flock": ("ENOLCK", "EIO"),
    "rename": ("EACCES", "EIO", "ENOSPC", "EXDEV"),
    "renameat": ("EACCES", "EIO", "ENOSPC", "EXDEV"),
    "renameat2": ("EACCES", "EIO", "ENOSPC", "EXDEV"),
    "link": ("EACCES", "EIO", "EXDEV"),
    "unlink": ("EACCES", "EIO"),
    "unlinkat": ("EACCES", "EIO"),
    "rmdir": ("EACCES", "EIO"),
}
"""System call that changes or opens something -> what it may fail with, in the folder that is written into."""
READ_ERRORS: Mapping[str, tuple[str, ...]] = {
    "openat": ("EACCES", "EIO"),
    "read": ("EIO",),
    "pread64": ("EIO",),
    "preadv": ("EIO",),
    "mmap": ("ENOMEM",),
    "fstat": ("EIO",),
    "newfstatat": ("EACCES", "EIO"),
    "statx": ("EACCES", "EIO"),
    "getdents64": ("EIO",),
}
"""System call that reads or looks -> what it may fail with, in that folder and where the build's other files lie."""
ARTIFACTS = ("package", "final.coldpress")
LINE = re.compile(r"(\d+) +(\w+)\(")
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Subject:
    """One stage from one beginning."""

    name: str
    command: tuple[str, ...]
    before: Path
    """What the folder that is written into holds at the beginning."""
    out: Path
    """The folder that is written into."""
    after: Mapping[str, str]
    """Relative path -> sha256 of what an undisturbed run leaves."""
    sources: tuple[Path, ...]
    """Folders of what it reads."""

    def reset(self) -> None:
        """Back to the beginning."""
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self.before, self.out)

    def run(self, *tracer: str) -> subprocess.CompletedProcess[str]:
        """The stage's process, perhaps traced."""
        return subprocess.run(
            (*tracer, *self.command),
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def trace(self, inject: str | None = None) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """(the stage's process, strace's lines)."""
        log = self.out.parent / "strace.txt"
        injection = ("-e", f"inject={inject}") if inject else ()
        tracer = ("strace", "-f", "--seccomp-bpf", "-y", "-s", "0", "-o", str(log))
        calls = ",".join(f"?{call}" for call in {**ERRORS, **READ_ERRORS})
        done = self.run(*tracer, "-e", f"trace={calls}", *injection)
        return done, log.read_text().splitlines()


@dataclass(frozen=True)
class Injection:
    """The `number`-th `call` of every thread that makes so many gives `error`."""

    subject: Subject
    call: str
    number: int
    error: str

    @property
    def kind(self) -> tuple[str, str, str]:
        """What a sample takes in turn."""
        return self.subject.name, self.call, self.error


def prepare(root: Path) -> Iterator[Subject]:
    """Makes the records of two builds, and the four subjects."""
    new, old = Build(root / "new"), Build(root / "old", num_pinned=5)
    old.package()
    out = root / "out"
    inputs = root / "inputs"
    sources = (inputs, root / "new")
    flags: list[str] = []
    for name in ("model", "corpus", "sparsity", "device", "layout", "order", "placement", "quantized"):
        found = getattr(new, name)
        records: tuple[Record, ...] = found if isinstance(found, tuple) else (found,)
        paths = [inputs / f"{name}-{number}.json" for number in range(len(records))]
        for record, path in zip(records, paths, strict=True):
            save_record(record, path)
        flags += [f"--{name}", *map(str, paths)]
    package = (*python("package"), *flags, "--artifact", str(out / "package"), "--output", str(out / "package.json"))
    for beginning in ("nothing", "another"):
        before = root / f"package-{beginning}"
        before.mkdir()
        if beginning == "another":
            shutil.copytree(old.artifact, before / "package")
        yield undisturbed(f"package over {beginning}", package, before, out, sources)
        packaged = root / f"publish-{beginning}"
        shutil.copytree(out, packaged)
        if beginning == "another":
            shutil.copytree(old.artifact, packaged / "final.coldpress")
            (packaged / "metrics.json").write_text("{}\n")
        verification = inputs / "verify.json"
        save_record(tiny_verification(new.layout, new.package().manifest_sha256), verification)
        publish = (
            *python("publish"),
            *("--artifact", str(out / "final.coldpress"), "--metrics", str(out / "metrics.json")),
            *("--html", str(out / "report.html"), "--exported", json.dumps([str(out / "final.gguf")])),
            *("--package", str(out / "package.json")),
            *("--verification", str(verification), "--output", str(out / "publish.json")),
        )
        yield undisturbed(f"publish over {beginning}", publish, packaged, out, sources)


def python(stage: str) -> tuple[str, ...]:
    """How a stage is called."""
    return (sys.executable, "-m", "coldpress.compiler", stage)


def undisturbed(name: str, command: tuple[str, ...], before: Path, out: Path, sources: tuple[Path, ...]) -> Subject:
    """A subject; `out` is left as the undisturbed run left it."""
    subject = Subject(name, command, before, out, {}, sources)
    subject.reset()
    done = subject.run()
    if done.returncode:
        raise SystemExit(f"{name}: the undisturbed run ended with {done.returncode}: {done.stderr}")
    return replace(subject, after=contents(out))


def places(subject: Subject) -> Iterator[Injection]:
    """All injections: calls whose number means, in every thread that gets so far, one in the folders."""
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
    """What a call of strace's `line` may fail with; nothing where it is about no file of the build."""
    if str(subject.out) in line:
        return tuple(dict.fromkeys((*ERRORS.get(call, ()), *READ_ERRORS.get(call, ()))))
    return READ_ERRORS.get(call, ()) if any(str(folder) in line for folder in subject.sources) else ()


def sampled(found: list[Injection], count: int, seed: int) -> list[Injection]:
    """`count` of them, the kinds in turn."""
    rng = np.random.default_rng(seed)
    turns: Counter[tuple[str, str, str]] = Counter()
    ranked: list[tuple[int, int, Injection]] = []
    for place, index in enumerate(rng.permutation(len(found))):
        ranked.append((turns[found[index].kind], place, found[index]))
        turns[found[index].kind] += 1
    return [injection for _, _, injection in sorted(ranked, key=lambda entry: entry[:2])[:count]]


def whole(subject: Subject, found: Mapping[str, str]) -> bool:
    """Whether every record and artifact is as it was, as it should be, or, where it was neither, absent.

    An artifact may also be the one that had the other name, since a move exchanges them.
    """
    before = contents(subject.before)
    stood = [files for files in (part(before, name) for name in ARTIFACTS) if files]
    for name in (*ARTIFACTS, "package.json", "publish.json"):
        states = [part(files, name) for files in (before, subject.after)] + (stood if name in ARTIFACTS else [])
        if part(found, name) not in states:
            return False
    return True


def part(files: Mapping[str, str], name: str) -> dict[str, str]:
    """Those files that are `name` or lie below it, by their paths there."""
    return {path[len(name) :]: digest for path, digest in files.items() if f"{path}/".startswith(f"{name}/")}


def visible(files: Mapping[str, str]) -> dict[str, str]:
    """Those files no part of whose path is hidden."""
    return {path: digest for path, digest in files.items() if not any(p.startswith(".") for p in path.split("/"))}


def attempt(injection: Injection) -> tuple[str, bool, bool, bool] | None:
    """(how the run ended, whether it is torn, untidy, and completed by the next); None where no call was met."""
    subject = injection.subject
    subject.reset()
    done, lines = subject.trace(f"{injection.call}:error={injection.error}:when={injection.number}")
    if not any("(INJECTED)" in line for line in lines):
        return None
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
    ending = f"{done.returncode}: {said[-1] if said else ''}".replace(str(subject.out.parent), "…")
    if torn or untidy or not complete:
        after = again.stderr[-300:] if again else ""
        print(injection.kind, injection.number, ending, left, after, done.stderr[-1500:], flush=True)
    return ending, torn, untidy, complete


def everything(folder: Path) -> dict[str, str]:
    """Relative path -> sha256 of every file, and of every folder nothing."""
    return {str(path.relative_to(folder)): "" for path in folder.rglob("*")} | contents(folder)


SUBJECTS: dict[str, Subject] = {}
"""Of this process, by name."""


def begin(root: Path) -> None:
    """Prepares a process for injections, in a folder of its own."""
    SUBJECTS.update((subject.name, subject) for subject in prepare(Path(tempfile.mkdtemp(dir=root))))


def attempt_here(injection: Injection) -> tuple[str, bool, bool, bool] | None:
    """`attempt`, in the folder of this process."""
    return attempt(replace(injection, subject=SUBJECTS[injection.subject.name]))


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    rows: list[tuple[str, str, int, str, str]] = []
    figures: dict[str, int] = dict.fromkeys(("injections", "missed", "torn", "untidy", "completed_after"), 0)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        pool = ProcessPoolExecutor(arguments.jobs, None, begin, (root,))
        begin(root)
        found = [injection for subject in SUBJECTS.values() for injection in places(subject)]
        chosen = found if arguments.all else sampled(found, arguments.sample, arguments.seed)
        print(f"{len(chosen)} of {len(found)} injections", flush=True)
        results = pool.map(attempt_here, chosen)
        for done, (injection, result) in enumerate(zip(chosen, results, strict=True), 1):
            figures["injections" if result else "missed"] += 1
            if result:
                ending, torn, untidy, complete = result
                figures["torn"] += torn
                figures["untidy"] += untidy
                figures["completed_after"] += complete
                rows.append((injection.subject.name, injection.call, injection.number, injection.error, ending))
            if done % REPORT_EVERY == 0:
                print(f"{done} of {len(chosen)}: {figures}", file=sys.stderr)
    show("faults", ("stage", "call", "number", "error", "ended"), rows)
    finish(figures)


if __name__ == "__main__":
    main()
