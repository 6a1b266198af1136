"""One flipped bit in any file of a finished build folder: the next stage that reads it refuses, and says what to do.

A whole build of a tiny model, stage by stage in this process, distillation and predictors included. What a stage reads
is seen by Python's own audit events, not asked of the stages.
"""

import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coldpress.compiler.io import _content, deletion, save_record
from coldpress.compiler.job import Job, config_of, run_job
from coldpress.compiler.pipeline import STAGES
from coldpress.schemas.errors import ColdpressError
from tests.support.dag import inputs_of_rules
from tests.support.imatrices import write_llama
from tests.support.models import write_corpus, write_model
from tests.support.tiny import tiny_device

pytestmark = pytest.mark.slow

BUILD = tuple(stage for stage in STAGES if stage not in ("preflight", "explore", "draft", "route", "export"))
"""`export` takes the published artifact, whose damage its own test has, and not this model of ReLU; `explore` runs only
where the method is open, `draft` only with a draft model, `route` only for a mixture."""
SETTINGS: dict[str, dict[str, object]] = {
    "tokenize": {"calibration_tokens": 1024, "block_tokens": 32},
    "allocate": {"method": "predictor", "format": "int8_group32", "dram_budget": "80%", "context_length": 64},
    "distill": {"distill_steps": 1, "distill_blocks": 2, "validation_blocks": 2},
    "quantize": {"algorithm": "gptq"},
    "verify": {"test_tokens": 64},
    "publish": {"max_ppl_ratio": "off", "min_top1_agreement": "off", "max_logit_error": "off"},
}
KEYS = ("method=predictor", "relufy=relu", "distill=true", "algorithm=gptq")
"""Of a build with all these stages."""
LAYERS = (0, 1)


@dataclass(frozen=True)
class Folder:
    """A build folder in which one job per stage has run."""

    path: Path
    inputs: Path

    def run(self, stage: str, output: Path | None = None) -> None:
        """Runs a stage, its record and its array files under `output` instead, if that is given."""
        settings: dict[str, Any] = {
            "model": str(self.inputs / "model"),
            "corpus": str(self.inputs / "corpus.txt"),
            "imatrix": str(self.inputs / "imatrix.dat"),
            "artifact": str(self.path / ("tiny.coldpress" if stage == "publish" else "package.coldpress")),
            "metrics": str(self.path / "report.json"),
            "html": str(self.path / "report.html"),
            "exported": (),
        }
        if output and stage == "package":
            settings["artifact"] = str(output.with_suffix(".coldpress"))
        fields = config_of(stage).model_fields
        sources = inputs_of_rules(*KEYS, importance=True)[stage]
        run_job(
            Job(
                stage=stage,
                settings={name: value for name, value in settings.items() if name in fields} | SETTINGS.get(stage, {}),
                records={name: (self.path / f"{source}.json",) for name, source in sources.items()},
                output=output or self.path / f"{stage}.json",
                layers=LAYERS,
                threads=1,
                code="test",
            )
        )


READ: list[set[Path]] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if READ and event == "open" and isinstance(arguments[0], str | bytes) and arguments[1] not in ("w", "wb", "rb+"):
        READ[-1].add(Path(arguments[0].decode() if isinstance(arguments[0], bytes) else arguments[0]))


@contextmanager
def reads() -> Iterator[set[Path]]:
    """The files that are opened for reading meanwhile."""
    READ.append(set())
    yield READ[-1]
    READ.pop()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Folder, dict[str, set[Path]]]:
    """(the folder before `publish` moves the artifact, what each stage reads of it)."""
    inputs = tmp_path_factory.mktemp("inputs")
    write_model(inputs / "model", num_hidden_layers=len(LAYERS), relu=True)
    write_corpus(inputs / "corpus.txt", 200)
    write_llama(inputs / "imatrix.dat", len(LAYERS), hidden_size=64, intermediate_size=160)
    folder = Folder(tmp_path_factory.mktemp("build"), inputs)
    save_record(tiny_device(), folder.path / "device.json")
    sys.addaudithook(_note)
    found: dict[str, set[Path]] = {}
    for stage in BUILD:
        before = set(folder.path.rglob("*"))
        _content.cache_clear()  # or what this process has written would not be read
        with reads() as read:
            folder.run(stage)
        # a link leads to the checkpoint, whose changes Snakemake notices
        found[stage] = {path for path in read & before if path.is_file() and not path.is_symlink()}
    published = folder.path / "tiny.coldpress"
    found["verify"] = {path for path in found["verify"] if path.is_file()} | set(
        filter(Path.is_file, published.rglob("*"))
    )
    return folder, found


def flip(path: Path, chance: random.Random) -> Callable[[], None]:
    """Flips one bit of a file; gives what puts it back."""
    data = path.read_bytes()
    bit = chance.randrange(8 * len(data))
    path.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
    return lambda: path.write_bytes(data) and None


@pytest.mark.parametrize("stage", BUILD[1:])
def test_a_flipped_bit_is_refused_by_every_stage_that_reads_it(
    built: tuple[Folder, dict[str, set[Path]]], tmp_path: Path, stage: str
) -> None:
    folder, found = built
    chance = random.Random(stage)
    for number, path in enumerate(sorted(found[stage])):
        output = tmp_path / str(number) / f"{stage}.json"
        restore = flip(path, chance)
        try:
            folder.run(stage, output)
        except ColdpressError as error:
            sentence = str(error)
        else:
            pytest.fail(f"{stage} takes a damaged {path}")
        finally:
            restore()
        assert (path.parent.name if path.name == "manifest.json" else path.name) in sentence
        assert "\n" not in sentence
        assert re.search(r"then build again|rebuild it|run package again", sentence), sentence
        assert not output.exists()


def test_every_file_of_a_finished_build_is_read_by_some_stage(built: tuple[Folder, dict[str, set[Path]]]) -> None:
    """So the test above tries all but these, which are for people, or for a stage that was interrupted."""
    folder, found = built
    files = {path for path in folder.path.rglob("*") if path.is_file() and not path.is_symlink()}
    left = files.difference(*found.values())
    names = _names(folder, left)
    resumed = {name for name in names if name.endswith(".done.json")} | {
        f"order/{layer}.neuron.json" for layer in LAYERS
    }
    first_inputs = {f"calibrate/{layer:03d}.inputs.safetensors" for layer in LAYERS}
    """Predictors learn from those of `recalibrate`."""
    people = {"publish.json", "manifest.json", "report.html", "report.json"} | {
        f"{stage}/source/model.safetensors.index.json" for stage in ("relufy", "distill")
    }
    used = {
        name.split(".")[1] for name in _names(folder, set().union(*found.values())) if name.startswith("calibrate/")
    }
    assert "neuron" in used
    others = {name for name in names if name.startswith("calibrate/") and name.split(".")[1] not in used}
    """Counts of families that other methods use: with another one, calibration need not run again."""
    assert names - resumed - first_inputs - others <= people


def _names(folder: Folder, paths: set[Path]) -> set[str]:
    return {path.relative_to(folder.path).as_posix() for path in paths}


def test_the_remedy_names_what_a_user_can_delete(tmp_path: Path) -> None:
    """The sentence names the entry of the cache, or the object of the store that a job had a copy of."""
    plain, linked = tmp_path / "place.json", tmp_path / "order.json"
    plain.touch()
    linked.symlink_to(tmp_path / "cache" / "abc_record.json")
    assert deletion(plain) == f"delete {plain}"
    assert deletion(linked) == f"delete {linked} and, in the cache, {tmp_path}/cache/abc_*"
    fetched = tmp_path / ".snakemake" / "storage" / "s3" / "bucket" / "builds" / "tiny" / "place.json"
    assert deletion(fetched) == "delete s3://bucket/builds/tiny/place.json"
