"""The result of `export`: a file for another engine, and its differences from the artifact."""

from coldpress.schemas.base import Many, PositiveCount, Record, Sha256


class Export(Record):
    target: str
    """A file of compiler/stages/export."""
    file: str
    """Path of the file; absolute in memory."""
    sha256: Sha256
    size_bytes: PositiveCount
    artifact_sha256: Sha256
    rounded: Many[str]
    """The file's names of tensors whose values were rounded again; all others equal the artifact's, to the bit."""
