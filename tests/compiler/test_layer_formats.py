"""Layers and matrices with other formats in planes, from their choice to the artifact that runs."""

import itertools
from pathlib import Path

import pytest

from coldpress.compiler.activity.calibration_pass import PassConfig, count_activity
from coldpress.compiler.activity.layer_counts import Activity, countable_families, exact_families
from coldpress.compiler.cost_model import all_read_units, flash_bytes, resident_bytes, unit_bytes
from coldpress.compiler.io import Workspace, load_record
from coldpress.compiler.sections import make_sections
from coldpress.compiler.stages import allocate, verify
from coldpress.compiler.stages.allocate import AllocateConfig, Inputs
from coldpress.compiler.stages.allocate._division import divided
from coldpress.compiler.stages.allocate._mixtures import (
    mixed,
    mixture,
    mixtures,
    saved_share,
)
from coldpress.compiler.stages.export._stored import StoredModel
from coldpress.compiler.stages.verify import VerifyConfig
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.quantization._planes import in_words
from coldpress.schemas.activations import Activations
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curve, LayerGains, Point
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.package import Package
from coldpress.schemas.sparsity import Densities, Sparsity, Tried
from tests.support.curves import NO_LOSS, curves_of
from tests.support.product import Case, Source, compiled, difference, source_of
from tests.support.shapes import small_device
from tests.support.statistics import device_of, model_of

GAINS = (0.2, 3.0, 0.7, -0.1, 0.05, 1.1, 0.7, 0.0, 2.5, 0.3, 0.9, 0.4)
COARSE, FINE = "int4_2_2", "int4_3_1"
BY_LAYER = (FINE, *[COARSE] * 4, FINE, FINE, *[COARSE] * 4)
UP, DOWN, UP_DOWN = f"{COARSE}+{FINE}+{COARSE}", f"{COARSE}+{COARSE}+{FINE}", f"{COARSE}+{FINE}+{FINE}"
BY_MATRIX = (FINE, COARSE, UP, UP, UP, COARSE, DOWN, UP_DOWN, *[COARSE] * 3)


def gains(values=GAINS, matrices: int = 3) -> LayerGains:
    """Gains by layer and matrix, in rows of `matrices`."""
    rows = tuple(tuple(values[at : at + matrices]) for at in range(0, len(values), matrices))
    return LayerGains(coarser=COARSE, finer=FINE, per_layer=rows)


# The choice


def finer(formats, matrices: int = 3) -> list[int]:
    """The places of finer matrices, counted from the first layer's on."""
    names = [name for layer in formats for name in (layer.split("+") * (1 if "+" in layer else matrices))]
    return [at for at, name in enumerate(names) if name == FINE]


@pytest.mark.parametrize("matrices", [1, 2, 3])
@pytest.mark.parametrize("count", range(1, 12))
def test_the_matrices_are_those_that_save_the_most_of_all_that_take_as_much(count: int, matrices: int) -> None:
    """No other choice of the same number of matrices, or of layers, gains more; all choices take the same bytes."""
    most = max(sum(GAINS[at] for at in chosen) for chosen in itertools.combinations(range(12), count))
    found = finer(mixture(gains(matrices=matrices), count), matrices)
    assert len(found) == count
    assert sum(GAINS[at] for at in found) == pytest.approx(most)


def test_of_equal_gains_the_first_come_first() -> None:
    assert finer(mixture(gains(), 5)) == [1, 2, 5, 8, 10]
    assert mixture(gains((1.0,) * 12), 4) == (FINE, f"{FINE}+{COARSE}+{COARSE}", COARSE, COARSE)


@pytest.mark.parametrize(("most", "counts"), [(100, [3, 6, 9, 11]), (7, [3, 6, 7]), (3, [3]), (1, [1]), (0, [])])
def test_a_search_compares_a_few_and_as_many_as_fit(most: int, counts: list[int]) -> None:
    found = mixtures(gains(), lambda formats: len(finer(formats)) <= most)
    assert [len(finer(formats)) for formats in found] == counts


def test_nothing_is_mixed_where_nothing_is_gained() -> None:
    assert mixtures(gains((0.0, -0.1) * 6), lambda _: True) == []


@pytest.mark.parametrize("matrices", [1, 2, 3])
def test_a_mixture_saves_its_matrices_share_of_the_loss(tmp_path: Path, matrices: int) -> None:
    """Gains below nothing, which are noise, count as none."""
    own = gains(matrices=matrices)
    known = curves_of(model_of(12, 64, 96), tmp_path, {}).model_copy(update={"layer_gains": (own,)})
    total = sum(gain for gain in GAINS if gain > 0)
    assert saved_share(known, mixture(own, 2)) == pytest.approx((3.0 + 2.5) / total)
    assert saved_share(known, mixture(own, 11)) == pytest.approx(1)
    assert saved_share(known, COARSE) == 0
    assert saved_share(known.model_copy(update={"layer_gains": ()}), mixture(own, 2)) == 0


def test_gains_of_older_builds_are_those_of_layers() -> None:
    older = LayerGains.model_validate_json('{"coarser": "int4_2_2", "finer": "int4_3_1", "per_layer": [1.0, 3.0, 2.0]}')
    assert mixture(older, 2) == (COARSE, FINE, FINE)
    assert [row for (row,) in gains().of_layers.rows] == pytest.approx([3.9, 1.05, 3.2, 1.6])


def _curve(name: str, ratios: dict[float, float], share: float = 0.1) -> Curve:
    points = tuple(Point(density=at, **(NO_LOSS | {"ppl_ratio": ratio})) for at, ratio in ratios.items())
    return Curve(method="refine", resident_share=share, format=name, points=points)


def test_a_mixture_s_curve_lies_between_those_of_its_formats() -> None:
    coarser = _curve("int4_2_2", {0.05: 1.2, 0.1: 1.1, 0.4: 1.04, 1.0: 1.02})
    finer = _curve("int4_3_1", {0.1: 1.06, 0.4: 1.03, 1.0: 1.02})
    (found,) = mixed([coarser], [_curve("int4_3_1", {0.1: 9.0}, 0.6), finer], 0.75)
    assert [(point.density, point.ppl_ratio) for point in found.points] == [
        (0.1, pytest.approx(1.07)),
        (0.4, pytest.approx(1.0325)),
        (1.0, pytest.approx(1.02)),
    ]
    assert mixed([coarser], [], 0.5) == []


def test_words_name_layers_or_matrices() -> None:
    assert in_words(BY_LAYER) == "int4_2_2 with int4_3_1 in layers 0, 5 to 6"
    assert in_words(mixture(gains(matrices=1), 1)) == "int4_2_2 with int4_3_1 in layer 1"
    assert in_words("int4_2_2") == "int4_2_2"
    assert in_words(BY_MATRIX) == (
        "int4_2_2 with int4_3_1 in 9 of 33 matrices: gate_proj of layer 0, up_proj of layers 0, 2 to 4, 7, "
        "down_proj of layers 0, 6 to 7"
    )
    assert in_words((COARSE, f"{COARSE}+{FINE}")) == "int4_2_2 with int4_3_1 in 1 of 4 matrices: down_proj of layer 1"


# Bytes


@pytest.mark.parametrize("formats", [BY_LAYER, BY_MATRIX])
def test_bytes_are_those_of_each_matrix_s_format(formats) -> None:
    """A neuron of three slices of 1024 values: 8 or 4 bytes a group of 32 on flash; 2 + 8 or 2 + 12 in DRAM."""
    model = model_of(11, 1024, 64)
    spec = model.spec
    sections = make_sections(spec, ("neuron",), formats)
    assert [section.format for section in sections] == [None if name == COARSE else name for name in formats]
    sizes = [768 - 128 * len(finer([name])) for name in formats]
    assert [section.unit_bytes for section in sections] == sizes
    assert flash_bytes(("neuron",), spec, formats) == 64 * sum(sizes)
    more = resident_bytes(model, ("neuron",), formats) - resident_bytes(model, ("neuron",), COARSE)
    assert more == len(finer(formats)) * 64 * 128
    reads = all_read_units(small_device(4096).flash, spec, ("neuron",), formats, 1)
    for layer, size in enumerate(sizes):
        assert reads[layer, "neuron"][0] == pytest.approx(reads[1, "neuron"][0] * 768 / size)
    assert unit_bytes("neuron", spec, FINE) == 384


def test_inputs_of_matrices_have_the_formats_of_theirs() -> None:
    """Units of `mlp_in` hold columns of gate and up, those of `mlp_mid` of down."""
    spec = model_of(11, 64, 96).spec
    sections = make_sections(spec, ("mlp_in", "mlp_mid"), BY_MATRIX)
    found = {(section.first_layer, section.family): section.format for section in sections}
    assert [found[2, "mlp_in"], found[2, "mlp_mid"]] == [f"{COARSE}+{FINE}", None]
    assert [found[6, "mlp_in"], found[6, "mlp_mid"]] == [None, FINE]
    assert [found[0, "mlp_in"], found[0, "mlp_mid"]] == [FINE, FINE]


def test_groups_of_layers_have_one_format() -> None:
    spec = model_of(11, 64, 96).spec
    with pytest.raises(ColdpressError, match=r"layers 0 to 1 are one group .*use layers_per_group=1"):
        make_sections(spec, ("neuron",), BY_LAYER, 2)
    paired = ("int4_3_1", "int4_3_1", *["int4_2_2"] * 9)
    assert make_sections(spec, ("neuron",), paired, 2)[0].format == "int4_3_1"


# The search


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return source_of(tmp_path_factory.mktemp("source"), "llama", relu=False, layers=11)


CONCENTRATED = (0.01, 0.02, 8.0, 0.01, 0.3, 0.02, 0.01, 0.01, 0.9, 0.02, 0.01)
"""Three layers have nearly all of the gain."""
SLOW = device_of(read_curve=((4096, 1e6), (65536, 1.2e6)), dram_bytes_per_s=4e10)
"""Every byte takes long, and small reads little more than large ones."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Units of two hundred bytes."""
    shape = {"hidden_size": 256, "intermediate_size": 1024}
    return source_of(tmp_path_factory.mktemp("wide"), "llama", relu=False, layers=11, **shape)


def asked(**changes: object) -> AllocateConfig:
    values = {"method": "auto", "format": "int4_2_2", "cache": "static", "context_length": 32, "max_ppl_ratio": 1.1}
    values |= {"density_allocation": "uniform", "dram_budget": "80%"}
    return AllocateConfig(**(values | changes))


def chosen(
    source: Source, folder: Path, per_matrix: tuple[float, ...] | None = None, **changes: object
) -> tuple[AllocateConfig, Sparsity]:
    """The choice where two bits need many refined units, and three bits in the right layers few."""
    corpus = load_record(source.folder / "tokenize.json", Corpus)
    families = countable_families(source.model.spec)
    known, work = Activity(exact_families(families, source.model.spec)), Workspace(folder / "calibrate", "test")
    activations = count_activity(PassConfig(), source.model, corpus, families, known, work, 1)
    coarse = _curve("int4_2_2", {0.05: 1.5, 0.1: 1.45, 0.2: 1.4, 0.4: 1.3, 1.0: 1.0})
    fine = _curve("int4_3_1", {0.05: 1.01, 0.1: 1.01, 0.2: 1.005, 0.4: 1.0, 1.0: 1.0})
    curves = curves_of(source.model, folder / "curves", {}, {"int4_group32": 1.0})
    worth = gains(CONCENTRATED, 1) if per_matrix is None else gains(per_matrix) if per_matrix else None
    unexplored = tuple(entry for entry in curves.unexplored if entry.method != "refine")
    found = {"curves": (coarse, fine), "layer_gains": () if worth is None else (worth,), "unexplored": unexplored}
    config = asked(**changes)
    inputs = source.model, activations, SLOW, Workspace(folder / "allocate", config.to_json())
    return config, allocate.run(config, *inputs, curves=curves.model_copy(update=found))


def refining(sparsity: Sparsity) -> Tried:
    """The best candidate that refines; a dense run is faster than it with units as small as these."""
    return next(entry for entry in sparsity.tried if entry.method == "refine")


@pytest.mark.slow
def test_a_search_compares_formats_by_layer(tmp_path: Path, wide: Source) -> None:
    """Two bits in all layers need most units refined; the layers that gain, and then few refined units, read less."""
    best = refining(chosen(wide, tmp_path / "a")[1])
    alone = refining(chosen(wide, tmp_path / "b", per_matrix=())[1])
    assert set(finer(best.layer_formats, 1)) >= {2, 4, 8}
    assert alone.layer_formats == ()
    assert best.token_s is not None
    assert alone.token_s is not None
    assert best.token_s < alone.token_s
    assert best.ppl_ratio is not None
    assert best.ppl_ratio <= 1.1
    assert "layer_formats" not in alone.model_dump()


@pytest.mark.parametrize("count", [1, 4])
def test_a_division_by_layer_uses_the_budget_to_the_byte(tmp_path: Path, wide: Source, count: int) -> None:
    config = asked()
    formats, model = mixture(gains(CONCENTRATED, 1), count), wide.model
    (budget,) = allocate.asked_budgets_of(config, model, SLOW)
    values = {"method": "refine", "density": 0.1, "dram_budget": budget}
    inputs = Inputs(model, Activations.model_construct(layers=()), SLOW, Workspace(tmp_path, "x"), None, 1)
    found = divided(config.model_copy(update=values), inputs, _uniform(0.1), formats)
    assert (found.formats, found.format) == (formats, "int4_2_2")
    assert found.budget.resident_bytes == resident_bytes(model, ("neuron",), formats)
    assert sum(value for name, value in found.budget if name != "dram_budget_bytes") == budget
    assert Sparsity.model_validate_json(found.model_dump_json()) == found


def test_a_search_compares_formats_by_matrix(tmp_path: Path, wide: Source) -> None:
    """The matrices that gain come first; of those that fit, the most leave less than another's third bits unused."""
    worth = tuple(5.0 if at in (1, 8, 20) else 0.01 for at in range(33))
    best = refining(chosen(wide, tmp_path, worth)[1])
    assert {1, 8, 20} <= set(finer(best.layer_formats))
    assert any("+" in name for name in best.layer_formats)
    assert best.ppl_ratio is not None
    assert best.ppl_ratio <= 1.1


@pytest.mark.parametrize("count", [1, 7, 30])
def test_a_budget_in_between_is_used(tmp_path: Path, wide: Source, count: int) -> None:
    """As many third bits as fit: what is left, for units, is less than those of another matrix."""
    model, spec, config = wide.model, wide.model.spec, asked()
    inputs = Inputs(model, Activations.model_construct(layers=()), SLOW, Workspace(tmp_path, "x"), None, 1)
    values = {
        "method": "refine",
        "density": 0.1,
        "dram_budget": next(iter(allocate.asked_budgets_of(config, model, SLOW))),
    }

    def division(formats) -> Sparsity:
        return divided(config.model_copy(update=values), inputs, _uniform(0.1), formats)

    def fits(formats) -> bool:
        try:
            return bool(division(formats))
        except ColdpressError:
            return False

    whole, third_bits = division(COARSE).budget, spec.intermediate_size * spec.hidden_size // 8
    fixed = whole.resident_bytes + whole.kv_cache_bytes + whole.bookkeeping_bytes
    values["dram_budget"] = fixed + 2 * 4096 + count * third_bits + third_bits // 2
    *_, most = mixtures(gains(tuple(range(33, 0, -1))), fits)
    assert finer(most) == list(range(count))
    found = division(most).budget
    assert found.cache_bytes < third_bits
    assert sum(value for name, value in found if name != "dram_budget_bytes") == values["dram_budget"]


def _uniform(density: float) -> tuple[Densities, ...]:
    return (Densities(family="neuron", per_layer=(density,) * 11),)


def test_layers_in_groups_keep_one_format(tmp_path: Path, wide: Source) -> None:
    assert chosen(wide, tmp_path, layers_per_group=2)[1].layer_formats == ()


# A build


@pytest.mark.parametrize("mixed_formats", [pytest.param(BY_LAYER, marks=pytest.mark.slow), BY_MATRIX])
def test_a_build_with_several_formats_is_verified(tmp_path: Path, source: Source, mixed_formats) -> None:
    """Eleven layers through all stages, some matrices with three bits: bytes, text and simulation are checked."""
    path = compiled(source, Case("llama", "refine", COARSE, layer_formats=mixed_formats), tmp_path / "build")
    artifact = open_artifact(path)
    formats = artifact.manifest.unit_formats
    assert [formats[layer, "neuron"] for layer in range(11)] == list(mixed_formats)
    assert "layer-formats" in artifact.manifest.features.required
    assert ("slice-formats" in artifact.manifest.features.required) == (mixed_formats is BY_MATRIX)
    corpus = load_record(source.folder / "tokenize.json", Corpus)
    package = load_record(tmp_path / "build/package.json", Package)
    found = verify.run(VerifyConfig(), source.model, source.model, corpus, package)
    assert found.simulated_equals_real
    assert found.run.misses > 0
    assert found.ppl_artifact == pytest.approx(found.ppl_source, rel=0.2)
    arrays = {layer: artifact.selector_arrays(artifact.manifest.plans[0], layer, "neuron") for layer in (0, 1)}
    ratio = arrays[0]["read_units"][0] / arrays[1]["read_units"][0]
    assert ratio == pytest.approx(2), "a read costs twice as many units of half the bytes"


@pytest.mark.parametrize("mixed_formats", [pytest.param(BY_LAYER, marks=pytest.mark.slow), BY_MATRIX])
def test_its_whole_weights_are_those_of_one_format(tmp_path: Path, source: Source, mixed_formats) -> None:
    """A dense run computes the plain format's values, as the evaluation does; more bytes are in DRAM."""
    case = Case("llama", "dense", COARSE, layer_formats=mixed_formats)
    path = compiled(source, case, tmp_path / "build")
    assert difference(path, source, tmp_path / "coded").equal
    plain = compiled(source, Case("llama", "dense", "int4_2_2"), tmp_path / "plain")
    sizes = [open_artifact(one).manifest.plans[0].resident_bytes for one in (path, plain)]
    spec = source.model.spec
    assert sizes[0] - sizes[1] == len(finer(mixed_formats)) * spec.intermediate_size * -(-spec.hidden_size // 32) * 4
    values = [StoredModel(open_artifact(one)) for one in (path, plain)]
    for role in ("layers.0.up_proj.weight", "layers.1.down_proj.weight", "layers.6.gate_proj.weight"):
        assert (values[0].values(role) == values[1].values(role)).all()
    assert "layer_formats" not in (tmp_path / "plain/allocate.json").read_text()
