"""A tokenizer of the `tokenizers` package, and its failures as sentences; no limits of its own.

It runs in this process for tokenizers that are known to be bounded, and in a limited one for others
(runtime/text/process.py), which is why it imports nothing but the package.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from coldpress.schemas.errors import ArtifactError, clipped

TOKENIZER_FILE = "tokenizer/tokenizer.json"


class Engine:
    """One tokenizer.json."""

    def __init__(self, data: bytes) -> None:
        """Builds it.

        Raises:
            ArtifactError: if the text is no tokenizer.
        """
        with _sentences("not a tokenizer"):
            self._tokenizer = Tokenizer.from_buffer(data)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # by id, because the library compares texts and fails to know special tokens that its normalizer has changed
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.special = frozenset(token_id for token_id, token in added if token.special)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids, with what the post-processor adds where `special` says so."""
        with _sentences("failing on this text"):
            return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        with _sentences("failing on these ids"):
            return self._tokenizer.decode([token_id for token_id in ids if token_id not in self.special])

    def stream(self) -> Callable[[Sequence[int]], str]:
        """A function that takes further ids and gives the text that has become certain."""
        stream = DecodeStream()

        def step(ids: Sequence[int]) -> str:
            with _sentences("failing on these ids"):
                pieces = [stream.step(self._tokenizer, token_id) for token_id in ids if token_id not in self.special]
            return "".join(piece or "" for piece in pieces)

        return step


@contextmanager
def _sentences(found: str) -> Generator[None]:
    try:
        yield
    except BaseException as error:  # the package raises plain Exception, and a panic of its core is not even that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ArtifactError(f"{TOKENIZER_FILE}: {found} ({clipped(str(error))}); rebuild the artifact") from error
