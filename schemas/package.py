"""What `package` and `publish` give: where an artifact stands, its identity and its sizes."""

from coldpress.schemas.base import Count, PositiveCount, Record, Sha256


class Package(Record):
    """A whole artifact: of `package`, before anyone has verified it; of `publish`, under its final name."""

    folder: str
    """The artifact's directory; absolute in memory."""
    manifest_sha256: Sha256
    """The artifact's identity."""
    artifact_bytes: PositiveCount
    """All files, the manifest among them."""
    flash_bytes: PositiveCount
    resident_bytes: Count
    predictor_bytes: Count
