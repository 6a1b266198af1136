"""Serves an artifact to lm-evaluation-harness as a model.

Run `python -m coldpress.runtime.cli.harness run --model coldpress --tasks …` (extra `eval`): it takes the harness's
command line. `--model_args artifact=FOLDER` names the artifact, and `dram_budget=…`, `selector=…`, `cache=…` change its
plan as they do for `coldpress`. Scores are those of normal use: the prompt is computed densely, the rest token by
token through selector and cache. With `sparse_prompt=true` the prompt goes through the selector, too, as papers on
sparsity measure.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from coldpress.runtime.cli.command_line import fail
from coldpress.runtime.generate.choice import budget_at
from coldpress.runtime.generate.likelihood import sum_nll
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from coldpress.runtime.generate.statistics import Token
from coldpress.runtime.kernels.activations import DEFAULT_ACTIVATIONS
from coldpress.runtime.text.stream import TextStream
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError, clipped

try:
    # the harness has no stubs, and some of its functions no types
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingTypeStubs]
    from lm_eval.api.registry import (  # pyright: ignore[reportMissingTypeStubs]
        register_model,  # pyright: ignore[reportUnknownVariableType]
    )
    from lm_eval.models.utils import (  # pyright: ignore[reportMissingTypeStubs]
        handle_stop_sequences,
        normalize_gen_kwargs,  # pyright: ignore[reportUnknownVariableType]
    )
    from lm_eval.utils import (  # pyright: ignore[reportMissingTypeStubs]
        get_rolling_token_windows,
        make_disjoint_window,
    )
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("lm_eval"):
        raise
    raise ColdpressError("lm-evaluation-harness is not installed; pip install '.[eval]' in a checkout") from error

MAX_NEW_TOKENS = 256
"""Length of an answer if a task gives none, as in the models of the harness."""
NO_NETWORK = (
    "without a network, give a task whose data is in local files: a YAML file with `dataset_path: json` and "
    "`dataset_kwargs: {data_files: {test: /path/items.jsonl}}`, its folder with --include_path"
)


class ArtifactModel(TemplateLM):
    """A session behind the harness's interface; one request runs at a time."""

    def __init__(
        self,
        artifact: str | Path,
        dram_budget: str | None = None,
        selector: str | None = None,
        cache: str | None = None,
        activations: str = DEFAULT_ACTIVATIONS,
        sparse_prompt: bool | str = False,
        **others: Any,
    ) -> None:
        """Opens the artifact.

        Args:
            dram_budget: Bytes, or an amount with a unit; None for the artifact's largest plan.
            selector, cache: A method of runtime/sparsity and a policy of runtime/cache; None for the plan's.
            activations: The type to which decoding rounds vectors before it multiplies them with codes.
            sparse_prompt: Whether every token but the first goes through the selector; also as text, `true` or `false`.
            others: Arguments that the harness gives every model: a batch size and a device. They are ignored.

        Raises:
            ArtifactError: if the artifact is damaged or has no tokenizer.
            ColdpressError: for an unknown argument, or a value of the wrong type.
        """
        super().__init__()
        unknown = sorted(set(others) - {"batch_size", "max_batch_size", "device"})
        if unknown:
            raise ColdpressError(
                f"model_args has {', '.join(unknown)}, expected artifact, dram_budget, selector, cache, "
                "activations or sparse_prompt"
            )
        names: dict[str, object] = {"selector": selector, "cache": cache, "activations": activations}
        for name, value in names.items():
            if not isinstance(value, str | None):
                raise ColdpressError(f"model_args has {name}={value!r}, expected a name; see `coldpress bench -h`")
        budget_bytes = budget_at(str(artifact), dram_budget)
        self._sparse_prompt = _truth("sparse_prompt", sparse_prompt)
        self._session = Session(
            str(artifact), dram_budget_bytes=budget_bytes, selector=selector, cache=cache, activations=activations
        )
        self._codec = TextCodec(self._session.artifact)
        self._spec = self._session.artifact.manifest.model

    @property
    def eot_token_id(self) -> int:
        """Returns an end-of-sequence token; if the model has none, the beginning-of-sequence token, or else 0."""
        ids = (*self._spec.eos_token_ids, *(() if self._spec.bos_token_id is None else (self._spec.bos_token_id,)))
        return ids[0] if ids else 0

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self._spec.bos_token_id is None else self._spec.bos_token_id

    @property
    def max_length(self) -> int:
        return self._session.plan.context_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encodes a text as a prompt; `add_special_tokens=False` removes a leading beginning-of-sequence token."""
        ids = self._codec.encode(string)
        if add_special_tokens is False and ids[:1] == [self._spec.bos_token_id]:
            return ids[1:]
        return ids

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Scores requests as the harness does; refuses those without a token, on which the harness fails."""
        for context, continuation in (request.args for request in requests):
            if not context and not self.tok_encode(continuation, add_special_tokens=False):
                raise ColdpressError(
                    f"a task scores the ending {continuation!r}, which has no tokens, after an empty context; expected "
                    "at least one token; correct the task's data"
                )
        return super().loglikelihood(list(requests), disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Returns (log-likelihood of the continuation in nats, whether greedy decoding gives it) per request."""
        found: list[tuple[float, bool]] = []
        for texts, context, continuation in requests:
            scored = self._scored(context, continuation)
            found.append(scored)
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, scored)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each whole text, in windows of the context's length that do not overlap."""
        found: list[float] = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            total = sum(self._scored(*make_disjoint_window(window))[0] for window in windows)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            found.append(float(total))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        found: list[str] = []
        for prompt, kwargs in (request.args for request in requests):
            text = self._continued(prompt, *_wanted(kwargs))
            self.cache_hook.add_partial("generate_until", (prompt, kwargs), text)
            found.append(text)
        return found

    def _continued(self, prompt: str, max_new_tokens: int, stops: Sequence[str], sampling: Sampling) -> str:
        """Continues a prompt; cuts the beginning of one that does not fit, as the models of the harness do."""
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ColdpressError(
                f"a task asks for {max_new_tokens} new tokens, the artifact's context has {self.max_length}; "
                "give --gen_kwargs max_gen_toks=…"
            )
        prompt_ids = self.tok_encode(prompt)[-room:]
        text = TextStream(self._codec, prompt_ids, stops)

        def until(token: Token) -> bool:
            if token.id in self._spec.eos_token_ids:
                return True
            text.add(token.id)
            return text.stop is not None

        self._session.generate(prompt_ids, max_new_tokens, sampling=sampling, on_token=until)
        return text.text()

    def _scored(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
        """Scores a continuation; cuts the beginning of a context that does not fit."""
        whole = np.array([*context, *continuation], np.int64)[-self.max_length :]
        first = len(whole) - len(continuation)
        if first < 1 or not continuation:
            raise ColdpressError(
                f"a task scores {len(continuation)} tokens after {len(context)}, expected at least one and one before "
                f"within the context of {self.max_length}; build with a larger context_length"
            )
        rows: list[np.ndarray] = []
        position = 0

        def keep(logits: np.ndarray) -> None:
            nonlocal position
            rows.extend(logits[max(0, first - 1 - position) :])
            position += len(logits)

        prefilled = 1 if self._sparse_prompt else first
        self._session.perplexity(whole[None], sparse=True, prefill_tokens=prefilled, on_logits=keep)
        logits = np.array(rows[: len(continuation)], np.float64)
        targets = whole[first:]
        return -sum_nll(logits, targets), bool((logits.argmax(axis=1) == targets).all())


def _truth(name: str, value: object) -> bool:
    found = {"true": True, "false": False}.get(str(value).lower())
    if found is None:
        raise ColdpressError(f"model_args has {name}={value!r}, expected true or false")
    return found


def _wanted(kwargs: Mapping[str, Any]) -> tuple[int, list[str], Sampling]:
    """Returns the number of new tokens, the stop strings and the sampling of a task's `generation_kwargs`."""
    try:
        wanted = normalize_gen_kwargs(dict(kwargs), MAX_NEW_TOKENS)
        given = cast(list[Any], handle_stop_sequences(wanted.get("until"), None))  # it does not look at the elements
        stops = [stop for stop in given if stop]
        sampling = Sampling(
            temperature=float(wanted.get("temperature") or 0.0) if wanted.get("do_sample") else 0.0,
            top_p=float(wanted.get("top_p") or 1.0),
            top_k=int(wanted.get("top_k") or 0),
            min_p=float(wanted.get("min_p") or 0.0),
            repetition_penalty=float(wanted.get("repetition_penalty") or 1.0),
        )
        max_new_tokens = int(wanted.get("max_gen_toks") or MAX_NEW_TOKENS)
    except (TypeError, ValueError) as error:
        raise ColdpressError(
            f"a task's generation_kwargs are {clipped(str(dict(kwargs)))}: {error}; correct them"
        ) from error
    for stop in stops:
        if not isinstance(stop, str):
            raise ColdpressError(f"a task's `until` has {stop!r}, expected texts; put it in quotes")
    return max_new_tokens, stops, sampling


register_model("coldpress")(ArtifactModel)  # no decorator: the registry's has no type


def main() -> None:
    """Runs the harness's command line, to which importing this module has added the model `coldpress`."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingTypeStubs]  it has none

    try:
        cli_evaluate()
    except (ColdpressError, ValueError) as error:  # the harness raises ValueError for arguments that it refuses
        raise SystemExit(fail(str(error))) from error
    except OSError as error:  # `datasets` and `huggingface_hub` raise it when they reach no server
        told = " ".join(str(error).split())
        raise SystemExit(fail(f"the harness could not load a task's data ({told}); {NO_NETWORK}")) from error


if __name__ == "__main__":
    main()
