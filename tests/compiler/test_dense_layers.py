"""A mixture with layers without experts and a shared expert, through all stages: it decodes what is evaluated."""

import json
from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.io import Workspace, load_record
from coldpress.compiler.sections import make_sections
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.runtime.artifact.reader import load_curve, open_artifact
from coldpress.schemas.activations import Activations
from coldpress.schemas.errors import CheckpointError, ColdpressError
from coldpress.schemas.model import Model
from tests.support.models import random_weights, write_model, write_weights
from tests.support.product import Case, Source, compiled, difference, source_of

LAYERS, DENSE = 12, (0, 1, 2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """GLM's: three layers without experts, groups of experts, two shared experts."""
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2}
    return source_of(
        tmp_path_factory.mktemp("glm"), "glm4_moe", relu=False, layers=LAYERS, first_k_dense_replace=3, **groups
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("glm4_moe", "dense", "int8_group32"),
        Case("glm4_moe", "topk", "fp16", attention=True),
    ],
    ids=lambda case: case.method,
)
def test_the_runtime_computes_what_is_evaluated(case: Case, source: Source, tmp_path: Path) -> None:
    artifact = compiled(source, case, tmp_path / "build")
    manifest = open_artifact(artifact).manifest
    assert manifest.model.dense_layers == DENSE
    of_mlp = {
        (layer, one.family) for one in manifest.flash.sections for layer in one.layers if one.family[:4] != "attn"
    }
    assert {layer for layer, _ in of_mlp} == set(range(3, LAYERS))
    found = difference(artifact, source, tmp_path / "codes")
    assert found.equal, found
    curve = load_record(tmp_path / "build/recalibrate.json", Activations).experts
    assert curve is not None
    assert (len(curve.lru_misses), curve.num_experts_per_tok) == (8, 3)
    assert load_curve(open_artifact(artifact)) == curve
    assert (case.method == "topk") == any(section.family == "attn_in" for section in manifest.flash.sections)


def test_groups_of_layers_are_refused(source: Source) -> None:
    with pytest.raises(ColdpressError, match="layers_per_group=2 was asked for, and layers 0, 1, 2 have no experts"):
        make_sections(source.model.spec, ("neuron",), "fp16", 2)


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("glm4_moe", {"first_k_dense_replace": 2}, "none of 2 layers has experts"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1]}, "none of 2 layers has experts"),
        ("glm4_moe", {"n_group": 4, "topk_group": 1}, "n_group is 4, expected groups of at least 2 experts"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0, expected a number above 0"),
        ("qwen2_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers is .*expected a list of layers' numbers"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected at most 4 experts"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, which is not supported, expected null"),
        (
            "qwen2_moe",
            {"layer_types": ["sliding_attention", "full_attention"]},
            "layer_types names sliding_attention and use_sliding_window is false",
        ),
    ],
)
def test_what_is_not_supported_is_refused(kind: str, changes: dict[str, object], expected: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=expected):
        source_of(tmp_path, kind, relu=False, layers=2, **changes)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """Those that the configuration counts; others are foreign."""
    folder = write_model(tmp_path / "a", "glm4_moe", num_hidden_layers=2, overrides={"num_nextn_predict_layers": 1})
    weights = random_weights(json.loads((folder / "config.json").read_text()))
    more = {"model.layers.2.eh_proj.weight": weights["model.layers.1.self_attn.o_proj.weight"]}

    def ingested(extra: dict[str, np.ndarray]) -> Model:
        write_weights(folder, {**weights, **extra})
        return ingest.run(IngestConfig(model=str(folder)), Workspace(tmp_path / "work", "test"))

    assert not [role for role in ingested(more).tensors if role.startswith("layers.2")]
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.3\.eh_proj.weight has no place"):
        ingested({"model.layers.3.eh_proj.weight": weights["model.layers.1.self_attn.o_proj.weight"]})
