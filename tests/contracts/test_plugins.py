"""Every plug-in of every kind is one class `Plugin` that extends the base class of its kind; others are refused."""

import sys
from pathlib import Path

import pytest

from coldpress.compiler.architectures import Architecture
from coldpress.compiler.density_allocation import Rule
from coldpress.compiler.rounding._weights import Algorithm
from coldpress.compiler.stages.distill import Recipe
from coldpress.compiler.stages.export import Target
from coldpress.compiler.stages.order._task import Heuristic
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.drafts import Draft
from coldpress.runtime.flash import Flash
from coldpress.runtime.plugins import PluginBase, load, load_class, names
from coldpress.runtime.quantization import Format
from coldpress.runtime.routing import Routing
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.errors import ColdpressError, UnknownNameError

SHARED: dict[str, type[PluginBase]] = {
    "coldpress.compiler.density_allocation": Rule,
    "coldpress.compiler.architectures": Architecture,
    "coldpress.compiler.stages.distill": Recipe,
    "coldpress.compiler.stages.export": Target,
    "coldpress.compiler.stages.order": Heuristic,
    "coldpress.compiler.rounding": Algorithm,
    "coldpress.runtime.drafts": Draft,
    "coldpress.runtime.quantization": Format,
    "coldpress.runtime.routing": Routing,
    "coldpress.runtime.sparsity": Selector,
}
MADE_OFTEN: dict[str, type[PluginBase]] = {"coldpress.runtime.cache": CachePolicy, "coldpress.runtime.flash": Flash}


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in SHARED for name in names(package)])
def test_a_plug_in_without_state_is_one_object(package: str, name: str) -> None:
    found = load(package, SHARED[package], name)
    assert found is load(package, SHARED[package], name)
    assert found.name() == name


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in MADE_OFTEN for name in names(package)])
def test_a_plug_in_with_state_is_a_class(package: str, name: str) -> None:
    assert load_class(package, MADE_OFTEN[package], name).name() == name


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of files that are no plug-ins, each in another way."""
    files = {
        "empty": "",
        "foreign": "class Plugin:\n    pass\n",
        "function": "def Plugin():\n    pass\n",
        "other": "from coldpress.runtime.cache import CachePolicy\n\n\nclass Plugin(CachePolicy):\n    pass\n",
        "partial": (
            "from coldpress.runtime.quantization import Format\n\n\n"
            "class Plugin(Format):\n    def nbytes(self, length):\n        return length\n"
        ),
    }
    folder = tmp_path / "made_up"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "made_up"]:
        del sys.modules[name]
    names.cache_clear()
    return "made_up"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("empty", "made_up.empty has no class Plugin that extends the base class of its kind"),
        ("foreign", "made_up.foreign has no class Plugin that extends the base class of its kind"),
        ("function", "made_up.function has no class Plugin that extends the base class of its kind"),
        ("other", "made_up.other: the class Plugin does not extend Format"),
        ("partial", "made_up.partial: the class Plugin does not define decode, encode, finite"),
    ],
)
def test_what_is_no_plug_in_is_refused_in_a_sentence(package: str, name: str, expected: str) -> None:
    with pytest.raises(ColdpressError, match=expected):
        load_class(package, Format, name)


def test_an_unknown_name_lists_the_choices(package: str) -> None:
    with pytest.raises(UnknownNameError, match="empty, foreign, function, other, partial"):
        load(package, Format, "nothing")
