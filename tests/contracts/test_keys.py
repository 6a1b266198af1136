"""A key of `--config` is declared once, and everything that tells of keys is made from its declaration."""

import inspect
import json

import jsonschema
import pytest

from coldpress.compiler.job import config_of
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.workflow.keys import (
    ConfigKey,
    WorkflowKeys,
    config_keys,
    marked,
    option_fields,
    option_keys,
    plugin_keys,
)
from coldpress.compiler.workflow.settings import resolve
from coldpress.runtime import plugins
from coldpress.schemas.base import Record
from coldpress.schemas.config import Key
from tools import key_documents

NO_KEYS = {
    "ingest": {"model", "name", "revision", "license", "offline"},
    "relufy": {"distill_evaluations", "distill_patience", "validation_blocks"},
    "distill": {
        "distill_evaluations",
        "distill_dense_share",
        "distill_kept_gain",
        "distill_patience",
        "validation_blocks",
    },
    "allocate": {"allocation_tokens", "head_as_layers"},
    "predict": {"predictor_steps"},
    "preflight": {"folder", "settings", "inputs", "shards", "here"},
    "calibrate": {"shard", "num_shards"},
    "recalibrate": {"shard", "num_shards"},
    "place": {"batch_units"},
    "package": {"artifact"},
    "publish": {"artifact", "metrics", "html", "exported"},
    "report": {"html"},
    "export": {"file"},
}
"""Settings that only the workflow sets: paths, shards, and sizes that a trial, a benchmark or a test
reduces."""
PLUGINS = [(package, name) for package in plugin_keys() for name in plugins.names(package)]


@pytest.mark.parametrize("stage", STAGES)
def test_whatever_makes_sense_to_a_user_is_a_key(stage: str) -> None:
    record = config_of(stage)
    assert set(record.model_fields) - set(marked(record)) - set(option_fields(record)) == NO_KEYS.get(stage, set())


@pytest.mark.parametrize("name", config_keys())
def test_a_key_is_declared_in_one_record(name: str) -> None:
    """A field of several stages is inherited by all of them, so that its default and its bounds cannot differ."""
    fields = [
        (record, field)
        for record in (WorkflowKeys, *map(config_of, STAGES))
        for field in marked(record)
        if field == name
    ]
    owners = {kind for record, field in fields for kind in record.__mro__ if field in inspect.get_annotations(kind)}
    assert len(owners) == 1
    assert config_keys()[name].field.description


@pytest.mark.parametrize("name", config_keys())
def test_a_default_is_a_value(name: str) -> None:
    key = config_keys()[name]
    built = resolve({})[name]
    if built is not None:
        assert key.read(built) == built
    assert (key.default is None or key.mark.auto) == bool(key.mark.default), (
        "what the workflow derives is said in words"
    )


@pytest.mark.parametrize(("package", "name"), PLUGINS)
def test_a_plugin_s_options_are_a_record_with_defaults(package: str, name: str) -> None:
    options = plugins.load_class(package, plugins.PluginBase, name).OPTIONS
    assert issubclass(options, Record)
    assert options() == options.model_validate({})
    assert all(field.description for field in options.model_fields.values())


def test_an_option_belongs_to_one_package_and_is_no_key() -> None:
    owners: dict[str, set[str]] = {name: {"compiler"} for name in config_keys()}
    for package, plugin in PLUGINS:
        for option in option_keys(package, plugin):
            owners.setdefault(option, set()).add(package)
    assert {name: found for name, found in owners.items() if len(found) > 1} == {}


def test_the_documents_are_up_to_date() -> None:
    outdated = [path.name for path, text in key_documents.documents().items() if path.read_text() != text]
    assert outdated == [], "run python -m tools.key_documents --fix"


def test_the_table_and_the_schema_have_every_key_and_name_no_plugin() -> None:
    """A new plug-in changes neither; what there is, a command prints."""
    rows = [line.split("`")[1] for line in key_documents.table().splitlines()[2:]]
    assert set(rows) == set(config_keys())
    properties = json.loads(key_documents.SCHEMA.read_text())["properties"]
    assert set(properties) == set(rows)
    for key in plugin_keys().values():
        assert "enum" not in properties[key.name]
        assert f"a file of {key.mark.plugins.replace('.', '/')}" in properties[key.name]["description"]
    printed = key_documents.options_table()
    for package, plugin in PLUGINS:
        assert plugin in printed
        assert all(f"`{option}`" in printed for option in option_keys(package, plugin))


def test_the_schema_takes_what_a_build_resolves_to_and_no_other_values() -> None:
    validator = jsonschema.Draft202012Validator(json.loads(key_documents.SCHEMA.read_text()))
    values = {key: value for key, value in resolve({}).values.items() if value is not None}
    assert list(validator.iter_errors(values)) == []
    for change in ({"density": 0}, {"format": 4}, {"seed": -1}, {"distill": "yes"}):
        assert list(validator.iter_errors({**values, **change})), change


def test_words_for_values_follow_from_the_field() -> None:
    class Sample(Record):
        share: float | None = None

    key = ConfigKey("share", Sample.model_fields["share"], Key(), "here")
    assert key.in_words == "a number"
