"""compiler/workflow/settings.py: options of plug-ins are keys where their plug-in is chosen, and refused elsewhere."""

import pytest
from pydantic import Field

from coldpress.compiler.profiles import load_model
from coldpress.compiler.shared_settings import CacheSetting
from coldpress.compiler.workflow import settings
from coldpress.runtime import plugins
from coldpress.runtime.cache import CachePolicy
from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError


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


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cache policies with options of their own."""
    monkeypatch.setattr(plugins.load_class("coldpress.runtime.cache", CachePolicy, "lru"), "OPTIONS", LruOptions)
    monkeypatch.setattr(plugins.load_class("coldpress.runtime.cache", CachePolicy, "lfu"), "OPTIONS", LfuOptions)
    monkeypatch.setattr(settings, "config_of", lambda stage: CacheSetting)


@pytest.mark.usefixtures("options")
def test_options_of_the_chosen_plugin_are_keys() -> None:
    built = settings.resolve({"cache": "lfu", "decay": 0.25, "patience": "4"})
    assert built.of_stage("allocate") == {"cache": "lfu", "cache_options": {"decay": 0.25, "patience": 4}}
    assert settings.flags(built, "allocate").endswith("""--cache-options '{"decay": 0.25, "patience": 4}'""")
    assert settings.resolve({"cache": "lfu"}).of_stage("allocate") == {"cache": "lfu"}


@pytest.mark.usefixtures("options")
def test_options_of_other_plugins_are_refused() -> None:
    assert refusal(cache="lru", decay=0.5) == (
        "config key 'decay' is an option of cache=lfu, and this build has cache=lru; leave it out or choose what it "
        "belongs to"
    )
    assert refusal(cache="lru", patienc=3) == "unknown config key 'patienc'. Did you mean 'patience'?"
    assert "config key 'patience' is 0, expected a whole number at least 1: tokens that a unit stays" in refusal(
        patience=0
    )


def test_options_of_a_cache_are_keys_of_the_stage_that_chooses_it() -> None:
    built = settings.resolve({"cache": "window", "window_tokens": "3"})
    assert built.of_stage("allocate")["cache_options"] == {"window_tokens": 3}
    assert "is an option of cache=window, and this build has cache=lfu" in refusal(cache="lfu", window_tokens=3)
    assert settings.resolve({"window_tokens": 3}).of_stage("plan")["cache_options"] == {"window_tokens": 3}, (
        "of one candidate"
    )
    assert refusal(cache="linked", linked_run=1) == (
        "config key 'linked_run' is 1, expected a whole number at least 2: units side by side on flash from which on "
        "they are a run"
    )


def test_a_cache_that_looks_ahead_is_for_simulations() -> None:
    assert refusal(cache="belady").startswith("cache=belady has to know all requests to come, which no run does")


@pytest.mark.usefixtures("options")
def test_a_profile_sets_options_for_when_their_plugin_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load_model("relu-demo").model_copy(update={"settings": {"decay": 0.25, "corpus": "pydoc"}})
    monkeypatch.setattr(settings, "load_model", lambda _: profile)
    assert settings.resolve({"cache": "lru"}).options["coldpress.runtime.cache"] == {}
    assert settings.resolve({"cache": "lfu"}).options["coldpress.runtime.cache"] == {"decay": 0.25}
    assert settings.resolve({"cache": "lfu", "decay": 0.75}).options["coldpress.runtime.cache"] == {"decay": 0.75}
