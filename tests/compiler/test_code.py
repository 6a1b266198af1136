"""compiler/workflow/code_digest.py: a stage's digest changes with what it runs, and with nothing else."""

from pathlib import Path

import pytest

from compiler.workflow import code_digest
from compiler.workflow.code_digest import source_files, stage_digest


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A little checkout: stage `one` loads plug-ins of runtime.tools by name, stage `two` is a package."""
    write(
        tmp_path, "compiler/one.py", 'from compiler import _io\nfrom runtime import _native\nTOOLS = "runtime.tools"\n'
    )
    write(tmp_path, "compiler/_io.py", "import schemas.base\nimport numpy\n")
    write(tmp_path, "compiler/two/__init__.py", "from compiler.two._help import x\n")
    write(tmp_path, "compiler/two/_help.py", "x = 1\n")
    write(tmp_path, "compiler/two/page.html.j2", "<p>\n")
    write(tmp_path, "runtime/tools/__init__.py", "")
    write(tmp_path, "runtime/tools/saw.py", "")
    write(tmp_path, "runtime/native/src/core.cpp", "int x;\n")
    write(tmp_path, "schemas/base.py", "")
    write(tmp_path, "schemas/unused.py", "")
    return tmp_path


@pytest.fixture(autouse=True)
def _fresh() -> None:
    clear()


def clear() -> None:
    code_digest._text.cache_clear()
    code_digest._references.cache_clear()


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def names(module: str, root: Path) -> set[str]:
    return {file.relative_to(root).as_posix() for file in source_files(module, root)}


def test_follows_imports_names_of_packages_and_the_native_core(tree: Path) -> None:
    expected = {"compiler/one.py", "compiler/_io.py", "schemas/base.py", "runtime/tools/saw.py"}
    assert names("compiler.one", tree) == expected | {"runtime/native/src/core.cpp"}


def test_a_package_counts_with_all_its_files(tree: Path) -> None:
    files = {"compiler/two/__init__.py", "compiler/two/_help.py", "compiler/two/page.html.j2"}
    assert names("compiler.two", tree) == files


@pytest.mark.parametrize(
    ("edited", "stages"),
    [
        ("compiler/one.py", {"one"}),
        ("schemas/base.py", {"one"}),
        ("runtime/tools/saw.py", {"one"}),
        ("runtime/tools/drill.py", {"one"}),
        ("runtime/native/src/core.cpp", {"one"}),
        ("compiler/two/page.html.j2", {"two"}),
        ("schemas/unused.py", set()),
    ],
)
def test_the_digest_moves_with_what_a_stage_runs(tree: Path, edited: str, stages: set[str]) -> None:
    before = {stage: stage_digest(stage, tree) for stage in ("one", "two")}
    write(tree, edited, "# edited\n" + ((tree / edited).read_text() if (tree / edited).exists() else ""))
    clear()
    assert {stage for stage in before if stage_digest(stage, tree) != before[stage]} == stages


def test_the_digest_does_not_hang_on_the_place(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    import shutil

    other = tmp_path_factory.mktemp("other") / "tree"
    shutil.copytree(tree, other)
    assert stage_digest("one", tree) == stage_digest("one", other)


def test_real_stages_follow_their_plugins() -> None:
    files = names("compiler.quantize", code_digest.ROOT)
    assert {"compiler/quantize/rtn.py", "runtime/quantization/int4_group32.py", "compiler/_io.py"} <= files
    assert not any(name.startswith("compiler/order") for name in files)
