"""Turns new tokens into text, piece by piece as it becomes certain, up to a stop string.

A stop string may begin and end anywhere in tokens. The text ends where the stop string begins, so that text which may
be the beginning of one is held back until that is certain. Of several stop strings, the one that ends first stops the
text; if two end at the same place, the longer one. So the result does not depend on how tokens cut the text.
"""

from collections.abc import Callable, Sequence

from coldpress.runtime.artifact import strict_json
from coldpress.runtime.artifact.errors import short
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.errors import ColdpressError


class StopFinder:
    def __init__(self, stops: Sequence[str]) -> None:
        """Raises `ColdpressError` if a stop string is empty, or not valid Unicode."""
        for stop in stops:
            if not stop or not strict_json.is_encodable(stop):
                raise ColdpressError(f"the stop string {short(stop)} is not text, expected at least one character")
        self._stops, self._held = tuple(stops), ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Adds a piece of text, and returns the text that is now certain to be before any stop string."""
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(place + len(stop), -len(stop)) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            end, negative = min(places)  # the first end; at equal ends the longest, whose negative length is least
            begin, self._held = end + negative, ""
            self.found = text[begin:end]
            return text[:begin]
        certain = len(text) - self._num_held(text)
        self._held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """Ends the text, and returns what was held back: it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Returns the length of the longest end of `text` that is the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int], stops: Sequence[str] = ()) -> None:
        """Raises as `StopFinder`."""
        self._codec, self._prompt_ids, self._finder = codec, list(prompt_ids), StopFinder(stops)
        self._step: Callable[[int], str] | None = None
        self._new_ids: list[int] = []
        self._shown: list[str] = []

    @property
    def stop(self) -> str | None:
        return self._finder.found

    def add(self, token_id: int) -> str:
        """Adds a token, and returns the text that has become certain with it. Raises `ArtifactError` if the tokenizer
        fails."""
        if self._step is None:  # not earlier: the session has checked the prompt's ids before it gives a token
            self._step = self._codec.streamer(self._prompt_ids)
        self._new_ids.append(token_id)
        self._shown.append(self._finder.push(self._step(token_id)))
        return self._shown[-1]

    def text(self) -> str:
        """Returns the text so far: up to the stop string, or all of it, with text that is not certain yet."""
        if self.stop is not None:
            return "".join(self._shown)
        return self._codec.continuation(self._prompt_ids, self._new_ids)

    def remainder(self) -> str:
        """Returns the rest of `text` behind the pieces that `add` has returned, once there are no more tokens."""
        whole, shown = self.text(), "".join(self._shown)
        return whole[len(shown) :] if whole.startswith(shown) else self._finder.rest()
