"""Prompts kept on flash: the same bits as a cold prefill, whatever happens to the files."""

import os
import subprocess
import sys

import numpy as np
import pytest

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.decoder import decoder as decoder_module
from coldpress.runtime.decoder.tokens import KvCache
from coldpress.runtime.generate.batch import BatchRoom, Prompt, generate_each
from coldpress.runtime.generate.prefixes import Prefixes
from coldpress.runtime.generate.session import Session
from coldpress.schemas.errors import ColdpressError
from tests.support.artifacts import Recipe, build_artifact, small_spec
from tests.support.data import ROOT

CHUNK = 40
PROMPT = [(7 * place) % 90 + 3 for place in range(2 * CHUNK + 11)]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(decoder_module, "PREFILL_CHUNK_TOKENS", CHUNK)


@pytest.fixture(scope="module", params=["fp16", "int8"])
def artifact(request, tmp_path_factory):
    spec = small_spec(
        num_hidden_layers=3, max_position_embeddings=128, num_attention_heads=2, head_dim=32, rotary_dim=32
    )
    recipe = Recipe(spec=spec, context_length=128, kv_cache=request.param)
    return build_artifact(tmp_path_factory.mktemp("prefix") / "a", recipe)


def kept_in(folder, session, max_bytes=10**9):
    return Prefixes(folder, session.artifact.sha256, max_bytes, CHUNK)


def run(session, prompt, prefixes=None, **settings):
    """The first logits, all tokens, and the prompt's keys and values."""
    rows, caches = [], []

    def see(position, logits):
        rows.append(logits[-1].copy())
        if len(rows) == 1:
            cache = session.decoder.kv_cache(0)
            caches.append((cache.keys[:, : len(prompt)].copy(), cache.values[:, : len(prompt)].copy()))

    each = [Prompt(prompt, on_logits=see, **settings)]
    (tokens,) = generate_each(session, each, 6, BatchRoom(1, 128, 128), ignore_eos=True, prefixes=prefixes)
    return rows[0], [token.id for token in tokens], caches[0]


def same(found, expected):
    return all(np.array_equal(a, b) for a, b in zip((found[0], *found[2]), (expected[0], *expected[2]), strict=True))


def test_a_warm_prompt_has_the_bits_of_a_cold_one(artifact, tmp_path):
    with Session(artifact.path) as session:
        cold = run(session, PROMPT)
        prefixes = kept_in(tmp_path, session)
        assert same(run(session, PROMPT, prefixes), cold)
        assert (prefixes.totals.restored_tokens, len(list(tmp_path.iterdir()))) == (0, 2)
        warm = run(session, PROMPT, prefixes)
        assert same(warm, cold)
        assert warm[1] == cold[1]
        assert prefixes.totals.restored_tokens == 2 * CHUNK
        other = [*PROMPT[: CHUNK + 3], 5, *PROMPT[CHUNK + 4 :]]  # the second chunk differs
        assert same(run(session, other, prefixes), run(session, other))
        assert prefixes.totals.restored_tokens == 3 * CHUNK
        assert (prefixes.kept_bytes(), prefixes.totals.damaged) == (prefixes.totals.written_bytes, 0)
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    with Session(artifact.path) as session:  # another process would find them, too
        again = kept_in(tmp_path, session)
        assert same(run(session, PROMPT, again), cold)
        assert again.totals.restored_tokens == 2 * CHUNK


def test_one_token_is_always_computed_and_a_scored_prompt_wholly(artifact, tmp_path):
    with Session(artifact.path) as session:
        prefixes = kept_in(tmp_path, session)
        prompt = PROMPT[: 2 * CHUNK]
        cold = run(session, prompt, prefixes)
        assert same(run(session, prompt, prefixes), cold)
        assert prefixes.totals.restored_tokens == CHUNK
        run(session, prompt, prefixes, scores_prompt=True)
        assert prefixes.totals.restored_tokens == CHUNK


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty"])
def test_a_damaged_file_is_removed_and_computed(artifact, tmp_path, damage):
    with Session(artifact.path) as session:
        prefixes = kept_in(tmp_path, session)
        cold = run(session, PROMPT, prefixes)
        for path in tmp_path.iterdir():
            data = bytearray(path.read_bytes())
            if damage == "flip":
                data[len(data) // 2] ^= 1
            path.write_bytes({"flip": data, "cut": data[:-1], "longer": data + b"x", "empty": b""}[damage])
        assert same(run(session, PROMPT, prefixes), cold)
        assert (prefixes.totals.restored_tokens, prefixes.totals.damaged) == (0, 1)
        assert same(run(session, PROMPT, prefixes), cold)
        assert prefixes.totals.restored_tokens >= CHUNK  # written anew


def test_another_artifact_finds_nothing(artifact, tmp_path):
    with Session(artifact.path) as session:
        run(session, PROMPT, kept_in(tmp_path, session))
        other = Prefixes(tmp_path, "0" * 64, 10**9, CHUNK)
        run(session, PROMPT, other)
        assert other.totals.restored_tokens == 0


@pytest.mark.parametrize("during", [False, True])
def test_another_read_buffer_has_files_of_its_own(tmp_path, during):
    """It divides sums into other blocks; also where a run changes its plan between a prompt and the end of its text."""
    shape = {"num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 32, "rotary_dim": 32}
    spec = small_spec(max_position_embeddings=128, intermediate_size=1024, hidden_act="silu", **shape)
    recipe = Recipe(spec=spec, method="dense", context_length=128, read_buffer_bytes=32768)
    path = build_artifact(tmp_path / "a", recipe).path
    plan = open_artifact(path).manifest.plans[0]
    more = {"read_buffer_bytes": 131072, "dram_budget_bytes": plan.dram_budget_bytes + 131072 - 32768}
    other = plan.model_copy(update=more)
    with Session(path, plan=plan) as session:
        prefixes, given = kept_in(tmp_path / "kept", session), session.store.plan

        def change(position, logits):
            if during:  # as if `resize` had changed it
                session.store.plan = other
                session.store._memory.take(other)

        each = [Prompt(PROMPT, on_logits=change)]
        list(generate_each(session, each, 6, BatchRoom(1, 128, 128), ignore_eos=True, prefixes=prefixes))
        session.store.plan = given
    with Session(path, plan=other) as session:
        cold = run(session, PROMPT)
        assert same(run(session, PROMPT, prefixes), cold)
        assert prefixes.totals.restored_tokens == 0
        assert same(run(session, PROMPT, prefixes), cold)
        assert prefixes.totals.restored_tokens == 2 * CHUNK


def test_bytes_are_bounded_and_the_oldest_end_goes_first(artifact, tmp_path):
    with Session(artifact.path) as session:
        run(session, PROMPT, kept_in(tmp_path / "all", session))
        size = next((tmp_path / "all").iterdir()).stat().st_size
        prefixes = kept_in(tmp_path / "few", session, 3 * size)
        prompts = [[first, *PROMPT[1:]] for first in (3, 4, 5)]
        for prompt in prompts:
            run(session, prompt, prefixes)
            assert prefixes.kept_bytes() <= 3 * size
        before = prefixes.totals.restored_tokens
        run(session, prompts[2], prefixes)
        assert prefixes.totals.restored_tokens - before == 2 * CHUNK
        tiny = kept_in(tmp_path / "none", session, size - 1)
        run(session, PROMPT, tiny)
        assert (tiny.kept_bytes(), tiny.totals.written_bytes) == (0, 0)


KILLED = """
import os, sys
from pathlib import Path
import numpy as np
from coldpress.runtime.decoder.tokens import KvCache
from coldpress.runtime.generate.prefixes import Prefixes

folder, ids = Path(sys.argv[1]), np.arange(90)
values = np.random.default_rng(0).normal(size=(3, 90, 2, 8)).astype(np.float16)

def dying(call, left):
    def instead(*given, **named):
        left[0] -= 1
        if left[0] == 0:
            os._exit(9)
        return call(*given, **named)
    return instead

def half(opened, data):
    return write(opened, data[: max(1, len(data) // 2)])  # so that it can die inside each array, too

write = os.write
for moment in range(1, 1000):
    child = os.fork()
    if not child:
        left = [moment]
        os.write, os.fsync, Path.rename = dying(half, left), dying(os.fsync, left), dying(Path.rename, left)
        Prefixes(folder, "1" * 64, 10**6, 40).save(KvCache(values, values.copy()), ids, "fp32")
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    prefixes, empty = Prefixes(folder, "1" * 64, 10**6, 40), np.zeros_like(values)
    cache = KvCache(empty, empty.copy())
    found = prefixes.restore(cache, ids, "fp32")
    assert (cache.keys[:, :found] == values[:, :found]).all() and (cache.values[:, :found] == values[:, :found]).all()
    assert prefixes.totals.damaged == 0 and not list(folder.glob("*.unfinished"))
    print(moment, code, found)
    if code == 0:
        break
    for path in folder.iterdir():
        path.unlink()
"""


@pytest.mark.slow
def test_a_process_that_dies_at_any_write_leaves_only_whole_files(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    moments = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(moments) > 50
    assert {code for _, code, _ in moments[:-1]} == {9}
    assert moments[-1][1:] == (0, 80)
    assert [found for _, _, found in moments] == sorted(found for _, _, found in moments)


def test_a_folder_that_cannot_be_is_refused_and_a_full_disk_only_told(artifact, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    with pytest.raises(ColdpressError, match=r"file: cannot keep prompts there .*name another folder"):
        Prefixes(tmp_path / "file", "0" * 64, 10**6)

    def full(*_):
        raise OSError(28, "No space left on device")

    with Session(artifact.path) as session:
        prefixes = kept_in(tmp_path / "kept", session)
        monkeypatch.setattr(os, "fsync", full)
        cold = run(session, PROMPT, prefixes)
        assert "a prompt is not kept there (No space left on device)" in caplog.text
        assert not list((tmp_path / "kept").iterdir())
        assert same(run(session, PROMPT, prefixes), cold)


def test_a_prompt_that_is_left_is_not_computed_to_its_end_nor_kept(artifact, tmp_path):
    """Two prompts of three passes each; nobody waits for the first one after its first pass."""
    asked, lengths = [], []

    def is_left():
        asked.append(None)
        return len(asked) > 1

    def ends(number, token):
        if not number:
            lengths.append(session.decoder.kv_cache(0).length)
        return not number

    with Session(artifact.path, dram_budget_bytes=10**7) as session:
        _, expected, _ = run(session, PROMPT[::-1])
        prefixes = kept_in(tmp_path, session)
        prompts = [Prompt(PROMPT, is_left=is_left), Prompt(PROMPT[::-1])]
        first, second = generate_each(
            session, prompts, 6, BatchRoom(2, 128, 256), ignore_eos=True, on_token=ends, prefixes=prefixes
        )
        assert (len(first), [token.id for token in second]) == (1, expected)
        assert (len(asked), lengths) == (3, [CHUNK])
        assert prefixes.kept_bytes() > 0
        again = [Prompt(PROMPT, on_logits=lambda *_: lengths.append(session.decoder.kv_cache(0).length))]
        list(generate_each(session, again, 1, BatchRoom(1, 128, 128), prefixes=prefixes))
        assert prefixes.totals.restored_tokens == 0, "nothing of the prompt that was left is there"


def test_an_array_that_is_keys_and_values_is_kept_once(tmp_path):
    """As the cache of latent attention is."""
    values = np.random.default_rng(0).normal(size=(3, 90, 1, 8)).astype(np.float16)
    prefixes = Prefixes(tmp_path, "1" * 64, 10**6, 40)
    prefixes.save(KvCache(values, values), np.arange(90), "fp32")
    assert prefixes.kept_bytes() == values[:, :80].nbytes + 2 * 32
    empty = np.zeros_like(values)
    assert prefixes.restore(KvCache(empty, empty), np.arange(90), "fp32") == 80
    assert (empty[:, :80] == values[:, :80]).all()
