"""Full verification finds what opening leaves to be found on use."""

import shutil

import numpy as np
import pytest

from coldpress.runtime import _native
from coldpress.runtime.artifact import errors
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.schemas.errors import CorruptPageError
from tests.support.artifacts import Recipe, build_artifact, change_arrays, change_manifest, small_spec


@pytest.fixture
def path(relu_artifact, tmp_path):
    return shutil.copytree(relu_artifact.path, tmp_path / "a.coldpress")


def write(path, offset, value, with_checksums):
    """Changes a byte of flash.img and, if wanted, every digest that would tell."""
    image = np.fromfile(path / "flash.img", np.uint8)
    image[offset] = value
    image.tofile(path / "flash.img")
    if with_checksums:
        sums = _native.crc32c_pages(image, 4096)
        change_arrays(path, "tables.safetensors", lambda arrays: arrays.update(page_crc32c=sums))


@pytest.mark.parametrize("name", ["relu_artifact", "topk_artifact", "predictor_artifact"])
def test_whole_artifacts_pass(request, name):
    built = request.getfixturevalue(name)
    size = sum(entry.size_bytes for entry in built.manifest.files)
    assert verify_artifact(open_artifact(built.path)) == size


def test_a_flipped_bit_on_flash_is_found(path):
    image = np.fromfile(path / "flash.img", np.uint8)
    write(path, 70_000, image[70_000] ^ 4, with_checksums=False)
    with pytest.raises(
        CorruptPageError, match=r"flash.img: page 17 at byte 69632 has the checksum [0-9a-f]{8}, expected"
    ):
        verify_artifact(open_artifact(path))


def test_another_file_with_right_checksums_is_found(path):
    write(path, 70_000, 1, with_checksums=True)
    change_manifest(path, lambda manifest: manifest["files"][0].update(sha256="0" * 64))
    with pytest.raises(errors.DigestError, match=r"flash.img: the sha256"):
        verify_artifact(open_artifact(path))


def test_data_between_sections_is_found(topk_artifact, tmp_path):
    path = shutil.copytree(topk_artifact.path, tmp_path / "a")
    section = topk_artifact.manifest.flash.sections[4]
    offset = section.offset_bytes + section.length_bytes + 10
    write(path, offset, 1, with_checksums=True)
    with pytest.raises(errors.HiddenDataError, match=rf"flash.img: byte {offset}, behind a section, is not 0"):
        verify_artifact(open_artifact(path))


def test_data_behind_the_last_section_is_found(tmp_path):
    built = build_artifact(tmp_path / "a", Recipe(spec=small_spec(num_hidden_layers=2, intermediate_size=500)))
    last = built.manifest.flash.sections[-1]
    end = last.offset_bytes + last.length_bytes
    assert end < built.manifest.flash.size_bytes
    verify_artifact(open_artifact(built.path))
    for offset in (end, built.manifest.flash.size_bytes - 1):
        path = shutil.copytree(built.path, tmp_path / str(offset))
        write(path, offset, 1, with_checksums=True)
        with pytest.raises(errors.HiddenDataError, match=rf"flash.img: byte {offset}, behind a section, is not 0"):
            verify_artifact(open_artifact(path))


def test_scales_that_are_not_finite_are_found(topk_artifact, tmp_path):
    path = shutil.copytree(topk_artifact.path, tmp_path / "a")
    image = np.fromfile(path / "flash.img", np.uint8)
    image[:2] = np.array([np.inf], np.float16).view(np.uint8)  # the first group's scale
    image.tofile(path / "flash.img")
    write(path, 0, image[0], with_checksums=True)
    with pytest.raises(errors.NonFiniteError, match=r"flash.img: layer 0, family mlp_in is holding values of NaN"):
        verify_artifact(open_artifact(path))


def test_resident_codes_that_are_not_finite_are_found(path):
    role = "layers.2.q_proj.weight"
    change_arrays(path, "resident.safetensors", lambda arrays: arrays[role][0].__setitem__(slice(0, 2), [0, 0x7C]))
    with pytest.raises(errors.NonFiniteError, match=rf"tensor '{role}'"):
        verify_artifact(open_artifact(path))


@pytest.mark.parametrize("name", ["7.fc1", "7.fc2"])
def test_predictor_codes_that_are_not_finite_are_found(predictor_artifact, tmp_path, name):
    path = shutil.copytree(predictor_artifact.path, tmp_path / "a")
    change_arrays(path, "predictors.safetensors", lambda arrays: arrays[name][3].__setitem__(slice(0, 2), [0, 0x7C]))
    with pytest.raises(errors.NonFiniteError, match=rf"predictors.safetensors: tensor '{name}' is holding values"):
        verify_artifact(open_artifact(path))


@pytest.mark.parametrize("name", ["extra.bin", ".gitattributes", "tokenizer/extra.json"])
def test_files_that_are_not_listed_are_found(path, name):
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("x")
    with pytest.raises(errors.HiddenDataError, match=f"the (file|folder) '{name.partition('/')[0]}' is present"):
        verify_artifact(open_artifact(path))


def test_a_link_to_a_folder_is_found(path):
    (path / "more").symlink_to("/")
    with pytest.raises(errors.HiddenDataError, match="the folder 'more' is present"):
        verify_artifact(open_artifact(path))
