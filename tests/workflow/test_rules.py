"""What every rule reads, writes and is told, from dry runs: a wrong input is a wrong artifact that looks right.

The table below is the pipeline of the design, written by hand: which record of which stage each one takes.
"""

import json
import re
import shlex
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from coldpress.compiler.io import load_record
from coldpress.compiler.job import config_of
from coldpress.compiler.needs import Build, Inputs, needs_of
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.workflow.settings import BuildConfig, of_all_stages, resolve
from coldpress.runtime.cli.command_line import flag
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.model import Model
from tests.support.dag import inputs_in
from tests.support.models import write_model
from tests.support.stages import DEFAULT, OPTIONAL
from tests.support.workflow import NUM_LAYERS, Workflow

DEVICE = "pixel6"
"""In the folder of the model's builds, as all paths here."""
OF_THE_BUILD = re.compile(rf"{DEVICE}/|calibrate-shards/|\w+\.json")
CHUNKS = ("000-001", "002-003")
SHARDS = ("0", "1")
PREDICTORS = (f"{DEVICE}/size.json",)
ORDER, QUANTIZED, TRAINED = (
    tuple(f"{DEVICE}/{stage}/{chunk}.json" for chunk in CHUNKS) for stage in ("order", "quantize", "predict")
)
SETTINGS = {
    "layers_per_job": 2,
    "calibration_shards": 2,
    "distill": "true",
    "algorithm": "gptq",
    "export": "gguf",
    "relufy": "relu",
    "method": "auto",
}


def expected_records(source: str, calibrated: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Rule -> flag -> the records it takes, where `source` is the model that is compiled, `calibrated` that which is
    calibrated."""
    ingest, corpus, dense = ("ingest.json",), ("tokenize.json",), (calibrated,)
    model, device = (source,), (f"{DEVICE}/device.json",)
    first, second = ("calibrate.json",), (f"{DEVICE}/recalibrate.json",)
    sparsity, placement, layout, plans = (
        (f"{DEVICE}/{stage}.json",) for stage in ("allocate", "place", "layout", "plan")
    )
    shard = {"model": dense, "corpus": corpus}
    second_shard = {"model": model, "corpus": corpus, "sparsity": sparsity, "activations": first}
    placing = {"model": model, "activations": second, "sparsity": sparsity, "device": device}
    verification = (f"{DEVICE}/verify.json",)
    laid_out = {"model": model, "sparsity": sparsity, "placement": placement, "order": ORDER, "device": device}
    packed = {"corpus": corpus, "layout": layout, "plans": plans, "quantized": QUANTIZED}
    return {
        "ingest": {},
        "tokenize": {"model": ingest},
        "preflight": {"model": ingest, "corpus": corpus, "device": device},
        "calibrate_shard": shard,
        "calibrate": shard | {"shards": tuple(f"calibrate-shards/{number}.json" for number in SHARDS)},
        "relufy": {"model": ingest, "corpus": corpus},
        "explore": shard | {"activations": first},
        "allocate": shard | {"activations": first, "device": device, "curves": ("explore.json",)},
        "distill": {"model": dense, "corpus": corpus, "sparsity": sparsity},
        "recalibrate_shard": second_shard,
        "recalibrate": second_shard
        | {"shards": tuple(f"{DEVICE}/recalibrate-shards/{number}.json" for number in SHARDS)},
        "predict": {"model": model, "activations": second, "sparsity": sparsity},
        "size": {"model": model, "corpus": corpus, "sparsity": sparsity, "trained": TRAINED},
        "place": placing,
        "order": placing | {"placement": placement},
        "gram": {"model": model, "corpus": corpus, "sparsity": sparsity},
        "importance": {"model": ingest},
        "quantize": {
            "model": model,
            "sparsity": sparsity,
            "gram": (f"{DEVICE}/gram.json",),
            "importance": (f"{DEVICE}/importance.json",),
            "activations": first,
        },
        "layout": {"model": model, "sparsity": sparsity, "device": device},
        "plan": laid_out | {"layout": layout, "predictors": PREDICTORS, "activations": second, "corpus": corpus},
        "package": laid_out | packed | {"predictors": PREDICTORS, "curves": ("explore.json",)},
        "verify": {"model": model, "original": ingest, "corpus": corpus, "package": (f"{DEVICE}/package.json",)},
        "publish": {"package": (f"{DEVICE}/package.json",), "verification": verification},
        "report": laid_out
        | {"corpus": corpus, "activations": second, "predictors": PREDICTORS, "layout": layout, "plans": plans}
        | {"package": (f"{DEVICE}/publish.json",), "verification": verification, "curves": ("explore.json",)},
        "export": {"package": (f"{DEVICE}/publish.json",)},
    }


OUTPUTS = {
    **{stage: f"{stage}.json" for stage in ("ingest", "tokenize", "relufy", "calibrate", "explore")},
    **{stage: f"{DEVICE}/{stage}/{{chunk}}.json" for stage in ("predict", "order", "quantize")},
    "calibrate_shard": "calibrate-shards/{shard}.json",
    "recalibrate_shard": f"{DEVICE}/recalibrate-shards/{{shard}}.json",
    "report": f"{DEVICE}/metrics.json",
}
ON_ALL_CORES = (
    "preflight",
    "relufy",
    "calibrate",
    "calibrate_shard",
    "explore",
    "allocate",
    "distill",
    "recalibrate",
    "recalibrate_shard",
    "size",
    "gram",
    "verify",
)


@dataclass(frozen=True)
class Planned:
    """A job as snakemake would start it."""

    rule: str
    facts: dict[str, str]
    """What it prints of the job: input, output, log, wildcards and so on."""
    command: list[str]

    def named(self, fact: str) -> list[str]:
        return [name for name in self.facts.get(fact, "").split(", ") if name]

    @property
    def flags(self) -> dict[str, tuple[str, ...]]:
        """Flag -> its values, in the command up to where its errors go."""
        found: dict[str, list[str]] = defaultdict(list)
        for word in self.command[: self.command.index("2>")]:
            if word.startswith("--"):
                found[name := word] = []
            elif found:
                found[name].append(word)
        return {name: tuple(values) for name, values in found.items()}


def planned(workflow: Workflow, folder: Path, **config: object) -> dict[str, list[Planned]]:
    """Rule -> its jobs."""
    done = workflow.at(folder).run("--dry-run", "--printshellcmds", **config)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[Planned]] = defaultdict(list)
    text = re.sub(rf"{folder}/build/tiny/|(?<![\w/.-])tiny/", "", done.stdout + done.stderr)
    for rule, facts, command in re.findall(r"^rule (\w+):\n((?:    .*\n)+)Shell command: (.*)$", text, re.MULTILINE):
        pairs = (line.strip().partition(": ") for line in facts.splitlines())
        job = Planned(rule, {name: value for name, _, value in pairs}, shlex.split(command))
        found[rule].append(job)
    return dict(found)


@pytest.fixture(scope="module")
def jobs(workflow: Workflow, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Planned]]:
    """All jobs of a build with everything in it."""
    found = planned(workflow, tmp_path_factory.mktemp("rules"), **SETTINGS, imatrix=workflow.imatrix)
    (everything,) = found.pop("all")
    last = ("preflight.json", "manifest.json", "metrics.json", "report.html", "export.json")
    assert set(everything.named("input")) == {f"{DEVICE}/{name}" for name in last}
    return found


def check_records(job: Planned, expected: dict[str, tuple[str, ...]]) -> None:
    """The command has each record under its flag, and the rule waits for all of them and for no other."""
    names = {flag(name): paths for name, paths in expected.items()}
    assert {name: job.flags.get(name) for name in names} == names, job.rule
    files = [path for path in job.named("input") if path.endswith(".json") and not path.endswith("/manifest.json")]
    records = [path for path in files if OF_THE_BUILD.match(path)]
    assert sorted(records) == sorted(path for paths in names.values() for path in paths), job.rule
    given = [path for paths in job.flags.values() for path in paths if OF_THE_BUILD.match(path)]
    own = {*job.named("output"), *own_places(job)}
    assert set(given) - own == set(records), job.rule
    check_folders(job, records)


def check_folders(job: Planned, records: list[str]) -> None:
    """The folders of array files that a rule waits for are those of its records, or of what these pass on."""
    passed_on = {"recalibrate": ["calibrate"], "size": [path.removesuffix(".json") for path in TRAINED]}
    of_records = {path.removesuffix(".json") for path in records}
    of_records |= {folder for path in records for folder in passed_on.get(Path(path).stem, ())}
    is_known = re.compile(rf"({DEVICE}/)?[\w-]+(/[\d-]+)?")
    folders = {path for path in job.named("input") if is_known.fullmatch(path)}
    assert folders <= of_records, job.rule
    assert not folders & {f"{DEVICE}/{name}" for name in ("device", "size", "layout", "plan", "route")}, job.rule


def own_places(job: Planned) -> set[str]:
    """Paths that a stage is told and that are no records."""
    artifact = f"{DEVICE}/tiny-pixel6.coldpress"
    return {
        "package": {f"{DEVICE}/package/artifact"},
        "publish": {artifact, f"{DEVICE}/metrics.json", f"{DEVICE}/report.html"},
    }.get(job.rule, set())


def test_every_rule_takes_the_records_of_its_stages(jobs: dict[str, list[Planned]]) -> None:
    """With distillation and relufication: what is packed, and all that is derived from weights, is of the distilled
    model, which is made of the ReLU model that was calibrated."""
    expected = expected_records(f"{DEVICE}/distill.json", "relufy.json")
    assert set(jobs) == {*expected, "device"}
    for rule, records in expected.items():
        for job in jobs[rule]:
            check_records(job, records)


def test_without_distillation_or_predictors_there_are_no_such_records(workflow: Workflow, tmp_path: Path) -> None:
    found = planned(workflow, tmp_path, layers_per_job=2, method="relu")
    expected = expected_records("ingest.json", "ingest.json")
    others = {"route", "draft"}  # of builds with a routing or a draft model
    absent = (OPTIONAL - others) | {"calibrate_shard", "recalibrate_shard", "predict", "size"}
    assert not others & found.keys()
    for rule in absent:
        assert rule not in found
        del expected[rule]
    for rule, records in expected.items():
        for job in found[rule]:
            left_out = ("shards", "predictors", "gram", "importance", "curves")
            check_records(job, {name: paths for name, paths in records.items() if name not in left_out})


def test_routers_are_settled_between_plan_and_package(workflow: Workflow, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model" / "tiny", "mixtral", num_hidden_layers=4)
    found = planned(workflow, tmp_path, model=model, method="dense", routing="cache_prior", layers_per_job=2)
    expected = expected_records("ingest.json", "ingest.json")
    ((route,), (package,), (report,)) = (found[rule] for rule in ("route", "package", "report"))
    names = ("model", "sparsity", "order", "placement", "device", "corpus", "layout", "plans")
    check_records(route, {name: (expected["package"] | {"model": ("ingest.json",)})[name] for name in names})
    assert package.flags["--plans"] == report.flags["--plans"] == (f"{DEVICE}/route.json",)


def test_every_rule_writes_where_the_next_one_reads(jobs: dict[str, list[Planned]]) -> None:
    for rule, found in jobs.items():
        pattern = OUTPUTS.get(rule, f"{DEVICE}/{rule}.json")
        wanted = [pattern.format(chunk=part, shard=part) for part in (CHUNKS if "chunk" in pattern else SHARDS)]
        outputs = [job.named("output")[0] for job in found]
        assert sorted(outputs) == sorted(set(wanted)), rule
        for job in found:
            assert job.flags["--output"] == (job.named("output")[0],)
            assert job.command[job.command.index("2>") + 1] == job.facts["log"]
    for rule, folder in (("package", f"{DEVICE}/package"), ("publish", DEVICE)):  # a link to the artifact's manifest
        (job,) = jobs[rule]
        assert job.named("output")[1:] == [f"{folder}/manifest.json"]
    for rule in ("verify", "publish"):  # an artifact that is gone is packaged again
        assert f"{DEVICE}/package/manifest.json" in jobs[rule][0].named("input")
    (exported,) = jobs["export"]
    assert exported.named("output")[1:] == list(exported.flags["--file"]) == [f"{DEVICE}/tiny-pixel6.gguf"]
    (publish,) = jobs["publish"]
    (found,) = publish.flags["--exported"]
    assert set(json.loads(found)) == set(exported.named("output")), "what another build leaves there goes with it"
    (report,) = jobs["report"]
    assert report.named("output")[1:] == list(report.flags["--html"]) == [f"{DEVICE}/report.html"]


def test_what_users_change_is_read_again(jobs: dict[str, list[Planned]]) -> None:
    """Every file of the checkpoint, the corpus, the device's profile and an importance matrix are inputs."""
    (ingest,), (tokenize,), (device,) = jobs["ingest"], jobs["tokenize"], jobs["device"]
    files = {Path(name).name for name in ingest.named("input")}
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert [Path(name).name for name in tokenize.named("input")] == ["corpus.txt", "ingest.json", "ingest"]
    assert [Path(name).name for name in device.named("input")] == ["pixel6.yaml"]
    (importance,) = jobs["importance"]
    assert [Path(name).name for name in importance.named("input")] == ["tiny.imatrix", "ingest.json", "ingest"]


def test_logs_and_times_have_files_of_their_own(jobs: dict[str, list[Planned]]) -> None:
    everything = [job for found in jobs.values() for job in found]
    for fact in ("log", "benchmark"):
        assert len({job.facts[fact] for job in everything}) == len(everything)
    for job in everything:
        folder = f"{DEVICE}/" if job.named("output")[0].startswith(f"{DEVICE}/") else ""
        assert job.facts["log"].startswith(f"{folder}logs/{job.rule.removesuffix('_shard')}")
        assert job.facts["benchmark"].startswith(f"{folder}benchmarks/{job.rule.removesuffix('_shard')}")


def test_layers_and_shards_are_divided_without_rest(jobs: dict[str, list[Planned]]) -> None:
    for rule in ("predict", "order", "quantize"):
        layers = [layer for job in jobs[rule] for layer in job.flags["--layers"]]
        assert sorted(map(int, layers)) == list(range(NUM_LAYERS))
        for job in jobs[rule]:
            first, last = job.facts["wildcards"].removeprefix("chunk=").split("-")
            assert [*map(int, job.flags["--layers"])] == list(range(int(first), int(last) + 1))
    for rule in ("calibrate_shard", "recalibrate_shard"):
        assert sorted(job.flags["--shard"] for job in jobs[rule]) == [(number,) for number in SHARDS]
        assert {job.flags["--num-shards"] for job in jobs[rule]} == {(str(len(SHARDS)),)}


def test_threads_are_those_that_snakemake_counts_on(jobs: dict[str, list[Planned]]) -> None:
    """Run with two cores."""
    for rule, found in jobs.items():
        threads = "2" if rule in ON_ALL_CORES else "1"
        for job in found:
            if rule != "device":
                assert job.command[0] == f"OMP_NUM_THREADS={threads}", rule
            assert job.flags.get("--threads", (threads,)) == (threads,), rule
    assert all("--threads" in job.flags for rule in (*ON_ALL_CORES, "predict") for job in jobs[rule])
    (preflight,) = jobs["preflight"]
    assert preflight.facts["priority"] == "1", "it goes first"


@pytest.mark.slow
def test_every_rule_asks_for_memory_and_time(built: Workflow) -> None:
    """By its stage's own count, once the model is known; `--resources` limits what runs side by side."""
    done = built.run("--dry-run", "--forceall", "--printshellcmds")
    output = done.stdout + done.stderr
    asked = re.findall(r"^rule (\w+):\n(?:    .*\n)*?    resources: (.*)$", output, re.MULTILINE)
    assert {rule for rule, _ in asked} == {*DEFAULT, "device", "all"}
    config = resolve({key: str(value) for key, value in built.config.items()})
    for rule, text in asked:
        if rule == "all":
            continue
        amounts = dict(pair.split("=") for pair in text.split(", "))
        assert int(amounts["runtime"]) >= 10
        if rule not in ("device", "ingest"):
            threads = 2 if rule in ON_ALL_CORES else 1
            build = build_of(built.model, config, inputs_in(output), threads)
            assert int(amounts["mem_mb"]) == -(-needs_of(rule, build).ram_bytes // 10**6), rule


def build_of(folder: Path, config: BuildConfig, inputs: Inputs, threads: int) -> Build:
    model = load_record(folder / "ingest.json", Model)
    blocks = load_record(folder / "tokenize.json", Corpus).split("calibration")
    tokens = blocks.num_blocks * blocks.block_tokens
    shared = (threads, config["calibration_shards"])
    return Build(model, of_all_stages(config), inputs, config.device, tokens, blocks.block_tokens, *shared)


def test_before_the_model_is_known_memory_is_to_be_determined(jobs: dict[str, list[Planned]]) -> None:
    for rule, found in jobs.items():
        for job in found:
            amounts = dict(pair.split("=") for pair in job.named("resources"))
            known = rule in ("ingest", "device")
            assert (amounts["mem_mb"] == "<TBD>") == (amounts["runtime"] == "<TBD>") == (not known), rule


def test_a_rule_gives_its_own_stage_its_own_settings(jobs: dict[str, list[Planned]]) -> None:
    codes: dict[str, set[str]] = defaultdict(set)
    for rule, found in jobs.items():
        stage = rule.removesuffix("_shard")
        if stage not in STAGES:
            continue
        fields = {flag(name) for name in config_of(stage).model_fields}
        records = {flag(name) for name in expected_records("", "")[rule]}
        rest = {"--code", "--build", "--output", "--layers", "--threads"}
        for job in found:
            assert job.command[2:5] == ["-m", "coldpress.compiler", stage]
            assert set(job.flags) - records - fields <= rest | {"-m"}, rule
            codes[stage].add(job.flags["--code"][0])
    assert all(len(found) == 1 for found in codes.values())
    assert len({code for found in codes.values() for code in found}) == len(codes)
    (allocate,) = jobs["allocate"]
    assert allocate.flags["--dram-budget"] == ("80%",)
    assert allocate.flags["--method"] == ("auto",)
    (preflight,) = jobs["preflight"]
    assert preflight.flags["--shards"] == ("2",)
    assert preflight.flags["--here"] == ("true",)


def test_preflight_tries_the_stages_of_the_rules(jobs: dict[str, list[Planned]]) -> None:
    """Each with the record of the stage whose rule writes it; shards are put together by their own stage."""
    (preflight,) = jobs["preflight"]
    told = json.loads(preflight.flags["--inputs"][0])
    expected = expected_records(f"{DEVICE}/distill.json", "relufy.json")
    assert set(told) == {rule for rule in expected if not rule.endswith("_shard")}
    for stage, inputs in told.items():
        named = {name: paths for name, paths in expected[stage].items() if name != "shards"}
        assert set(inputs) == set(named), stage
        for name, writer in inputs.items():
            assert writer in (Path(named[name][0]).stem, Path(named[name][0]).parent.name), (stage, name)
