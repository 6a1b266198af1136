"""Reads what an artifact says of a mixture's experts: experts.json, which calibration's figures are in."""

from pydantic import ValidationError

from coldpress.runtime.artifact.errors import SchemaError, short
from coldpress.runtime.artifact.reader import Artifact
from coldpress.schemas.experts import ExpertCurve
from coldpress.schemas.manifest import EXPERTS_FILE

MAX_BYTES = 1 << 20


def load_curve(artifact: Artifact) -> ExpertCurve | None:
    """Returns what an artifact says of its experts; None if it says nothing. Raises `ArtifactError` if the file is
    damaged, or is not about the model's experts."""
    spec = artifact.manifest.model
    if all(entry.path != EXPERTS_FILE for entry in artifact.manifest.files):
        return None
    try:
        curve = ExpertCurve.model_validate_json(artifact.read_bytes(EXPERTS_FILE, MAX_BYTES))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the content"
        raise SchemaError(EXPERTS_FILE, short(field), short(first["msg"]), "a record of schemas/experts.py") from error
    found = (len(curve.lru_misses), len(curve.static_misses), curve.num_experts_per_tok)
    expected = (spec.num_experts, spec.num_experts, spec.num_experts_per_tok)
    if found != expected:
        raise SchemaError(EXPERTS_FILE, "lengths of both curves, and experts of a token", f"{found}", f"{expected}")
    return curve
