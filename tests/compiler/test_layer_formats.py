"""Layers and matrices in formats of their own, from the division of DRAM to the artifact that runs."""

import re
from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.cost_model import all_read_units, flash_bytes, read_buffer_bytes, resident_bytes, unit_bytes
from coldpress.compiler.dense_run import dense_for, dense_run
from coldpress.compiler.io import Workspace, load_record
from coldpress.compiler.search.density import AllocationInputs
from coldpress.compiler.search.dram_shares import asked_budgets_of, divided
from coldpress.compiler.search.floor import Floor
from coldpress.compiler.search.settings import AllocateConfig
from coldpress.compiler.sections import make_sections
from coldpress.compiler.stages import allocate, verify
from coldpress.compiler.stages.export._stored import StoredModel
from coldpress.compiler.stages.verify import VerifyConfig
from coldpress.compiler.workflow.settings import resolve
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.quantization._mixed import coarsest, in_words
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.package import Package
from coldpress.schemas.sparsity import Densities, Sparsity
from tests.support.curves import curves_of
from tests.support.product import Case, Source, compiled, difference, source_of
from tests.support.shapes import small_device
from tests.support.statistics import activations_of, device_of, model_of

BASE, FINE = "int4_group32", "int8_group32"
BY_LAYER = (FINE, *[BASE] * 4, FINE, FINE, *[BASE] * 4)
UP, DOWN, UP_DOWN = f"{BASE}+{FINE}+{BASE}", f"{BASE}+{BASE}+{FINE}", f"{BASE}+{FINE}+{FINE}"
BY_MATRIX = (FINE, BASE, UP, UP, UP, BASE, DOWN, UP_DOWN, *[BASE] * 3)


def num_finer(formats) -> int:
    """The matrices in the finer format."""
    names = [name for layer in formats for name in (layer.split("+") if "+" in layer else [layer] * 3)]
    return names.count(FINE)


def test_words_name_layers_or_matrices() -> None:
    assert in_words(BY_LAYER) == "int4_group32 with int8_group32 in layers 0, 5 to 6"
    assert in_words((BASE, FINE, BASE)) == "int4_group32 with int8_group32 in layer 1"
    assert in_words(BASE) == "int4_group32"
    assert in_words(BY_MATRIX) == (
        "int4_group32 with int8_group32 in gate_proj of layer 0, up_proj of layers 0, 2 to 4, 7, "
        "down_proj of layers 0, 6 to 7"
    )
    assert in_words((BASE, f"{BASE}+{FINE}")) == "int4_group32 with int8_group32 in down_proj of layer 1"
    assert in_words(DOWN) == in_words((DOWN,) * 11) == "int4_group32 with int8_group32 in down_proj"
    assert in_words("int8_group32+fp16+int4_group32") == (
        "int4_group32 with fp16 in up_proj and int8_group32 in gate_proj"
    )


def test_the_coarsest_format_has_the_fewest_bits() -> None:
    assert coarsest(FINE) == FINE
    assert coarsest(BY_MATRIX) == BASE
    assert coarsest(("fp16", f"fp16+{FINE}+{BASE}")) == BASE


def test_a_mixture_loses_at_most_what_its_worst_format_does(tmp_path: Path) -> None:
    """Until a mixture is measured, all its matrices count as if they had that format."""
    losses = {BASE: 1.3, FINE: 1.01, "q4_1": 2.0}
    floor = Floor(curves_of(model_of(11, 64, 96), tmp_path, {}, losses), 1.1)
    assert floor.format_ratio(BY_MATRIX) == floor.format_ratio(DOWN) == pytest.approx(1.3)
    assert floor.format_ratio((FINE, f"{FINE}+{FINE}+q4_1")) == pytest.approx(2.0)


# Bytes


@pytest.mark.parametrize("formats", [BY_LAYER, BY_MATRIX, (DOWN,) * 11])
def test_bytes_are_those_of_each_matrix_s_format(formats) -> None:
    """A neuron of three slices of 1024 values: 2 + 16 or 2 + 32 bytes a group of 32. What stays in DRAM is coarse."""
    model = model_of(11, 1024, 64)
    spec = model.spec
    sections = make_sections(spec, ("neuron",), formats)
    assert [section.format for section in sections] == [None if name == BASE else name for name in formats]
    sizes = [3 * 576 + 512 * num_finer([name]) for name in formats]
    assert [section.unit_bytes for section in sections] == sizes
    assert flash_bytes(("neuron",), spec, formats) == 64 * sum(sizes)
    assert resident_bytes(model, ("neuron",), formats) == resident_bytes(model, ("neuron",), BASE)
    reads = all_read_units(small_device(4096).flash, spec, ("neuron",), formats, 1)
    for layer, size in enumerate(sizes):
        assert reads[layer, "neuron"][0] == pytest.approx(reads[1, "neuron"][0] * sizes[1] / size)
    assert unit_bytes("neuron", spec, FINE) == 3264


@pytest.mark.parametrize("formats", [BY_LAYER, BY_MATRIX, DOWN])
def test_a_read_buffer_holds_the_largest_unit(formats) -> None:
    spec = model_of(11, 1024, 64).spec
    largest = max(section.unit_bytes for section in make_sections(spec, ("neuron",), formats))
    assert read_buffer_bytes(spec, formats, ("neuron",), 0, 512) == -(-largest // 512) * 512 + 512


def test_inputs_of_matrices_have_the_formats_of_theirs() -> None:
    """Units of `mlp_in` hold columns of gate and up, those of `mlp_mid` of down."""
    spec = model_of(11, 64, 96).spec
    sections = make_sections(spec, ("mlp_in", "mlp_mid"), BY_MATRIX)
    found = {(section.first_layer, section.family): section.format for section in sections}
    assert [found[2, "mlp_in"], found[2, "mlp_mid"]] == [f"{BASE}+{FINE}", None]
    assert [found[6, "mlp_in"], found[6, "mlp_mid"]] == [None, FINE]
    assert [found[0, "mlp_in"], found[0, "mlp_mid"]] == [FINE, FINE]


def test_groups_of_layers_have_one_format() -> None:
    spec = model_of(11, 64, 96).spec
    with pytest.raises(ColdpressError, match=r"layers 0 to 1 are one group .*use layers_per_group=1"):
        make_sections(spec, ("neuron",), BY_LAYER, 2)
    paired = (FINE, FINE, *[BASE] * 9)
    assert make_sections(spec, ("neuron",), paired, 2)[0].format == FINE


SLOW = device_of(read_curve=((4096, 1e6), (65536, 1.2e6)), dram_bytes_per_s=4e10)
"""Every byte takes long, and small reads little more than large ones."""


def test_a_dense_run_reads_the_bytes_of_the_slices() -> None:
    """Of one format of units everywhere; where nothing is pinned, all of them."""
    model = model_of(11, 1024, 512)
    for formats, size in ((BASE, 1728), (DOWN, 2240), (FINE, 3264)):
        found = dense_run(model, formats, 32, 1 << 30, SLOW, naive=True)
        assert found is not None
        assert found.flash_bytes_per_token == pytest.approx(11 * 512 * size, rel=0.01)


def test_a_search_takes_named_formats_of_matrices(tmp_path: Path) -> None:
    """Their loss is that of the worst of them, and the record names all."""
    model = model_of(11, 64, 96)
    active = np.random.default_rng(1).random((96, 8)) < 0.5
    activations = activations_of(tmp_path / "a", [{"neuron": active}] * 11, exact_zeros=False)
    values = {"method": "auto", "format": DOWN, "cache": "static", "context_length": 32, "dram_budget": "90%"}
    config = AllocateConfig(**values, max_ppl_ratio=1.1)
    curves = curves_of(model, tmp_path / "c", {}, {BASE: 1.05, FINE: 1.01}, num_tokens=8)
    found = allocate.run(config, model, activations, SLOW, Workspace(tmp_path / "w", "x"), curves=curves)
    assert (found.method, found.format, found.layer_formats) == ("dense", BASE, (DOWN,) * 11)
    assert found.tried[0].layer_formats == (DOWN,) * 11
    assert found.tried[0].ppl_ratio == pytest.approx(1.05)


# A build


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return source_of(tmp_path_factory.mktemp("source"), "llama", relu=False, layers=11)


@pytest.mark.parametrize("formats", [BY_LAYER, BY_MATRIX, DOWN])
def test_a_division_by_layer_uses_the_budget_to_the_byte(tmp_path: Path, source: Source, formats) -> None:
    model = source.model
    values = {"method": "dense", "format": BASE, "cache": "static", "context_length": 32, "dram_budget": "80%"}
    config = AllocateConfig(**values, density_allocation="uniform")
    (budget,) = asked_budgets_of(config, model, SLOW)
    inputs = AllocationInputs(model, Activations.model_construct(layers=()), SLOW, Workspace(tmp_path, "x"), None, 1)
    every = (Densities(family="neuron", per_layer=(1.0,) * 11),)
    found = divided(config, inputs, every, formats)
    assert (found.formats, found.format) == (formats if formats is not DOWN else (DOWN,) * 11, BASE)
    assert found.budget.resident_bytes == resident_bytes(model, ("neuron",), formats)
    assert sum(value for name, value in found.budget if name != "dram_budget_bytes") == budget
    assert Sparsity.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("method", "formats"),
    [
        pytest.param("dense", BY_LAYER, marks=pytest.mark.slow),
        pytest.param("wina", BY_LAYER, marks=pytest.mark.slow),
        pytest.param("wina", BY_MATRIX, marks=pytest.mark.slow),
        ("dense", f"{BASE}+{BASE}+{FINE}"),
        pytest.param("dense", "int8_group32+q5_0+fp16", marks=pytest.mark.slow),
        pytest.param("flash", BY_MATRIX, marks=pytest.mark.slow),
    ],
)
def test_a_build_computes_with_the_codes_of_each_matrix(tmp_path: Path, source: Source, method: str, formats) -> None:
    """Eleven layers through all stages: transformers' own modules with the values of the codes give the same logits;
    bytes, text and simulation are checked, and exports have the values."""
    path = compiled(source, Case("llama", method, coarsest(formats), layer_formats=formats), tmp_path / "build")
    artifact = open_artifact(path)
    assert difference(path, source, tmp_path / "coded").equal
    assert "layer-formats" in artifact.manifest.features.required
    assert "layer_formats" in (tmp_path / "build/allocate.json").read_text()
    corpus = load_record(source.folder / "tokenize.json", Corpus)
    package = load_record(tmp_path / "build/package.json", Package)
    found = verify.run(VerifyConfig(), source.model, source.model, corpus, package)
    assert found.simulated_equals_real
    assert found.ppl_artifact == pytest.approx(found.ppl_source, rel=0.2)
    stored = StoredModel(artifact)
    each = formats if isinstance(formats, tuple) else (formats,) * 11
    for layer in (0, 2, 6):
        for role, name in zip(("gate", "up", "down"), each[layer].split("+") * 3, strict=False):
            assert stored.tensors[f"layers.{layer}.{role}_proj.weight"].format == name
    dense = dense_for(source.model, artifact.manifest, artifact.manifest.plans[0])
    assert (dense is None) == (found.dense is None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{BASE}+{BASE}+{FINE}", f"fp16+{BASE}+{FINE}"])
def test_the_key_names_formats_of_gate_up_and_down(tmp_path: Path, source: Source, name: str) -> None:
    path = compiled(source, Case("llama", "dense", name), tmp_path / "build")
    manifest = open_artifact(path).manifest
    assert set(manifest.unit_formats.values()) == {name}
    assert manifest.families[0].format == BASE
    assert next(one.format for one in manifest.resident if one.role == "layers.3.q_proj.weight") == BASE
    assert difference(path, source, tmp_path / "coded").equal


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{BASE}+{FINE}", "names 2 formats, expected one, or one for each of gate, up, down"),
        (f"{BASE}+int9+{FINE}", "unknown format 'int9'"),
        (f"{BASE}+auto+{FINE}", "unknown format 'auto'"),
        (f"{BASE}+", "unknown format ''"),
        ("int4_2_2", "unknown format 'int4_2_2'"),
    ],
)
def test_a_key_that_names_no_formats_is_refused(source: Source, name: str, words: str) -> None:
    with pytest.raises(ColdpressError, match=re.escape(words)):
        resolve({"model": str(source.folder / "tiny"), "method": "dense", "format": name})


@pytest.mark.slow
def test_a_build_in_one_format_says_nothing_of_layers(tmp_path: Path, source: Source) -> None:
    compiled(source, Case("llama", "dense", BASE), tmp_path / "plain")
    assert "layer_formats" not in (tmp_path / "plain/allocate.json").read_text()
