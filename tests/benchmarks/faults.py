"""Every system call of packaging and publishing that changes or opens something is made to fail, one at a time.

`python -m tests.benchmarks.faults [--sample 40 | --all] [--seed 0]`, on Linux with strace. The records of a tiny model
are made once. `python -m compiler package` and `publish` then run under strace, into a folder where nothing stands and
into one where another artifact does, and their calls in that folder are counted. An injection is one run in which one
of these calls gives one error number. A sample takes the kinds of stage, call and error number in turn.

An injection is `torn` if an artifact or record is then neither absent (where there was none), nor as it was, nor whole
as it should be. It is `untidy` if the run did not end with code 2 and one sentence, its last line, nor with code 0 and
all in place (as where a temporary file could not be removed), or if something hidden is left after the next run. It is
counted in `completed_after` if a run without faults then ends with the same files as an undisturbed one. `missed` are
injections that met no call in the folder. The last line is {injections, missed, torn, untidy, completed_after}.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compiler._io import save_record
from schemas.base import Record
from tests.benchmarks._report import finish, show
from tests.support.records import Build, contents, tiny_verification

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
"""System call -> what it may fail with."""
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
        calls = ",".join(f"?{call}" for call in ERRORS)
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
        yield undisturbed(f"package over {beginning}", package, before, out)
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
            *("--html", str(out / "report.html"), "--package", str(out / "package.json")),
            *("--verification", str(verification), "--output", str(out / "publish.json")),
        )
        yield undisturbed(f"publish over {beginning}", publish, packaged, out)


def python(stage: str) -> tuple[str, ...]:
    """How a stage is called."""
    return (sys.executable, "-m", "compiler", stage)


def undisturbed(name: str, command: tuple[str, ...], before: Path, out: Path) -> Subject:
    """A subject; `out` is left as the undisturbed run left it."""
    subject = Subject(name, command, before, out, {})
    subject.reset()
    done = subject.run()
    if done.returncode:
        raise SystemExit(f"{name}: the undisturbed run ended with {done.returncode}: {done.stderr}")
    return Subject(name, command, before, out, contents(out))


def places(subject: Subject) -> Iterator[Injection]:
    """All injections: calls whose number means, in every thread that gets so far, one in the folder."""
    subject.reset()
    _, lines = subject.trace()
    counts: Counter[tuple[str, str]] = Counter()
    inside: defaultdict[tuple[str, int], list[bool]] = defaultdict(list)
    for line in lines:
        if found := LINE.match(line):
            thread, call = found.groups()
            counts[thread, call] += 1
            inside[call, counts[thread, call]].append(str(subject.out) in line)
    for (call, number), where in sorted(inside.items()):
        if all(where):
            for error in ERRORS[call]:
                yield Injection(subject, call, number, error)


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
    """Whether every artifact and record is as it was, as it should be, or, where it was neither, absent."""
    before = contents(subject.before)
    for name in ("package", "final.coldpress", "package.json", "publish.json"):
        states = [part(files, name) for files in (before, subject.after)]
        if part(found, name) not in states:
            return False
    return True


def part(files: Mapping[str, str], name: str) -> dict[str, str]:
    """Those files that are `name` or lie below it."""
    return {path: digest for path, digest in files.items() if path == name or path.startswith(f"{name}/")}


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
    again = subject.run()
    complete = again.returncode == 0 and visible(contents(subject.out)) == subject.after
    left = [path for path in subject.out.rglob(".*") if path.name.endswith(".tmp")]
    untidy = not (refused or fine) or "Traceback" in done.stderr or bool(left)
    ending = f"{done.returncode}: {said[-1] if said else ''}".replace(str(subject.out.parent), "…")
    if torn or untidy or not complete:
        print(injection.kind, injection.number, ending, left, again.stderr[-300:], done.stderr[-1500:], flush=True)
    return ending, torn, untidy, complete


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows: list[tuple[str, str, int, str, str]] = []
    figures: dict[str, int] = dict.fromkeys(("injections", "missed", "torn", "untidy", "completed_after"), 0)
    with tempfile.TemporaryDirectory() as name:
        found = [injection for subject in list(prepare(Path(name).resolve())) for injection in places(subject)]
        chosen = found if arguments.all else sampled(found, arguments.sample, arguments.seed)
        print(f"{len(chosen)} of {len(found)} injections", flush=True)
        for injection in chosen:
            result = attempt(injection)
            figures["injections" if result else "missed"] += 1
            if result:
                ending, torn, untidy, complete = result
                figures["torn"] += torn
                figures["untidy"] += untidy
                figures["completed_after"] += complete
                rows.append((injection.subject.name, injection.call, injection.number, injection.error, ending))
    show("faults", ("stage", "call", "number", "error", "ended"), rows)
    finish(figures)


if __name__ == "__main__":
    main()
