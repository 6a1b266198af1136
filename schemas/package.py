"""The results of `package` and `publish`: an artifact's folder, its identity and its sizes; and that of `export`."""

from coldpress.schemas.base import Count, Many, PositiveCount, Record, Sha256
from coldpress.schemas.provenance import Provenance


class Package(Record):
    """A complete artifact: from `package`, not verified yet; from `publish`, under its final name."""

    folder: str
    """The artifact's directory; absolute in memory."""
    manifest_sha256: Sha256
    """The artifact's identity."""
    artifact_bytes: PositiveCount
    """Bytes of all files, the manifest included."""
    flash_bytes: PositiveCount
    resident_bytes: Count
    predictor_bytes: Count
    provenance: Provenance


class Exported(Record):
    """A file for another engine, and its differences from the artifact."""

    target: str
    """A file of compiler/stages/export."""
    file: str
    """Path of the file; absolute in memory."""
    sha256: Sha256
    size_bytes: PositiveCount
    artifact_sha256: Sha256
    rounded: Many[str]
    """The file's names of tensors whose values were rounded again; all others equal the artifact's, to the bit."""
