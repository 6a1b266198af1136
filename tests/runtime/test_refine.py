"""Decoding with units in planes: all refined is the plain format bit for bit; others compute by their coarse planes."""

import numpy as np
import pytest

from coldpress.runtime import _native, plugins
from coldpress.runtime.arithmetic import activation
from coldpress.runtime.artifact.errors import ArtifactError
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.decoder.blocks import chosen_blocks
from coldpress.runtime.decoder.tokens import Tokens
from coldpress.runtime.generate.session import Session
from coldpress.runtime.quantization._planes import planes_of, whole_format
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import Recorder
from coldpress.schemas.errors import ColdpressError
from coldpress.schemas.families import slice_length, slices
from tests.support.artifacts import Recipe, build_artifact, change_manifest, small_spec

FORMATS = [name for name in plugins.names("coldpress.runtime.quantization") if planes_of(name)]
TOKENS = np.array([3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26])
ALL_IN_DRAM = {"pinned_share": 1.0, "slots_share": 0.0, "read_buffer_bytes": 1 << 20}


def spec_of(**changes):
    return small_spec(**{"num_hidden_layers": 11, "intermediate_size": 64, "hidden_act": "silu"} | changes)


def logits_of(session):
    """Logits of prefilled tokens, of tokens one by one, and of tokens together."""
    session.decoder.begin(32)
    prefilled = session.decoder.prefill(TOKENS[:4])
    alone = [session.decoder.decode(token) for token in TOKENS[4:9].tolist()]
    return np.concatenate([prefilled, alone, session.decoder.decode_many(TOKENS[9:])])


@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("families", ["neuron", "mlp_in+mlp_mid", "mlp_mid"])
@pytest.mark.parametrize("quantization", FORMATS)
def test_everything_refined_is_the_plain_format_bit_for_bit(tmp_path, quantization, families, experts):
    """If units come in the same batches, over which sums are made: with everything in DRAM, and a large buffer."""
    spec = spec_of(num_experts=experts, num_experts_per_tok=min(2, experts))
    common = {"spec": spec, "method": "dense", "options": {"families": families}, "density": 1.0}
    common["families"] = tuple(families.split("+"))
    planar = build_artifact(tmp_path / "a", Recipe(format=quantization, **common, **ALL_IN_DRAM))
    plain = build_artifact(tmp_path / "b", Recipe(format=whole_format(quantization), **common, **ALL_IN_DRAM))
    assert (logits_of(Session(planar.path)) == logits_of(Session(plain.path))).all()


@pytest.mark.parametrize("activations", ["fp32", "int16"])
@pytest.mark.parametrize("cpu", _native.cpus())
def test_joined_units_have_the_bits_of_the_plain_format(tmp_path, cpu, activations):
    """On every instruction set, and in a model with biases."""
    before = _native.cpu()
    try:
        _native.use_cpu(cpu)
        spec = spec_of(gated_mlp=False, hidden_act="relu", norm="layer_norm")
        common = {"spec": spec, "method": "dense", "density": 1.0}
        planar = build_artifact(tmp_path / "a", Recipe(format="int4_3_1", **common, **ALL_IN_DRAM))
        plain = build_artifact(tmp_path / "b", Recipe(format="int4_group32", **common, **ALL_IN_DRAM))
        found, expected = (logits_of(Session(one.path, activations=activations)) for one in (planar, plain))
        assert (found == expected).all()
    finally:
        _native.use_cpu(before)


def values_of(planes, coarse, units, spec, family):
    """The coarse and the joined values of each role's slices, float64 [units, length]."""
    whole, found, at = planes.join(coarse, units), {}, [0, 0]
    for piece in slices(family, spec):
        length = slice_length(piece, spec)
        sizes = planes.nbytes(length), planes.whole.nbytes(length)
        high, both = (codes[:, a : a + size] for codes, a, size in zip((coarse, whole), at, sizes, strict=True))
        found[piece.role] = [
            fmt.decode(np.ascontiguousarray(codes), length).astype(np.float64)
            for fmt, codes in ((planes, high), (planes.whole, both))
        ]
        at = [a + size for a, size in zip(at, sizes, strict=True)]
    return found


@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("quantization", FORMATS)
def test_units_that_are_not_refined_compute_by_their_coarse_planes(tmp_path, quantization, inputs, experts):
    """A layer of one token, held against the formula in float64; half of the units are refined, drawn at random."""
    spec = spec_of(num_experts=experts, num_experts_per_tok=min(2, experts))
    families = ("mlp_in", "mlp_mid") if inputs else ("neuron",)
    recipe = Recipe(spec=spec, method="refine", options={"inputs": inputs}, format=quantization, families=families)
    built = build_artifact(tmp_path / "a", recipe)
    session, planes, random = Session(built.path), planes_of(quantization), np.random.default_rng(4)
    decoder, store = session.decoder, session.store
    x, layer = random.normal(size=(1, spec.hidden_size)).astype(np.float32), 7
    mlp = decoder._layers[layer].mlp
    work, refined = mlp.begin(x, Tokens((), None)), {}
    for key in mlp.requests:
        signal = work.signal(key)
        assert signal.shape == (1, len(built.units[key]))
        ids = np.flatnonzero(random.random(signal.shape[1]) < 0.5).astype(np.int32)
        if experts > 1:
            ids = ids[work.experts[0][ids // (signal.shape[1] // experts)]]
        coarse, came = decoder._coarse[key], []
        for block in chosen_blocks(store.submit(key, ids), decoder._units[key[1]], None, coarse):
            work.add(key, block)
            came.append(block.ids)
        refined[key[1]] = np.isin(np.arange(signal.shape[1]), np.concatenate(came))
        work.add(key, coarse.rest([np.concatenate(came)], work.experts))
    expected = formula(built, layer, planes, x[0].astype(np.float64), refined, mlp, x)
    np.testing.assert_allclose(work.result()[0], expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def formula(built, layer, planes, x, refined, mlp, x_TN):
    """The MLP's output, float64 [hidden_size]."""
    spec, act = built.recipe.spec, activation(built.recipe.spec.hidden_act, 0.0)
    weights = mlp.route(x_TN)[1][0] if spec.is_mixture else np.ones(1)
    found = {}
    for family, chosen in refined.items():
        coarse, units = planes.split(built.units[layer, family])
        for role, (high, both) in values_of(planes, coarse, units, spec, family).items():
            found[role] = np.where(chosen[:, None], both, high)
    output = np.zeros(spec.hidden_size)
    for expert, weight in enumerate(weights):
        gate, up, down = (np.split(found[role], len(weights))[expert] for role in ("gate_proj", "up_proj", "down_proj"))
        inner = act(gate @ x) * (up @ x) if "neuron" in refined else act(x @ gate) * (x @ up)
        output += weight * (inner @ down)
    return output


def test_a_simulation_reads_what_a_run_that_refines_read(tmp_path):
    recipe = Recipe(spec=spec_of(intermediate_size=512), method="refine", density=0.5, slots_share=0.02)
    recorder = Recorder()
    session = Session(build_artifact(tmp_path / "a", recipe).path, recorder=recorder)
    session.decoder.begin(32)
    session.decoder.prefill(TOKENS[:4])
    for token in TOKENS[4:].tolist():
        session.decoder.decode(token)
    assert session.store.counters.read_bytes > 0
    simulated = simulate(session.artifact, session.plan, recorder.events)
    assert simulated.extents_sha256 == session.store.extents_sha256()


@pytest.mark.parametrize(
    ("method", "quantization", "words"),
    [
        ("topk", "int4_2_2", "in planes: they are refined or coarse"),
        ("refine", "int4_group32", "refines units in planes"),
    ],
)
def test_a_selector_that_does_not_go_with_the_format_is_refused(tmp_path, method, quantization, words):
    families = ("mlp_in", "mlp_mid")
    built = build_artifact(
        tmp_path / "a", Recipe(spec=spec_of(), method="dense", format=quantization, families=families, density=1.0)
    )
    with pytest.raises(ColdpressError, match=words):
        Session(built.path, selector=method)


@pytest.mark.parametrize("changed", ["format", "shape", "missing", "attention"])
def test_an_artifact_whose_coarse_planes_do_not_fit_is_refused(tmp_path, changed):
    families = ("attn_out",) if changed == "attention" else ("neuron",)
    quantization = "fp16" if changed == "attention" else "int4_2_2"
    recipe = Recipe(spec=spec_of(num_hidden_layers=2), method="dense", format=quantization, families=families)
    path = build_artifact(tmp_path / "a", recipe).path

    def change(manifest):
        entries = [entry for entry in manifest["resident"] if entry["role"].endswith(".coarse")]
        if changed == "format":
            entries[1]["format"] = "int4_3_1"
        elif changed == "shape":
            entries[1]["shape"][1] += 32
        elif changed == "missing":
            manifest["resident"].remove(entries[1])
        else:
            manifest["families"][0]["format"] = "int4_2_2"

    change_manifest(path, change)
    words = {"format": "int4_2_2, as its units", "shape": "neuron.coarse", "missing": "a list without layers.1.neuron"}
    with pytest.raises(ArtifactError, match=words.get(changed, "which only the MLP's families have")):
        open_artifact(path)


def test_units_that_are_in_memory_are_refined_and_not_coarse_as_well(tmp_path):
    """With everything in DRAM a token uses all refinements, since they cost no read: the logits are the dense ones."""
    common = {"spec": spec_of(), "format": "int4_2_2", **ALL_IN_DRAM}
    refined = build_artifact(tmp_path / "a", Recipe(method="refine", density=0.1, **common))
    dense = build_artifact(tmp_path / "b", Recipe(method="dense", density=1.0, **common))
    found = []
    for one in (refined, dense):
        session = Session(one.path)
        session.decoder.begin(32)
        session.decoder.prefill(TOKENS[:4])
        found.append(np.stack([session.decoder.decode(token) for token in TOKENS[4:].tolist()]))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5 * np.abs(found[1]).max())
