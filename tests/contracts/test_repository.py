"""How the repository hangs together: stage = rule = module = test, and what may be imported where."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from statistics import median

import pytest

from coldpress.compiler.pipeline import STAGES
from coldpress.schemas.families import FAMILIES
from tests.support.data import ROOT

RULES = ROOT / "rules"
WITHOUT_TORCH = ("order", "place", "quantize", "layout", "plan", "package", "verify", "report", "allocate")


def module_of(stage: str) -> Path:
    stages = ROOT / "compiler" / "stages"
    single, package = stages / f"{stage}.py", stages / stage / "__init__.py"
    assert single.exists() != package.exists(), f"{stage} must be a module or a package"
    return single if single.exists() else package


def imported(code: str) -> set[str]:
    """Packages, whole and by their first two names, that a fresh interpreter has loaded after running `code`."""
    names = "{'.'.join(name.split('.')[:length]) for name in sys.modules for length in (1, 2)}"
    script = f"import sys\n{code}\nprint(*sorted({names}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_a_module_a_rule_and_a_test(stage: str) -> None:
    assert module_of(stage)
    rule = (RULES / f"{stage}.smk").read_text()
    assert re.findall(r"^rule (\w+):", rule, re.MULTILINE) == [stage]
    assert re.findall(r"^use rule (\w+) as (\w+) with:", rule, re.MULTILINE) in ([], [(stage, f"{stage}_shard")])
    assert re.findall(r'commands\.job\(\s*"(\w+)"', rule) == [stage]
    found = re.findall(r'(?:commands\.params|commands\.code|settings\.flags)\(\s*CONFIG,\s*"(\w+)"', rule)
    assert set(found) == {stage}
    assert len(found) == (2 if stage == "preflight" else 1)
    assert list((ROOT / "tests" / "compiler").glob(f"test_{stage}*.py"))


PRODUCT = ("compiler", "runtime", "schemas", "coldpress/cli", "coldpress/server")
"""The folders of what is installed."""
UNNAMED = {"highspy": "pulp's solver HiGHS, which `place` asks for by name"}
"""Declared packages that no module imports, and what needs them."""


@pytest.mark.parametrize(
    ("extra", "folders"),
    [
        ("", ("runtime", "schemas", "coldpress/cli")),
        ("compiler", ("compiler",)),
        ("eval", ("runtime",)),
        ("serve", ("coldpress/server",)),
    ],
)
def test_what_the_product_declares_it_imports(extra: str, folders: tuple[str, ...]) -> None:
    """A package that is imported nowhere is a download for nothing."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = declared["optional-dependencies"][extra] if extra else declared["dependencies"]
    packages = {re.split(r"[<>=\[;]", line)[0].strip().lower().replace("_", "-") for line in wanted}
    used: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            used |= {name.partition(".")[0] for name in names}
    brought = packages_distributions()
    found = {package.lower().replace("_", "-") for name in used for package in brought.get(name, [])}
    assert packages - found - UNNAMED.keys() == set()


def test_make_says_what_it_installs_and_shows_it() -> None:
    """Nobody should wait for minutes without a line."""
    done = subprocess.run(
        ["make", "-n", "-B", "demo"], cwd=ROOT, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    install = next(line for line in done.stdout.splitlines() if "uv pip install " in line)
    assert "--quiet" not in install
    before = done.stdout[: done.stdout.index(install)]
    assert "torch" in before
    assert " GB " in before
    assert re.search(r"\d+ to \d+ minutes", before)


def test_every_benchmark_is_listed() -> None:
    modules = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    listed = set(re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    assert modules == {name for names in listed for name in re.findall(r"\w+", names)}


NO_RULES = ("builds", "build", "common")
"""Files without a rule: the builds of a run, what one includes, and its names."""


def test_there_are_no_other_rules() -> None:
    assert {path.stem for path in RULES.glob("*.smk")} == {*STAGES, "device", *NO_RULES}
    included = re.findall(r'include: "(\w+)\.smk"', (RULES / "build.smk").read_text())
    assert included == ["common", "device", *STAGES]


@pytest.mark.parametrize("rule", sorted(path.stem for path in RULES.glob("*.smk") if path.stem not in NO_RULES))
def test_every_rule_logs_and_is_timed_and_has_no_code(rule: str) -> None:
    text = (RULES / f"{rule}.smk").read_text()
    for directive in ("input:", "output:", "log:", "benchmark:", "params:", "shell:"):
        assert f"    {directive}" in text, directive
    assert "2> {log:q}" in text or "commands.job(" in text
    assert not re.search(r"^\s+(run|script|notebook|wrapper|checkpoint):", text, re.MULTILINE)
    assert not re.search(r"^(def|import|from|if|for) ", text, re.MULTILINE)


def _sources(top: str) -> dict[str, str]:
    files = (ROOT / top).rglob("*.py")
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


def _functions(text: str) -> list[tuple[str, int]]:
    """Name and lines of each function, its signature and documentation included."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in nodes]


@pytest.mark.parametrize("top", [*PRODUCT, "demo", "tests", "benchmarks", "tools"])
def test_functions_are_short(top: str) -> None:
    """A function has at most 60 lines, half of them at most 12. Files have no limit: they end where a thought does."""
    sources = _sources(top)
    assert sources
    functions = [(file, *found) for file, text in sources.items() for found in _functions(text)]
    assert not [found for found in functions if found[2] > 60]
    assert median(lines for _, _, lines in functions) <= 12


def test_the_snakefile_has_no_logic() -> None:
    lines = (ROOT / "Snakefile").read_text().splitlines()
    assert len(lines) <= 50
    assert not [line for line in lines if re.match(r"(def|if|for|import) ", line)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_help_is_enough_and_imports_no_torch(stage: str) -> None:
    code = (
        "import contextlib, io\n"
        "from coldpress.compiler.__main__ import main\n"
        "out = io.StringIO()\n"
        "with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):\n"
        f"    main(['{stage}', '--help'])\n"
        "text = out.getvalue()\n"
        "assert '--output' in text and len(text) > 400, text\n"
    )
    assert not imported(code) & {"torch", "transformers", "datasets"}


@pytest.mark.parametrize("stage", WITHOUT_TORCH)
def test_no_torch_in_stages_that_decide_or_write(stage: str) -> None:
    """Not even inside a function."""
    folder = module_of(stage)
    files = folder.parent.glob("*.py") if folder.name == "__init__.py" else [folder]
    found = {file.name for file in files if re.search(r"^\s*(import|from) torch\b", file.read_text(), re.MULTILINE)}
    assert not found


def test_the_runtime_imports_neither_torch_nor_the_compiler() -> None:
    assert not imported("import coldpress.cli.main") & {
        "torch",
        "transformers",
        "coldpress.compiler",
        "datasets",
        "pulp",
    }


def test_parsing_the_workflow_imports_no_torch() -> None:
    assert not imported("from coldpress.compiler.workflow.settings import resolve; resolve({})") & {
        "torch",
        "transformers",
        "datasets",
    }


def test_no_machine_paths_in_the_text() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".py", ".md", ".smk", ".yaml", ".yml", ".toml") and path.is_file():
            assert not re.search(r"(?<![\w.])/(home|root|Users)/\w", path.read_text(encoding="utf-8")), name


def test_the_vocabulary_names_every_family() -> None:
    """In its table of words, and none that is gone."""
    text = (ROOT / "docs/explanation/vocabulary.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| family \|.*$", text, re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == list(FAMILIES)
