"""A JSON file that carries the digest of its own content: manifests and the records of stages.

The digest stands in the second line, `  "body_sha256": "<64 hex digits>",`. It is that of the *body*, which is the file
without this line: itself one JSON object. So every byte of the file counts, and no reader needs a canonical form of
numbers or strings to check it (FORMAT.md, section 2).
"""

import hashlib
import re
from dataclasses import dataclass

KEY = "body_sha256"
_BEGIN = "{\n"
_LINE = re.compile(rb'\{\n  "body_sha256": "([0-9a-f]{64})",\n')


@dataclass(frozen=True)
class Opened:
    """What a file says of its body, and the body."""

    stated: str | None
    """The digest in the second line; None if no such line is there."""
    body: bytes

    @property
    def found(self) -> str:
        """Hex digest of the body."""
        return hashlib.sha256(self.body).hexdigest()


def seal(body: str) -> str:
    """A JSON object's text with its digest in the second line.

    Raises:
        ValueError: if the text does not begin with a brace and a line's end, as JSON with indentation does.
    """
    if not body.startswith(_BEGIN):
        raise ValueError(f"the text begins with {body[:2]!r}, expected {_BEGIN!r}")
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{_BEGIN}  "{KEY}": "{digest}",\n{body.removeprefix(_BEGIN)}'


def unseal(data: bytes) -> Opened:
    """A file's body and what it says of it; without such a line, all of it is the body."""
    line = _LINE.match(data)
    if line is None:
        return Opened(None, data)
    return Opened(line.group(1).decode(), _BEGIN.encode() + data[line.end() :])
