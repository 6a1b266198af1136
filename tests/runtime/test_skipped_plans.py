"""A plan that this runtime cannot serve is left out and named; what every plan needs is refused by its feature."""

import pytest

from coldpress.runtime.artifact import errors
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cli.inspect import describe, render
from coldpress.runtime.generate.session import Session
from tests.support.artifacts import change_manifest, refuse


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("cache", "magic", "the cache 'magic'"),
        ("method", "magic", "the selector 'magic'"),
        ("draft", "magic", "the draft 'magic'"),
        ("options", {"magic": 1}, "the option 'magic' of the selector 'relu'"),
        ("cache_options", {"magic": 1}, "the option 'magic' of the cache 'lru'"),
    ],
)
def test_a_plan_with_an_unknown_name_is_left_out_and_named(path, caplog, field, value, words):
    def add(manifest):
        manifest["plans"].insert(0, manifest["plans"][0] | {"name": "new", field: value, "dram_budget_bytes": 1 << 40})

    change_manifest(path, add)
    artifact = open_artifact(path)
    assert [found.name for found in artifact.manifest.plans] == ["test"]
    (sentence,) = artifact.skipped_plans
    assert "plan 'new' is left out" in sentence
    assert words in sentence
    assert sentence in caplog.text
    assert describe(artifact)["skipped_plans"] == [sentence]
    assert sentence in render(describe(artifact), artifact.manifest.model)
    assert Session(path).plan.name == "test"


@pytest.mark.parametrize("name", ["family.router", "format.int3_group64"])
def test_what_no_plan_can_do_without_is_refused_by_its_feature(path, name):
    def change(manifest):
        manifest["features"]["required"].append(name)
        manifest["families"][0]["note"] = "fields of a later version"

    change_manifest(path, change)
    refuse(path, errors.FeatureError, f"'{name}'", "family.neuron", "format.fp16")
