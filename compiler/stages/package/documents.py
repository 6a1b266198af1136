"""Writes the files of an artifact that people and tools read: tokenizer, licence, provenance, and the model card. They
depend on the records and on file contents alone: on no time, host or path."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from coldpress.compiler.checkpoint.private import record_of
from coldpress.compiler.io import checked_file, checked_path, digest, load_arrays
from coldpress.compiler.stages.package.hashing import Written
from coldpress.compiler.stages.package.joined import Codes
from coldpress.runtime.quantization._mixed import in_words
from coldpress.schemas import __version__
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.curves import Curves
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import printable
from coldpress.schemas.layout import Layout
from coldpress.schemas.manifest import CURVES_FILE, EXPERTS_FILE, FLASH_FILE, RESIDENT_FILE, TRACE_FILE
from coldpress.schemas.model import Model, SourceFile
from coldpress.schemas.order import Order
from coldpress.schemas.placement import Placement
from coldpress.schemas.plans import Plans
from coldpress.schemas.predictors import LayerPredictor
from coldpress.schemas.sparsity import Sparsity

TOKENIZER_FILES = {
    *("added_tokens.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"),
}
PROVENANCE_FILE = "provenance/build.json"


@dataclass(frozen=True)
class DocumentInputs:
    model: Model
    corpus: Corpus
    sparsity: Sparsity
    device: DeviceProfile
    layout: Layout
    plans: Plans
    order: tuple[Order, ...]
    placement: Placement
    codes: Codes
    predictors: tuple[LayerPredictor, ...]
    curves: Curves | None = None
    """None where the method was given."""


def input_digests(inputs: DocumentInputs) -> dict[str, str]:
    """Returns digests by content: the records' own files are not hashed, because they hold paths."""
    found = {"text": inputs.corpus.text_sha256, "weights": inputs.model.weights_sha256}
    for blocks in inputs.corpus.splits:
        tokens = load_arrays(blocks.arrays, "tokens")["tokens"].astype("<i4")
        found[f"{blocks.split}_tokens"] = hashlib.sha256(tokens.tobytes()).hexdigest()
    settings = (
        json.dumps(_without_paths(inputs.sparsity), sort_keys=True),
        inputs.device.to_json(),
        inputs.codes.algorithm,
        inputs.placement.solver,
    )
    found["settings"] = digest(*settings, inputs.layout.to_json(), *(plan.to_json() for plan in inputs.plans.plans))
    return found


def _without_paths(sparsity: Sparsity) -> dict[str, Any]:
    """Dumps the record without the paths of its arrays: the tables hold the arrays themselves."""
    return sparsity.model_dump(mode="json", exclude={"arrays": True, "ladder": {"__all__": {"arrays"}}})


def write_documents(written: Written, inputs: DocumentInputs, digests: dict[str, str]) -> None:
    """Writes tokenizer, licences, curves, experts, provenance, README.md; flash.img and resident.safetensors exist."""
    # the files that `ingest` took, and nothing else from any folder
    for file in inputs.model.private_files:
        if file.name in TOKENIZER_FILES:
            written.add(f"tokenizer/{file.name}", _content(inputs.model, file))
    for file in inputs.model.license_files:
        written.add(file.name, _content(inputs.model, file))
    if (curves := inputs.curves) is not None:
        written.copy(checked_path(curves.trace), TRACE_FILE)
        beside = curves.trace.model_copy(update={"array_file": TRACE_FILE})
        written.add(CURVES_FILE, curves.model_copy(update={"trace": beside}).to_json().encode())
    if inputs.plans.experts is not None:
        written.add(EXPERTS_FILE, inputs.plans.experts.to_json().encode())
    provenance = json.dumps(_provenance(inputs, digests), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    written.add(PROVENANCE_FILE, provenance.encode())
    written.add("README.md", _card(written, inputs).encode())


def _content(model: Model, file: SourceFile) -> bytes:
    return checked_file(Path(model.folder) / file.name, file.sha256, record_of(model)).read_bytes()


def _provenance(inputs: DocumentInputs, digests: dict[str, str]) -> dict[str, object]:
    entries = [entry for part in inputs.order for entry in part.entries]
    of_placement = ("solver", "objective", "gap", "pinned_bytes")
    of_order = ("layer", "num_layers", "family", "heuristic", "adjacent_coactivation")
    of_predictor = ("layer", "rank", "recall", "precision", "predicted_density")
    return {
        "compiler": {"name": "coldpress", "version": __version__},
        "inputs": digests,
        "corpus": inputs.corpus.name,
        **({"corpus_revision": inputs.corpus.revision} if inputs.corpus.revision else {}),
        "source_files": [file.model_dump() for file in inputs.model.files],
        "sparsity": _without_paths(inputs.sparsity),
        "quantization": {"algorithm": inputs.codes.algorithm, "format": inputs.sparsity.format},
        "placement": {key: getattr(inputs.placement, key) for key in of_placement},
        "order": [
            {key: getattr(entry, key) for key in of_order}
            for entry in sorted(entries, key=lambda entry: (entry.layer, entry.family))
        ],
        "predictors": [{key: getattr(entry, key) for key in of_predictor} for entry in inputs.predictors],
    }


def _card(written: Written, inputs: DocumentInputs) -> str:
    plan = inputs.plans.largest_plan
    predicted = [layer.predicted_density for layer in inputs.predictors]  # predictors choose more than active units
    densities = [(entry.family, predicted or entry.per_layer) for entry in inputs.sparsity.densities]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_cell,
    )
    environment.filters["json"] = lambda value: Markup(json.dumps(value))  # Markup, so that `_cell` leaves it unchanged
    return environment.get_template("card.md.j2").render(
        model=inputs.model,
        sparsity=inputs.sparsity,
        formats=in_words(inputs.sparsity.formats),
        device=inputs.device,
        layout=inputs.layout,
        corpus=inputs.corpus,
        plan=plan,
        algorithm=inputs.codes.algorithm,
        flash_bytes=written.size_bytes(FLASH_FILE),
        resident_bytes=written.size_bytes(RESIDENT_FILE),
        num_pinned=sum(part.num_pinned for part in plan.parts),
        densities=[(family, sum(used) / len(used), min(used), max(used)) for family, used in densities],
    )


def _cell(value: Any) -> Any:
    """Makes a value safe for a table cell of the card: untrusted text on one line, of visible characters."""
    return printable(value).replace("|", "\\|").replace("<", "&lt;") if type(value) is str else value
