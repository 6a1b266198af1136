"""`coldpress`: what each command says, what it refuses and how, and what it needs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import pytest

from coldpress.cli import doctor
from coldpress.cli.main import COMMANDS, FRONT_DOOR, load, main
from coldpress.compiler.workflow.keys import config_keys
from coldpress.runtime import _native
from coldpress.runtime.cli.declaration import known_keys
from tests.support.artifacts import Recipe, build_artifact, change_manifest, small_spec
from tests.support.data import ROOT
from tests.support.models import write_corpus, write_model
from tests.support.page_shell import ENVIRONMENT


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"coldpress {name} " in said
    assert said.startswith("Usage: coldpress ")


def test_a_word_that_is_no_command_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bild", "relu-demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no such command 'bild' (did you mean build" in line


def test_a_flag_that_no_command_knows_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "a.coldpress", "--loud"]) == 2
    assert "no such option '--loud'; see `coldpress inspect --help`" in capsys.readouterr().err


def test_the_help_needs_no_compiler() -> None:
    code = "import sys; from coldpress.cli.main import main; main(['--help']); print(sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    for heavy in ("torch", "snakemake", "transformers", "scipy", "pandas", "numpy", "pydantic", "yaml"):
        assert f"'{heavy}'" not in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "package"),
    [
        (["build", "relu-demo", "--device", "pixel6"], "snakemake"),
        (["quote", "relu-demo", "--device", "pixel6"], "yaml"),
    ],
)
def test_without_the_compiler_its_commands_say_what_to_install(words: list[str], package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from coldpress.cli.main import main; sys.exit(main({words}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: coldpress {words[0]} needs {package}, which is not installed; pip install '.[compiler]' in a checkout"
    )


def test_an_absent_native_core_is_one_sentence() -> None:
    without = "import sys; sys.modules['coldpress.runtime._native'] = None"
    code = f"{without}; from coldpress.cli.main import main; sys.exit(main(['inspect', 'x']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(r"error: the native core of coldpress cannot be loaded \(.*\); install .*\n", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("coldpress b", {"build", "bench"}),
        ("coldpress build --max", {"--max-logit-error", "--max-ppl-ratio"}),
        ("coldpress generate --max", {"--max-new-tokens"}),
        ("coldpress generate --kv-cache i", {"int8"}),
        ("coldpress device m", {"measure"}),
        ("coldpress quote --max", {"--max-ppl-ratio"}),
    ],
)
def test_the_shell_completes_commands_flags_and_choices(shell: str, line: str, offered: set[str]) -> None:
    """By what the shells' own scripts ask: words, and the number or the text of the one that is typed."""
    words = line.split()
    cword = words[-1] if shell == "fish" else str(len(words) - 1)
    asking = {"_COLDPRESS_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": cword}
    code = "import sys; from coldpress.cli.main import main; main([]); sys.exit('scipy' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | asking, check=True)
    assert set(re.split(r"[\s,]+", done.stdout)) >= offered
    assert "--help" not in done.stdout


def of_build(*words: str) -> Mapping[str, str]:
    """Returns the keys and options that a command line of `coldpress build` has."""
    parent = FRONT_DOOR.make_context("coldpress", [], resilient_parsing=True)
    return load("build").make_context("build", list(words), parent=parent).params["more"]


def test_a_build_has_a_flag_for_every_key() -> None:
    assert known_keys().keys() == config_keys().keys()
    for name in set(known_keys()) - {"model", "locked"}:
        assert of_build("relu-demo", f"--{name.replace('_', '-')}", "some") == {name: "some"}


def test_options_of_plug_ins_are_flags_too() -> None:
    assert of_build("--window-tokens", "3", "relu-demo", "--families=neuron") == {
        "window_tokens": "3",
        "families": "neuron",
    }
    with pytest.raises(click.UsageError, match="'--window-tokens' was given without a value"):
        of_build("relu-demo", "--window-tokens")
    with pytest.raises(click.UsageError, match="unexpected extra argument"):
        of_build("relu-demo", "fast")


def test_the_help_of_a_build_is_short(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", ENVIRONMENT["COLUMNS"])
    assert main(["build", "--help"]) == 0
    short = capsys.readouterr().out
    assert main(["build", "--help-all"]) == 0
    every = capsys.readouterr().out
    assert len(short.splitlines()) < 80 < len(every.splitlines())
    assert "--dram-budget" in short
    assert "--layers-per-job" not in short
    assert all(f"--{name.replace('_', '-')} " in every for name in set(known_keys()) - {"model", "locked"})


@pytest.mark.parametrize("command", ["build", "quote"])
def test_an_unknown_key_is_the_flag_as_typed_and_the_nearest_one(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Not 1,500 characters of keys."""
    assert main([command, "relu-demo", "--device", "pixel6", "--dram-bugdet", "1GB"]) == 2
    sentence = "error: there is no flag '--dram-bugdet' (did you mean --dram-budget?); see `coldpress build --help`\n"
    assert capsys.readouterr().err == sentence


def test_an_interrupted_build_says_that_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Process:
        stdout, waited = (), 0

        def __enter__(self) -> "Process":
            return self

        def __exit__(self, *_: object) -> None: ...

        def wait(self) -> None:
            Process.waited += 1

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("coldpress.compiler.python_api.started", lambda *_: Process())
    monkeypatch.setattr("coldpress.compiler.workflow.progress.follow", interrupted)
    assert main(["build", "relu-demo", "--device", "pixel6"]) == 130
    assert capsys.readouterr().err == "interrupted; the same command continues\n"
    assert Process.waited == 1


def test_a_typo_is_told_the_flag_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a", "--promt", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no such option '--promt' (did you mean --prompt")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["build"], "no model was given; name one, or a file of builds with --matrix"),
        (["build", "relu-demo", "--device"], "option '--device' requires an argument; see `coldpress build --help`"),
        (["device", "show"], "missing argument 'DEVICE'; see `coldpress device show --help`"),
    ],
)
def test_what_is_missing_is_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], sentence: str) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


@pytest.mark.slow
def test_a_build_is_the_workflow_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A dry run lists the workflow's steps; a refusal is its one sentence, with its exit code."""
    write_model(tmp_path / "tiny", num_hidden_layers=2, relu=True)
    write_corpus(tmp_path / "corpus.txt", 200)
    monkeypatch.chdir(tmp_path)
    told = ["build", "tiny", "--device", "pixel6", "--corpus", "corpus.txt", "--cores", "1"]
    assert main([*told, "--dry-run"]) == 0
    listed = capfd.readouterr().out
    assert "rule quantize:" in listed
    assert not list(tmp_path.rglob("*.coldpress"))
    assert main([*told, "--method", "nope", "--json"]) == 2
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {"exit_code": 2}
    assert "error: unknown method 'nope'" in captured.err
    assert main([*told, "--no-such-key", "3", "--json"]) == 2
    refused = "error: there is no flag '--no-such-key'; see `coldpress build --help`\n"
    assert capfd.readouterr() == ("", refused), "like any command line that is wrong"


def test_a_difference_is_shown_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = build_artifact(tmp_path / "a.coldpress", Recipe(spec=small_spec())).path
    other = build_artifact(tmp_path / "b.coldpress", Recipe(spec=small_spec(), cache="lfu")).path
    assert main(["diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "the two are equal, byte for byte\n"
    assert main(["diff", str(one), str(other), "--json"]) == 0
    rows = {row["name"]: (row["a"], row["b"]) for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["plans.0.cache"] == ("lru", "lfu")
    assert "model.hidden_size" not in rows
    assert main(["diff", str(one), str(other), "--all"]) == 0
    assert "model.hidden_size" in capsys.readouterr().out
    change_manifest(other, lambda manifest: manifest["device"].update(name="other"))
    assert main(["diff", str(one), str(other)]) == 0
    assert "device" in capsys.readouterr().out
    assert main(["diff", str(one), str(tmp_path)]) == 2
    assert "expected one artifact; give the path of one" in capsys.readouterr().err


def test_the_doctor_says_what_lacks_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(_native, "ring_error", lambda: 1)
    monkeypatch.setitem(doctor.EXTRAS, "eval", ("a_package_that_nobody_has",))
    assert main(["doctor", "--folder", str(tmp_path), "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["io_uring"]["state"] == found["hub"]["state"] == found["eval"]["state"] == "limited"
    assert found["eval"]["remedy"] == "pip install '.[eval]' in a checkout"
    assert "HF_HUB_OFFLINE" in found["hub"]["found"]
    assert found["python"]["state"] == "ok"
    assert main(["doctor", "--folder", str(tmp_path)]) == 0
    assert "limited  eval " in capsys.readouterr().out
    assert main(["doctor", "--folder", str(tmp_path / "none")]) == 2
