"""The JSON Schemas are those of the records, valid, and as strict as the records are."""

import json
import pickle

import jsonschema
import pytest

from coldpress.runtime.artifact.errors import TableError
from coldpress.runtime.plugins import names as plugin_names
from coldpress.schemas.base import ArrayFile, Record
from coldpress.schemas.device import Flash, ReadPoint
from coldpress.schemas.families import FAMILIES, num_units, slices
from coldpress.schemas.layout import SECTION_ALIGN_BYTES
from coldpress.schemas.manifest import (
    FLASH_FILE,
    FORMAT_MAJOR,
    FORMAT_MINOR,
    PAGE_CHECKSUMS,
    PREDICTORS_FILE,
    RESIDENT_FILE,
    TABLES_FILE,
    Manifest,
)
from coldpress.schemas.model import MLP_ROLES
from tests.support.artifacts import build_artifact, small_device, small_spec
from tools import json_schemas
from tools.json_schemas import main


def test_an_error_comes_back_from_another_process():
    """Its class may take other arguments than its text."""
    error = TableError("a.json", "the field", "5", "6")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.field) == (TableError, str(error), "the field")


def read(name):
    return json.loads((json_schemas.FOLDER / f"{name}.schema.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    path = build_artifact(tmp_path_factory.mktemp("artifact") / "a").path
    return json.loads((path / "manifest.json").read_text(encoding="utf-8"))


def without_digest(manifest):
    return {key: value for key, value in manifest.items() if key != "body_sha256"}


def test_the_schemas_are_up_to_date():
    assert json_schemas.outdated() == [], "run python -m tools.json_schemas --fix"


def test_only_what_others_read_has_a_schema():
    names = {path.name.partition(".")[0] for path in json_schemas.FOLDER.iterdir()}
    assert names == {"manifest", "config", "device", "profiles"}


@pytest.mark.parametrize("path", sorted(json_schemas.FOLDER.iterdir()), ids=lambda path: path.name)
def test_each_is_a_valid_schema_whose_references_resolve(path):
    schema = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(schema)
    definitions = schema.get("$defs", {})
    assert definitions or path.name in json_schemas.ELSEWHERE
    for name in definitions:
        assert "FieldInfo" not in name
    references = {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}
    assert references <= definitions.keys()


def test_a_manifest_fits_its_schema_and_a_changed_one_does_not(manifest):
    validator = jsonschema.Draft202012Validator(read("manifest"))
    assert list(validator.iter_errors(manifest)) == []
    Manifest.model_validate_json(json.dumps(without_digest(manifest)))
    assert list(validator.iter_errors(without_digest(manifest)))
    for change in ({"extra": 1}, {"plans": []}, {"byte_order": "big"}, {"files": "none"}):
        assert list(validator.iter_errors(manifest | change))
    bad_count = manifest | {"flash": manifest["flash"] | {"size_bytes": 2**53}}
    assert list(validator.iter_errors(bad_count))


def test_a_stale_schema_is_noticed_and_fixed(tmp_path, monkeypatch):
    monkeypatch.setattr(json_schemas, "FOLDER", tmp_path / "json")
    json_schemas.write()
    assert json_schemas.outdated() == []
    (tmp_path / "json/device.schema.json").write_text("{}")
    (tmp_path / "json/profiles.schema.json").unlink()
    (tmp_path / "json/gone.schema.json").write_text("{}")
    assert json_schemas.outdated() == ["device.schema.json", "gone.schema.json", "profiles.schema.json"]
    json_schemas.write()
    assert json_schemas.outdated() == []
    assert not (tmp_path / "json/gone.schema.json").exists()


def test_the_command_reports_by_its_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(json_schemas, "FOLDER", tmp_path / "json")
    assert main([]) == 1
    assert "manifest.schema.json: out of date; run python -m tools.json_schemas --fix" in capsys.readouterr().out
    assert main(["--fix"]) == 0
    assert main([]) == 0


# Records


def test_records_are_frozen_strict_and_closed():
    record = ArrayFile(array_file="a.safetensors", sha256="0" * 64)
    with pytest.raises(ValueError, match="frozen"):
        record.array_file = "b"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="extra_forbidden"):
        ArrayFile.model_validate({"array_file": "a", "sha256": "0" * 64, "more": 1})
    with pytest.raises(ValueError, match="string"):
        ArrayFile.model_validate({"array_file": 3, "sha256": "0" * 64})


class Loss(Record):
    value: float


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_in_a_record_is_finite(number):
    for kind, values in ((ReadPoint, {"read_bytes": 1, "bytes_per_s": number}), (Loss, {"value": number})):
        with pytest.raises(ValueError, match=r"finite|greater than 0"):
            kind.model_validate(values)


@pytest.mark.parametrize(
    ("figure", "value", "message"),
    [
        ("page_bytes", 4095, "page_bytes must be a power of two from 512 to 65536, found 4095"),
        ("page_bytes", 6144, "page_bytes must be a power of two"),
        ("page_bytes", 256, "page_bytes must be a power of two"),
        ("page_bytes", 131072, "page_bytes must be a power of two"),
        ("read_curve", (4096, 4096, 8192), r"ascending, distinct read sizes, found \[4096, 4096, 8192\]"),
        ("read_curve", (8192, 4096), "ascending, distinct read sizes"),
        ("read_curve", (), "ascending, distinct read sizes"),
    ],
)
def test_flash_that_makes_no_sense_is_refused(figure, value, message):
    flash = small_device().flash.model_dump()
    curve = [{"read_bytes": size, "bytes_per_s": 1e9} for size in value] if figure == "read_curve" else None
    flash[figure]["value"] = tuple(curve) if curve is not None else value
    with pytest.raises(ValueError, match=message):
        Flash.model_validate(flash)


def test_record_text_is_canonical(manifest):
    record = Manifest.model_validate_json(json.dumps(without_digest(manifest)))
    text = record.to_json()
    assert text == Manifest.model_validate_json(text).to_json()
    assert text.endswith("}\n")
    keys = list(json.loads(text))
    assert keys == sorted(keys)


# The text of FORMAT.md against the code


def test_the_specification_names_what_the_code_has():
    text = (json_schemas.FOLDER.parent / "FORMAT.md").read_text(encoding="utf-8")
    names = [
        *FAMILIES,
        *plugin_names("coldpress.runtime.quantization"),
        PAGE_CHECKSUMS,
        *Manifest.model_fields,
        *MLP_ROLES,
    ]
    names += [FLASH_FILE, RESIDENT_FILE, TABLES_FILE, PREDICTORS_FILE, str(SECTION_ALIGN_BYTES)]
    assert [name for name in names if name not in text] == []
    assert f"format {FORMAT_MAJOR}.{FORMAT_MINOR}" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_specification_has_the_slices_of_each_family(family):
    text = (json_schemas.FOLDER.parent / "FORMAT.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| `{family}` |"))
    size, listed = (cell.strip() for cell in row.strip("|").split("|")[1:])
    spec = small_spec()
    assert listed == ", ".join(f"{piece.role} {piece.axis}" for piece in slices(family, spec))
    of_heads = "`num_attention_heads` x `head_dim` (with latent attention `v_head_dim`)"
    sizes = {
        of_heads: spec.num_attention_heads * spec.head_dim,
        "`intermediate_size` / B": spec.intermediate_size // 256,
    }
    assert num_units(family, spec) == (sizes[size] if size in sizes else getattr(spec, size.strip("`")))
