"""A KV cache in int8: attention over it, what it takes of the budget, and that everything else goes on as it does."""

import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from coldpress.cli.main import main
from coldpress.compiler.stages.verify.decoded import decode
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.decoder.tokens import new_cache
from coldpress.runtime.dram.kv_cache import head_bytes, kv_cache_bytes
from coldpress.runtime.generate.batch import generate_batch
from coldpress.runtime.generate.session import Session
from coldpress.runtime.kernels import attention
from coldpress.runtime.kernels.attention import encode_heads
from coldpress.runtime.quantization import int8_group32
from coldpress.schemas.errors import ArtifactError, ColdpressError
from tests.support import reference_kernels
from tests.support.artifacts import Recipe, build_artifact, change_manifest
from tests.support.shapes import small_spec
from tests.support.tiny import describe, tensor_shapes

PROMPT = [3, 14, 15, 9, 26]


def cached(rng, positions, heads, head_dim):
    """(what is kept uint8, what that says float32) of random keys or values."""
    codes = int8_group32.Plugin().encode(rng.standard_normal((positions * heads, head_dim)).astype(np.float32))
    floats = int8_group32.Plugin().decode(codes, head_dim).reshape(positions, heads, head_dim)
    return codes.reshape(positions, heads, -1), floats


def softmax_attention(q, keys, values, first, last, scale=None, softcap=None, sinks=None):
    """float64 [heads, head_dim], written out."""
    group, out = len(q) // keys.shape[1], []
    for head, query in enumerate(q.astype(np.float64)):
        scores = keys[first:last, head // group] @ query * (scale or 1 / np.sqrt(q.shape[1]))
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        peak = scores.max() if sinks is None else max(scores.max(), sinks[head])
        weights, rest = np.exp(scores - peak), 0 if sinks is None else np.exp(sinks[head] - peak)
        out.append(weights / (weights.sum() + rest) @ values[first:last, head // group])
    return np.stack(out)


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("scores", [{}, {"scale": 0.4, "softcap": 1.5}, {"sinks": np.float32([-1, 0, 2, 5])}])
def test_attention_over_codes_is_that_over_what_they_say(rng, cpu, head_dim, window, scores):
    (keys, k), (values, v) = (cached(rng, 40, 2, head_dim) for _ in "kv")
    q = rng.standard_normal((6, 4, head_dim)).astype(np.float32)
    many = attention.attend_prefill(q, keys, values, 37, window, **scores)
    for at, query in enumerate(q):
        length = 32 + at
        first = 0 if window is None else length - window
        expected = softmax_attention(query, k.astype(np.float64), v.astype(np.float64), first, length, **scores)
        one = attention.attend(query, keys, values, length, window, num_threads=2, **scores)
        reference = reference_kernels.attend(query, keys, values, length, window, **scores)
        for found in (one, reference, many[at]):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def on_the_edge(rng, head_dim):
    """float32 [tokens, 2, head_dim]: levels that lie between two, scales that do between halves, small and large."""
    levels = rng.integers(-254, 255, (600, 2, head_dim)) / 2
    levels[..., 0] = 127
    near = np.nextafter(levels.astype(np.float32), np.float32(np.inf) * rng.choice([-1, 1], levels.shape))
    values = np.where(rng.random(levels.shape) < 0.3, near, levels)
    scales = np.exp2(rng.integers(-40, 16, (600, 2, 1))) * (1 + rng.integers(0, 4096, (600, 2, 1)) / 4096)
    values = values * np.minimum(scales, 65519)
    values[:3] = [[[0]], [[1e-45]], [[-1e-38]]]
    return values.astype(np.float32)


@pytest.mark.parametrize("head_dim", [32, 80])
def test_the_native_codes_are_those_of_numpy_to_the_bit(rng, head_dim):
    for values in (on_the_edge(rng, head_dim), rng.standard_normal((300, 2, head_dim)).astype(np.float32)):
        found, expected = np.empty((2, len(values), 2, int8_group32.Plugin().nbytes(head_dim)), np.uint8)
        encode_heads(values, found)
        reference_kernels.encode_heads(values, expected)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -65520 * 127.0])
def test_a_value_beyond_a_scale_is_refused_wherever_it_stands(rng, wrong):
    values = rng.standard_normal((3, 2, 40)).astype(np.float32)
    values[1, 0, 35] = wrong
    with pytest.raises(ColdpressError, match="int8_group32: found a value or scale of magnitude"):
        encode_heads(values, np.empty((3, 2, 68), np.uint8))


def test_codes_are_written_into_room_of_their_size_alone():
    values = np.zeros((3, 2, 40), np.float32)
    with pytest.raises(ValueError, match="a head of out has 34 values, expected 68"):
        encode_heads(values, np.empty((3, 2, 34), np.uint8))
    with pytest.raises(ValueError, match="values and out differ in shape at axis 0"):
        encode_heads(values, np.empty((2, 2, 68), np.uint8))
    with pytest.raises(TypeError):
        encode_heads(values, np.empty((3, 2, 136), np.uint8)[:, :, ::2])  # a copy would be written to


def test_shapes_that_do_not_fit_are_refused(rng):
    keys, _ = cached(rng, 4, 2, 32)
    q = np.zeros((4, 48), np.float32)
    with pytest.raises(ValueError, match="a key has 34 values, expected 68"):
        attention.attend(q, keys, keys, 4)
    with pytest.raises(ValueError, match=r"expected \[context, kv_heads, 68\]"):
        attention.attend_prefill(q[None], keys, keys, 4)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """Heads of whole groups, a quarter of the units in DRAM."""
    spec = small_spec(num_hidden_layers=4, head_dim=32, rotary_dim=32, hidden_act="silu")
    recipe = Recipe(spec=spec, method="topk", density=0.5, slots_share=0.25, context_length=48)
    return build_artifact(tmp_path_factory.mktemp("kv") / "a.coldpress", recipe)


def test_what_it_saves_of_the_budget_is_for_units(artifact):
    fp16, int8 = (Session(artifact.path, kv_cache=kind) for kind in ("fp16", "int8"))
    assert int8.plan.kv_cache_bytes == 4 * 48 * 2 * 2 * 34  # layers, tokens, heads, keys and values, a group of 32
    assert 32 * int8.plan.kv_cache_bytes == 17 * fp16.plan.kv_cache_bytes
    int8.decoder.begin(48)
    (cache,) = int8.decoder._caches
    assert cache.keys.nbytes + cache.values.nbytes == int8.plan.kv_cache_bytes
    slots = [sum(part.cache_slots for part in session.plan.parts) for session in (fp16, int8)]
    assert slots[1] > slots[0]
    assert int8.store.dram_used_bytes <= int8.plan.dram_budget_bytes == fp16.plan.dram_budget_bytes
    less = int8.store.dram_used_bytes - 4096
    assert Session(artifact.path, kv_cache="int8", dram_budget_bytes=less).plan.dram_budget_bytes == less


def test_heads_of_which_it_would_take_more_are_refused(relu_artifact, capsys):
    """A head of 16 values fills half a group: 34 bytes, where fp16 has 32."""
    with pytest.raises(ColdpressError, match=r"int8 takes 34 bytes for the 16 values of a head .* fewer than the 32"):
        Session(relu_artifact.path, kv_cache="int8")
    assert main(["bench", str(relu_artifact.path), "--tokens", "1", "--kv-cache", "int8"]) == 2
    assert "use fp16\n" in capsys.readouterr().err
    assert [head_bytes(head_dim, "int8") for head_dim in (18, 32, 35, 40)] == [34, 34, 68, 68]
    with pytest.raises(ColdpressError, match="34 bytes for the 17 values"):
        head_bytes(17, "int8")


@pytest.fixture(scope="module")
def built_for_int8(tmp_path_factory):
    """The same with an int8 KV cache in its plan."""
    spec = small_spec(num_hidden_layers=4, head_dim=32, rotary_dim=32, hidden_act="silu")
    recipe = Recipe(spec=spec, method="topk", density=0.5, slots_share=0.25, context_length=48, kv_cache="int8")
    return build_artifact(tmp_path_factory.mktemp("kv8") / "a.coldpress", recipe)


@pytest.mark.slow
def test_a_plan_says_how_keys_and_values_are_kept_and_the_caller_says_otherwise(artifact, built_for_int8, capsys):
    manifest = open_artifact(built_for_int8.path).manifest
    own, said = Session(built_for_int8.path), Session(artifact.path, kv_cache="int8")
    assert own.plan == manifest.plans[0] == Session(built_for_int8.path, kv_cache="int8").plan
    assert (own.plan.kv_cache, own.plan.kv_cache_bytes) == ("int8", said.plan.kv_cache_bytes)
    for found in (own, said):
        found.decoder.begin(48)
        assert found.decoder._caches[0].keys.dtype == np.uint8
    other = Session(built_for_int8.path, kv_cache="fp16")
    assert 17 * other.plan.kv_cache_bytes == 32 * own.plan.kv_cache_bytes
    assert other.plan.kv_cache == "fp16"
    assert other.store.dram_used_bytes <= other.plan.dram_budget_bytes == own.plan.dram_budget_bytes
    assert main(["bench", str(built_for_int8.path), "--ladder", "--tokens", "2", "--runs", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ladder"]
    assert main(["bench", str(built_for_int8.path), "--ladder", "--kv-cache", "fp16"]) == 2
    assert "--kv-cache is fp16; leave --kv-cache out" in capsys.readouterr().err


def test_a_plan_whose_kv_cache_is_no_such_is_refused(built_for_int8, relu_artifact, tmp_path):
    for built, changes, words in (
        (built_for_int8, {"kv_cache": "fp16"}, "kv_cache_bytes is 26112, expected 49152"),
        (
            relu_artifact,
            {"kv_cache": "int8"},
            "kv_cache is 'int8', expected fp16, which takes as little for a head of 16",
        ),
        (built_for_int8, {"kv_cache": "int4"}, "kv_cache"),
    ):
        path = copytree(built.path, tmp_path / str(len(list(tmp_path.iterdir()))))
        change_manifest(path, lambda manifest, changes=changes: manifest["plans"][0].update(changes))
        with pytest.raises(ArtifactError, match=words):
            open_artifact(path)


@pytest.mark.slow
def test_verify_decodes_with_the_kv_cache_of_the_plan(artifact, built_for_int8):
    """As the same weights do that are told to; its dense run has such a cache, too."""
    blocks = np.random.default_rng(2).integers(0, 96, (2, 24)).astype(np.int32)
    spec = built_for_int8.manifest.model
    model = describe(spec, tensor_shapes(spec), Path("nowhere/model.safetensors"))
    found = decode(str(built_for_int8.path), model, blocks, lambda logits: None, much=False)
    plan = Session(artifact.path, kv_cache="int8").plan
    same = Session(artifact.path, plan=plan).perplexity(blocks, sparse=True).block_nll
    np.testing.assert_allclose(found.block_nll, same, rtol=1e-6)
    assert found.block_nll != Session(artifact.path).perplexity(blocks, sparse=True).block_nll
    assert found.simulated_equals_real


@pytest.mark.slow
def test_quality_is_that_of_rounded_keys_and_values(artifact):
    blocks = np.random.default_rng(2).integers(0, 96, (2, 48))
    fp16, int8 = (Session(artifact.path, selector="dense", kv_cache=kind) for kind in ("fp16", "int8"))
    for sparse in (False, True):  # the prefill, and token by token
        pair = [np.array(session.perplexity(blocks, sparse=sparse).block_nll) for session in (fp16, int8)]
        assert (pair[0] != pair[1]).all()
        np.testing.assert_allclose(pair[1], pair[0], rtol=0.01)


def test_batches_and_resizing_count_what_it_takes(artifact):
    session = Session(artifact.path, kv_cache="int8")
    during = []

    def note(number, token):
        during.append(session.plan.kv_cache_bytes)
        if token.pass_number == 1 and number == 0:
            session.resize(session.plan.dram_budget_bytes + 50_000)

    opened = session.plan.kv_cache_bytes
    done = generate_batch(session, [PROMPT, PROMPT[:3], PROMPT[1:]], 20, ignore_eos=True, on_token=note)
    assert [len(tokens) for tokens in done.sequences] == [20, 20, 20]
    assert set(during) == {opened * (5 + 3 + 4 + 60) // 48}
    assert session.plan.kv_cache_bytes == opened


def test_a_value_that_no_scale_holds_is_refused_in_a_sentence(artifact):
    session = Session(artifact.path, kv_cache="int8")
    for layer in session.decoder._layers:
        attention = layer.branches[0].sublayer
        attention._matrices["v_proj"] = _Biased(attention._matrices["v_proj"])
    with pytest.raises(ColdpressError, match="int8_group32"):
        session.generate(PROMPT, 2)


class _Biased:
    def __init__(self, matrix):
        self._matrix = matrix

    def apply(self, x, parts):
        return self._matrix.apply(x, parts) + np.float32(1e30)


def test_the_command_line_takes_it(artifact, capsys):
    options = ["generate", str(artifact.path), "--prompt-ids", "3,14,15", "--max-new-tokens", "4", "--json"]
    assert main([*options, "--kv-cache", "int8"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = Session(artifact.path, kv_cache="int8").generate([3, 14, 15], 4)
    assert found["token_ids"] == list(expected.token_ids)
    assert found["metrics"]["dram_used_bytes"] == expected.metrics.dram_used_bytes
    with pytest.raises(ColdpressError, match="'int7'"):
        Session(artifact.path, kv_cache="int7")


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_latents_are_kept_once(kind):
    """A key and a value of 32 numbers in each layer would take twice the bytes."""
    sizes = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 1, "head_dim": 32}
    cache = new_cache(small_spec(**sizes), 48, kind)
    assert cache.values is cache.keys
    each = {"fp16": 2 * 32, "int8": 34}[kind]
    assert kv_cache_bytes(small_spec(**sizes), 48, kind) == cache.keys.nbytes == 12 * 48 * each
