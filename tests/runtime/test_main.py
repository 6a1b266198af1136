"""`coldpress` as a user meets it: what it prints, what it refuses and how."""

import json
import re
import shutil
import subprocess
import sys
import time
import tomllib

import pytest

import coldpress
from coldpress.cli.main import main
from coldpress.compiler.__main__ import main as compiler_main
from coldpress.compiler.workflow import settings
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.runtime.dram.budget import whole_bytes
from coldpress.runtime.generate.session import Session
from coldpress.runtime.quantities import parse_bytes, show_bytes, table
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.metrics import RunMetrics
from tests.support.artifacts import Recipe, build_artifact, change_manifest, small_device, small_spec
from tests.support.command_line import run, speaking_artifact
from tests.support.data import ROOT
from tests.support.usage import processor_s
from tools.fuzz.limited import run_limited


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return speaking_artifact(tmp_path_factory.mktemp("main"), num_hidden_layers=4)


def command(*arguments):
    return [sys.executable, "-m", "coldpress", *map(str, arguments)]


# generate


def test_json_is_one_object_with_everything(capsys, artifact):
    code, out, err = run(capsys, "generate", artifact.path, "--prompt", "The map was", "--max-new-tokens", 6, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    keys = {"prompt_token_ids", "token_ids", "text", "stop", "metrics", "tokens", "per_token", "speculation"}
    assert found.keys() == keys
    assert found["speculation"] == {
        "passes": 5,
        "drafted": 0,
        "accepted": 0,
        "acceptance": 0.0,
        "tokens_per_pass": 1.0,
    }
    assert found["prompt_token_ids"][0] == 0
    expected = Session(artifact.path).generate(found["prompt_token_ids"], 6)
    assert found["token_ids"] == list(expected.token_ids)
    metrics = RunMetrics.model_validate_json(json.dumps(found["metrics"]))
    assert metrics.misses == expected.metrics.misses
    assert isinstance(found["text"], str)
    assert found["stop"] is None
    assert [token["id"] for token in found["tokens"]] == found["token_ids"]
    assert found["per_token"].keys() == {"seconds", "flash_s", "reads", "read_bytes", "hit_rate"}
    for name in ("seconds", "flash_s", "reads", "read_bytes"):
        decoded = sorted(token[name] for token in found["tokens"][1:])
        assert found["per_token"][name]["median"] == decoded[2]
        assert decoded[0] <= found["per_token"][name]["p5"] <= found["per_token"][name]["p95"] <= decoded[-1]


def test_a_stop_string_ends_the_text_and_is_not_printed(capsys, artifact):
    options = ("--prompt", "The map was", "--max-new-tokens", 12, "--ignore-eos")
    whole = json.loads(run(capsys, "generate", artifact.path, *options, "--json")[1])
    stop = whole["text"][3:6]
    cut = json.loads(run(capsys, "generate", artifact.path, *options, "--json", "--stop", "nowhere", "--stop", stop)[1])
    assert (cut["stop"], cut["text"]) == (stop, whole["text"][: whole["text"].index(stop)])
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    assert cut["metrics"]["num_tokens"] == len(cut["token_ids"]) - 1 < 11
    _, out, _ = run(capsys, "generate", artifact.path, *options, "--stop", stop)
    shown = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", cut["text"])
    assert out.startswith(f"The map was{shown}\n\n")
    _, out, _ = run(capsys, "generate", artifact.path, *options, "--max-new-tokens", 1, "--json")
    assert json.loads(out)["per_token"] is None


def test_text_streams_and_ends_with_a_table(capsys, artifact):
    options = ("--prompt", "The map was", "--max-new-tokens", 6)
    text = json.loads(run(capsys, "generate", artifact.path, *options, "--json")[1])["text"]
    code, out, err = run(capsys, "generate", artifact.path, *options)
    assert (code, err) == (0, "")
    shown = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "�", text)  # what would move a terminal's cursor
    assert out.startswith(f"The map was{shown.rstrip('�')}")
    assert re.search(r"a token: p5, median, p95 +[\d.]+ ms, [\d.]+ ms, [\d.]+ ms\n", out)
    for label in ("tokens/s", "hit rate", "reads per token", "DRAM used, of the budget", "process, at its peak"):
        assert label in out


def test_prompt_ids_and_flags_reach_the_run(capsys, artifact):
    prompt = ("--prompt-ids", "3,14,15", "--max-new-tokens", 5, "--json", "--ignore-eos")
    dense = json.loads(run(capsys, "generate", artifact.path, *prompt, "--selector", "dense", "--cache", "static")[1])
    assert dense["prompt_token_ids"] == [3, 14, 15]
    assert dense["metrics"]["hits"] + dense["metrics"]["misses"] == 4 * 4 * 512
    assert dense["metrics"]["evictions"] == 0
    budget = dense["metrics"]["dram_budget_bytes"] - 20_000
    less = json.loads(run(capsys, "generate", artifact.path, *prompt, "--dram-budget", f"{budget / 1000}kB")[1])
    assert less["metrics"]["dram_budget_bytes"] == budget
    assert less["token_ids"] == dense["token_ids"]
    sampled = ("--temperature", "5", "--top-p", "0.9", "--seed", "3")
    drawn = ("generate", artifact.path, *prompt, *sampled)
    first, second = (json.loads(run(capsys, *drawn)[1]) for _ in range(2))
    assert first["token_ids"] == second["token_ids"] != dense["token_ids"]
    for flags in (("--top-k", "1"), ("--min-p", "1")):  # which leave but the likeliest
        assert json.loads(run(capsys, *drawn, *flags)[1])["token_ids"] == dense["token_ids"]
    penalized = json.loads(run(capsys, *drawn[:-6], "--repetition-penalty", "100")[1])["token_ids"]
    assert len(set(penalized)) == len(penalized)


def test_an_artifact_without_a_tokenizer_takes_ids(capsys, relu_artifact):
    code, out, _ = run(capsys, "generate", relu_artifact.path, "--prompt-ids", "1,2", "--max-new-tokens", 3, "--json")
    assert code == 0
    assert json.loads(out)["text"] is None
    code, _, err = run(capsys, "generate", relu_artifact.path, "--prompt-ids", "1,2", "--stop", "x")
    assert (code, "stop strings need a tokenizer, and the artifact has none" in err) == (2, True)
    _, out, _ = run(capsys, "generate", relu_artifact.path, "--prompt-ids", "1,2", "--max-new-tokens", 3)
    assert out.startswith("1 2 " + " ".join(map(str, Session(relu_artifact.path).generate([1, 2], 3).token_ids)))


def test_modelled_seconds_are_told_where_they_are_asked_for(capsys, artifact):
    options = ("generate", artifact.path, "--prompt-ids", "3,4", "--max-new-tokens", 3, "--ignore-eos")
    assert json.loads(run(capsys, *options, "--json")[1])["metrics"]["modelled_s"] is None
    assert json.loads(run(capsys, *options, "--json", "--modelled")[1])["metrics"]["modelled_s"] > 0
    assert "modelled flash" not in run(capsys, *options)[1]
    assert "modelled flash" in run(capsys, *options, "--modelled")[1]


def test_a_trace_replays_with_equal_counters(capsys, artifact, tmp_path):
    trace = tmp_path / "run.trace"
    options = ("--prompt-ids", "3,4", "--max-new-tokens", 5, "--ignore-eos", "--json")
    real = json.loads(run(capsys, "generate", artifact.path, *options, "--trace", trace)[1])["metrics"]
    code, out, _ = run(capsys, "simulate", artifact.path, "--trace", trace, "--json")
    assert code == 0
    replayed = json.loads(out)["metrics"]
    for name in ("hits", "misses", "evictions", "reads", "read_bytes", "extents_sha256", "num_tokens"):
        assert replayed[name] == real[name]
    device = tmp_path / "device.json"
    profile = small_device()
    slow = profile.flash.latency_s.model_copy(update={"value": 0.05})
    deep = profile.flash.queue_depth.model_copy(update={"value": 1000})  # so that the small reads of the curve go on
    changed = {"name": "slow", "flash": profile.flash.model_copy(update={"latency_s": slow, "queue_depth": deep})}
    device.write_text(profile.model_copy(update=changed).to_json())
    out = run(capsys, "simulate", artifact.path, "--trace", trace, "--device", device, "--json")[1]
    assert json.loads(out)["device"] == "slow"
    assert json.loads(out)["metrics"]["flash_s"] > 10 * replayed["flash_s"]
    assert "hit rate" in run(capsys, "simulate", artifact.path, "--trace", trace, "--cache", "lfu")[1]


def test_a_device_is_named_in_one_way_everywhere(capsys, artifact, tmp_path):
    """By the name of a profile, or by its file in YAML or JSON; `device=` of a build too."""
    trace, record = tmp_path / "run.trace", tmp_path / "device.json"
    simulated = (
        "generate",
        artifact.path,
        "--prompt-ids",
        "3,4",
        "--max-new-tokens",
        5,
        "--flash",
        "simulated",
        "--json",
    )
    run(capsys, "generate", artifact.path, "--prompt-ids", "3,4", "--max-new-tokens", 5, "--trace", trace)
    record.write_text(load_device("oneplus12").to_json())
    for device in ("oneplus12", ROOT / "profiles" / "devices" / "oneplus12.yaml", record):
        code, out, err = run(capsys, "simulate", artifact.path, "--trace", trace, "--device", device, "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["device"] == "oneplus12"
        assert run(capsys, *simulated, "--device", device)[0] == 0
        assert settings.resolve({"device": str(device)}).device.name == "oneplus12"
    code, _, err = run(capsys, "simulate", artifact.path, "--trace", trace, "--device", "oneplus21")
    assert code == 2
    assert "unknown device 'oneplus21'. Did you mean 'oneplus12'?" in err


def test_a_file_that_is_no_trace_is_called_so(capsys, artifact, tmp_path):
    (tmp_path / "notes.txt").write_text("some notes that are no trace at all")
    code, _, err = run(capsys, "simulate", artifact.path, "--trace", tmp_path / "notes.txt")
    assert code == 2
    assert "notes.txt: is not a trace, expected a file that `generate --trace` wrote" in err


def test_a_simulation_gives_short_times_in_milliseconds(capsys, artifact, tmp_path):
    trace = tmp_path / "run.trace"
    run(capsys, "generate", artifact.path, "--prompt-ids", "3,4", "--max-new-tokens", 5, "--trace", trace)
    out = run(capsys, "simulate", artifact.path, "--trace", trace)[1]
    (line,) = [line for line in out.splitlines() if line.startswith("first token")]
    assert re.search(r" [0-9.]+ ms$", line)
    assert float(line.split()[-2]) > 0


def test_whether_the_whole_model_fits_is_said(capsys, artifact):
    plan = open_artifact(artifact.path).manifest.plans[0]
    whole = whole_bytes(open_artifact(artifact.path).manifest, plan)
    options = ("--prompt-ids", "3,4", "--max-new-tokens", 5)
    out = run(capsys, "generate", artifact.path, *options)[1]
    assert f"fits in {whole:,} bytes, {whole - plan.dram_budget_bytes:,} more than the budget" in out
    out = run(capsys, "generate", artifact.path, *options, "--dram-budget", whole)[1]
    assert f"fits in {whole:,} bytes: flash is not needed" in out


def test_bench_tells_of_selectors_that_the_layout_was_not_made_for(capsys, artifact):
    out = run(capsys, "bench", artifact.path, "--tokens", 1, "--runs", 1, "--selector", "relu,dense")[1]
    assert "the artifact was laid out for relu: one built with method=dense may be faster than dense here" in out
    out = run(capsys, "bench", artifact.path, "--tokens", 1, "--runs", 1, "--selector", "relu")[1]
    assert "laid out for" not in out


# inspect, verify, bench


def test_inspect_says_what_the_artifact_is(capsys, artifact):
    code, out, _ = run(capsys, "inspect", artifact.path)
    assert code == 0
    for text in (
        "llama, relu",
        "4 layers",
        "up_down",
        "up_proj row, down_proj column",
        "flash.img",
        "lru",
        "test-device",
    ):
        assert text in out
    summary = json.loads(run(capsys, "inspect", artifact.path, "--json")[1])
    plan = artifact.manifest.plans[0]
    assert summary["plans"][0]["dram_budget_bytes"] == plan.dram_budget_bytes == summary["plans"][0]["used_bytes"]
    assert summary["families"][0]["num_units"] == 4 * 512
    files = [path for path in artifact.path.rglob("*") if path.is_file()]
    assert summary["artifact_bytes"] == sum(path.stat().st_size for path in files)


def test_verify_reads_everything(capsys, artifact, tmp_path):
    code, out, _ = run(capsys, "verify", artifact.path)
    assert code == 0
    assert "all as the manifest" in out
    assert json.loads(run(capsys, "verify", artifact.path, "--json")[1])["verified"] is True
    build_artifact(tmp_path / "bad", Recipe(spec=small_spec(num_hidden_layers=1)))
    image = bytearray((tmp_path / "bad" / "flash.img").read_bytes())
    image[5000] ^= 1
    (tmp_path / "bad" / "flash.img").write_bytes(image)
    code, out, err = run(capsys, "verify", tmp_path / "bad")
    assert (code, out) == (2, "")
    assert err.startswith("error: flash.img: page 1 ")


def test_bench_compares_and_ends_with_json(capsys, artifact):
    options = ("--selector", "dense,relu", "--cache", "lru,static", "--tokens", 3, "--runs", 2)
    code, out, _ = run(capsys, "bench", artifact.path, *options)
    assert code == 0
    rows = json.loads(out.splitlines()[-1])["runs"]
    assert [(row["selector"], row["cache"]) for row in rows] == [
        *(("dense", "lru"), ("dense", "static")),
        *(("relu", "lru"), ("relu", "static")),
    ]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    for row in rows:
        seconds = row["per_token"]["seconds"]
        assert 0 < seconds["p5"] <= seconds["median"] <= seconds["p95"]
    assert rows[2]["read_bytes_per_token"] <= rows[0]["read_bytes_per_token"]
    assert out.count("\n") == 8  # head, four rows, the setting, the selector that the layout was not made for, JSON


# What is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--dram-budget", "100"],
            "100 bytes was asked for, .* are needed before any unit is cached, by plan",
        ),
        (["--dram-budget", "lots"], "'lots' is not an amount of memory"),
        (["--dram-budget=-1GB"], "'-1GB' is negative; give an amount of memory above 0"),
        (["--dram-budget", "0"], "'0' is less than one byte"),
        (["--selector", "predictor"], "the selector 'predictor' cannot choose units of the family up_down"),
        (["--selector", "topp"], "unknown selector 'topp'. Did you mean 'topk'"),
        (["--cache", "lruu"], "unknown cache 'lruu'. Did you mean 'lru'"),
        (["--cache", "lru:window_tokens=2"], "unknown option of lru 'window_tokens'. Known: none."),
        (["--cache", "window:window_tokens"], "'window_tokens' is no option of the cache 'window', expected such as"),
        (
            ["--cache", "window:window_tokens=0"],
            "option window_tokens of window is 0, expected tokens",
        ),
        (["--cache", "belady"], "the cache 'belady' has to know all requests to come, which a run does not"),
        (["--flash", "tape"], "unknown flash 'tape'. Known: direct, io_uring, serial, simulated"),
        (["--activations", "int4"], "unknown activation format 'int4'. Did you mean 'int8'"),
        (["--device", "x.json"], "add --flash simulated"),
        (["--flash", "simulated", "--device", "x.json"], "x.json: No such file"),
        (["--flash", "simulated", "--device", str(ROOT / "pyproject.toml")], "not a device record, at the text"),
        (["--max-new-tokens", "40"], "make 42 tokens, the plan 'test' has a KV cache for 32"),
        (["--temperature", "-1"], "the sampling's temperature is -1"),
        (["--top-p", "2"], "the sampling's top_p is 2.0, expected at most 1"),
        (["--min-p", "-1"], "the sampling's min_p is -1.0, expected at least 0"),
        (["--repetition-penalty", "0"], "the sampling's repetition_penalty is 0.0, expected at least 0.01"),
        (["--stop", ""], "the stop string '' is not text, expected at least one character"),
        (["--trace", "/nowhere/run.trace"], "/nowhere/run.trace: there is no folder /nowhere"),
    ],
)
def test_bad_options_end_in_one_sentence(capsys, artifact, options, sentence):
    arguments = ["generate", artifact.path, "--prompt-ids", "3,4"]
    if "--max-new-tokens" not in options:
        arguments += ["--max-new-tokens", "2"]
    code, out, err = run(capsys, *arguments, *options)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert re.search(sentence, err)


def test_a_trace_that_cannot_be_written_ends_in_one_sentence(capsys, artifact, tmp_path):
    options = ("--max-new-tokens", 2, "--json", "--trace", tmp_path / ("x" * 300))
    code, _, err = run(capsys, "generate", artifact.path, "--prompt-ids", "3", *options)
    assert code == 2
    assert err.startswith(f"error: {tmp_path}/xxx")
    assert "File name too long" in err


def test_a_token_outside_the_vocabulary_ends_in_one_sentence(capsys, artifact):
    code, out, err = run(capsys, "generate", artifact.path, "--prompt-ids", "3,384", "--max-new-tokens", "2")
    assert (code, out) == (2, "")
    assert err == "error: token id 384 is outside the vocabulary, expected 0 to 383\n"


def test_a_missing_artifact_ends_in_one_sentence(capsys, tmp_path):
    code, _, err = run(capsys, "inspect", tmp_path / "none")
    assert code == 2
    assert err.startswith(f"error: {tmp_path / 'none'}: the artifact is missing")


def test_memory_that_a_process_may_not_have_ends_in_one_sentence(artifact, tmp_path):
    path = shutil.copytree(artifact.path, tmp_path / "long")

    def lengthen(manifest):
        (plan,), spec = manifest["plans"], manifest["model"]
        plan["context_length"] = spec["max_position_embeddings"] = 6_000_000
        plan["kv_cache_bytes"] = 4 * 4 * 2 * 16 * 6_000_000  # 3.1 GB: 4 layers, 2 heads of 16, keys and values in fp16
        plan["dram_budget_bytes"] += plan["kv_cache_bytes"]

    change_manifest(path, lengthen)
    options = ["--prompt-ids", "1", "--max-new-tokens", "5900000"]
    ended = run_limited(lambda: main(["generate", str(path), *options]), tmp_path)
    assert ended.kind == "refused"
    assert ended.words == (
        f"error: {path}: this process needs more memory than it may have; give a smaller --dram-budget"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "a", "--prompt", "x", "--prompt-ids", "1"],
        ["generate", "a"],
        ["generate", "a", "--prompt-ids", "1,x"],
        ["generate", "a", "--prompt-ids", "1", "--max-new-tokens", "0"],
        ["simulate", "a"],
        ["simulate", "a", "--trace", "b", "--signals"],
        ["fly"],
    ],
)
def test_a_wrong_command_line_is_one_sentence(capsys, arguments):
    assert main(arguments) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: .+; see `coldpress( generate| simulate)? --help`", sentence)


@pytest.mark.parametrize("name", ["generate", "inspect", "verify", "bench", "simulate"])
def test_every_help_has_an_example(capsys, name):
    assert main([name, "--help"]) == 0
    assert f"coldpress {name} demo.coldpress" in capsys.readouterr().out


def test_version(capsys):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"coldpress {declared}, artifact format 2.0\n"
    assert compiler_main(["--version"]) == 0
    assert capsys.readouterr().out == f"coldpress {declared}\n"


# The process


@pytest.mark.slow
def test_the_first_token_takes_little_more_than_a_start(artifact):
    """A library such as torch or transformers would take several times as long."""

    def run(*arguments):
        return subprocess.run(command(*arguments), cwd=ROOT, capture_output=True, text=True, check=True).stdout

    generate = ("generate", artifact.path, "--prompt", "The map", "--max-new-tokens", 1, "--json")
    start = time.perf_counter()
    first_token_s = json.loads(run(*generate))["metrics"]["first_token_s"]
    assert 0.05 < first_token_s < time.perf_counter() - start
    assert processor_s(lambda: run(*generate)) < 3 * processor_s(lambda: run("--version"))


def test_a_reader_that_leaves_is_no_error(artifact):
    arguments = command("inspect", artifact.path)
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == b""
    assert process.returncode == 141


def test_a_console_without_unicode_still_prints(artifact):
    arguments = command("generate", artifact.path, "--prompt", "日本", "--max-new-tokens", 1)
    environment = {"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin"}
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"??")


# Quantities


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[(3221225472, 3 << 30), ("1", 1), ("3GB", 3 * 10**9), ("1.5 GiB", 3 << 29), ("50mb", 50 * 10**6)],
        *[("0.5KiB", 512), (" 7 B ", 7), (f"{2**53 - 1}", 2**53 - 1), ("9007199254739kB", 9007199254739 * 1000)],
    ],
)
def test_amounts_of_memory_are_read(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "3XB", "-1", "1e9", "0", "0.2", "3 GB 2", "50%", "nan"])
def test_other_texts_are_no_amount(text):
    with pytest.raises(ColdpressError, match=f"'{text}' is "):
        parse_bytes(text)


def test_amounts_are_shown_with_three_digits():
    shown = {0: "0 B", 999: "999 B", 999.6: "1 kB", 1460: "1.46 kB", 1_234_567: "1.23 MB", 3e9: "3 GB"}
    shown |= {999_400: "999 kB", 999_600: "1 MB", 12_300_000: "12.3 MB", 5.4e15: "5400 TB"}
    assert {count: show_bytes(count) for count in shown} == shown


def test_tables_align():
    assert table([("a", "b"), ("long", "12")]) == "a      b\nlong  12"


def test_the_python_of_the_documents_runs(capsys, artifact):
    blocks = [
        re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
        for name in ("README.md", "docs/how-to/python-and-server.md", "docs/how-to/session.md")
    ]
    (model,), (same,), (session,) = blocks
    assert model == same
    path, budget = "build/relu-demo/pixel6/relu-demo-pixel6.coldpress", "6_000_000"
    least = artifact.manifest.plans[0].dram_budget_bytes
    assert path in session
    assert budget in session
    exec(session.replace(path, str(artifact.path)).replace(budget, str(least)), {})
    assert re.search(r"^\d+ hits, \d+ misses, \d+ bytes of DRAM$", capsys.readouterr().out, re.MULTILINE)
    assert path in model
    assert '"6MB"' in model
    exec(model.replace(path, str(artifact.path)).replace('"6MB"', str(least)), {})
    with coldpress.load(artifact.path) as loaded:
        assert capsys.readouterr().out == loaded.generate("The for statement", 16).text
