"""compiler/code_digest.py: a stage's digest changes with all that it may run, and with little else."""

import shutil
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from coldpress.compiler import code_digest
from coldpress.compiler.code_digest import Plugins, source_files, stage_digest
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.workflow.settings import resolve
from coldpress.runtime import plugins as _plugins
from coldpress.runtime.sparsity import Selector

PACKAGES = {f"coldpress/{name}__init__.py" for name in ("", "compiler/", "compiler/stages/")}
SAW: Plugins = {"coldpress.runtime.tools": ("saw",)}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A little checkout: stage `one` loads plug-ins of coldpress.runtime.tools by name, stage `two` is a package."""
    for package in PACKAGES:
        write(tmp_path, package, "")
    one = (
        "from coldpress.compiler import io",
        'TOOLS = "coldpress.runtime.tools"',
    )
    write(tmp_path, "coldpress/compiler/stages/one.py", "\n".join(one))
    write(tmp_path, "coldpress/compiler/io.py", "import coldpress.schemas.base\nimport numpy\n")
    two = "coldpress.compiler.stages.two"
    write(tmp_path, "coldpress/compiler/stages/two/__init__.py", f'from {two}._help import x\nHERE = "{two}"\n')
    write(tmp_path, "coldpress/compiler/stages/two/_help.py", 'x = Key(plugins="coldpress.runtime.tools")\n')
    write(tmp_path, "coldpress/compiler/stages/two/_unused.py", "")
    write(tmp_path, "coldpress/compiler/stages/two/fast.py", "")
    write(tmp_path, "coldpress/compiler/stages/two/page.html.j2", "<p>\n")
    write(tmp_path, "coldpress/compiler/stages/verify/__init__.py", "from coldpress.runtime import _native")
    write(tmp_path, "coldpress/compiler/stages/package.py", "")
    write(tmp_path, "coldpress/runtime/__init__.py", "")
    write(tmp_path, "coldpress/runtime/tools/__init__.py", "")
    write(tmp_path, "coldpress/runtime/tools/saw.py", "from coldpress.runtime.tools import _blade")
    write(tmp_path, "coldpress/runtime/tools/_blade.py", "")
    write(tmp_path, "coldpress/runtime/tools/plane.py", "")
    write(tmp_path, "coldpress/runtime/native/src/core.cpp", "int x;\n")
    write(tmp_path, "coldpress/schemas/__init__.py", "")
    write(tmp_path, "coldpress/schemas/base.py", "")
    write(tmp_path, "coldpress/schemas/unused.py", "")
    return tmp_path


def clear() -> None:
    """Forgets what files said before an edit; each test has a checkout of its own, so nothing else goes stale."""
    for read in (code_digest._text, code_digest._references, code_digest._files):
        read.cache_clear()


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def names(stage: str, root: Path, plugins: Plugins = SAW) -> set[str]:
    return {file.relative_to(root).as_posix() for file in source_files(stage, plugins, root)}


def test_follows_imports_with_their_packages_and_the_plugins_that_are_used(tree: Path) -> None:
    own = PACKAGES | {
        "coldpress/compiler/stages/one.py",
        "coldpress/compiler/io.py",
        "coldpress/schemas/__init__.py",
        "coldpress/schemas/base.py",
    }
    tools = {
        "coldpress/runtime/__init__.py",
        "coldpress/runtime/tools/__init__.py",
        "coldpress/runtime/tools/saw.py",
        "coldpress/runtime/tools/_blade.py",
    }
    assert names("one", tree) == own | tools
    assert names("one", tree, {}) == own | tools | {"coldpress/runtime/tools/plane.py"}, "all where nobody knows which"


def test_a_package_counts_with_what_it_imports_and_its_templates(tree: Path) -> None:
    files = {"__init__.py", "_help.py", "page.html.j2"}
    own = PACKAGES | {*(f"coldpress/compiler/stages/two/{name}" for name in files)}
    assert names("two", tree, {"coldpress.compiler.stages.two": ()}) == own
    assert names("two", tree, {"coldpress.compiler.stages.two": ("fast",)}) == own | {
        "coldpress/compiler/stages/two/fast.py"
    }


@pytest.mark.parametrize(
    ("edited", "stages"),
    [
        ("coldpress/compiler/stages/one.py", {"one"}),
        ("coldpress/schemas/base.py", {"one"}),
        ("coldpress/runtime/tools/saw.py", {"one"}),
        ("coldpress/runtime/tools/_blade.py", {"one"}),
        ("coldpress/runtime/tools/plane.py", set()),
        ("coldpress/runtime/tools/drill.py", set()),
        ("coldpress/runtime/native/src/core.cpp", {"verify"}),
        ("coldpress/compiler/stages/two/page.html.j2", {"two"}),
        ("coldpress/compiler/stages/two/_unused.py", set()),
        ("coldpress/schemas/unused.py", set()),
    ],
)
def test_the_digest_moves_with_what_a_stage_runs(tree: Path, edited: str, stages: set[str]) -> None:
    known = ("one", "two", "verify", "package")
    before = {stage: stage_digest(stage, SAW, tree) for stage in known}
    write(tree, edited, "# edited\n" + ((tree / edited).read_text() if (tree / edited).exists() else ""))
    clear()
    assert {stage for stage in before if stage_digest(stage, SAW, tree) != before[stage]} == stages


def test_the_digest_does_not_hang_on_the_place(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other") / "tree"
    shutil.copytree(tree, other)
    assert stage_digest("one", SAW, tree) == stage_digest("one", SAW, other)


def test_what_only_the_type_checker_imports_does_not_count(tree: Path) -> None:
    checked = (
        "\nif TYPE_CHECKING:\n    from coldpress.compiler.typed import X\n"
        "else:\n    from coldpress.compiler.ran import X\n"
    )
    write(tree, "coldpress/compiler/stages/one.py", (tree / "coldpress/compiler/stages/one.py").read_text() + checked)
    write(tree, "coldpress/compiler/typed.py", "X = 1\n")
    write(tree, "coldpress/compiler/ran.py", "X = 1\n")
    clear()
    found = names("one", tree)
    assert "coldpress/compiler/typed.py" not in found
    assert "coldpress/compiler/ran.py" in found


# The stages of this repository


def used_by(file: str, **config: object) -> set[str]:
    """The stages whose result hangs on a file in a build of the demo."""
    plugins = resolve(config).plugins()
    return {stage for stage in STAGES if file in names(stage, code_digest.ROOT, plugins)}


def test_real_stages_follow_their_plugins() -> None:
    files = names("quantize", code_digest.ROOT, resolve({"format": "int4_group32"}).plugins())
    assert {
        "coldpress/compiler/rounding/rtn.py",
        "coldpress/runtime/quantization/int4_group32.py",
        "coldpress/compiler/io.py",
    } <= files
    assert not any(name.startswith("coldpress/compiler/stages/order") for name in files)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "config", "stages"),
    [
        ("coldpress/compiler/stages/order/closest_friend.py", {}, set()),
        ("coldpress/compiler/stages/order/closest_friend.py", {"order": "closest_friend"}, {"order", "preflight"}),
        # `auto` has it compete; preflight asks every stage what it needs, and may run them all
        ("coldpress/compiler/stages/order/frequency.py", {}, {"order", "preflight"}),
        ("coldpress/compiler/stages/order/frequency.py", {"order": "ripple"}, set()),
        ("coldpress/compiler/architectures/opt.py", {}, set()),
        # `explore` and `allocate` run the model with the values that a build has.
        ("coldpress/compiler/rounding/rtn.py", {}, {"explore", "allocate", "quantize", "preflight"}),
        ("coldpress/compiler/rounding/gptq.py", {}, set()),
        ("coldpress/compiler/stages/distill/lora.py", {}, set()),
        ("coldpress/compiler/stages/distill/lora.py", {"recipe": "lora"}, {"distill", "preflight"}),
    ],
)
def test_a_plugin_that_is_not_chosen_concerns_no_stage(file: str, config: dict[str, object], stages: set[str]) -> None:
    assert (code_digest.ROOT / file).is_file()
    assert used_by(file, **config) == stages


@pytest.mark.slow
def test_a_plugin_that_the_build_is_compared_with_counts_where_its_name_is_a_text() -> None:
    assert used_by("coldpress/runtime/cache/static.py", cache="lru") >= {"allocate", "plan", "verify"}
    assert used_by("coldpress/runtime/cache/lfu.py", cache="lru") >= {"explore", "recalibrate"}
    assert used_by("coldpress/runtime/cache/linked.py", cache="lru") >= {"verify"}, "a step of the ladder"
    assert used_by("coldpress/runtime/sparsity/dense.py", method="topk") >= {"verify"}
    assert used_by("coldpress/runtime/quantization/int4_group32.py", format="fp16") >= {"report"}
    assert used_by("coldpress/runtime/quantization/q5_1.py", method="auto", format="fp16") >= {"explore"}
    assert used_by("coldpress/runtime/quantization/q5_1.py", format="fp16") == set()


@pytest.mark.slow
def test_a_cache_policy_concerns_the_stages_that_count_on_it() -> None:
    assert used_by("coldpress/runtime/cache/s3fifo.py", cache="lfu") == set()
    assert used_by("coldpress/runtime/cache/s3fifo.py") >= {"plan", "verify"}, "a candidate of an open cache"
    assert not used_by("coldpress/runtime/cache/lru.py", cache="lfu") & {"allocate", "place", "order", "plan"}
    assert used_by("coldpress/runtime/cache/lru.py", cache="lru") >= {"allocate", "place", "order", "plan", "verify"}
    assert not used_by("coldpress/runtime/cache/lru.py", cache="lru") & {"ingest", "tokenize", "calibrate", "quantize"}


@pytest.mark.slow
def test_a_selector_concerns_no_build_that_has_another() -> None:
    assert used_by("coldpress/runtime/sparsity/predictor.py") == set()
    assert used_by("coldpress/runtime/sparsity/predictor.py", method="predictor") >= {
        "allocate",
        "recalibrate",
        "verify",
    }
    assert "calibrate" not in used_by("coldpress/runtime/sparsity/predictor.py", method="predictor"), (
        "it looks at every family"
    )


def test_a_format_concerns_no_stage_that_only_counts() -> None:
    counting = {"ingest", "tokenize", "calibrate"}
    assert not used_by("coldpress/runtime/quantization/int4_group32.py", format="int4_group32") & counting
    assert "distill" not in used_by("coldpress/runtime/quantization/int4_group32.py", format="fp16", recipe="lora")


@pytest.mark.slow
def test_the_native_core_concerns_the_stages_that_import_it() -> None:
    """It may do so in a kernel of a selector: `flash` finds its price and decides for many tokens with one."""
    fitting = {"allocate", "recalibrate", "distill", "verify"}
    assert used_by("coldpress/runtime/kernels/intervals.py", method="flash") >= fitting
    for file in ("CMakeLists.txt", "src/intervals.cpp", "src/plan.cpp", "src/kernels_avx2.cpp"):
        found = used_by(f"coldpress/runtime/native/{file}", method="flash")
        assert found >= fitting | {"ingest", "calibrate", "place", "package"}, "ingest decodes GGUF with it"


@pytest.mark.parametrize("method", _plugins.names("coldpress.runtime.sparsity"))
def test_kernels_that_a_selector_runs_while_it_is_fitted_are_in_the_digest(method: str) -> None:
    """As they are called in fact."""
    module, called = _plugins.load("coldpress.runtime.sparsity", Selector, method), set[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        called.add(Path(frame.f_code.co_filename).absolute().relative_to(code_digest.ROOT.anchor).as_posix())

    activity = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    statistics = {
        "magnitude_histogram": np.ones(32, np.int64),
        "magnitude_edges": np.linspace(0, 4, 33, dtype=np.float32),
        "unit_norms": np.ones(64, np.float32),
        "read_units": np.array([4, 1, 2, 1], np.float32),
        "counts": np.ones(64, np.int64),
    }
    sys.setprofile(note)
    try:
        arrays = module.fit(64, 0.5, statistics, module.OPTIONS())
        module.select_many(activity, arrays)
    finally:
        sys.setprofile(None)
    root = code_digest.ROOT.as_posix().lstrip("/")
    ran = {name.removeprefix(f"{root}/") for name in called if name.startswith(root)}
    assert any(name.startswith("coldpress/runtime/sparsity/") for name in ran)
    kernels = {name for name in ran if name.startswith("coldpress/runtime/kernels/")}
    assert bool(kernels) == (method == "flash")
    plugins = {**resolve({}).plugins(), "coldpress.runtime.sparsity": (method,)}
    assert kernels <= names("allocate", code_digest.ROOT, plugins)
