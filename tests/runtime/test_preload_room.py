"""How much is preloaded, and what of a guess: by hand, and by what a run of it counts."""

import numpy as np
import pytest

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import simulate
from coldpress.runtime.store.preload import most_certain
from coldpress.runtime.store.preload_room import PreloadReads, buffer_bytes, most_bytes, rooms
from coldpress.runtime.trace import PRELOAD, Recorder
from coldpress.schemas.layout import placed_parts
from tests.support.artifacts import Recipe, build_artifact, small_spec
from tests.support.similar import similar_weights

PROMPT = [5, 17, 3, 60]
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Four layers alike; units of the inputs are 1,088 bytes."""
    spec = small_spec(num_hidden_layers=4, hidden_act="silu")
    recipe = Recipe(spec=spec, method="topk", format="int8_group32", slots_share=0.25)
    return build_artifact(tmp_path_factory.mktemp("room") / "a", recipe, similar_weights(spec, 0.9))


def with_buffer(manifest, guess):
    """The plan with room for all that is guessed, beside its budget."""
    plan, flash = manifest.plans[0], manifest.flash
    ahead = most_bytes(flash.sections, plan.parts, flash.page_bytes, 1 << 30)
    budget = plan.dram_budget_bytes + ahead
    changes = {"preload_buffer_bytes": ahead, "dram_budget_bytes": budget, "preload_guess": guess}
    return plan.model_copy(update=changes)


def test_the_most_certain_of_a_guess_are_the_largest_entries():
    signal = np.array([[0.5, -4, 0, 2, -2, 1], [0, 0, 3, 0, 0, 0]], np.float32)
    ids = np.array([0, 1, 3, 4, 5], np.int32)
    assert most_certain(ids, signal[:1], 0.4).tolist() == [1, 3]  # of 3 and 4, which are as large, the first
    assert most_certain(ids, signal[:1], 0.41).tolist() == [1, 3, 4]
    assert most_certain(np.array([0, 2, 5], np.int32), signal, 0.3).tolist() == [2]  # of any token
    assert most_certain(ids, signal, 0.0).tolist() == [1]
    assert most_certain(ids, signal, 1.0).tolist() == ids.tolist()
    assert most_certain(ids[:0], signal, 0.5).size == 0


def test_a_part_of_a_guess_is_righter_and_changes_no_token(built):
    artifact, found = open_artifact(built.path), {}
    for guess in (1.0, 0.5):
        recorder, plan = Recorder(), with_buffer(artifact.manifest, guess)
        with Session(built.path, plan=plan, recorder=recorder) as session:
            text = session.generate(PROMPT, NUM_TOKENS, ignore_eos=True)
        modelled = simulate(artifact, plan, recorder.events)
        assert modelled.extents_sha256 == text.metrics.extents_sha256
        ids = [event.ids for event in recorder.events if event.kind == PRELOAD]
        found[guess] = text.token_ids, text.metrics, sum(some.size for some in ids)
    (whole_text, whole, whole_ids), (half_text, half, half_ids) = found[1.0], found[0.5]
    assert half_text == whole_text
    assert half_ids == whole_ids / 2
    assert half.preload_precision > whole.preload_precision + 0.05
    assert half.preloaded_bytes < 0.6 * whole.preloaded_bytes


def test_what_is_preloaded_is_what_fits_while_nothing_is_asked_for(built):
    """A unit at least, all of a guess at most, and never more than a quarter of the DRAM for units."""
    artifact = open_artifact(built.path)
    plan, flash = artifact.manifest.plans[0], artifact.manifest.flash
    law = artifact.manifest.device.flash.issuing(plan.queue_depth)
    reading = PreloadReads(flash.sections, plan.parts, law, 0)
    most = most_bytes(flash.sections, plan.parts, 4096, 1 << 30)
    rooms = [buffer_bytes(reading, idle_s, 1.0, 1 << 30) for idle_s in (0.0, 1e-5, 1e-4, 1.0)]
    assert rooms == sorted(rooms)
    assert 8192 <= rooms[0] <= 12288  # a unit may lie on two pages
    assert rooms[-1] == most
    assert buffer_bytes(reading, 1.0, 0.5, 1 << 30) in (most // 8192 * 4096, most // 8192 * 4096 + 4096)
    assert buffer_bytes(reading, 1.0, 1.0, 40_000) == 8192  # a quarter of the DRAM at most
    first = [section for section in flash.sections if section.first_layer == 0]
    assert most_bytes(first, plan.parts, 4096, 1 << 30) == 0  # no layer before it would tell
    within = PreloadReads(flash.sections, tuple(_all_in_dram(plan, flash.sections)), law, 0)
    assert buffer_bytes(within, 1.0, 1.0, 1 << 30) == 0


def test_a_guess_of_a_whole_section_has_room_for_the_pages_on_both_of_its_edges(built):
    """Units lie packed, so that a section of n pages that begins inside a page touches n + 1 of them."""
    plan, flash = built.manifest.plans[0], built.manifest.flash
    everything = [part.model_copy(update={"density": 1.0, "num_pinned": 0, "cache_slots": 0}) for part in plan.parts]
    (length,) = {section.length_bytes for section in flash.sections if section.family == "mlp_in"}
    touched = {(start + length - 1) // 4096 - start // 4096 + 1 for start in range(4096)}
    assert rooms(flash.sections, everything, 4096)["mlp_in"].section_bytes == max(touched) * 4096
    assert max(touched) * 4096 > length


def _all_in_dram(plan, sections):
    for part, section in placed_parts(plan, sections):
        yield part.model_copy(update={"cache_slots": section.num_units - part.num_pinned})
