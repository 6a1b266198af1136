"""ingest: a model in GGUF is what it was before it was exported, and hostile files end in a sentence."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coldpress.compiler.checkpoint.tensors import read_role, rotary_inv_freq
from coldpress.compiler.stages import export
from coldpress.compiler.stages.export import ExportConfig
from coldpress.runtime.generate.session import Session
from coldpress.schemas.model import Model
from coldpress.schemas.package import Package
from tests.support.artifacts import Recipe, build_artifact, change_manifest
from tests.support.checkpoints import run
from tests.support.gguf_cases import WITH_MORE
from tests.support.models import write_model
from tests.support.records import PROVENANCE

PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 11, "num_experts_per_tok": 3, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "nemotron": ("nemotron", {}),
    "arcee": ("arcee", {}),
    "olmoe": ("olmoe", {"num_key_value_heads": 4}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
}


def exported(folder: Path, kind: str, overrides: dict[str, Any], layers: int = 2, **options: Any) -> tuple[Model, Path]:
    """Returns a model of transformers', and the GGUF file that `export` makes of it."""
    write_model(folder / "m", kind, num_hidden_layers=layers, dtype="float16", overrides=overrides)
    model = run(folder / "m", folder / "w")
    roles = {role: read_role(model, role) for role in model.tensors}
    roles |= {role: rotary_inv_freq(model, kind) for kind, role in model.spec.frequencies.items()}
    built = build_artifact(folder / "a", Recipe(model.spec, method="dense"), roles)
    shutil.copytree(
        folder / "m", built.path / "tokenizer", ignore=lambda _, names: [n for n in names if "tok" not in n]
    )
    change_manifest(built.path, lambda manifest: None, relist=True)
    sha256 = Session(built.path).artifact.sha256
    sizes = {"artifact_bytes": 1, "flash_bytes": 1, "resident_bytes": 1, "predictor_bytes": 0}
    package = Package(folder=str(built.path), manifest_sha256=sha256, provenance=PROVENANCE, **sizes)
    export.run(ExportConfig(export="gguf", options=options, file=str(folder / "a.gguf")), package)
    return model, folder / "a.gguf"


def near(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Returns their numbers where ours are the same as far as float32 goes."""
    numbers = {key: value for key, value in theirs.items() if isinstance(value, float)}
    return {key: value for key, value in numbers.items() if np.isclose(ours[key] or 0, value, rtol=1e-6)}


@pytest.mark.parametrize("name", [*PLAIN, *WITH_MORE])
def test_a_model_comes_back_from_its_gguf(tmp_path, name):
    kind, overrides = (PLAIN | WITH_MORE)[name]
    model, file = exported(tmp_path, kind, overrides, 12 if name in WITH_MORE else 2)
    found = run(file, tmp_path / "g")
    ours, theirs = ({**one.spec.model_dump()} for one in (found, model))
    assert {**ours, **near(ours, theirs)} == theirs
    assert found.tensors.keys() == model.tensors.keys()
    for role in model.tensors:
        values = read_role(model, role)
        np.testing.assert_allclose(read_role(found, role), values, rtol=0, atol=2e-7 if "norm" in role else 0)
    for kind in model.spec.frequencies:
        np.testing.assert_allclose(rotary_inv_freq(found, kind), rotary_inv_freq(model, kind), rtol=1e-6)
