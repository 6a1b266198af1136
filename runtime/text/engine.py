"""Runs a tokenizer of the `tokenizers` package, and turns its failures into sentences; sets no limits.

It runs in a limited process (runtime/text/process.py), and imports little else, so that it starts fast and stays small.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from coldpress.schemas.errors import ArtifactError, clipped

TOKENIZER_FILE = "tokenizer/tokenizer.json"


class Engine:
    def __init__(self, data: bytes) -> None:
        """Raises `ArtifactError` if the bytes are not a tokenizer."""
        with _sentences("not a tokenizer"):
            self._tokenizer = Tokenizer.from_buffer(data)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # by id: the library compares texts, and misses special tokens whose text its normalizer has changed
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._special = frozenset(token_id for token_id, token in added if token.special)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Returns the token ids of a text; with `special`, the post-processor adds its special tokens."""
        with _sentences("failing on this text"):
            return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        with _sentences("failing on these ids"):
            return self._tokenizer.decode([token_id for token_id in ids if token_id not in self._special])

    def token(self, token_id: int) -> str:
        """Returns a token as the vocabulary writes it; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def stream(self) -> Callable[[Sequence[int]], str]:
        """Returns a function that takes further ids and returns the text that has become certain."""
        stream = DecodeStream()

        def step(ids: Sequence[int]) -> str:
            with _sentences("failing on these ids"):
                pieces = [stream.step(self._tokenizer, token_id) for token_id in ids if token_id not in self._special]
            return "".join(piece or "" for piece in pieces)

        return step


@contextmanager
def _sentences(found: str) -> Generator[None]:
    try:
        yield
    except BaseException as error:  # the package raises plain Exception; a panic of its core is only a BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ArtifactError(f"{TOKENIZER_FILE}: {found} ({clipped(str(error))}); rebuild the artifact") from error
