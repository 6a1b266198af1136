"""The source model with units in planes against the runtime, which decodes an artifact in the same format."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from threadpoolctl import threadpool_info, threadpool_limits

from coldpress.compiler.activity.choice import Choice
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.gram_pass import add_grams
from coldpress.compiler.activity.in_planes import InPlanes, in_model, model_for
from coldpress.compiler.activity.rounded import Rounded
from coldpress.compiler.activity.variants import Variant, last_hidden
from coldpress.compiler.io import Workspace
from coldpress.compiler.rounding import rtn
from coldpress.compiler.rounding._matrix import Known, Rounding, grams_of, matrix_of
from coldpress.compiler.rounding._weights import Algorithm, Weights
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.quantize._units import encode_resident, encode_units
from coldpress.runtime import plugins
from coldpress.runtime.generate.session import Session
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._planes import planes_of
from coldpress.runtime.sparsity import flash, refine
from coldpress.schemas.corpus import SPLITS
from coldpress.schemas.families import num_units
from coldpress.schemas.gram import INPUT_OF
from coldpress.schemas.model import Model
from coldpress.schemas.quantized import ResidentTensor
from tests.support.artifacts import Recipe, build_artifact
from tests.support.hf import load_hf, roles_of, spec_of
from tests.support.models import write_model
from tests.support.product import arrays_of
from tests.support.statistics import corpus_of_tokens

TOKENS = np.random.default_rng(8).integers(0, 384, (2, 20)).astype(np.int32)
OUTER = ("model.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(autouse=True)
def _few_drawn_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices are found from fewer drawn units: a sixteenth of the time."""
    monkeypatch.setattr(flash, "DRAWN_UNITS", 1 << 10)


def written(folder: Path, kind: str, **changes: Any) -> Model:
    """Writes a model whose embeddings and head int8 holds exactly, as artifacts store them, and its attention int4."""
    write_model(folder / "tiny", kind, num_hidden_layers=2, **changes)
    weights = load_file(folder / "tiny/model.safetensors")
    for name, values in weights.items():
        if name in OUTER or re.search(r"(attn|attention)\.\w+\.weight", name):
            codec = planes_of("int8_4_4" if name in OUTER else "int4_2_2").whole
            weights[name] = codec.decode(codec.encode(values), values.shape[1])
    save_file(weights, folder / "tiny/model.safetensors", {"format": "pt"})
    return ingest.run(IngestConfig(model=str(folder / "tiny")), Workspace(folder / "work", "test"))


def decoded(
    model: Model, folder: Path, quantization: str, inputs: bool, rounding: Rounding
) -> tuple[Session, np.ndarray]:
    """An artifact with no unit in DRAM, and its logits of each token after those before it."""
    hf = load_hf(Path(model.tensors["norm.weight"].file).resolve().parent)
    spec, families = spec_of(hf.config), ("mlp_in", "mlp_mid") if inputs else ("neuron",)
    recipe = Recipe(
        spec=spec,
        method="refine",
        options={"inputs": inputs, "use_read_units": False},
        format=quantization,
        families=families,
        pinned_share=0,
        slots_share=0,
        density=0.9,  # of drawn magnitudes, which are smaller than these models' own
        context_length=TOKENS.shape[1],
        read_buffer_bytes=1 << 18,
        order={
            (layer, family): np.arange(num_units(family, spec), dtype=np.int32)
            for layer in range(spec.num_hidden_layers)
            for family in families
        },
    )
    matrices = {matrix_of(role) for role in model.tensors}
    known = [Known(grams_of(rounding.gram, layer, matrices)) for layer in range(spec.num_hidden_layers)]
    units = {
        (layer, family): encode_units(rounding.algorithm, model, layer, family, quantization, known[layer])
        for layer, family in recipe.order
    }
    built = build_artifact(folder / "a.coldpress", recipe, roles_of(hf, spec), units)
    session = Session(built.path, plan=built.manifest.plans[0], modelled=True)
    logits = []
    for block in TOKENS:
        session.decoder.begin(len(block))
        logits.append(np.stack([session.decoder.decode(int(token)) for token in block]))
    return session, np.stack(logits)


def rounding_by(algorithm: str, model: Model, folder: Path) -> Rounding:
    """An algorithm, with Gram matrices if it needs them."""
    found = plugins.load("coldpress.compiler.rounding", Algorithm, algorithm)
    if not found.NEEDS_GRAM:
        return Rounding(found)
    corpus = corpus_of_tokens(folder / "corpus", dict.fromkeys(SPLITS, TOKENS))
    return Rounding(found, add_grams(LayerStream(model), corpus, Workspace(folder / "gram", "test")))


@pytest.mark.parametrize("inputs", [False, True], ids=["neurons", "inputs"])
@pytest.mark.parametrize(
    ("kind", "quantization", "algorithm"),
    [
        ("llama", "int4_2_2", "rtn"),
        ("llama", "int4_2_2", "nested"),
        ("llama", "int4_3_1", "rtn"),
        ("llama", "int4_3_1", "nested"),
        ("opt", "int4_2_2", "rtn"),
        ("phi3", "int4_2_2", "nested"),
        ("mixtral", "int4_2_2", "nested"),
        ("gpt_oss", "int4_2_2", "nested"),
        ("bamboo", "int4_2_2", "rtn"),
    ],
)
def test_logits_are_those_of_the_runtime(
    kind: str, quantization: str, algorithm: str, inputs: bool, tmp_path: Path
) -> None:
    """Up to a unit at the edge of a choice: the runtime's KV cache is fp16. Codes are those of `quantize`."""
    model = written(tmp_path, kind)
    rounding = rounding_by(algorithm, model, tmp_path)
    session, expected = decoded(model, tmp_path, quantization, inputs, rounding)
    source, selector = LayerStream(model), refine.Plugin()
    families = selector.families(model.spec, refine.Options(inputs=inputs))
    running = model_for(selector, source, quantization, families, rounding)
    arrays = arrays_of(session)

    def logits_at(price: float | None) -> np.ndarray:
        own = {
            key: dict(found) if price is None else {**found, "price": np.array([price])}
            for key, found in arrays.items()
        }
        chosen = Variant(in_model(Choice(selector, own, model.spec)), families)
        return source.head(last_hidden(running, TOKENS, [chosen])).numpy()

    found, coarse = logits_at(None), logits_at(1e30)
    error = np.abs(found - expected)
    assert np.median(error.max(axis=2)) < 2e-3 * np.abs(expected).max()
    assert error.mean() < 0.2 * np.abs(coarse - expected).mean(), "what is refined shows"


def test_matrices_outside_planes_have_the_codes_of_the_build(tmp_path: Path) -> None:
    """Those that `quantize` stores: units' slices, and what stays in DRAM row by row."""
    write_model(tmp_path / "tiny", num_hidden_layers=2)
    model = ingest.run(IngestConfig(model=str(tmp_path / "tiny")), Workspace(tmp_path / "work", "test"))
    rounding = rounding_by("gptq", model, tmp_path)
    running = Rounded(LayerStream(model), "int3_group32", rounding, ("mlp_mid",))
    codec = plugins.load("coldpress.runtime.quantization", Format, "int3_group32")
    known = Known(grams_of(rounding.gram, 1, INPUT_OF))
    down = encode_units(rounding.algorithm, model, 1, "mlp_mid", "int3_group32", known)
    np.testing.assert_array_equal(running._of_role("layers.1.down_proj.weight").numpy().T, codec.decode(down, 64))
    for name in ("q_proj", "up_proj"):
        shape = model.tensors[role := f"layers.1.{name}.weight"].shape
        tensor = ResidentTensor(role=role, format="int3_group32", shape=shape)
        stored = codec.decode(encode_resident(rounding.algorithm, model, tensor, known), shape[1])
        found = running._of_role(role).numpy()
        np.testing.assert_array_equal(found, stored)
        nearest = Rounded(LayerStream(model), "int3_group32")._of_role(role).numpy()
        assert np.abs(found - nearest).max() > 0.01, "the algorithm shows"


def test_everything_refined_is_the_plain_format(tmp_path: Path) -> None:
    """Against matrices rounded slice by slice, without another plane beside them."""
    model = written(tmp_path, "llama")
    selector, source = refine.Plugin(), LayerStream(model)
    arrays = {"price": np.zeros(1), "read_units": np.zeros(4), "unit_norms": np.ones(160, np.float32)}
    chosen = in_model(Choice(selector, {(layer, "neuron"): arrays for layer in range(2)}, model.spec))
    codec = plugins.load("coldpress.runtime.quantization", Format, "int4_group32")

    class Plain(LayerStream):
        def _of_role(self, role: str) -> Any:
            import torch

            tensor = super()._of_role(role)
            if "_proj" not in role:
                return tensor
            rows = (tensor.T if "down_proj" in role else tensor).contiguous().numpy()
            values = codec.decode(codec.encode(rows), rows.shape[1])
            return torch.from_numpy(np.ascontiguousarray(values.T if "down_proj" in role else values))

    for name in ("int4_2_2", "int4_3_1"):
        running = model_for(selector, source, name, ("neuron",))
        found = last_hidden(running, TOKENS, [Variant(chosen, ("neuron",))])
        np.testing.assert_allclose(found, Plain(model).last_hidden(TOKENS), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "algorithm"), [("llama", "rtn"), ("llama", "nested"), ("opt", "rtn"), ("phi3", "rtn"), ("bamboo", "rtn")]
)
def test_coarse_planes_alone_are_the_runtime_s_draft(kind: str, algorithm: str, tmp_path: Path) -> None:
    model = written(tmp_path, kind)
    rounding = rounding_by(algorithm, model, tmp_path)
    session, whole = decoded(model, tmp_path, "int4_2_2", False, rounding)
    expected = []
    for block in TOKENS:
        session.decoder.begin(len(block))
        expected.append(np.stack([session.decoder.decode_coarse(int(token)) for token in block]))
    source = LayerStream(model)
    alone = InPlanes(source, "int4_2_2", ("neuron",), rounding, coarse_alone=True)
    found = source.head(alone.last_hidden(TOKENS)).numpy()
    error = np.abs(found - np.stack(expected))
    assert np.median(error.max(axis=2)) < 2e-3 * np.abs(whole).max()
    assert error.mean() < 0.2 * np.abs(whole - np.stack(expected)).mean(), "low bits show"


def test_codes_do_not_depend_on_cores(tmp_path: Path) -> None:
    """Products of matrices round otherwise on several, and a job of `quantize` has one."""
    write_model(tmp_path / "tiny", num_hidden_layers=1)
    model = ingest.run(IngestConfig(model=str(tmp_path / "tiny")), Workspace(tmp_path / "work", "test"))
    seen: list[int] = []

    class Watched(rtn.Plugin):
        def quantize(self, weights: Weights, format_name: str) -> np.ndarray:
            seen.extend(library["num_threads"] for library in threadpool_info())
            return super().quantize(weights, format_name)

    with threadpool_limits(2):
        Rounding(Watched()).codes(model, "layers.0.down_proj.weight", "column", "int4_2_2")
    assert set(seen) == {1}
