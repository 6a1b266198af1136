"""Attention and embeddings of a quantized file keep its codes, in the types that the file has them in."""

from pathlib import Path

import numpy as np
import pytest

from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.rounded import Rounded
from coldpress.compiler.checkpoint.tensors import read_codes
from coldpress.compiler.io import load_record
from coldpress.compiler.kept_codes import keeping
from coldpress.compiler.rounding._matrix import NEAREST
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import WHOLE_MLP, kept_of
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Sparsity
from tests.support.checkpoints import run
from tests.support.gguf_cases import exported, rewritten
from tests.support.product import Case, Source, compiled, with_text

LAYERS = 11
FORMATS = {"attn_v": "q6_k", "attn_q": "q5_k", "token_embd": "q5_0", "output": "int8_group32"}
"""Formats by GGUF's name; all other matrices have q4_k."""
ROLES = {"q_proj": "q5_k", "v_proj": "q6_k"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("source")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    _, file = exported(folder, "llama", sizes | {"head_dim": 64}, layers=LAYERS)

    def change(name: str, values: np.ndarray, _type: str) -> tuple[np.ndarray, str]:
        if values.ndim == 1:
            return values, "F32"
        format_name = FORMATS.get(name.split(".")[-2], "q4_k")
        codec = load("coldpress.runtime.quantization", Format, format_name)
        assert codec.GGUF_TYPE is not None
        return codec.encode(np.ascontiguousarray(values, np.float32)), codec.GGUF_TYPE

    mixed = rewritten(file, folder / "mixed.gguf", change)
    return with_text(folder, mixed, run(mixed, folder / "ingest"))


def kept(model: Model, layers: str) -> dict[str, str]:
    return {role: one.format for one in kept_of(keeping(model, layers)) for role in one.roles}


def of_all_layers(formats: dict[str, str]) -> dict[str, str]:
    return {f"layers.{layer}.{role}.weight": name for layer in range(LAYERS) for role, name in formats.items()}


def test_they_are_kept_in_the_file_s_format_or_where_they_are_smaller(source: Source) -> None:
    embeddings = {"embed_tokens.weight": "q5_0"}
    assert kept(source.model, "q4_k") == embeddings | of_all_layers(ROLES)
    assert kept(source.model, "q5_k") == embeddings | of_all_layers({"k_proj": "q4_k", "o_proj": "q4_k"})
    assert kept(source.model, "q4_1") == embeddings | of_all_layers({"k_proj": "q4_k", "o_proj": "q4_k"})


def test_a_build_stores_and_computes_them(source: Source, tmp_path: Path) -> None:
    artifact = compiled(source, Case("llama", "dense", "q4_k"), tmp_path / "build")
    sparsity = load_record(tmp_path / "build" / "allocate.json", Sparsity)
    assert sparsity.formats == keeping(source.model, "q4_k")
    session = Session(artifact)
    stored = {tensor.role: tensor.format for tensor in session.artifact.manifest.resident}
    assert of_all_layers(ROLES).items() <= stored.items()
    for role in of_all_layers(ROLES):
        np.testing.assert_array_equal(session.artifact.resident[role], read_codes(source.model, role))
    (table,) = session.artifact.manifest.flash.tables
    assert (table.role, table.format) == ("embed_tokens.weight", "q5_0")
    expected = Rounded(LayerStream(source.model), sparsity.formats, NEAREST, (WHOLE_MLP,)).logits(source.tokens[:1])[0]
    session.decoder.begin(len(expected))
    found = np.stack([session.decoder.decode(int(token)) for token in source.tokens[0]])
    assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()
