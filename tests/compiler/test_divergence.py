"""The divergence's figures are those that scipy's relative entropy and a few lines by hand give."""

import math
import threading

import numpy as np
import pytest
import scipy.special
import scipy.stats

from coldpress.compiler.stages.verify.divergence import SourceComparison, of_dense_run
from coldpress.schemas.errors import ColdpressError


@pytest.fixture
def case():
    random = np.random.default_rng(0)
    source = random.normal(0, 2, (3, 9, 40)).astype(np.float32)
    found = (source + random.normal(0, 0.5, source.shape)).astype(np.float32)
    return source, found, random.integers(0, 40, (3, 9))


def watched(source, found, blocks, some=4):
    """Given in pieces, which may end inside a block but hold no last position, as a session gives them."""
    watch = SourceComparison(source.__getitem__, blocks)
    rows = found[:, :-1].reshape(-1, found.shape[-1])
    for start in range(0, len(rows), some):
        watch(rows[start : start + some])
    return watch


@pytest.mark.parametrize("some", [1, 4, 100])
def test_figures_by_other_means(case, some):
    source, found, blocks = case
    watch = watched(source, found, blocks, some)
    p, q = (scipy.special.softmax(logits[:, :-1].astype(np.float64), axis=-1) for logits in (source, found))
    kld = scipy.stats.entropy(p, q, axis=-1)
    targets = blocks[:, 1:, None]
    delta = (np.take_along_axis(q, targets, -1) - np.take_along_axis(p, targets, -1))[..., 0]
    figures = watch.divergence()
    assert figures.mean_kld == pytest.approx(kld.mean())
    assert figures.mean_kld_error == pytest.approx(scipy.stats.sem(kld.mean(axis=1)))
    assert figures.max_kld == pytest.approx(kld.max())
    assert figures.p999_kld == pytest.approx(np.quantile(kld, 0.999))
    assert figures.rms_delta_p == pytest.approx(np.sqrt((delta**2).mean()))
    by_delta_method = scipy.stats.sem((delta**2).mean(axis=1)) / (2 * figures.rms_delta_p)
    assert figures.rms_delta_p_error == pytest.approx(by_delta_method)
    same = (p.argmax(-1) == q.argmax(-1)).mean(axis=1)
    assert 0 < same.mean() < 1
    assert watch.top1_agreement() == (pytest.approx(same.mean()), pytest.approx(scipy.stats.sem(same)))


def test_a_model_does_not_diverge_from_itself(case):
    source, _, blocks = case
    figures = watched(source, source, blocks).divergence()
    assert (figures.mean_kld, figures.max_kld, figures.rms_delta_p, figures.rms_delta_p_error) == (0, 0, 0, 0)


def test_one_block_has_no_error(case):
    source, found, blocks = case
    watch = watched(source[:1], found[:1], blocks[:1])
    assert math.isnan(watch.divergence().mean_kld_error)
    assert math.isnan(watch.top1_agreement()[1])


@pytest.mark.parametrize("threads", [1, 2])
def test_source_logits_ahead_change_nothing(case, threads):
    source, found, blocks = case
    asked = []

    def of_source(block):
        asked.append(block)
        return source[block]

    watch = SourceComparison(of_source, blocks, threads)
    with watch.ahead() as receive:
        for rows in found[:, :-1].reshape(-1, 6, found.shape[-1]):
            receive(rows)
    expected = watched(source, found, blocks)
    assert asked == [0, 1, 2]
    assert np.array_equal(watch.kld, expected.kld)
    assert np.array_equal(watch.delta_p, expected.delta_p)
    assert np.array_equal(watch.same, expected.same)


def test_with_two_cores_the_source_runs_while_a_block_is_decoded(case):
    source, found, blocks = case
    begun = [threading.Event() for _ in blocks]

    def of_source(block):
        begun[block].set()
        return source[block]

    with SourceComparison(of_source, blocks, threads=2).ahead() as receive:
        for rows, following in zip(found[:-1, :-1], begun[1:], strict=True):
            receive(rows)
            assert following.wait(timeout=60)


def test_an_error_of_the_source_ahead_is_raised(case):
    source, found, blocks = case

    def of_source(block):
        if block == 1:
            raise ColdpressError("damaged")
        return source[block]

    with SourceComparison(of_source, blocks, threads=2).ahead() as receive:
        receive(found[0, :-1])
        with pytest.raises(ColdpressError, match="damaged"):
            receive(found[1, :-1])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_ruined_logit_is_no_small_divergence(case, value):
    source, found, blocks = case
    found[1, 2, 3] = value
    figures = watched(source, found, blocks).divergence()
    assert math.isnan(figures.mean_kld)
    assert math.isnan(figures.max_kld)
    assert math.isnan(figures.p999_kld)


def test_logits_that_are_all_0_have_no_relative_error(case):
    """And no warning of numpy's."""
    source, found, blocks = case
    assert np.isnan(of_dense_run(watched(0 * source, 0 * found, blocks), ()).max_logit_error)
