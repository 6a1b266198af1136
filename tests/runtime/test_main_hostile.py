"""Whatever `coldpress` is given: one sentence of printable characters and exit code 2, never a traceback."""

import errno
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from coldpress.cli.main import main
from coldpress.runtime.generate.sampling import Sampling, candidates
from tests.support.artifacts import change_manifest, small_device
from tests.support.command_line import speaking_artifact
from tests.support.data import ROOT

GENERATE = ("generate", "--max-new-tokens", "2")


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """An artifact with a tokenizer."""
    return speaking_artifact(tmp_path_factory.mktemp("spoken"), num_hidden_layers=2).path


def refused(capsys, *arguments):
    """The sentence that a command ends with."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stopped:  # argparse
        code = stopped.code
    last = capsys.readouterr().err.rstrip("\n").split("\n")[-1]
    assert code == 2, last
    assert "error: " in last
    assert last.isprintable()
    assert len(last) < 1000
    return last


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prompt-ids", "99999999999999999999"), "outside any vocabulary"),
        (("--prompt-ids", "9" * 5000), "is not a list of token ids"),
        (("--prompt", "\udcff\udcfe"), "is not UTF-8; write it in UTF-8"),
        (("--prompt-ids", "1", "--dram-budget", "10000TB"), "is more than 9007199254740991 bytes"),
        (("--prompt-ids", "1", "--dram-budget", "9" * 299), "is more than"),
        (("--prompt-ids", "1", "--dram-budget", "9" * 400), "is not an amount of memory"),
        (("--prompt-ids", "1", "--dram-budget", "9" * 299 + ".5TB"), "is more than"),
        (("--prompt-ids", "1", "--dram-budget", "9" * 5000), "is not an amount of memory"),
        (("--prompt-ids", "1", "--max-new-tokens", "9" * 5000), "is not a whole number of at least 1"),
        (("--prompt-ids", "1", "--top-k", "9" * 5000), "is not a whole number of at least 0"),
        (("--prompt-ids", "1", "--seed", "-1"), "'-1' is not a whole number of at least 0"),
        (("--prompt-ids", "1", "--min-p", "x" * 5000), "is not a number such as 0.8"),
        (("--prompt-ids", "1", "--stop", "\udcff"), "is not text, expected at least one character"),
        (("--prompt-ids", "1", "--cache", "window:window_tokens=0"), "where they fit (Input should be greater than"),
        (("--prompt-ids", "1", "--flash", "simulated", "--device", "/dev/zero"), "1048577 bytes long"),
    ],
)
def test_arguments(spoken, capsys, flags, words):
    assert words in refused(capsys, *GENERATE, spoken, *flags)


@pytest.mark.parametrize("flags", [("--scale", "0.5"), ("--memory", "1GB")])
def test_caps_without_a_device_are_refused(spoken, capsys, flags):
    assert "there is none; add --emulate" in refused(capsys, "bench", spoken, "--tokens", "1", *flags)


@pytest.mark.parametrize(
    ("redirected", "words"),
    [
        (">&-", "standard output is closed, but this command prints to it"),
        ("> /dev/full", "standard output: No space left on"),
    ],
)
def test_an_output_that_takes_nothing(spoken, redirected, words):
    command = f'"$0" -m coldpress generate "$1" --prompt-ids 1 --max-new-tokens 2 {redirected}'
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    shell = ["/bin/sh", "-c", command, sys.executable, spoken]
    done = subprocess.run(shell, capture_output=True, text=True, cwd=ROOT, env=buffered)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {words}")
    assert done.stderr.count("\n") == 1


def test_a_folder_that_takes_no_trace_is_known_before_the_run(spoken, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))  # root may write anywhere
    sentence = refused(capsys, *GENERATE, spoken, "--prompt-ids", "1", "--trace", tmp_path / "a.trace")
    assert f"a.trace: {tmp_path} is a folder that is not writable" in sentence


def test_the_lowest_temperature_takes_the_likeliest(spoken, capsys):
    texts = []
    for temperature in ("0", "1e-320"):
        assert main([*GENERATE, str(spoken), "--prompt-ids", "1", "--json", "--temperature", temperature]) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("latency_s", 1e308), ("latency_s", -1.0), ("bytes_per_s", 5e-324), ("dram_bytes_per_s", 0.0)],
)
def test_devices_that_no_arithmetic_holds(spoken, capsys, tmp_path, field, value):
    device = small_device().model_dump(mode="json")
    if field == "bytes_per_s":
        device["flash"]["read_curve"]["value"][0][field] = value
    else:
        (device if field in device else device["flash"])[field]["value"] = value
    (tmp_path / "device.json").write_text(json.dumps(device))
    flags = ("--prompt-ids", "1", "--flash", "simulated", "--device", tmp_path / "device.json")
    sentence = refused(capsys, *GENERATE, spoken, *flags)
    assert field in sentence
    assert "should be greater than or equal to 1" in sentence or "must be from" in sentence


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("other"), os.mkfifo])
def test_a_trace_replaces_nothing_but_a_file(spoken, capsys, tmp_path, make):
    make(tmp_path / "trace")
    kind = os.lstat(tmp_path / "trace").st_mode
    sentence = refused(capsys, *GENERATE, spoken, "--prompt-ids", "1", "--trace", tmp_path / "trace")
    assert "is not a regular file, and a trace would replace it" in sentence
    assert os.lstat(tmp_path / "trace").st_mode == kind


def test_no_name_moves_the_cursor_or_begins_a_line(spoken, capsys, tmp_path):
    path, evil = shutil.copytree(spoken, tmp_path / "a"), "\x1b[2J\nerror: forged" + "x" * 5000

    def change(manifest):
        manifest["source"] |= {"name": evil, "source": evil, "license": evil}
        manifest["plans"][0]["name"] = evil
        manifest["device"]["title"] = evil[:50]

    change_manifest(path, change)
    trace = str(tmp_path / "trace")
    for command in (["inspect"], [*GENERATE, "--prompt-ids", "1", "--trace", trace], ["simulate", "--trace", trace]):
        assert main([command[0], str(path), *command[1:]]) == 0
        shown = capsys.readouterr().out
        assert all(letter.isprintable() or letter == "\n" for letter in shown)
        assert "\nerror" not in shown
        assert len(shown) < 5000
    assert "forged" in refused(capsys, *GENERATE, path, "--prompt-ids", "1", "--dram-budget", "1")


def test_generated_text_cannot_move_the_cursor(spoken, capsys, tmp_path):
    path = shutil.copytree(spoken, tmp_path / "a")
    tokenizer = path / "tokenizer" / "tokenizer.json"
    values = json.loads(tokenizer.read_text())
    for token, token_id in list(values["model"]["vocab"].items()):
        if token not in {added["content"] for added in values["added_tokens"]} and len(token) > 1:
            del values["model"]["vocab"][token]
            values["model"]["vocab"][f"\x1b[{token_id}J"] = token_id
    values["model"]["merges"], values["decoder"] = [], None
    tokenizer.write_text(json.dumps(values))
    change_manifest(path, lambda manifest: None, relist=True)
    assert main([*GENERATE, str(path), "--prompt-ids", "300,301", "--ignore-eos"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\ufffd[300J" in shown


@pytest.mark.parametrize("deep", [1, 1500])
def test_folders_that_are_not_listed(spoken, capsys, tmp_path, deep):
    path = shutil.copytree(spoken, tmp_path / "a")
    here = os.getcwd()
    os.chdir(path)
    try:
        for _ in range(deep):
            os.mkdir("more")
            os.chdir("more")
    finally:
        os.chdir(here)
    try:
        assert "the folder 'more' is present, expected only files" in refused(capsys, "verify", path)
    finally:
        subprocess.run(["rm", "-rf", path / "more"], check=True)  # which Python and pytest cannot


@pytest.mark.parametrize("name", ["tables.safetensors", "resident.safetensors", "tokenizer/tokenizer.json"])
def test_a_failing_device_is_blamed_with_the_file(spoken, capsys, monkeypatch, name):
    size, real = (spoken / name).stat().st_size, os.preadv

    def fail(opened, *rest):
        if os.fstat(opened).st_size == size:
            raise OSError(errno.EIO, "Input/output error")
        return real(opened, *rest)

    monkeypatch.setattr(os, "preadv", fail)
    assert f"{name}: a read is failing (Input/output error)" in refused(capsys, *GENERATE, spoken, "--prompt", "The")


def test_probabilities_at_the_lowest_temperature_are_one_and_zeros():
    tokens, probabilities = candidates(np.array([1, 3, 2], np.float32), Sampling(temperature=1e-320))
    assert tokens[0] == 1
    assert probabilities[0] == 1
    assert probabilities.sum() == 1
