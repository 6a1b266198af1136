"""A manifest's digest of itself, and the identity that a user asks for."""

import hashlib
import json
import re
import shutil

import pytest

from coldpress.cli.main import main
from coldpress.runtime.artifact import errors
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.session import Session
from tests.support.artifacts import Recipe, build_artifact, refuse, small_spec

OTHER = "0" * 64


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    recipe = Recipe(spec=small_spec(num_hidden_layers=1, intermediate_size=64), method="predictor")
    return build_artifact(tmp_path_factory.mktemp("identity") / "a", recipe).path


@pytest.fixture
def path(original, tmp_path):
    return shutil.copytree(original, tmp_path / "a")


def edit(path, old, new):
    text = (path / "manifest.json").read_text()
    assert text.count(old) >= 1
    (path / "manifest.json").write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"threshold": 0.1', '"threshold":\r0.1'),  # still the same JSON
        ('"threshold": 0.1', '"threshold": 0.3'),
        ('"name": "test"', '"name": "tesu"'),
        ('"minor": 0', '"minor": 1'),
        ('"major": 2', '"major": 3'),  # damage is said before another version is
        ('"crc32c-pages"', '"crc32c-pagds"'),
        ('"body_sha256": "', '"body_sha256": "0'),
    ],
)
def test_a_manifest_that_changed_is_damage(path, old, new):
    if "sha256" in old:
        found = re.search(r'"body_sha256": "[0-9a-f]', (path / "manifest.json").read_text()).group()
        edit(path, found, new if found != new else new[:-1] + "1")
    else:
        edit(path, old, new)
    refuse(path, errors.DigestError, "manifest.json: body_sha256 is", "the artifact is damaged")


def test_a_manifest_without_its_digest_is_refused(path):
    data = json.loads((path / "manifest.json").read_text())
    del data["body_sha256"]
    (path / "manifest.json").write_text(json.dumps(data, indent=2))
    refuse(path, errors.SchemaError, "manifest.json: the second line", "body_sha256")


def test_a_digest_in_another_place_is_none(path):
    """Its place is what makes the digest one of bytes; a key further down is not looked at."""
    data = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(data, indent=2, sort_keys=True).replace('{\n  "b', '{\n "b', 1))
    refuse(path, errors.SchemaError, "manifest.json: the second line")


def test_the_identity_is_asked_of_what_is_opened(path):
    identity = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    assert open_artifact(path, identity).sha256 == identity
    assert Session(path, identity=identity).artifact.sha256 == identity
    for use in (open_artifact, lambda path, identity: Session(path, identity=identity)):
        with pytest.raises(errors.IdentityError, match=f"is {identity}, expected {OTHER}; give the path"):
            use(path, OTHER)


@pytest.mark.parametrize("command", [("verify",), ("generate", "--prompt-ids", "3,4", "--max-new-tokens", "2")])
def test_both_commands_refuse_another_artifact(capsys, path, command):
    name, *options = command
    identity = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    assert main([name, str(path), *options, "--identity", identity]) == 0
    capsys.readouterr()
    assert main([name, str(path), *options, "--identity", OTHER]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: manifest.json: the artifact's identity is {identity}, expected {OTHER}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["", "abc", "0" * 63, "g" * 64, "A" * 64, "0" * 64 + "\n"])
def test_what_is_no_identity_is_said_at_once(capsys, path, text):
    assert main(["verify", str(path), "--identity", text]) == 2
    assert "is not an identity" in capsys.readouterr().err
