"""What is installed is the package `coldpress` and nothing else, with the device profiles."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.data import ROOT

FOLDERS = {"compiler", "runtime", "schemas"}
"""Folders of the repository that are packages inside `coldpress`."""


def imported(path: Path) -> set[str]:
    """The first names of what a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("top", [*sorted(FOLDERS), "coldpress", "demo", "tests", "benchmarks", "tools"])
def test_nothing_is_imported_by_the_name_of_its_folder(top: str) -> None:
    """From the checkout's folder `import runtime` would work, and give every module a second time."""
    files = sorted((ROOT / top).rglob("*.py"))
    assert files
    assert not {str(path.relative_to(ROOT)) for path in files if imported(path) & FOLDERS}


@pytest.mark.slow
def test_a_wheel_has_one_package_with_the_profiles(tmp_path: Path) -> None:
    """Without the native core, which does not change the names."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(ROOT),
        "--no-deps",
        "-w",
        str(tmp_path),
        "-C",
        "wheel.cmake=false",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"coldpress"}
    devices = {f"coldpress/profiles/devices/{path.name}" for path in (ROOT / "profiles" / "devices").glob("*.yaml")}
    assert devices <= set(names)
    assert {f"coldpress/{name}/__init__.py" for name in FOLDERS} <= set(names)
    assert not [name for name in names if name.startswith(("coldpress/profiles/slurm", "coldpress/runtime/native"))]
