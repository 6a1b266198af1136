"""Token embeddings that are read by row from flash: the same tokens as from DRAM, and every row is counted."""

import dataclasses
import json

import numpy as np
import pytest

from coldpress.cli.main import main
from coldpress.runtime.artifact.errors import FeatureError, ModelError, SectionError
from coldpress.runtime.artifact.integrity import verify_artifact
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.dram.budget import fixed_bytes, holds_tables, refit, table_bytes, whole_bytes
from coldpress.runtime.flash import direct, simulated
from coldpress.runtime.generate.batch import generate_batch
from coldpress.runtime.generate.session import Session
from coldpress.runtime.simulate import read_some_rows, simulate, token_seconds_of
from coldpress.runtime.store.facts import Observer, Purpose
from coldpress.runtime.store.resident import row_seconds
from coldpress.runtime.store.store import Store
from coldpress.runtime.trace import ROWS, Event, Recorder, load_trace
from coldpress.schemas.errors import ColdpressError, CorruptPageError
from tests.support.artifacts import Recipe, build_artifact, change_manifest, refuse
from tests.support.shapes import small_spec

SPEC = small_spec(num_hidden_layers=11, intermediate_size=128, vocab_size=960, tie_word_embeddings=False)
PROMPT = [3, 14, 15, 926, 535, 14]
NEW = 8


@pytest.fixture(scope="module", params=["fp16", "int4_group32", "q4_1"])
def pair(request, tmp_path_factory):
    """The same weights, with token embeddings in DRAM and on flash."""
    folder, recipe = tmp_path_factory.mktemp("rows"), Recipe(spec=SPEC, format=request.param)
    resident = build_artifact(folder / "resident", recipe)
    return resident, build_artifact(folder / "rows", dataclasses.replace(recipe, rows_on_flash=True))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_artifact(tmp_path_factory.mktemp("row") / "a", Recipe(spec=SPEC, rows_on_flash=True))


class RowReads(Observer):
    """The reads of rows, by purpose."""

    def __init__(self):
        self.reads = []

    def rows(self, facts):
        self.reads.append((facts.purpose, facts.ids.tolist()))


@pytest.mark.slow
def test_tokens_are_the_same_bit_for_bit(pair):
    found = []
    for built in pair:
        with Session(built.path) as session:
            generated = session.generate(PROMPT, NEW, ignore_eos=True)
            session.decoder.begin(9)
            session.decoder.prefill_last(np.array(PROMPT))
            logits = session.decoder.decode_many(np.array([1, 2, 1]))
            batch = generate_batch(session, [PROMPT, PROMPT[:3], [7]], 4, ignore_eos=True)
            sequences = [[token.id for token in tokens] for tokens in batch.sequences]
            found.append((generated.token_ids, logits.tobytes(), sequences))
    assert found[0] == found[1]


def test_the_embeddings_are_not_in_dram(pair):
    resident, rows = (built.manifest for built in pair)
    (table,) = rows.flash.tables
    assert table.length_bytes == resident.plans[0].resident_bytes - rows.plans[0].resident_bytes
    assert table.offset_bytes % 65536 == 0
    assert "embed_tokens.weight" not in {tensor.role for tensor in rows.resident}


def test_a_token_reads_one_row_and_a_prompt_its_distinct_ones_at_once(built):
    watch = RowReads()
    with Session(built.path, observers=[watch]) as session:
        new = session.generate(PROMPT, NEW, ignore_eos=True).token_ids
    prompt, *decoded = watch.reads
    assert prompt == (Purpose.STREAM, sorted(set(PROMPT)))
    assert decoded == [(Purpose.ROWS, [token]) for token in new[:-1]]


def test_a_row_is_asked_for_before_the_caller_sees_its_token(built):
    with Session(built.path) as session:
        steps = session.stream(PROMPT, 3, ignore_eos=True)
        token = next(steps)
        assert session.store._rows._begun.ids.tolist() == [token.id]
        last = list(steps)[-1]
        assert session.store._rows._begun is None, last


def test_a_simulated_run_reads_what_the_run_reads(built, tmp_path):
    recorder = Recorder()
    with Session(built.path, recorder=recorder) as session:
        real = session.generate(PROMPT, NEW, ignore_eos=True).metrics
    recorder.save(tmp_path / "trace")
    trace = load_trace(tmp_path / "trace")
    assert sum(event.kind == ROWS for event in trace) == NEW
    artifact = open_artifact(built.path)
    found = simulate(artifact, session.plan, trace)
    for name in ["reads", "read_bytes", "used_bytes", "prefill_reads", "prefill_read_bytes", "extents_sha256"]:
        assert getattr(found, name) == getattr(real, name), name
    without = simulate(artifact, session.plan, [event for event in trace if event.kind != ROWS])
    assert without.reads == found.reads  # a trace that names no rows counts one for each token
    assert without.used_bytes == found.used_bytes
    seconds = token_seconds_of(artifact.manifest, session.plan, found)
    assert 0 < row_seconds(artifact.manifest, session.plan) < seconds


def test_a_trace_of_another_vocabulary_is_refused(built):
    artifact = open_artifact(built.path)
    event = Event(ROWS, 0, 0, "neuron", np.array([960], np.int32))
    with pytest.raises(ColdpressError, match="asks for the embedding of token 960, where the artifact has 960"):
        simulate(artifact, artifact.manifest.plans[0], [event])


def test_tokens_without_names_read_distinct_rows(built):
    artifact, watch = open_artifact(built.path), RowReads()
    plan = artifact.manifest.plans[0]
    store = Store(artifact, plan, simulated.Plugin(artifact, plan.queue_depth), watch)
    for number in range(960):
        read_some_rows(store, range(number, number + 1))
    assert len({ids[0] for _, ids in watch.reads}) > 900
    assert store.counters.reads == 960


def test_with_room_for_everything_nothing_is_read(built):
    manifest = built.manifest
    plan = manifest.plans[0]
    whole = whole_bytes(manifest, plan)
    tables = table_bytes(manifest)
    assert whole - tables == fixed_bytes(manifest, plan) - plan.read_buffer_bytes + 11 * 128 * 256
    few, all_but_rows = (refit(manifest, plan, size) for size in (whole - tables - 1, whole - 1))
    assert [holds_tables(manifest, one) for one in (few, all_but_rows, refit(manifest, plan, whole))] == [0, 0, 1]
    with Session(built.path, dram_budget_bytes=whole) as session:
        assert session.store.dram_used_bytes == whole
        found = session.generate(PROMPT, NEW, ignore_eos=True)
    assert found.metrics.reads == found.metrics.prefill_reads == 0
    with Session(built.path, dram_budget_bytes=whole - 1) as session:
        assert session.store.dram_used_bytes == whole - tables
        rows = session.generate(PROMPT, NEW, ignore_eos=True)
    assert rows.metrics.reads == NEW - 1
    assert rows.token_ids == found.token_ids


def test_tokens_stay_while_the_table_comes_and_goes(built):
    plan = built.manifest.plans[0]
    whole = whole_bytes(built.manifest, plan)
    with Session(built.path) as session:
        wanted = session.generate(PROMPT, 16, ignore_eos=True).token_ids
    changes = {3: whole, 6: plan.dram_budget_bytes, 9: whole - 1, 12: whole}
    found, reads, watch = list[int](), {}, RowReads()
    with Session(built.path, observers=[watch]) as session:
        for token in session.stream(PROMPT, 16, ignore_eos=True):
            found.append(token.id)
            reads[len(found)] = len(watch.reads)
            if len(found) in changes:
                session.resize(changes[len(found)])
                assert session.store.dram_used_bytes <= changes[len(found)]
                held = session.store._rows._held
                assert (held is not None) == (changes[len(found)] == whole)
    assert tuple(found) == wanted
    assert reads[6] == reads[3]
    assert reads[9] == reads[6] + 3 == reads[12] - 3
    assert reads[16] == reads[12]


def test_a_damaged_page_of_the_embeddings_is_named(built, tmp_path):
    path = build_artifact(tmp_path / "a", built.recipe).path
    (table,) = built.manifest.flash.tables
    place = table.offset_bytes + 926 * table.row_bytes
    with (path / "flash.img").open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    page = place // built.manifest.flash.page_bytes
    with Session(path) as session, pytest.raises(CorruptPageError, match=rf"page {page} .*embed_tokens.weight"):
        session.generate(PROMPT, 2)
    with Session(path) as session:  # its other pages are whole, and the session can go on
        first, _ = session.generate([3, 4], 2, ignore_eos=True).token_ids
        with pytest.raises(CorruptPageError):
            session.resize(whole_bytes(built.manifest, session.plan))
        assert session.generate([3, 4], 1, ignore_eos=True).token_ids == (first,)
    with pytest.raises(CorruptPageError, match=f"page {page} "):
        verify_artifact(open_artifact(path))


def test_the_whole_artifact_passes(built):
    verify_artifact(open_artifact(built.path))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda flash: flash.update(tables=[]), SectionError, ("flash.size_bytes", "whole pages")),
        (lambda flash: flash["tables"][0].update(role="lm_head.weight"), SectionError, ("tables[0].role", "lm_head")),
        (lambda flash: flash["tables"][0].update(num_rows=961), SectionError, ("tables[0].num_rows", "961", "960")),
        (lambda flash: flash["tables"][0].update(row_bytes=130), SectionError, ("tables[0].row_bytes", "130", "128")),
        (lambda flash: flash["tables"][0].update(offset_bytes=0), SectionError, ("tables[0].offset_bytes",)),
        (lambda flash: flash["tables"][0].update(format="int4"), SectionError, ("tables[0].format", "int4")),
        (lambda flash: flash["tables"].append(flash["tables"][0]), SectionError, ("tables[1].role", "no more")),
    ],
)
def test_a_wrong_table_is_refused(built, tmp_path, change, kind, words):
    path = build_artifact(tmp_path / "a", built.recipe).path
    change_manifest(path, lambda manifest: change(manifest["flash"]))
    refuse(path, kind, *words)


def test_a_list_of_features_without_tables_is_refused(built, tmp_path):
    path = build_artifact(tmp_path / "a", built.recipe).path
    change_manifest(path, lambda manifest: manifest["features"]["required"].remove("row-tables"))
    refuse(path, FeatureError, "row-tables")


def test_a_tied_head_keeps_the_embeddings(tmp_path):
    spec = SPEC.model_copy(update={"tie_word_embeddings": True})
    path = build_artifact(tmp_path / "a", Recipe(spec=spec, rows_on_flash=True)).path
    assert open_artifact(path).manifest.flash.tables == ()
    table = {"role": "embed_tokens.weight", "format": "fp16", "num_rows": 960, "row_bytes": 128, "offset_bytes": 0}
    change_manifest(path, lambda manifest: manifest["flash"].update(tables=[table]))
    refuse(path, SectionError, "tables[0].role", "no more matrices")


def test_a_model_without_its_embeddings_is_refused(built, tmp_path):
    path = build_artifact(tmp_path / "a", dataclasses.replace(built.recipe, rows_on_flash=False)).path
    change_manifest(path, lambda manifest: manifest["resident"].pop(0))
    refuse(path, ModelError, "resident")


def test_a_prompt_longer_than_a_chunk_reads_its_rows_chunk_by_chunk(tmp_path):
    spec = SPEC.model_copy(update={"max_position_embeddings": 600})
    path = build_artifact(tmp_path / "a", Recipe(spec=spec, rows_on_flash=True, context_length=600)).path
    watch = RowReads()
    prompt = np.arange(300) * 7 % 960
    with Session(path, observers=[watch]) as session:
        session.generate(prompt.tolist(), 1)
    assert [ids for _, ids in watch.reads] == [sorted(prompt[:256].tolist()), sorted(prompt[256:].tolist())]


def test_rows_of_reads_in_order(built):
    """Each row's bytes, whichever pages it lies in, alone and together with others in any order."""
    artifact = open_artifact(built.path)
    store = Store(artifact, artifact.manifest.plans[0], direct.Plugin(artifact, 8))
    (table,) = artifact.manifest.flash.tables
    stored = np.fromfile(built.path / "flash.img", np.uint8)[table.offset_bytes :][: table.length_bytes]
    expected = stored.reshape(table.num_rows, table.row_bytes)
    random = np.random.default_rng(5)
    for count in (1, 2, 40, 960):
        tokens = random.integers(0, 960, count)
        assert (store.read_rows(tokens) == expected[tokens]).all()
    store.close()


def test_inspect_lists_what_is_read_by_row(built, capsys):
    assert main(["inspect", str(built.path)]) == 0
    assert "embed_tokens.weight: 960 rows of 128 bytes in fp16, 123 kB" in capsys.readouterr().out
    assert main(["inspect", str(built.path), "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert (table["num_rows"], table["total_bytes"]) == (960, 960 * 128)
