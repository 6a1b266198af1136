"""The result of `package` and `publish`: an artifact's folder, its identity and its sizes."""

from coldpress.schemas.base import Count, PositiveCount, Record, Sha256
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
