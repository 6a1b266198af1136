"""compiler/workflow/settings.py: options of plug-ins are keys where their plug-in is chosen, and refused elsewhere."""

from typing import Annotated

import pytest
from pydantic import Field, JsonValue

from compiler._shared_settings import CacheSetting
from compiler.profiles import load_model
from compiler.workflow import settings
from runtime import _plugins
from schemas.base import Record
from schemas.config import OptionsOf
from schemas.errors import ColdpressError


def refusal(**raw: object) -> str:
    with pytest.raises(ColdpressError) as caught:
        settings.resolve(raw)
    return str(caught.value)


class LruOptions(Record):
    """As a plug-in declares them."""

    patience: int = Field(default=3, ge=1, description="tokens that a unit stays")


class LfuOptions(Record):
    """Of a sibling, which may have the same key."""

    patience: int = Field(default=3, ge=1, description="tokens that a unit stays")
    decay: float = Field(default=0.5, gt=0, lt=1, description="what a count loses per token")


class TakesOptions(CacheSetting):
    """A stage's settings with its plug-in's options."""

    cache_options: Annotated[dict[str, JsonValue], OptionsOf("cache")] = Field(default={}, description="JSON")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cache policies with options, and a stage that takes them."""
    monkeypatch.setattr(_plugins.load("runtime.cache", "lru"), "Options", LruOptions, raising=False)
    monkeypatch.setattr(_plugins.load("runtime.cache", "lfu"), "Options", LfuOptions, raising=False)
    monkeypatch.setattr(settings, "config_of", lambda stage: TakesOptions)


@pytest.mark.usefixtures("options")
def test_options_of_the_chosen_plugin_are_keys() -> None:
    built = settings.resolve({"cache": "lfu", "decay": 0.25, "patience": "4"})
    assert built.of_stage("place") == {"cache": "lfu", "cache_options": {"decay": 0.25, "patience": 4}}
    assert settings.flags(built, "place").endswith("""--cache-options '{"decay": 0.25, "patience": 4}'""")
    assert settings.resolve({"cache": "lfu"}).of_stage("place") == {"cache": "lfu"}


@pytest.mark.usefixtures("options")
def test_options_of_other_plugins_are_refused() -> None:
    assert refusal(decay=0.5) == (
        "config key 'decay' is an option of cache=lfu, and this build has cache=lru; leave it out or choose what it "
        "belongs to"
    )
    assert "Did you mean 'patience'? Known: " in refusal(patienc=3)
    assert "config key 'patience' is 0, expected a whole number at least 1: tokens that a unit stays" in refusal(
        patience=0
    )


@pytest.mark.usefixtures("options")
def test_a_profile_sets_options_for_when_their_plugin_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load_model("demo").model_copy(update={"settings": {"decay": 0.25, "corpus": "pydoc"}})
    monkeypatch.setattr(settings, "load_model", lambda _: profile)
    assert settings.resolve({}).options["runtime.cache"] == {}
    assert settings.resolve({"cache": "lfu"}).options["runtime.cache"] == {"decay": 0.25}
    assert settings.resolve({"cache": "lfu", "decay": 0.75}).options["runtime.cache"] == {"decay": 0.75}
