"""Notes the inputs of a process that was forked from a warm one, for the record of a benchmark.

Such a process has more modules than it uses. For a build's job, the files in the digest of its code count
(compiler/code_digest.py): the imports of the stage, with the plug-ins of this build. For snakemake, the modules of the
workflow count, and for any other process all modules.
"""

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HOOK = Path(__file__).parents[2] / "benchmarks" / "harness" / "hook" / "sitecustomize.py"


def begin(module: str, arguments: Sequence[str]) -> None:
    """Begins to note the inputs of this process, which is about to run `module`, if a benchmark asks for them."""
    notes = os.environ.get("BENCHMARK_INPUTS")
    if not notes:
        return
    hook = runpy.run_path(str(HOOK))
    of_code = Path(notes).parent / "code"
    if module == "snakemake":
        hook["begin"](_workflow())
        _keep_files_of_code(of_code)
    elif module == "coldpress.compiler":
        hook["begin"]([])
        for file in (of_code / arguments[arguments.index("--code") + 1]).read_text().splitlines():
            hook["note"](file)
    else:
        hook["begin"](list(sys.modules.values()))


def _workflow() -> list[ModuleType]:
    """Returns the modules that belong to every build."""
    return [module for name, module in sys.modules.items() if name.startswith("coldpress.compiler.workflow")]


def _keep_files_of_code(folder: Path) -> None:
    """Writes, for each digest of a stage's code that snakemake asks for, a list of the digest's files."""
    commands = importlib.import_module("coldpress.compiler.workflow.commands")
    source_files = importlib.import_module("coldpress.compiler.code_digest").source_files
    digest: Callable[[str, Any], str] = commands.stage_digest
    folder.mkdir(exist_ok=True)

    def kept(stage: str, plugins: Any) -> str:
        found = digest(stage, plugins)
        (folder / found).write_text("".join(f"{file}\n" for file in source_files(stage, plugins)))
        return found

    setattr(commands, "stage_digest", kept)  # noqa: B010 - a module has no such attribute for the type checker
