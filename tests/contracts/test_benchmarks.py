"""Every benchmark runs with its smallest inputs, what it imports is there, and what it lacks is said in a sentence."""

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks.harness.places import names
from tests.support import warm
from tests.support.data import data_folder

ROOT = Path(__file__).parents[2]
WITH_INPUTS = "parity"
"""It has a test of its own, which looks at its inputs, too."""


@cache
def names_in(path: Path) -> set[str]:
    """What a module defines or imports, on whatever level."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def missing_in(path: Path) -> list[str]:
    """What a module imports from ours by a name that is not there."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        at = ROOT / node.module.replace(".", "/")
        if at.parts[len(ROOT.parts)] not in ("tests", "coldpress", "benchmarks", "tools"):
            continue
        known = {part.stem for part in at.iterdir()} if at.is_dir() else set[str]()
        file = at / "__init__.py" if at.is_dir() else at.with_suffix(".py")
        known |= names_in(file) if file.exists() else set()
        found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in known]
    return found


def test_what_benchmarks_take_from_elsewhere_is_there() -> None:
    """Nobody runs all of them after every change; a name that went would be missed by whoever needs a figure."""
    benchmarks = sorted((ROOT / "benchmarks").rglob("*.py"))
    assert len(benchmarks) > 60
    assert {path.name: missing for path in benchmarks if (missing := missing_in(path))} == {}


OTHERS = (pytest.param(name, marks=pytest.mark.slow) for name in ("ladder", "llama_cpp", "parity", "quantization"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kernels", *OTHERS])
def test_a_benchmark_without_its_extra_ends_in_a_sentence(name: str) -> None:
    code = f"import sys; sys.modules['xllamacpp'] = None; import benchmarks.{name} as one; one.main('{name}', [])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 2
    assert done.stderr == f"error: benchmarks.{name} needs xllamacpp; pip install -e '.[llama]' in the checkout\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if name != WITH_INPUTS])
def test_a_benchmark_runs_with_its_smallest_inputs(name: str, tmp_path: Path) -> None:
    """Its last line has the documented keys, or it says in one sentence what this machine lacks.

    It is forked from a process that has imported the libraries; all benchmarks of a worker and their builds share it.
    """
    done = warm.start_module(tmp_path, f"benchmarks.{name}", "--smoke", "--fresh")
    code = done.wait(600)
    if code == 2:
        last = done.stderr.splitlines()[-1]
        assert last.startswith(f"error: benchmarks.{name} "), done.stderr[-3000:]
        pytest.skip(last)
    assert code == 0, done.stderr[-6000:]
    assert json.loads(done.stdout.splitlines()[-1])["rows"]


@pytest.mark.slow
def test_a_benchmark_runs_and_its_inputs_are_what_it_uses(tmp_path: Path) -> None:
    """Its jobs are forked from a process that has imported every plug-in; an edit of another makes nothing stale."""
    data_folder()
    pytest.importorskip("xllamacpp")
    path = tmp_path / "record.json"
    command = [sys.executable, "-m", f"benchmarks.{WITH_INPUTS}", "--smoke", "--fresh", "--record", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    assert json.loads(done.stdout.splitlines()[-1])["rows"]
    found = set(json.loads(path.read_text())["inputs"])
    assert {f"benchmarks/{WITH_INPUTS}.py", "rules/quantize.smk", "data:models/stories260k"} <= found
    assert {"compiler/rounding/rtn.py", "runtime/sparsity/dense.py", "runtime/cache/lfu.py"} <= found
    assert any(path.startswith("runtime/native") for path in found)
    others = {"compiler/rounding/gptq.py", "runtime/sparsity/wina.py", "compiler/stages/order/closest_friend.py"}
    assert not others & found
    assert not {path for path in found if path.startswith("tests/support/warm")}
