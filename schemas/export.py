"""What `export` gives: a file for another engine, and what in it differs from the artifact that it was made of."""

from coldpress.schemas.base import Many, PositiveCount, Record, Sha256


class Export(Record):
    """One file in another engine's format."""

    target: str
    """A file of compiler/stages/export."""
    file: str
    """Absolute in memory."""
    sha256: Sha256
    size_bytes: PositiveCount
    artifact_sha256: Sha256
    """Identity of the artifact."""
    rounded: Many[str]
    """The file's own names of tensors whose values were rounded again; the others are the artifact's, to the bit."""
