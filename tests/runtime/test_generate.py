"""Sessions: generation, perplexity, plans and overrides, counters, and what an import pulls in."""

import json
import math
import subprocess
import sys
import time

import numpy as np
import pytest

from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.cache import show_choice
from coldpress.runtime.dram.budget import fixed_bytes, used_bytes
from coldpress.runtime.generate.choice import choose_plan
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Spread, Token, spreads
from coldpress.runtime.simulate import simulate
from coldpress.runtime.trace import Recorder, load_trace
from coldpress.schemas.errors import ColdpressError, CorruptPageError, DoesNotFitError, UnknownNameError
from tests.support.artifacts import Recipe, build_artifact, change_arrays, change_manifest, small_device, small_spec
from tests.support.data import ROOT
from tests.support.hf import all_logits, load_hf, roles_of, spec_of
from tests.support.models import write_model

PROMPT = [3, 14, 15]
DECISIONS = (
    *("hits", "misses", "evictions", "reads", "read_bytes", "used_bytes"),
    *("prefill_reads", "prefill_read_bytes", "extents_sha256"),
)


# Tokens


@pytest.mark.slow
def test_the_same_prompt_gives_the_same_tokens(relu_artifact):
    first = Session(relu_artifact.path).generate(PROMPT, 12)
    session = Session(relu_artifact.path)
    assert session.generate(PROMPT, 12).token_ids == first.token_ids
    assert session.generate(PROMPT, 12).token_ids == first.token_ids  # with what the call before left in the cache
    assert len(first.token_ids) == 12


def test_an_end_of_sequence_token_stops_the_run(relu_artifact, tmp_path):
    free = Session(relu_artifact.path).generate(PROMPT, 12).token_ids
    last = next(token for token in free if token != free[0])
    build_artifact(tmp_path / "a")
    change_manifest(tmp_path / "a", lambda manifest: manifest["model"].update(eos_token_ids=[last]))
    session = Session(tmp_path / "a")
    assert session.generate(PROMPT, 12).token_ids == free[: free.index(last) + 1]
    assert session.generate(PROMPT, 12, ignore_eos=True).token_ids == free


def test_every_token_is_reported_as_it_comes(relu_artifact):
    seen = []
    done = Session(relu_artifact.path).generate(PROMPT, 5, on_token=seen.append)
    assert tuple(seen) == done.tokens
    assert done.token_ids == tuple(token.id for token in seen)


def test_a_caller_can_end_a_run_and_has_its_figures(relu_artifact):
    session = Session(relu_artifact.path)
    whole = session.generate(PROMPT, 8)
    done = session.generate(PROMPT, 8, on_token=lambda token: token.id == whole.token_ids[3])
    assert done.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[3]) + 1]
    assert done.metrics.num_tokens == len(done.tokens) - 1


@pytest.mark.slow
def test_samples_depend_on_the_seed_alone(relu_artifact):
    session = Session(relu_artifact.path)

    def draw(seed):
        return session.generate(PROMPT, 20, sampling=Sampling(temperature=5.0, seed=seed)).token_ids

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_every_prompt_is_a_context_of_its_own(topk_artifact, monkeypatch):
    """What a policy counts per context starts anew with each call: the second run of a prompt evicts as the first."""
    session = Session(topk_artifact.path, cache="lfu")
    begun = []
    for (layer, family), part in session.store._parts.items():
        reset = part.cache.reset
        monkeypatch.setattr(part.cache, "reset", lambda key=(layer, family), reset=reset: (begun.append(key), reset()))
    session.generate(PROMPT, 2, ignore_eos=True)
    assert sorted(begun) == sorted(session.store._parts)
    session.generate(PROMPT, 2, ignore_eos=True)
    assert sorted(begun) == sorted(2 * list(session.store._parts))


def test_no_new_tokens_are_refused(relu_artifact):
    with pytest.raises(ColdpressError, match="number of new tokens is 0"):
        Session(relu_artifact.path).generate(PROMPT, 0)


# Counters


@pytest.mark.parametrize("name", ["relu_artifact", "topk_artifact", "predictor_artifact"])
def test_a_run_is_counted(request, name):
    built = request.getfixturevalue(name)
    started = time.perf_counter()
    metrics = Session(built.path).generate(PROMPT, 6).metrics
    assert metrics.num_tokens == 5
    assert metrics.misses > 0
    assert metrics.reads > 0
    assert (
        metrics.used_bytes == metrics.misses * built.manifest.families[0].unit_bytes or len(built.manifest.families) > 1
    )
    flash_bytes = sum(section.length_bytes for section in built.manifest.flash.sections)
    assert flash_bytes <= metrics.prefill_read_bytes < 1.3 * flash_bytes
    assert 0 < metrics.prefill_s < metrics.first_token_s < time.perf_counter() - started
    assert 0 < metrics.flash_s < metrics.decode_s
    assert metrics.dram_used_bytes <= metrics.dram_budget_bytes


def test_each_run_is_counted_on_its_own(relu_artifact):
    session = Session(relu_artifact.path, cache="static")
    first, second = (session.generate(PROMPT, 6).metrics for _ in range(2))
    assert (first.hits, first.misses, first.reads) == (second.hits, second.misses, second.reads)
    assert second.first_token_s < first.first_token_s + 1


def test_the_records_of_tokens_add_up_to_the_run(relu_artifact):
    done = Session(relu_artifact.path).generate(PROMPT, 6)
    first, decoded = done.tokens[0], done.tokens[1:]
    assert (first.seconds, first.hits + first.misses) == (done.metrics.prefill_s, 0)
    assert (first.reads, first.read_bytes) == (done.metrics.prefill_reads, done.metrics.prefill_read_bytes)
    assert all(0 < token.flash_s < token.seconds for token in done.tokens if token.reads)
    assert sum(token.reads for token in decoded) > 0
    for name in ("hits", "misses", "reads", "read_bytes"):
        assert sum(getattr(token, name) for token in decoded) == getattr(done.metrics, name), name
    assert sum(token.flash_s for token in decoded) == pytest.approx(done.metrics.flash_s)
    assert sum(token.seconds for token in decoded) == pytest.approx(done.metrics.decode_s)


def test_how_records_spread():
    """Five figures from the least to the largest: percentiles lie on the lines between neighbours."""
    tokens = [
        Token(id=0, seconds=value, flash_s=value / 2, reads=int(value), read_bytes=4096 * int(value), hits=3, misses=1)
        for value in (50.0, 10.0, 40.0, 20.0, 30.0)
    ]
    found = spreads(tokens)
    assert found is not None
    assert found.seconds == Spread(p5=12, median=30, p95=48)
    assert found.flash_s == Spread(p5=6, median=15, p95=24)
    assert found.reads == found.seconds
    assert found.read_bytes.median == 30 * 4096
    assert found.hit_rate == Spread(0.75, 0.75, 0.75)
    assert spreads([]) is None


def test_the_first_token_counts_from_the_given_start(relu_artifact):
    started_s = time.perf_counter() - 100
    metrics = Session(relu_artifact.path, started_s=started_s).generate(PROMPT, 1).metrics
    assert 100 < metrics.first_token_s < time.perf_counter() - started_s


# Simulated flash


@pytest.mark.slow
@pytest.mark.parametrize("name", ["relu_artifact", "topk_artifact", "predictor_artifact"])
def test_simulated_flash_decides_as_the_real_one(request, name, tmp_path):
    path = request.getfixturevalue(name).path
    recorder = Recorder()
    real = Session(path, recorder=recorder).generate(PROMPT, 8)
    modelled = Session(path, flash="simulated").generate(PROMPT, 8)
    recorder.save(tmp_path / "trace")
    artifact = open_artifact(path)
    replayed = simulate(artifact, choose_plan(artifact.manifest), load_trace(tmp_path / "trace"))
    assert modelled.token_ids == real.token_ids
    for field in DECISIONS:
        assert getattr(modelled.metrics, field) == getattr(real.metrics, field) == getattr(replayed, field), field
    assert modelled.metrics.flash_s == pytest.approx(replayed.flash_s)
    assert replayed.num_tokens == real.metrics.num_tokens


def test_another_device_changes_only_the_seconds(relu_artifact):
    device = small_device()
    slow = device.flash.latency_s.model_copy(update={"value": 1.0})
    slow_device = device.model_copy(update={"flash": device.flash.model_copy(update={"latency_s": slow})})
    fast, slow = (
        Session(relu_artifact.path, flash="simulated", device=profile).generate(PROMPT, 4)
        for profile in (device, slow_device)
    )
    assert slow.metrics.flash_s > 10 * fast.metrics.flash_s
    assert slow.metrics.reads == fast.metrics.reads
    assert slow.token_ids == fast.token_ids


# Plans and overrides


def test_a_budget_is_kept(relu_artifact):
    manifest = relu_artifact.manifest
    least = fixed_bytes(manifest, manifest.plans[0])
    hit_rates = []
    for budget in (least, least + 100_000, least + 2_000_000):
        session = Session(relu_artifact.path, dram_budget_bytes=budget)
        done = session.generate(PROMPT, 8)
        assert done.metrics.dram_used_bytes <= budget == done.metrics.dram_budget_bytes
        hit_rates.append(done.metrics.hit_rate)
    assert 0 == hit_rates[0] < hit_rates[1] < hit_rates[2]
    warm = session.generate(PROMPT, 8).metrics  # the last budget holds every unit that was used before
    assert (warm.misses, warm.reads) == (0, 0)


def test_the_budget_does_not_change_the_tokens(relu_artifact):
    least = fixed_bytes(relu_artifact.manifest, relu_artifact.manifest.plans[0])
    tokens = {
        Session(relu_artifact.path, dram_budget_bytes=least + extra).generate(PROMPT, 12).token_ids
        for extra in (0, 50_000, 3_000_000)
    }
    assert len(tokens) == 1


def test_a_budget_below_the_resident_part_is_refused_with_both_numbers(relu_artifact):
    least = fixed_bytes(relu_artifact.manifest, relu_artifact.manifest.plans[0])
    with pytest.raises(DoesNotFitError, match=rf"of {least - 1:,} bytes was asked for, {least:,} are needed before"):
        Session(relu_artifact.path, dram_budget_bytes=least - 1)


@pytest.mark.parametrize("cache", ["lru", "lfu", "static"])
def test_a_cache_policy_can_be_named(relu_artifact, cache):
    session = Session(relu_artifact.path, cache=cache)
    assert session.plan.cache == cache
    assert used_bytes(relu_artifact.manifest, session.plan) <= session.plan.dram_budget_bytes
    assert (sum(part.cache_slots for part in session.plan.parts) > 0) == (cache != "static")
    assert session.generate(PROMPT, 6).token_ids == Session(relu_artifact.path).generate(PROMPT, 6).token_ids


@pytest.mark.parametrize("text", ["window:window_tokens=2", "linked:linked_over=lfu:linked_admission=0.25", "s3fifo"])
def test_a_cache_policy_can_be_given_options(relu_artifact, text):
    plan = Session(relu_artifact.path, cache=text).plan
    assert show_choice(plan.cache, plan.cache_options) == text


@pytest.mark.parametrize("name", ["relu_artifact", "topk_artifact", "predictor_artifact"])
def test_dense_runs_every_artifact(request, name):
    built = request.getfixturevalue(name)
    session = Session(built.path, selector="dense")
    metrics = session.generate(PROMPT, 4).metrics
    assert metrics.hits + metrics.misses == 3 * sum(len(codes) for codes in built.units.values())


def test_topk_can_prune_by_the_gate(relu_artifact):
    metrics = Session(relu_artifact.path, selector="topk").generate(PROMPT, 4).metrics
    assert metrics.hits + metrics.misses == 3 * 12 * 128  # tokens, layers, a quarter of 512


def without_selector(arrays):
    for name in [name for name in arrays if name.startswith("selector.")]:
        del arrays[name]


def test_a_predictor_counts_in_the_budget(predictor_artifact, tmp_path):
    build_artifact(tmp_path / "a", predictor_artifact.recipe)
    dense = {"method": "dense", "predictor_bytes": 0, "arrays": []}
    change_manifest(tmp_path / "a", lambda manifest: manifest["plans"][0].update(dense))
    change_arrays(tmp_path / "a", "tables.safetensors", without_selector)
    budget = open_artifact(tmp_path / "a").manifest.plans[0].dram_budget_bytes
    session = Session(tmp_path / "a", selector="predictor")
    assert session.plan.method == "predictor"
    assert session.plan.predictor_bytes == predictor_artifact.manifest.plans[0].predictor_bytes > 0
    assert used_bytes(session.artifact.manifest, session.plan) <= budget
    expected = Session(predictor_artifact.path).generate(PROMPT, 6).token_ids
    assert session.generate(PROMPT, 6).token_ids == expected


@pytest.mark.parametrize(
    ("name", "selector", "message"),
    [
        ("relu_artifact", "predictor", "cannot choose units of the family up_down.*one of: .*dense, .*relu, .*topk"),
        ("topk_artifact", "relu", "cannot choose units of the family mlp_in.*choose one of: dense, .*topk"),
        ("predictor_artifact", "topk", "cannot choose units of the family neuron.*choose one of: dense, predictor"),
    ],
)
def test_a_selector_that_lacks_something_is_refused(request, name, selector, message):
    with pytest.raises(ColdpressError, match=message):
        Session(request.getfixturevalue(name).path, selector=selector)


def test_relu_needs_a_relu_model_and_predictor_its_predictors(tmp_path):
    build_artifact(tmp_path / "silu", Recipe(spec=small_spec(hidden_act="silu", num_hidden_layers=1), method="relu"))
    with pytest.raises(ColdpressError, match="needs exact zeros, but the model's activation is silu"):
        Session(tmp_path / "silu")
    recipe = Recipe(spec=small_spec(num_hidden_layers=1), method="dense", families=("neuron",))
    build_artifact(tmp_path / "dense", recipe)
    with pytest.raises(ColdpressError, match="needs predictors, and this artifact has none"):
        Session(tmp_path / "dense", selector="predictor")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"selector": "topp"}, "unknown selector 'topp'. Did you mean 'topk'"),
        ({"cache": "lruu"}, "unknown cache 'lruu'. Did you mean 'lru'"),
        ({"flash": "direkt"}, "unknown flash 'direkt'. Did you mean 'direct'"),
    ],
)
def test_unknown_names_get_the_nearest_one(relu_artifact, option, message):
    with pytest.raises(UnknownNameError, match=message):
        Session(relu_artifact.path, **option)


def test_a_damaged_page_stops_the_run(tmp_path):
    built = build_artifact(tmp_path / "a")
    with (built.path / "flash.img").open("r+b") as file:
        file.seek(built.manifest.flash.sections[3].offset_bytes + 5)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(CorruptPageError, match=r"flash.img: page \d+ .*layer 3, family up_down"):
        Session(built.path).generate(PROMPT, 2)


# Perplexity


def test_perplexity_is_that_of_transformers(tmp_path):
    model = load_hf(write_model(tmp_path / "model", num_hidden_layers=2))
    spec = spec_of(model.config)
    build_artifact(tmp_path / "a", Recipe(spec=spec, method="dense", context_length=40), roles_of(model, spec))
    blocks = np.random.default_rng(0).integers(0, spec.vocab_size, (3, 40))
    expected, likeliest = [], []
    for block in blocks:
        logits = all_logits(model, block.tolist())[:-1].astype(np.float64)
        log_sums = np.log(np.exp(logits).sum(axis=1))
        likeliest.append(logits.argmax(axis=1))
        expected.append(log_sums - logits[np.arange(39), block[1:]])
    session = Session(tmp_path / "a")
    rows = []
    dense = session.perplexity(blocks, sparse=False)
    sparse = session.perplexity(blocks, sparse=True, on_logits=rows.extend)
    assert dense.mean_nll == pytest.approx(np.mean(expected), rel=1e-3)
    assert sparse.mean_nll == pytest.approx(np.mean(expected), rel=1e-3)
    assert dense.perplexity == pytest.approx(np.exp(dense.mean_nll))
    assert dense.num_predicted == sparse.num_predicted == 3 * 39
    assert (dense.metrics.num_tokens, sparse.metrics.num_tokens) == (0, 3 * 38)
    assert (len(dense.block_tokens_per_s), len(sparse.block_tokens_per_s)) == (0, 3)
    assert sum(38 / rate for rate in sparse.block_tokens_per_s) == pytest.approx(sparse.metrics.decode_s)
    assert (np.argmax(rows, axis=1) == np.concatenate(likeliest)).mean() > 0.95
    mixed = session.perplexity(blocks, sparse=True, prefill_tokens=10)
    assert mixed.mean_nll == pytest.approx(np.mean(expected), rel=1e-3)
    assert (mixed.num_predicted, mixed.metrics.num_tokens) == (3 * 39, 3 * 29)


@pytest.mark.parametrize(("shape", "prefilled"), [((2, 1), 1), ((0, 8), 1), ((2, 8), 0), ((2, 8), 9)])
def test_perplexity_needs_something_to_predict(relu_artifact, shape, prefilled):
    with pytest.raises(
        ColdpressError, match=rf"found {shape[0]} blocks of {shape[1]} tokens with {prefilled} prefilled"
    ):
        Session(relu_artifact.path).perplexity(np.zeros(shape, int), sparse=True, prefill_tokens=prefilled)


# Imports


def test_the_runtime_needs_neither_torch_nor_transformers():
    """Nor does anything but the harness, which loads what it likes."""
    code = (
        "import pkgutil, importlib, sys\n"
        "from coldpress import runtime\n"
        "for module in pkgutil.walk_packages(runtime.__path__, 'coldpress.runtime.'):\n"
        "    if not module.name.endswith(('.__main__', '.harness')): importlib.import_module(module.name)\n"
        "heavy = {'torch', 'transformers', 'pulp', 'sklearn', 'datasets', 'scipy', 'coldpress.compiler'}\n"
        "sys.exit(', '.join(sorted(heavy & sys.modules.keys())) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_has_no_modelled_clock_unless_it_is_asked_for(topk_artifact):
    """What it counts is the same with it."""
    found = {}
    for modelled in (False, True):
        with Session(topk_artifact.path, modelled=modelled) as session:
            found[modelled] = session.generate([3, 4, 5], 6, ignore_eos=True).metrics
            assert (session.store.clock is not None) == modelled
    assert math.isnan(found[False].modelled_s)
    assert json.loads(found[False].to_json())["modelled_flash_s"] is None
    assert found[True].modelled_s > found[True].modelled_flash_s > 0
    assert found[True].extents_sha256 == found[False].extents_sha256
    assert (found[True].hits, found[True].kept_bytes) == (found[False].hits, found[False].kept_bytes)
