"""The bytes of a tiny artifact, by digest: a refactor proves that it changed none of them.

A change that is meant needs `COLDPRESS_FIX=1 pytest tests/golden` and a line in the changelog.
"""

import json
import os
from pathlib import Path

import pytest

from coldpress.compiler.stages import quantize
from coldpress.schemas.manifest import MANIFEST_FILE
from tests.support.records import Build
from tests.support.tiny import hashed

FOLDER = Path(__file__).parent
CASES = [("predictor", "int4_group32"), ("topk", "int8_group32"), ("relu", "fp16")]


def compare(name: str, found: object) -> None:
    """Holds `found` against the committed JSON file, or writes it where COLDPRESS_FIX is set."""
    path = FOLDER / name
    text = json.dumps(found, indent=2, sort_keys=True) + "\n"
    if os.environ.get("COLDPRESS_FIX"):
        path.write_text(text)
    assert json.loads(path.read_text()) == json.loads(text), f"{name} differs; if that is meant, COLDPRESS_FIX=1"


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    # The frequencies come from transformers, whose power function may differ in the last bit between processors.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "rotary_inv_freq", lambda model, _kind: hashed("rotary", model.spec.rotary_dim // 2))
        return _make_builds(tmp_path_factory)


def _make_builds(tmp_path_factory):
    return {
        f"{method}-{format_name}": Build(tmp_path_factory.mktemp(method), method=method, format_name=format_name)
        for method, format_name in CASES
    }


def test_digests(builds):
    found = {}
    for name, build in builds.items():
        package = build.package()
        manifest = json.loads((build.artifact / MANIFEST_FILE).read_text())
        found[name] = {entry["path"]: entry["sha256"] for entry in manifest["files"]}
        found[name][MANIFEST_FILE] = package.manifest_sha256
    compare("digests.json", found)


def keys_of(value: object, prefix: str = "") -> set[str]:
    """Every key path of a JSON value, list positions left out."""
    if isinstance(value, dict):
        inner = {path for key, part in value.items() for path in keys_of(part, f"{prefix}.{key}" if prefix else key)}
        return inner | ({prefix} if prefix else set())
    if isinstance(value, list):
        return {path for part in value for path in keys_of(part, f"{prefix}[]")} | {prefix}
    return {prefix}


def test_the_keys_of_the_manifest_are_frozen(builds):
    """A key that comes or goes moves the format's version (schemas/FORMAT.md)."""
    found: set[str] = set()
    for build in builds.values():
        build.package()
        found |= keys_of(json.loads((build.artifact / MANIFEST_FILE).read_text()))
    compare("manifest_keys.json", sorted(found))
