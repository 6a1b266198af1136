"""The source model with units in planes against the runtime, which decodes an artifact in the same format."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coldpress.compiler.activity.choice import Choice
from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.in_planes import InPlanes, in_model, model_for
from coldpress.compiler.activity.variants import Variant, last_hidden
from coldpress.compiler.io import Workspace
from coldpress.compiler.stages import ingest
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.runtime import plugins
from coldpress.runtime.generate.session import Session
from coldpress.runtime.quantization import Format
from coldpress.runtime.quantization._planes import planes_of
from coldpress.runtime.sparsity import flash, refine
from coldpress.schemas.families import num_units
from coldpress.schemas.model import Model
from tests.support.artifacts import Recipe, build_artifact
from tests.support.hf import load_hf, roles_of, spec_of
from tests.support.models import write_model
from tests.support.product import arrays_of

TOKENS = np.random.default_rng(8).integers(0, 384, (2, 20)).astype(np.int32)
OUTER = ("model.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(autouse=True)
def _few_drawn_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices are found from fewer drawn units: a sixteenth of the time."""
    monkeypatch.setattr(flash, "DRAWN_UNITS", 1 << 10)


def written(folder: Path, kind: str, **changes: Any) -> Model:
    """Writes a model whose embeddings and head int8 holds exactly, as artifacts store them."""
    write_model(folder / "tiny", kind, num_hidden_layers=2, **changes)
    weights, codec = load_file(folder / "tiny/model.safetensors"), planes_of("int8_4_4").whole
    for name in OUTER:
        if name in weights:
            weights[name] = codec.decode(codec.encode(weights[name]), weights[name].shape[1])
    save_file(weights, folder / "tiny/model.safetensors", {"format": "pt"})
    return ingest.run(IngestConfig(model=str(folder / "tiny")), Workspace(folder / "work", "test"))


def decoded(model: Model, folder: Path, quantization: str, inputs: bool) -> tuple[Session, np.ndarray]:
    """An artifact with no unit in DRAM, and its logits of each token after those before it."""
    hf = load_hf(Path(model.tensors["norm.weight"].file).parent)
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
    built = build_artifact(folder / "a.coldpress", recipe, roles_of(hf, spec))
    session = Session(built.path, plan=built.manifest.plans[0], modelled=True)
    logits = []
    for block in TOKENS:
        session.decoder.begin(len(block))
        logits.append(np.stack([session.decoder.decode(int(token)) for token in block]))
    return session, np.stack(logits)


@pytest.mark.parametrize("inputs", [False, True], ids=["neurons", "inputs"])
@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        ("llama", "int4_2_2"),
        ("llama", "int4_3_1"),
        ("opt", "int4_2_2"),
        ("phi3", "int4_2_2"),
        ("mixtral", "int4_2_2"),
        ("bamboo", "int4_2_2"),
    ],
)
def test_logits_are_those_of_the_runtime(kind: str, quantization: str, inputs: bool, tmp_path: Path) -> None:
    """Up to a unit at the edge of a choice: the runtime's KV cache is fp16."""
    model = written(tmp_path, kind)
    session, expected = decoded(model, tmp_path, quantization, inputs)
    source, selector = LayerStream(model), refine.Plugin()
    families = selector.families(model.spec, refine.Options(inputs=inputs))
    running = model_for(selector, source, quantization, families)
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


@pytest.mark.parametrize("kind", ["llama", "opt", "phi3", "bamboo"])
def test_coarse_planes_alone_are_the_runtime_s_draft(kind: str, tmp_path: Path) -> None:
    model = written(tmp_path, kind)
    session, whole = decoded(model, tmp_path, "int4_2_2", inputs=False)
    expected = []
    for block in TOKENS:
        session.decoder.begin(len(block))
        expected.append(np.stack([session.decoder.decode_coarse(int(token)) for token in block]))
    source = LayerStream(model)
    alone = InPlanes(source, "int4_2_2", ("neuron",), coarse_alone=True)
    found = source.head(alone.last_hidden(TOKENS)).numpy()
    error = np.abs(found - np.stack(expected))
    assert np.median(error.max(axis=2)) < 2e-3 * np.abs(whole).max()
    assert error.mean() < 0.2 * np.abs(whole - np.stack(expected)).mean(), "low bits show"
