"""The text that new tokens add to a prompt's, piece by piece as it becomes certain, up to a stop string.

A stop string may begin and end anywhere in tokens. The text is cut where it begins, so that what may turn out to be its
beginning is held back until that is known. Of several stop strings the one that ends first stops the text, the longest
among those: which one does not depend on how the text was cut into tokens.
"""

from collections.abc import Callable, Sequence

from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import short
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError


class StopFinder:
    """Looks for stop strings in text that comes in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Takes any number of stop strings.

        Raises:
            ColdpressError: if one is empty, or no Unicode.
        """
        for stop in stops:
            if not stop or not strict_json.is_encodable(stop):
                raise ColdpressError(f"the stop string {short(stop)} is no text, expected at least one character of it")
        self._stops, self._held = tuple(stops), ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """What is certain to stand before any stop string, `piece` being the next text; nothing behind one."""
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(place + len(stop), -len(stop)) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            end, negative = min(places)
            begin, self._held = end + negative, ""
            self.found = text[begin:end]
            return text[:begin]
        kept = len(text) - self._num_held(text)
        self._held = text[kept:]
        return text[:kept]

    def rest(self) -> str:
        """What was held back and, as the text has ended, begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """The continuation of one prompt."""

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int], stops: Sequence[str] = ()) -> None:
        """Begins behind the prompt.

        Raises:
            ColdpressError: if a stop string is empty, or no Unicode.
        """
        self._codec, self._prompt_ids, self._finder = codec, list(prompt_ids), StopFinder(stops)
        self._step: Callable[[int], str] | None = None
        self._new_ids: list[int] = []
        self._shown: list[str] = []

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._finder.found

    def add(self, token_id: int) -> str:
        """The text that has become certain with one more token.

        Raises:
            ArtifactError: if the tokenizer fails.
        """
        if self._step is None:  # not before a token: by then the session has found the prompt's ids to be ids
            self._step = self._codec.streamer(self._prompt_ids)
        self._new_ids.append(token_id)
        self._shown.append(self._finder.push(self._step(token_id)))
        return self._shown[-1]

    def rest(self) -> str:
        """What no further token will come for."""
        return self._finder.rest()

    def text(self) -> str:
        """All of it so far: up to the stop string, or with what is not certain yet."""
        if self.stop is not None:
            return "".join(self._shown)
        return self._codec.continuation(self._prompt_ids, self._new_ids)
