"""Origin of an artifact: the compiler's version and commit, and the libraries that it ran with.

None of it is in the artifact. Every byte there counts for the identity, and the same inputs must give the same bytes on
another host, from another checkout, and with another library that computes the same. So `package` writes it to its
own record beside the artifact, and `report` to metrics.json.
"""

from pydantic import Field

from coldpress.schemas.base import Record


class Provenance(Record):
    compiler_version: str
    commit: str | None = Field(default=None, pattern=r"^[0-9a-f]{40,64}$")
    """Commit of the checkout that the compiler ran from; None if it was installed, or if git is missing."""
    dirty: bool = False
    """True if files of that checkout differed from the commit."""
    python_version: str
    libraries: dict[str, str]
    """Name -> version of the libraries that decide bytes or figures; those that are not installed are left out."""

    @property
    def compiler(self) -> str:
        """Returns version and commit in a few words; `+` marks a checkout with changes."""
        return f"{self.compiler_version} {self.commit[:12]}{'+' * self.dirty}" if self.commit else self.compiler_version
