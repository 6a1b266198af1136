"""Chooses the next token from logits: the largest, or a seeded draw from the likeliest. Probabilities are float64.

Settings act in the order of transformers' generation: repetition penalty (in greedy decoding, too), temperature, top_k,
top_p, min_p; each of the last three sees the probabilities of the tokens that earlier settings left. llama.cpp has the
same settings, but applies the temperature last, and looks for repetitions only among the last 64 tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from coldpress.schemas.base import Record
from coldpress.schemas.errors import ColdpressError

Temperature = Annotated[float, Field(ge=0, le=100, description="0 takes the likeliest token, the lowest id of several")]
TopP = Annotated[
    float, Field(gt=0, le=1, description="draw from the likeliest tokens that together have this probability")
]
TopK = Annotated[
    int, Field(ge=0, description="draw from this many likeliest tokens, and from ties with the last; 0 for all")
]
MinP = Annotated[
    float, Field(ge=0, le=1, description="draw from tokens of at least this share of the likeliest's probability")
]
RepetitionPenalty = Annotated[
    float,
    # beyond these limits it drowns the logits, and its products with them may overflow
    Field(
        ge=0.01,
        le=100,
        description="make tokens of the prompt and of the text so far less likely, in greedy decoding, too: divide "
        "positive logits by it, multiply negative ones (CTRL, section 4.1)",
    ),
]
Seed = Annotated[
    int,
    Field(
        ge=0,
        lt=1 << 63,
        description="seed of the draws; of several prompts the first has it, the next one the seed plus 1",
    ),
]


EXPECTED: Mapping[str, str] = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "less than {lt:g}",
    "extra_forbidden": "no such name",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "value_error": "{error}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_too_long": "text of at most {max_length}",
    **dict.fromkeys(("string_type", "string_sub_type"), "text"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "bool_type": "true or false",
    "list_type": "a list",
    **dict.fromkeys(("dict_type", "model_type"), "an object"),
}
"""Kind of a mistake that pydantic finds -> the words for what it expected."""


def expected(mistake: Mapping[str, Any]) -> str:
    """Returns the expected value where pydantic found a mistake, one of `ValidationError.errors()`."""
    return EXPECTED.get(mistake["type"], mistake["msg"]).format(**mistake.get("ctx", {}))


class Sampling(Record):
    """Settings for choosing the next token; the command line's flags and the server's fields are these."""

    model_config = ConfigDict(strict=False)

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Seed = 0

    @model_validator(mode="wrap")
    @classmethod
    def _in_a_sentence(cls, values: Any, handler: ModelWrapValidatorHandler["Sampling"]) -> "Sampling":
        try:
            return handler(values)
        except ValidationError as error:
            first = error.errors()[0]
            name, value = ".".join(map(str, first["loc"])), first["input"]
            raise ColdpressError(f"the sampling's {name} is {value}, expected {expected(first)}") from error

    def at(self, place: int) -> "Sampling":
        """Returns the settings of the sequence at `place` among several: each has the next seed."""
        return self.model_copy(update={"seed": self.seed + place})


class Chooser:
    """Chooses the tokens of one sequence; the same settings, prompt and logits give the same tokens."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int] = ()) -> None:
        self._sampling, self._used = sampling, set(prompt_ids)
        self._random = np.random.default_rng(sampling.seed)

    def choose(self, logits: np.ndarray) -> int:
        """Chooses the next token from `logits`, float32 [vocab_size], and counts it as used. Raises `ColdpressError` if
        the logits are not finite."""
        if not np.isfinite(logits).all():
            raise ColdpressError("the model's logits are not finite numbers; its weights overflow in this arithmetic")
        if self._sampling.repetition_penalty != 1:
            used = np.fromiter(self._used, np.int64, len(self._used))
            logits = penalized(logits, used, self._sampling.repetition_penalty)
        if self._sampling.temperature == 0:
            chosen = int(np.argmax(logits))
        else:
            tokens, probabilities = candidates(logits, self._sampling)
            chosen = int(self._random.choice(tokens, p=probabilities))
        self._used.add(chosen)
        return chosen


def penalized(logits: np.ndarray, used: np.ndarray, penalty: float) -> np.ndarray:
    """Returns logits, float64 [vocab_size], with `penalty` applied to the tokens `used`, distinct ids int64 [n]."""
    found = logits.astype(np.float64)
    found[used] = np.where(found[used] < 0, found[used] * penalty, found[used] / penalty)
    return found


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens that may be drawn at a temperature above 0, and their probabilities.

    `logits` are finite floats [vocab_size], with the repetition penalty applied. The ids are int64 [n], likeliest first
    and lower ids first among equals; the probabilities are float64 [n], and sum to 1.
    """
    below = logits.astype(np.float64) - logits.max()
    with np.errstate(over="ignore"):  # a tiny temperature takes all but the likeliest to -inf, which exp makes 0
        weights = np.exp(below / sampling.temperature)
    tokens = np.arange(len(below))
    if 0 < sampling.top_k < weights.size:
        tokens = np.flatnonzero(below >= np.partition(below, -sampling.top_k)[-sampling.top_k])
    tokens = tokens[np.argsort(-weights[tokens], kind="stable")]
    if sampling.top_p < 1:  # at 1, rounded sums would reach the whole before the last token
        sums = weights[tokens].cumsum()
        tokens = tokens[: int(sums.searchsorted(sampling.top_p * sums[-1])) + 1]
    tokens = tokens[weights[tokens] >= sampling.min_p * weights[tokens[0]]]
    return tokens, weights[tokens] / weights[tokens].sum()
