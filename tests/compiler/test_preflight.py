"""preflight: refusals with numbers from injected measurements, sums against real files, and the trial on two layers."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from coldpress.compiler.device import memory
from coldpress.compiler.io import Workspace, save_arrays
from coldpress.compiler.job import Job, config_of
from coldpress.compiler.needs import PASS_THREADS, Build, all_needs, needs_of
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.profiles import device_file
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.stages import calibrate, ingest, layout, predict, preflight, quantize
from coldpress.compiler.stages.calibrate import CalibrateConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.preflight import PreflightConfig, trial
from coldpress.compiler.stages.preflight.budget import least_needs
from coldpress.compiler.stages.quantize import QuantizeConfig
from coldpress.compiler.workflow.settings import of_all_stages, resolve
from coldpress.runtime.device_profiles.devices import read_device
from coldpress.runtime.dram.memory import memory_groups, physical_bytes
from coldpress.schemas.corpus import SPLITS, Corpus, TokenBlocks
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import Preflight, StageNeeds
from coldpress.schemas.sparsity import Budget, Densities, Sparsity
from tests.support.dag import inputs_for
from tests.support.data import ROOT
from tests.support.models import write_model

LAYERS, BLOCKS, BLOCK_TOKENS = 12, 8, 128
PIXEL6 = read_device(device_file("pixel6", Path()))
SETTINGS: dict[str, Any] = {
    "method": "predictor",
    "format": "int8_group32",
    "dram_budget": "80%",
    "context_length": 64,
    "calibration_tokens": BLOCKS * BLOCK_TOKENS,
}
OWN = ("folder", "shards", "here")
"""Settings of `preflight` that are no keys."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return ingested(tmp_path_factory.mktemp("model") / "tiny", relu=True)


def ingested(folder: Path, **shape: Any) -> Model:
    write_model(folder, num_hidden_layers=LAYERS, **shape)
    return ingest.run(IngestConfig(model=str(folder)), Workspace(folder / "work", "test"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    tokens = np.random.default_rng(5).integers(2, 384, (BLOCKS, BLOCK_TOKENS)).astype(np.int32)
    arrays = save_arrays(tmp_path_factory.mktemp("corpus") / "tokens.safetensors", {"tokens": tokens})
    splits = (TokenBlocks(split=name, arrays=arrays, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS) for name in SPLITS)
    return Corpus(name="random", text_sha256="0" * 64, splits=tuple(splits))


def run(model: Model, corpus: Corpus, folder: Path, threads: int = 1, **changes: Any) -> Preflight:
    own = {name: value for name, value in changes.items() if name in OWN}
    keys = {**SETTINGS, **{name: value for name, value in changes.items() if name not in OWN}}
    built = resolve({"model": model.folder, **keys})
    settings = of_all_stages(built)
    settings["allocate"]["allocation_tokens"] = BLOCK_TOKENS
    told = {"preflight": built["preflight"], "settings": settings, "inputs": inputs_for(built)}
    config = PreflightConfig(**{"folder": str(folder), **told, **own})
    return preflight.run(config, model, corpus, PIXEL6, folder / "preflight", threads)


# Refusals


@pytest.mark.slow
def test_a_budget_that_is_too_small_is_told_the_share_that_will_do(
    model: Model, corpus: Corpus, tmp_path: Path
) -> None:
    words = r"at least [\d,]+ \((\d+)%\), which gives about [\d,.]+ tokens/s on pixel6"
    with pytest.raises(DoesNotFitError, match=words) as refused:
        run(model, corpus, tmp_path, dram_budget="1%")
    found = re.search(words, str(refused.value))
    assert found is not None
    percent = int(found[1])
    run(model, corpus, tmp_path, dram_budget=f"{percent}%")
    with pytest.raises(DoesNotFitError):
        run(model, corpus, tmp_path, dram_budget=f"{percent - 1}%")


def test_too_little_memory(model: Model, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_dram_bytes", lambda: 300_000_000)
    with pytest.raises(
        DoesNotFitError, match=r"\w+ needs \d\d\d MB of memory, this machine has 300 MB free; .*preflight=off"
    ):
        run(model, corpus, tmp_path, here=True)


def test_text_that_is_too_long_can_be_shortened() -> None:
    stages = tuple(stage_needs(stage, ram_bytes=10**9) for stage in ("calibrate", "verify"))
    preflight.check_ram(stages, 10**9)
    with pytest.raises(DoesNotFitError, match=r"calibrate needs 1 GB of memory, .* lower calibration_tokens"):
        preflight.check_ram(stages, 9 * 10**8)


def test_memory_of_this_machine_limits_only_jobs_that_run_here(
    model: Model, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster each job is given what its rule asks for; the record says what that is."""
    monkeypatch.setattr(memory, "free_dram_bytes", lambda: 300_000_000)
    found = {needs.stage: needs for needs in run(model, corpus, tmp_path).stages}
    assert found["verify"].ram_bytes > 600_000_000
    with pytest.raises(DoesNotFitError, match="this machine has 300 MB free"):
        run(model, corpus, tmp_path, here=True)


def stage_needs(stage: str, ram_bytes: int = 0, disk_bytes: int = 0) -> StageNeeds:
    return StageNeeds(stage=stage, ram_bytes=ram_bytes, disk_bytes=disk_bytes)


@pytest.mark.parametrize(
    ("line", "folder", "limit", "usage", "cache"),
    [
        ("0::/slurm/job_7/step_0", "slurm/job_7", "memory.max", "memory.current", "inactive_file"),
        (
            "4:cpu,memory:/job_7/step_0",
            "memory/job_7",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
)
def test_the_limits_of_all_groups_around_a_job_count(
    tmp_path: Path, line: str, folder: str, limit: str, usage: str, cache: str
) -> None:
    """A cluster job's limit lies some groups above its processes; caches can be given back."""
    groups = tmp_path / "sys" / "fs" / "cgroup"
    job = groups / folder
    for path, most in ((job, "5000"), (job / "step_0", "max"), (job.parent, "4000")):
        path.mkdir(parents=True, exist_ok=True)
        (path / limit).write_text(f"{most}\n")
        (path / usage).write_text("3000\n")
        (path / "memory.stat").write_text(f"anon 1\n{cache} 500\n")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"9:pids:/\n{line}\n")
    assert [group.left_bytes for group in memory_groups(tmp_path)] == [2500, 1500]
    assert physical_bytes(tmp_path) == 4000
    assert list(memory_groups(tmp_path / "elsewhere")) == []
    assert physical_bytes(tmp_path / "elsewhere") == psutil.virtual_memory().total


def test_too_little_disk(model: Model, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_free_disk_bytes", lambda _: 12_000_000)
    with pytest.raises(
        DoesNotFitError, match=r"needs 7\d(\.\d)? MB on disk in .*, has 12 MB \(most of it, 6\d(\.\d)? MB, for package"
    ):
        run(model, corpus, tmp_path)
    assert run(model, corpus, tmp_path, preflight="off").stages == ()


def test_what_an_earlier_run_left_is_not_needed_again(tmp_path: Path) -> None:
    needs = (stage_needs("quantize", disk_bytes=1000),)
    with pytest.raises(DoesNotFitError, match=r"needs 1 kB on disk .* has 400 B"):
        preflight.check_disk(needs, 400, tmp_path, "pixel6")
    codes = tmp_path / "pixel6" / "quantize" / "000-003" / "layer-0.safetensors"
    codes.parent.mkdir(parents=True)
    codes.write_bytes(bytes(700))
    preflight.check_disk(needs, 400, tmp_path, "pixel6")
    with pytest.raises(DoesNotFitError):
        preflight.check_disk((*needs, *needs), 400, tmp_path, "oneplus12")


def test_a_budget_below_what_is_always_resident(model: Model, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"budget of 1,000 bytes was asked for, \d{2,3},\d{3} are needed"):
        run(model, corpus, tmp_path, dram_budget=1000)


def test_too_few_tokens(model: Model, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model's hours are not spent on a corpus that is far too short; a small one is built with a warning."""
    assert run(model, corpus, tmp_path, calibration_tokens=1 << 20).calibration_tokens == 1024
    monkeypatch.setattr(preflight, "LARGE_BYTES", 1)
    with pytest.raises(ColdpressError, match="random gives 1,024 calibration tokens, 1,048,576 were asked for"):
        run(model, corpus, tmp_path, calibration_tokens=1 << 20)


def test_more_shards_than_text(model: Model, corpus: Corpus, tmp_path: Path) -> None:
    assert run(model, corpus, tmp_path, shards=BLOCKS).stages
    with pytest.raises(ColdpressError, match="calibration_shards=9 was asked for, the text has 8 calibration blocks"):
        run(model, corpus, tmp_path, shards=BLOCKS + 1)


def test_the_licence_is_said(model: Model, corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run(model, corpus, tmp_path)
    assert "names no licence" in caplog.text
    named = model.model_copy(update={"license": "apache-2.0"})
    assert run(named, corpus, tmp_path).license == "apache-2.0"
    assert "under the licence apache-2.0" in caplog.text


@pytest.mark.parametrize(("mode", "large", "expected"), [("auto", False, 0), ("auto", True, 2), ("always", False, 2)])
def test_when_there_is_a_trial(
    model: Model,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    large: bool,
    expected: int,
) -> None:
    monkeypatch.setattr(preflight, "LARGE_BYTES", 1 if large else 1 << 60)
    monkeypatch.setattr(trial, "run", lambda *_: 2)
    assert run(model, corpus, tmp_path, preflight=mode).trial_layers == expected


# Sums


@pytest.mark.slow
def test_disk_is_what_stages_write(model: Model, corpus: Corpus, tmp_path: Path) -> None:
    """Never less than the files' sizes, and not much more even where all files are small."""
    needs = {found.stage: found.disk_bytes for found in all_needs(build_of(model))}
    calibrate.run(CalibrateConfig(), model, corpus, Workspace(tmp_path / "calibrate", "test"), 2)
    densities = (Densities(family="neuron", per_layer=(0.5,) * LAYERS),)
    parts = ("resident", "predictor", "kv_cache", "bookkeeping", "buffer", "cache")
    budget = Budget.model_validate({"dram_budget_bytes": 1} | {f"{part}_bytes": 0 for part in parts})
    sparsity = Sparsity(
        method="predictor",
        format="int8_group32",
        context_length=64,
        densities=densities,
        predictor_rank=(8,) * LAYERS,
        budget=budget,
    )
    quantize.run(QuantizeConfig(), model, sparsity, tuple(range(LAYERS)), Workspace(tmp_path / "quantize", "test"))
    for stage, slack in (("calibrate", 1.5), ("quantize", 1.05)):
        written = sum(file.stat().st_size for file in (tmp_path / stage).iterdir())
        hidden = 2 * 4 * BLOCKS * BLOCK_TOKENS * model.spec.hidden_size if stage == "calibrate" else 0
        headers = 2048 * LAYERS if stage == "quantize" else 0
        assert written + hidden - headers <= needs[stage] <= slack * (written + hidden), stage


def as_llama_cpp_computes(model: Model) -> Model:
    """The same shapes with llama.cpp's activation of a Llama."""
    return model.model_copy(update={"spec": model.spec.model_copy(update={"hidden_act": "silu"})})


def test_what_is_exported_takes_its_room(model: Model, corpus: Corpus, tmp_path: Path) -> None:
    """Beside the artifact: codes of all weights once more, twice as many bytes in F16 as in Q8_0."""
    model = as_llama_cpp_computes(model)
    needs = {
        kind: {found.stage: found for found in run(model, corpus, tmp_path, export="gguf", gguf_type=kind).stages}
        for kind in ("Q8_0", "F16")
    }
    assert "export" not in {found.stage for found in run(model, corpus, tmp_path).stages}
    matrices = sum(math.prod(found.shape) for found in model.tensors.values() if len(found.shape) == 2)
    grown = needs["F16"]["export"].disk_bytes - needs["Q8_0"]["export"].disk_bytes
    assert grown == pytest.approx(matrices * (2 - 34 / 32), rel=0.05)
    assert needs["F16"]["export"].disk_bytes > 2 * matrices
    assert needs["F16"]["export"].ram_bytes > 0


def test_what_llama_cpp_computes_otherwise_is_refused_before_it_is_built(
    model: Model, corpus: Corpus, tmp_path: Path
) -> None:
    """For its shape alone: that of an artifact would be known only after hours."""
    for changes, words in (
        ({"model_type": "gpt_oss"}, "llama.cpp computes the architecture 'gpt_oss' otherwise"),
        ({"hidden_act": "gelu"}, "the model's activation is gelu, and llama.cpp computes silu"),
    ):
        other = model.model_copy(update={"spec": model.spec.model_copy(update=changes)})
        with pytest.raises(ColdpressError, match=words):
            run(other, corpus, tmp_path, export="gguf")


def build_of(model: Model, tokens: int = BLOCKS * BLOCK_TOKENS, shards: int = 1, **keys: Any) -> Build:
    built = resolve({"model": model.folder, **SETTINGS, **keys})
    settings = of_all_stages(built)
    whole = trial.compiled(model, settings)
    return Build(whole, settings, inputs_for(built), PIXEL6, tokens, BLOCK_TOKENS, 2, shards)


def ram(build: Build) -> dict[str, int]:
    return {found.stage: found.ram_bytes for found in all_needs(build)}


def disk(build: Build) -> dict[str, int]:
    return {found.stage: found.disk_bytes for found in all_needs(build)}


@pytest.mark.slow
def test_needs_grow_with_what_they_depend_on(model: Model) -> None:
    small, usual = disk(build_of(model)), ram(build_of(model, order="ripple"))
    assert small["recalibrate"] == 0
    assert disk(build_of(model, shards=3))["calibrate"] == 2 * small["calibrate"]
    counts = 2 * model.spec.intermediate_size**2
    assert ram(build_of(model, order="auto"))["order"] == usual["order"] + 2 * counts
    assert "distill" not in usual
    assert "relufy" not in usual
    longer = build_of(model, tokens=64 * BLOCKS * BLOCK_TOKENS, distill="true")
    assert disk(longer)["recalibrate"] > 15 * small["calibrate"]
    states = 2 * 4 * 4 * model.num_parameters  # two, of weights, the best ones and two moments
    assert disk(longer)["distill"] == 4 * model.num_parameters + states
    adapted = build_of(model, distill="true", recipe="lora", lora_rank=1)
    assert disk(adapted)["distill"] < disk(longer)["distill"]
    assert ram(adapted)["distill"] < ram(longer)["distill"]
    assert ram(longer)["predict"] > usual["predict"]
    greedy = ram(build_of(model, density_allocation="greedy"))["allocate"]
    states = 4 * BLOCKS * BLOCK_TOKENS * model.spec.hidden_size
    uniform = ram(build_of(model, density_allocation="uniform"))["allocate"]
    assert greedy > uniform + (1 + LAYERS) * states, "a variant per layer of the one family"
    assert ram(build_of(model, dram_budget=1 << 30))["verify"] > 1 << 30
    half = model.spec.model_copy(update={"num_hidden_layers": LAYERS // 2})
    halved = dataclasses.replace(build_of(model), model=model.model_copy(update={"spec": half}))
    assert disk(halved)["calibrate"] < 0.6 * small["calibrate"]
    assert ram(halved)["calibrate"] == usual["calibrate"], "memory is bounded by a layer"


@pytest.mark.slow
def test_relufication_needs_what_distillation_does(tmp_path: Path) -> None:
    smooth = ingested(tmp_path / "smooth")
    other, trained = build_of(smooth, relufy="relu"), build_of(smooth, distill="true", method="topk", density=0.5)
    assert ram(other)["relufy"] == ram(trained)["distill"]
    assert disk(other)["relufy"] == 20 * smooth.num_parameters + 16 * smooth.num_parameters
    adapted = build_of(smooth, relufy="relu", relufy_rank=1)
    for counted in (ram, disk):
        assert counted(adapted)["relufy"] < counted(other)["relufy"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_counts_for_itself(stage: str, model: Model) -> None:
    """With every stage in the build: the rules ask each of them, and a longer text or a larger job never needs less."""
    settings: dict[str, Any] = {"distill": "true", "algorithm": "gptq", "export": "gguf"}
    model = as_llama_cpp_computes(model)
    small, large = build_of(model, **settings), build_of(model, tokens=1 << 20, **settings)
    found, more = needs_of(stage, small), needs_of(stage, large)
    assert found.stage == stage
    assert found.ram_bytes >= Build.PYTHON_BYTES
    assert more.ram_bytes >= found.ram_bytes


def test_allocation_counts_two_states_of_each_variant_and_one_of_the_model(model: Model) -> None:
    build = build_of(model, density_allocation="greedy")
    spec, tokens = model.spec, AllocateConfig.model_fields["allocation_tokens"].default
    variants = 1 + LAYERS  # of one family
    hidden = (2 * variants + 1) * 4 * tokens * spec.hidden_size
    running = 2 * BLOCK_TOKENS * 4 * 8 * spec.intermediate_size
    logits = 4 * 4 * 4 * BLOCK_TOKENS * spec.vocab_size
    fixed = Build.TORCH_BYTES + build.layer_weights_bytes
    assert ram(build)["allocate"] == fixed + running + hidden + logits


def test_limits_are_those_of_the_stages() -> None:
    for rule in ("calibrate", "distill", "recalibrate", "size"):
        text = (ROOT / "rules" / f"{rule}.smk").read_text()
        assert set(re.findall(r"threads: (\d+)", text)) == {str(PASS_THREADS)}
    assert preflight.PREDICTOR_TOKENS == predict.MIN_TOKENS


# The trial


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "relu", "method", "distill"),
    [
        ("llama", True, "predictor", False),  # with grouped queries, as all but opt
        ("llama", False, "topk", True),
        ("opt", True, "relu", False),
        ("opt", True, "topk", False),
        ("mistral", False, "dense", False),
    ],
)
def test_all_stages_run_on_two_layers(
    corpus: Corpus,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    model_type: str,
    relu: bool,
    method: str,
    distill: bool,
) -> None:
    caplog.set_level("INFO")
    model = ingested(tmp_path / "tiny", model_type=model_type, relu=relu)
    found = run(
        model,
        corpus,
        tmp_path / "build",
        2,
        preflight="always",
        method=method,
        distill=str(distill).lower(),
        dram_budget="95%",
    )
    assert found.trial_layers == 2
    for line in ("layer 2/2", "allocate:", "place:", "order:", "quantize:", "package:", "verify:"):
        assert line in caplog.text
    assert ("distill:" in caplog.text) == distill
    assert "layer 3" not in caplog.text
    assert not list((tmp_path / "build").rglob("*"))


@pytest.mark.slow
def test_a_broken_stage_is_told_early(
    model: Model, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise IndexError("row 7 of 6")

    monkeypatch.setattr(layout, "make_sections", broken)
    with pytest.raises(ColdpressError, match="trial run on 2 layers, layout failed with IndexError: row 7 of 6"):
        run(model, corpus, tmp_path / "build", preflight="always")
    assert not list((tmp_path / "build").rglob("*"))


def test_the_trial_has_the_settings_of_the_build(
    model: Model, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage is given what its rule will give it, whatever keys a user set, and records of the right stages."""
    jobs: dict[str, Job] = {}
    monkeypatch.setattr(trial, "run_job", lambda job: jobs.setdefault(job.stage, job))
    keys = {"order": "ripple", "pinned_share": 0.25, "predictor_tolerance": 0.5, "cache": "lru", "seed": 7}
    run(model, corpus, tmp_path / "build", preflight="always", distill="true", **keys)
    assert (jobs["order"].settings["order"], jobs["allocate"].settings["cache"]) == ("ripple", "lru")
    assert (jobs["place"].settings["pinned_share"], jobs["size"].settings["predictor_tolerance"]) == (0.25, 0.5)
    assert {job.settings["seed"] for job in jobs.values() if "seed" in config_of(job.stage).model_fields} == {7}
    sources = {stage: {name: path.stem for name, (path,) in job.records.items()} for stage, job in jobs.items()}
    assert sources["allocate"] == {
        "model": "ingest",
        "corpus": "tokenize",
        "activations": "calibrate",
        "device": "device",
    }
    assert sources["recalibrate"]["activations"] == "calibrate"
    assert (sources["recalibrate"]["model"], sources["place"]["model"]) == ("distill", "distill")
    assert "relufy" not in jobs
    assert sources["place"]["activations"] == sources["order"]["activations"] == "recalibrate"
    assert "shards" not in sources["recalibrate"]
    assert sources["size"]["trained"] == "predict"
    assert sources["plan"]["predictors"] == sources["report"]["predictors"] == "size"


def test_a_stage_that_refuses_is_named(model: Model, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ColdpressError, match="on 2 layers, allocate refused: context_length 999 exceeds the 256"):
        run(model, corpus, tmp_path / "build", preflight="always", context_length=999, dram_budget="100%")


def test_the_slice_keeps_what_layers_share_and_cuts_the_rest(model: Model, tmp_path: Path) -> None:
    config = json.loads((Path(model.folder) / "config.json").read_text())
    folder = tmp_path / "with-types"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "layer_types": ["full_attention"] * LAYERS}))
    other = model.model_copy(update={"folder": str(folder), "private_files": ()})
    few = trial.slice_model(other, tmp_path / "slice")
    cut = json.loads((tmp_path / "slice" / "config.json").read_text())
    assert (cut["num_hidden_layers"], cut["layer_types"]) == (2, ["full_attention"] * 2)
    layers = {role.split(".")[1] for role in few.tensors if role.startswith("layers.")}
    assert layers == {"0", "1"}, "not 10 and 11"
    assert {role for role in model.tensors if not role.startswith("layers.")} <= set(few.tensors)
    assert few.weights_sha256 != model.weights_sha256


def test_the_slice_has_the_room_per_layer_that_the_build_has(model: Model, tmp_path: Path) -> None:
    few = trial.slice_model(model, tmp_path / "slice")

    def at(one: Model, budget: int) -> Build:
        return dataclasses.replace(build_of(model, dram_budget=budget), model=one)

    least, slice_least = (min(need.least_bytes for need in least_needs(at(one, 1 << 20))) for one in (model, few))
    roomy = least + 12_000
    assert trial.slice_budget(at(model, roomy), at(few, roomy)) == slice_least + 2_000
