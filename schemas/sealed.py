"""Seals a JSON file with a digest of its content, for manifests and the records of stages.

The second line holds the digest: `  "body_sha256": "<64 hex digits>",`. It is the sha256 of the *body*, the file
without this line; the body is a JSON object, too. So the digest covers every byte of the file, and a reader needs no
canonical form of numbers or strings to check it (FORMAT.md, section 2).
"""

import hashlib
import re
from dataclasses import dataclass

KEY = "body_sha256"
_BEGIN = "{\n"
_LINE = re.compile(rb'\{\n  "body_sha256": "([0-9a-f]{64})",\n')


@dataclass(frozen=True)
class Opened:
    """The body of a file, and the digest that the file states."""

    stated: str | None
    """The digest in the second line; None if the file has no such line."""
    body: bytes

    @property
    def found(self) -> str:
        return hashlib.sha256(self.body).hexdigest()


def seal(body: str) -> str:
    """Inserts the digest of a JSON object's text as its second line; raises ValueError if the text does not begin with
    a brace and a line feed, as indented JSON does."""
    if not body.startswith(_BEGIN):
        raise ValueError(f"the text begins with {body[:2]!r}, expected {_BEGIN!r}")
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{_BEGIN}  "{KEY}": "{digest}",\n{body.removeprefix(_BEGIN)}'


def unseal(data: bytes) -> Opened:
    """Splits a file into its stated digest and its body; without the digest's line, the whole file is the body."""
    line = _LINE.match(data)
    if line is None:
        return Opened(None, data)
    return Opened(line.group(1).decode(), _BEGIN.encode() + data[line.end() :])
