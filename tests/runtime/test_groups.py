"""Layers that lie together on flash: another layout of the same units gives the same rows, logits and tokens."""

from collections import deque

import numpy as np
import pytest

from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import Recorder
from coldpress.schemas.errors import CorruptPageError
from tests.support.artifacts import Recipe, build_artifact, small_spec

SPEC = small_spec(num_hidden_layers=11, hidden_act="silu")
PROMPT = [5, 17, 3, 60]
GROUPS = (1, 2, 4)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The same weights, orders drawn anew, in groups of 1, 2 and 4 layers; the last group has fewer."""
    recipes = {size: Recipe(spec=SPEC, method="topk", format="int8_group32", layers_per_group=size) for size in GROUPS}
    folder = tmp_path_factory.mktemp("groups")
    return {size: build_artifact(folder / f"of-{size}", recipe) for size, recipe in recipes.items()}


def test_sections_cover_groups_and_the_last_one_is_smaller(built):
    found = [
        (part.first_layer, part.last_layer) for part in built[4].manifest.flash.sections if part.family == "mlp_in"
    ]
    assert found == [(0, 3), (4, 7), (8, 10)]
    sizes = [part.stride_bytes // part.unit_bytes for part in built[4].manifest.flash.sections]
    assert sizes == [4, 4, 4, 4, 3, 3]
    for artifact in built.values():
        assert verify_artifact(open_artifact(artifact.path)) > 0


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("gap_bytes", [0, 65536])
def test_fetch_and_stream_bring_the_layers_own_units(built, size, gap_bytes):
    session = Session(built[size].path)
    store, units = session.store, built[size].units
    store.plan = session.plan.model_copy(update={"collapse_gap_bytes": gap_bytes})
    random = np.random.default_rng(0)
    for (layer, family), codes in units.items():
        ids = np.sort(random.choice(len(codes), 23, replace=False)).astype(np.int32)
        for batch in store.submit((layer, family), ids):
            assert (batch.rows[batch.slots] == codes[batch.ids]).all()
        seen: list[int] = []
        for found, rows in store.stream((layer, family)):
            assert (rows == codes[found]).all()
            seen += found.tolist()
        assert sorted(seen) == list(range(len(codes)))


@pytest.mark.slow
def test_logits_and_tokens_do_not_depend_on_groups(built):
    sessions = {size: Session(artifact.path, activations="fp32") for size, artifact in built.items()}
    prefilled = {}
    for size, session in sessions.items():
        session.decoder.begin(len(PROMPT))
        prefilled[size] = session.decoder.prefill(np.array(PROMPT))
    tokens = {size: session.generate(PROMPT, 20).token_ids for size, session in sessions.items()}
    for size in GROUPS[1:]:
        np.testing.assert_allclose(prefilled[size], prefilled[1], rtol=1e-4, atol=1e-4)  # sums in another order
        assert tokens[size] == tokens[1]


@pytest.mark.slow
@pytest.mark.parametrize("size", GROUPS[1:])
def test_a_simulation_makes_the_reads_of_the_real_run(built, size):
    recorder = Recorder()
    session = Session(built[size].path, recorder=recorder)
    real = session.generate(PROMPT, 12).metrics
    modelled = simulate(session.artifact, session.plan, recorder.events)
    assert modelled.extents_sha256 == real.extents_sha256
    assert (modelled.reads, modelled.read_bytes, modelled.hits) == (real.reads, real.read_bytes, real.hits)


def test_a_fetch_of_a_group_reads_its_own_layer_only(tmp_path):
    """Parts of 4 pages, groups of 4 layers: each missing unit is one read of its part and the page that it ends in."""
    spec = small_spec(num_hidden_layers=4, hidden_size=4096, intermediate_size=32, num_attention_heads=4, head_dim=16)
    recipe = Recipe(
        spec=spec, layers_per_group=4, pinned_share=0, slots_share=0, collapse_gap_bytes=0, read_buffer_bytes=1 << 18
    )
    built = build_artifact(tmp_path / "a", recipe)
    store = Session(built.path).store
    deque(store.submit((2, "up_down"), np.arange(0, 32, 2, dtype=np.int32)), maxlen=0)
    assert store.counters.reads == 16
    assert store.counters.read_bytes == 16 * 16384


def test_damage_in_a_group_names_its_layers(built, tmp_path):
    artifact = build_artifact(tmp_path / "a", built[4].recipe)
    with (artifact.path / "flash.img").open("r+b") as file:
        file.seek(100)
        file.write(b"\xff\xff\xff")
    with pytest.raises(CorruptPageError, match="layers 0 to 3, family mlp_in"):
        deque(Session(artifact.path).store.stream((1, "mlp_in")), maxlen=0)
