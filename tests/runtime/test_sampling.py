"""The next token: transformers' own processors decide what may be drawn, and how likely."""

import re

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig

from coldpress.runtime.generate.sampling import Chooser, Sampling, candidates, penalized
from coldpress.schemas.errors import ColdpressError

VOCAB = 400
SETTINGS = (
    Sampling(temperature=0.7),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=17),
    Sampling(temperature=2.5, top_k=VOCAB + 5, min_p=0.02),
    Sampling(temperature=0.6, top_p=0.8),
    Sampling(temperature=1.3, min_p=0.1),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.4, top_k=30, top_p=0.7, min_p=0.2, repetition_penalty=1.3),
    Sampling(temperature=3.0, top_k=50, top_p=0.95, repetition_penalty=0.6),
)


class Generator(GenerationMixin):
    config = PretrainedConfig()


def expected(logits, used, sampling):
    """float64 [vocab_size] of transformers' processors in the order that its `generate` has them."""
    config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty,
    )
    processors = Generator()._get_logits_processor(config, input_ids_seq_length=len(used))
    scores = processors(torch.tensor([used]), torch.tensor(logits, dtype=torch.float64)[None])
    return torch.softmax(scores[0], dim=0).numpy()


@pytest.mark.parametrize("sampling", SETTINGS)
def test_what_may_be_drawn_is_what_transformers_would_draw_from(sampling):
    random = np.random.default_rng(3)
    for scale in (0.5, 2, 8):
        logits = (scale * random.standard_normal(VOCAB)).astype(np.float32)
        used = random.integers(0, VOCAB, 25).tolist()  # some of them twice
        found = np.zeros(VOCAB)
        penalty = sampling.repetition_penalty
        tokens, probabilities = candidates(penalized(logits, np.unique(used), penalty), sampling)
        found[tokens] = probabilities
        wanted = expected(logits, used, sampling)
        assert (found > 0).tolist() == (wanted > 0).tolist()
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=0)
        assert (np.diff(probabilities) <= 0).all()


def test_greedy_decoding_takes_no_token_again_that_the_penalty_makes_worse():
    """Of prompt and new tokens; a negative logit is multiplied."""
    logits = np.array([3.0, 2.9, 2.8, -1.0], np.float32)
    chooser = Chooser(Sampling(repetition_penalty=1.2), [0, 3, 3])
    assert [chooser.choose(logits) for _ in range(4)] == [1, 2, 0, 0]
    assert penalized(logits, np.array([1, 3]), 2.0).tolist() == [3.0, np.float32(2.9) / 2, np.float32(2.8), -2.0]


def test_equals_of_the_last_of_the_likeliest_stay():
    logits = np.array([1, 5, 1, 0, 1], np.float32)
    assert candidates(logits, Sampling(temperature=1.0, top_k=2))[0].tolist() == [1, 0, 2, 4]


def test_the_nucleus_ends_where_the_sum_is_reached():
    """Of four equal tokens two make a half exactly, so a third is one too many; float64 has these sums exactly."""
    equal = np.zeros(4, np.float32)
    for top_p, count in ((0.25, 1), (0.5, 2), (0.75, 3), (0.51, 3)):
        assert candidates(equal, Sampling(temperature=1.0, top_p=top_p))[0].tolist() == list(range(count))


def test_the_nucleus_is_the_fewest_likeliest_tokens():
    logits = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2])).astype(np.float32)
    tokens, probabilities = candidates(logits, Sampling(temperature=1.0, top_p=0.7))
    assert tokens.tolist() == [1, 3, 4]
    np.testing.assert_allclose(probabilities, np.array([0.4, 0.25, 0.2]) / 0.85, rtol=1e-6)
    assert candidates(logits, Sampling(temperature=1.0, top_p=1e-9))[0].tolist() == [1]
    assert sorted(candidates(logits, Sampling(temperature=1.0))[0].tolist()) == [0, 1, 2, 3, 4]
    assert candidates(logits, Sampling(temperature=0.01))[1][0] == pytest.approx(1)


def test_draws_follow_the_probabilities():
    chooser, logits = Chooser(Sampling(temperature=1.0)), np.log(np.array([0.7, 0.2, 0.1])).astype(np.float32)
    counts = np.bincount([chooser.choose(logits) for _ in range(3000)], minlength=3)
    np.testing.assert_allclose(counts / 3000, [0.7, 0.2, 0.1], atol=0.03)


def test_greedy_takes_the_lower_id_among_equals():
    assert Chooser(Sampling()).choose(np.array([0, 2, 2, 1], np.float32)) == 1


def test_logits_that_are_no_numbers_are_refused():
    with pytest.raises(ColdpressError, match="logits are not finite"):
        Chooser(Sampling()).choose(np.array([0, np.nan], np.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-1.0, float("inf"), float("nan"))],
        *[("top_p", value) for value in (0.0, 1.1, float("nan"))],
        *[("min_p", value) for value in (-0.1, 1.1, float("nan"))],
        *[("repetition_penalty", value) for value in (0.0, -2.0, 1e300, float("nan"))],
        *(("top_k", -1), ("seed", -1)),
    ],
)
def test_impossible_sampling_is_refused(field, value):
    with pytest.raises(ColdpressError, match=re.escape(f"the sampling's {field} is {value}, expected ")):
        Sampling(**{field: value})
