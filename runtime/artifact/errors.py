"""The errors with which an artifact is refused, one class per cause. All of them are `ArtifactError`s.

Every text names the file, the field, what was found and what was expected, and ends with the remedy.
"""

from coldpress.schemas.errors import ArtifactError, clipped

DAMAGED = "the artifact is damaged or not coldpress's own: copy it again or rebuild it"


def short(value: object) -> str:
    """Returns a value from an artifact as one line of bounded length, for an error's text."""
    return clipped(repr(value), 110)


class FieldError(ArtifactError):
    def __init__(self, file: str, field: str, found: str, expected: str, remedy: str = DAMAGED) -> None:
        """`found` and `expected` are phrases that follow `is` and `expected`."""
        field, found, expected = clipped(field), clipped(found), clipped(expected, 500)
        super().__init__(f"{file}: {field} is {found}, expected {expected}; {remedy}")
        self.file, self.field, self.found, self.expected = file, field, found, expected


class JsonError(FieldError):
    """Text that is not strict JSON: duplicate keys, NaN, too deep, too large, not UTF-8."""


class SchemaError(FieldError):
    """JSON that does not fit the manifest's schema."""


class VersionError(FieldError):
    """Another format, or another major version of it."""


class FeatureError(FieldError):
    """A required feature that this runtime does not have."""


class FileNameError(FieldError):
    """A file name that is unsafe, leads out of the folder, or is listed twice."""


class FileKindError(FieldError):
    """A missing file, or a link, folder or device in a file's place."""


class FileSizeError(FieldError):
    """A file that is shorter or longer than the manifest says."""


class DigestError(FieldError):
    """A file whose content is not what the manifest says."""


class IdentityError(FieldError):
    """Not the artifact that the caller asked for."""


class TensorFileError(FieldError):
    """A safetensors file that breaks its format, or whose tensors differ from the manifest."""


class ModelError(FieldError):
    """A model description that contradicts itself."""


class SectionError(FieldError):
    """A section of flash.img that is misaligned, out of order, overlapping or outside the file."""


class TableError(FieldError):
    """A unit order or a rank that is not a permutation, or what a selector keeps out of its bounds."""


class PlanError(FieldError):
    """A plan whose parts contradict the artifact or its own budget."""


class HiddenDataError(FieldError):
    """Bytes or files where there must be none."""


class NonFiniteError(FieldError):
    """Weights that are not finite numbers."""


class DeviceError(FieldError):
    """A read that the device or the operating system refuses, or a file cut short while open."""
