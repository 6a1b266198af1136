"""Random damage: whatever is done to an artifact, the reader ends with its own error or gives what it should."""

import json
import random
import shutil

import pytest

from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.schemas.errors import ArtifactError
from tests.support.artifacts import Recipe, build_artifact, change_manifest, small_spec, write_manifest

NUM_MUTANTS = 150
STRANGE = (0, 1, -1, 2**31, 2**53 - 1, 1.5, True, None, "", "x", "../x", [], {}, [[]], {"a": 1}, [1, 2, 3], 10**9)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    recipe = Recipe(
        spec=small_spec(num_hidden_layers=2, intermediate_size=64), method="predictor", format="int8_group32"
    )
    return build_artifact(tmp_path_factory.mktemp("hostile") / "a", recipe)


def outcome(path):
    """`verified`, or `refused`; any other error fails the test."""
    try:
        verify_artifact(open_artifact(path))
    except ArtifactError:
        return "refused"
    return "verified"


def mutate(value, chance):
    """Changes one place of nested JSON values: removes, doubles, or replaces it."""
    place = chance.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
    inner = value[place]
    if isinstance(inner, dict | list) and inner and chance.random() < 0.8:
        mutate(inner, chance)
    elif chance.random() < 0.2:
        del value[place]
    elif isinstance(value, list) and chance.random() < 0.3:
        value.append(inner)
    elif isinstance(inner, int) and chance.random() < 0.5:
        value[place] = inner + chance.choice((-1, 1, 4096, -inner - 1))
    else:
        value[place] = chance.choice(STRANGE)


def test_a_manifest_changed_at_random_is_refused_or_harmless(original, tmp_path):
    chance, path = random.Random(1), shutil.copytree(original.path, tmp_path / "a")
    text = (path / "manifest.json").read_text()
    refused = 0
    for _ in range(NUM_MUTANTS):
        manifest = json.loads(text)
        del manifest["body_sha256"]
        mutate(manifest, chance)
        write_manifest(path, manifest)
        refused += outcome(path) == "refused"
    assert refused > NUM_MUTANTS // 2


@pytest.mark.parametrize("name", ["manifest.json", "resident.safetensors", "tables.safetensors", "flash.img"])
def test_flipped_bits_are_never_taken_for_the_original(original, tmp_path, name):
    chance, path = random.Random(2), shutil.copytree(original.path, tmp_path / "a")
    data = (path / name).read_bytes()
    for _ in range(NUM_MUTANTS // 3):
        damaged = bytearray(data)
        # half of the flips go to the header, where the structure is
        bit = chance.randrange(8 * min(len(data), 2000) if chance.random() < 0.5 else 8 * len(data))
        damaged[bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(damaged)
        assert outcome(path) == "refused"


def test_a_tensor_header_changed_at_random_is_refused(original, tmp_path):
    chance, path = random.Random(3), shutil.copytree(original.path, tmp_path / "a")
    data = (path / "tables.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    for _ in range(NUM_MUTANTS // 3):
        header = json.loads(data[8 : 8 + length])
        mutate(header, chance)
        text = json.dumps(header).encode()
        (path / "tables.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        change_manifest(path, lambda manifest: None, relist=True)
        assert outcome(path) == "refused"
