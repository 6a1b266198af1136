"""Decides what a build does: checks and resolves the values of `snakemake --config` before any DAG exists.

Reads model and device profiles (profiles/) and, of a model that has no profile, its config.json and nothing else.
Returns a `BuildConfig` with nothing left open. Every refusal is one sentence with the nearest name and the known ones.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from compiler.checkpoint.hub import HUB_ID, check_dataset, snapshot
from compiler.checkpoint.source_config import checked_config
from compiler.checkpoint.source_json import read_object
from compiler.checkpoint.tensors import MAX_CONFIG_BYTES
from compiler.checkpoint.weight_files import kind_of
from compiler.cost_model import parse_share
from compiler.profiles import device_file, load_device, load_model, model_names
from runtime import _plugins
from runtime.quantities import parse_bytes
from schemas.config import NAME_PATTERN, BuildConfig, BuildRequest, ModelReference, Settings
from schemas.errors import ColdpressError, UnknownNameError
from schemas.families import Method
from schemas.profiles import ModelProfile

ROOT = Path(__file__).resolve().parents[2]

DEFAULTS: dict[str, Any] = {
    "method": "auto",
    "format": "int4_group32",
    "order": "auto",
    "place": "pulp_highs",
    "cache": "lru",
    "distill": False,
    "corpus": "pydoc",
    "calibration_tokens": 8192,
    "calibration_shards": 1,
    "seed": 0,
    "preflight": "auto",
}
"""What holds where neither the user nor the model's profile says anything."""
LONGEST_DEFAULT_CONTEXT = 1024
"""Tokens; a longer context is a choice, because its KV cache is taken from the DRAM budget."""
DEFAULT_CHUNKS = 4
"""Jobs per layer-wise stage. Not derived from the cores: a cluster job parses the workflow again on another machine,
and must find the same chunks."""
CONFIG_FILE = "config.json"


def resolve(raw: Mapping[str, Any]) -> BuildConfig:
    """The complete configuration of a build from the raw values of `--config`.

    A setting is taken from the user, else from the model's profile, else from `DEFAULTS`.

    Raises:
        ColdpressError: for an unknown key, name or value; the text is one sentence.
    """
    request = BuildRequest(**{key: _coerce(key, value) for key, value in raw.items()})
    profile, reference, longest_context = _find_model(request.model, request.revision)
    device_path = device_file(request.device, Path(request.build_dir))
    device = load_device(device_path)
    settings: dict[str, Any] = {
        **DEFAULTS,
        **dict.fromkeys(("density", "max_ppl_ratio", "min_top1_agreement", "max_logit_error")),
        "corpus_revision": None,
        "context_length": min(longest_context, LONGEST_DEFAULT_CONTEXT),
        "dram_budget": device.dram_budget_bytes.value,
        "layers_per_job": -(-reference.num_hidden_layers // DEFAULT_CHUNKS),
        **(profile.settings.model_dump(exclude_none=True) if profile else {}),
        **{key: value for key, value in request.model_dump(exclude_none=True).items() if key in Settings.model_fields},
    }
    if request.corpus is not None:  # the profile's commit is one of the profile's corpus
        settings["corpus_revision"] = request.corpus_revision
    _check_names(settings)
    check_dataset(settings["corpus"], settings["corpus_revision"])
    settings["method"] = _method(settings["method"], reference)
    settings["dram_budget"] = _budget(settings["dram_budget"])
    return BuildConfig(
        model=reference,
        device=device,
        device_file=_shown(device_path),
        label=request.label,
        build_dir=request.build_dir,
        **settings,
    )


def chunks(config: BuildConfig) -> list[str]:
    """The chunks of layers, first and last layer of each, as 000-003."""
    num_layers, step = config.model.num_hidden_layers, config.layers_per_job
    return [f"{first:03d}-{min(first + step, num_layers) - 1:03d}" for first in range(0, num_layers, step)]


def needs_predictors(config: BuildConfig) -> bool:
    """Whether the build has predictors."""
    return _plugins.load("runtime.sparsity", config.method).NEEDS_PREDICTORS


def checkpoint_files(config: BuildConfig) -> list[str]:
    """The files of a local checkpoint that the build hangs on; none for a hub model, whose commit says it all."""
    if config.model.revision is not None:
        return []
    patterns = ("*.json", "*.safetensors", "*.model", "*.txt")
    return sorted(str(path) for pattern in patterns for path in Path(config.model.source).glob(pattern))


def corpus_files(config: BuildConfig) -> list[str]:
    """The files of a corpus that is a file or a folder; none for one that has a name."""
    path = Path(config.corpus).expanduser()
    if path.is_dir():
        return sorted(str(file) for file in path.rglob("*") if file.suffix in (".txt", ".jsonl"))
    return [str(path)] if path.is_file() else []


def _coerce(key: str, value: Any) -> Any:
    """`value` as its key's type: snakemake hands over `true` as text, 1e3 as 1000.0, a model called 7 as a number."""
    if key not in BuildRequest.model_fields:
        raise UnknownNameError("config key", key, BuildRequest.model_fields)
    field = BuildRequest.model_fields[key]
    if value is None or value == "":
        raise ColdpressError(f"config key '{key}' has no value; leave it out to take its default")
    adapter = TypeAdapter(field.rebuild_annotation())
    for candidate in _readings(value):
        try:
            return adapter.validate_python(candidate, strict=True)
        except ValidationError:
            continue
    choices = _choices(field.annotation)
    if choices and isinstance(value, str):
        raise UnknownNameError(key, value, choices)
    raise ColdpressError(f"config key '{key}' is {value!r}, expected {field.description}")


def _readings(value: Any) -> list[Any]:
    """What a raw value may have meant, the likeliest first."""
    readings = [value]
    if isinstance(value, float) and value.is_integer():
        readings.append(int(value))
    if isinstance(value, str):
        text = value.strip()
        readings += {"true": [True], "yes": [True], "false": [False], "no": [False]}.get(text.lower(), [])
        if re.fullmatch(r"\d+(\.\d+)?%", text):
            readings.append(float(text[:-1]) / 100)
        if re.fullmatch(r"\d+", text.replace("_", "")):
            readings.append(int(text))
    elif not isinstance(value, (bool, list, dict)):
        readings.append(str(value))
    return readings


def _choices(annotation: Any) -> tuple[str, ...]:
    """The texts of `Literal[...] | None`; empty for other annotations."""
    literals = [argument for part in get_args(annotation) for argument in get_args(part)]
    return tuple(literals) if literals and all(isinstance(argument, str) for argument in literals) else ()


def _check_names(settings: Mapping[str, Any]) -> None:
    """Refuses plug-ins that do not exist, before the stage that would load them."""
    packages = {"order": "compiler.order", "place": "compiler.place", "cache": "runtime.cache"}
    for key, package in (packages | {"format": "runtime.quantization"}).items():
        known = _plugins.names(package)
        if settings[key] not in known:
            raise UnknownNameError(key, settings[key], known)


def _method(requested: str, model: ModelReference) -> Method:
    """Predictors where inactive units are exact zeros, input pruning otherwise; other requests are checked."""
    if requested == "auto":
        return "predictor" if model.exact_zeros else "topk"
    if _plugins.load("runtime.sparsity", requested).NEEDS_EXACT_ZEROS and not model.exact_zeros:
        raise ColdpressError(
            f"method={requested} needs a model whose MLP activation is ReLU, and {model.name}'s is not; "
            "use method=topk or method=dense"
        )
    return TypeAdapter(Method).validate_python(requested)


def _budget(value: int | str) -> int | str:
    """Bytes as a number; a share of the dense footprint stays text, because only `allocate` knows the footprint."""
    return parse_bytes(value) if parse_share(value) is None else value


def _find_model(named: str, revision: str | None) -> tuple[ModelProfile | None, ModelReference, int]:
    """(profile if one has that name, the model, the longest context its config.json allows, in tokens)."""
    if named in model_names():
        profile = load_model(named)
        return profile, _reference_of(profile, revision), LONGEST_DEFAULT_CONTEXT
    folder = Path(named).expanduser()
    if folder.is_dir() or named.startswith((".", "/", "~")):
        return None, *_read_folder(folder, revision)
    if HUB_ID.fullmatch(named):
        return None, *_read_hub(named, revision)
    known = model_names()
    unknown = UnknownNameError("model", named, known)
    raise ColdpressError(f"{unknown} A folder (./path or /path) or a hub id (owner/name) will do as well.")


def _reference_of(profile: ModelProfile, revision: str | None) -> ModelReference:
    is_local = profile.source.startswith("./")
    if is_local and revision is not None:
        raise ColdpressError(
            f"revision={revision} has no meaning for {profile.name}, which is a folder of this repository"
        )
    commit = revision or profile.revision
    if not is_local and commit is None:
        raise ColdpressError(
            f"{profile.name} needs revision=<40 hexadecimal digits>: no commit of {profile.source} that holds "
            "safetensors weights is known; look one up on the model's page"
        )
    return ModelReference(
        name=profile.name,
        source=_shown(ROOT / profile.source) if is_local else profile.source,
        revision=commit,
        license=profile.license,
        num_hidden_layers=profile.num_hidden_layers,
        exact_zeros=profile.hidden_act == "relu",
    )


def _read_folder(folder: Path, revision: str | None) -> tuple[ModelReference, int]:
    if not folder.is_dir():
        raise ColdpressError(f"model folder {folder} does not exist")
    if revision is not None:
        raise ColdpressError(f"revision={revision} has no meaning for the model folder {folder}; leave it out")
    if not (folder / CONFIG_FILE).is_file():
        known = kind_of(folder) or f"holds no {CONFIG_FILE}, so it is no Hugging Face checkpoint"
        raise ColdpressError(f"{folder} {known}")
    return _describe(folder / CONFIG_FILE, folder.resolve().name, _shown(folder), None)


def _read_hub(hub_id: str, revision: str | None) -> tuple[ModelReference, int]:
    """Fetches config.json of a hub model and nothing else, or takes it from the local cache."""
    folder = snapshot(hub_id, revision, offline=False, patterns=(CONFIG_FILE,))
    return _describe(folder / CONFIG_FILE, hub_id.partition("/")[2], hub_id, revision)


def _describe(file: Path, name: str, source: str, revision: str | None) -> tuple[ModelReference, int]:
    """(the model, its longest context in tokens) from config.json; the rest of it is `ingest`'s to check.

    transformers would fill in what config.json leaves out, but it takes seconds to import.
    """
    _, believed = checked_config(read_object(file, MAX_CONFIG_BYTES))
    reference = ModelReference(
        name=_folder_name(name),
        source=source,
        revision=revision,
        license=None,
        num_hidden_layers=believed["num_hidden_layers"],
        exact_zeros="relu" in (believed.get("hidden_act"), believed.get("activation_function")),
    )
    return reference, believed["max_position_embeddings"]


def _shown(path: Path) -> str:
    """`path`, relative where it lies below the working directory: a tree that moves as a whole rebuilds nothing."""
    absolute = path.resolve()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def _folder_name(name: str) -> str:
    """`name` with whatever cannot be part of a file name replaced."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")
    if not re.fullmatch(NAME_PATTERN, safe):
        raise ColdpressError(f"the model's name {name!r} has no letter or digit to name the build folder by; rename it")
    return safe
