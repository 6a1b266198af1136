"""What of DRAM a token's computing reads, by hand; what it takes is in test_simulate.py and test_preload.py."""

import pytest

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.store.clock import FlashQueue
from coldpress.runtime.store.computing import NOTHING, Work
from coldpress.runtime.store.resident import bytes_before, computed_bytes
from tests.support.artifacts import Recipe, build_artifact
from tests.support.shapes import small_spec

LAYERS, WORDS, WIDTH = 2, 96, 64


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_that_is_looked_up_alone_is_not_read(tmp_path, tied):
    """Which the embedding is where the head is another matrix."""
    spec = small_spec(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    manifest = open_artifact(build_artifact(tmp_path / "a", Recipe(spec, method="dense")).path).manifest
    plan = manifest.plans[0]
    embedding = 0 if tied else 2 * WORDS * WIDTH  # fp16
    assert computed_bytes(manifest, plan).total() == plan.resident_bytes - embedding + plan.kv_cache_bytes // 2


def test_what_a_layer_computes_with_before_it_asks_for_units(tmp_path):
    """Attention's matrices, and a layer's share of half the KV cache; down comes behind the units of the inputs."""
    spec = small_spec(num_hidden_layers=LAYERS)
    recipe = Recipe(spec, method="dense", families=("mlp_in",))
    manifest = open_artifact(build_artifact(tmp_path / "a", recipe).path).manifest
    attention = 2 * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2)  # q and o; k and v of half as many heads
    expected = attention + manifest.plans[0].kv_cache_bytes // 2 // LAYERS
    before = bytes_before(manifest, manifest.plans[0])
    assert {key: found.total() for key, found in before.items()} == {
        (layer, "mlp_in"): expected for layer in range(LAYERS)
    }
    assert before[0, "mlp_in"]["fp16"] == attention


def test_of_resident_experts_a_token_multiplies_its_own(tmp_path):
    """Two of eight, and the router; up and down are on flash, and ask for what the gate has left."""
    spec = small_spec(num_hidden_layers=LAYERS, num_experts=8, num_experts_per_tok=2)
    manifest = open_artifact(build_artifact(tmp_path / "a", Recipe(spec, method="cats")).path).manifest
    plan = manifest.plans[0]
    gate = 2 * WIDTH * spec.intermediate_size  # fp16
    assert [family.family for family in manifest.families] == ["up_down"]
    assert computed_bytes(manifest, plan).total() == plan.resident_bytes - LAYERS * 6 * gate + plan.kv_cache_bytes // 2
    attention = 2 * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2)
    expected = attention + 2 * gate + plan.kv_cache_bytes // 2 // LAYERS
    found = {key: sizes.total() for key, sizes in bytes_before(manifest, plan).items()}
    assert found == {(layer, "up_down"): expected for layer in range(LAYERS)}


def test_a_device_that_has_nothing_to_read_saves_nothing_up():
    """What it could have read while memory was computed with is lost where nobody asked for it."""
    queue = FlashQueue()
    assert queue.fetch_s(NOTHING, Work(0.0, 0.05, 0.0), needs_queue=False) == 0.05
    queue.begin(1e-3)
    assert queue.fetch_s(NOTHING, Work(0.0, 0.0, 0.0), needs_queue=True) == 1e-3
