"""Decides what a build does: checks and resolves the values of `snakemake --config` before any DAG exists.

Reads model and device profiles (profiles/) and, for a model without a profile, only its config.json. The rules take
each stage's settings from the `BuildConfig`. Every refusal is one sentence with the nearest name and the known ones.
"""

import json
import os
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field

import coldpress
from coldpress.compiler.architectures import Architecture, Modules, _common
from coldpress.compiler.candidates import (
    AUTO,
    DEFAULT_FORMAT,
    caches_for,
    drafts_for,
    families_for,
    formats_for,
    methods_for,
    routings_for,
)
from coldpress.compiler.checkpoint.gguf_config import source_config_of
from coldpress.compiler.checkpoint.gguf_files import name_of, open_gguf
from coldpress.compiler.checkpoint.hub import HUB_ID, check_dataset, is_dataset, snapshot
from coldpress.compiler.checkpoint.packages import place_of, unpacked
from coldpress.compiler.checkpoint.source_config import checked_config
from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.tensors import MAX_CONFIG_BYTES
from coldpress.compiler.checkpoint.weight_files import kind_of
from coldpress.compiler.cost_model import stored_formats
from coldpress.compiler.draft_passes import MODEL
from coldpress.compiler.job import config_of
from coldpress.compiler.llama_bench import llama_cpp_runs
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.profiles import device_file, load_model, model_names
from coldpress.compiler.rounding._weights import Algorithm
from coldpress.compiler.stages.tokenize.text import PYDOC
from coldpress.compiler.workflow.keys import (
    NOT_IN_PROFILES,
    check_artifact_name,
    check_paths,
    config_keys,
    marked,
    option_fields,
    option_keys,
    owners_of,
    plugin_keys,
    unknown_key,
)
from coldpress.compiler.workflow.pins import Pins
from coldpress.runtime import plugins as _plugins
from coldpress.runtime.cache import CachePolicy
from coldpress.runtime.cli.command_line import flag
from coldpress.runtime.device_profiles.devices import read_device
from coldpress.runtime.drafts import NO_DRAFT
from coldpress.runtime.dram.kv_cache import DEFAULT_KV_CACHE
from coldpress.runtime.routers import PACKAGE as ROUTERS
from coldpress.runtime.routing import EXACT
from coldpress.runtime.sparsity import Selector
from coldpress.schemas.base import PositiveCount, Record
from coldpress.schemas.config import NAME_PATTERN
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.errors import CheckpointError, ColdpressError, UnknownNameError
from coldpress.schemas.families import WHOLE_MLP, slice_formats, slices
from coldpress.schemas.model import EXACT_ZEROS, ModelSpec
from coldpress.schemas.profiles import ModelProfile, Packages

ROOT = Path(coldpress.__file__).resolve().parents[1]
LONGEST_DEFAULT_CONTEXT = 1024
"""Tokens; a longer context must be asked for, because its KV cache takes part of the DRAM budget."""
DEFAULT_CHUNKS = 4
"""Jobs per layer-wise stage. Does not depend on the cores: a cluster job parses the workflow again on another machine
and must find the same chunks."""
CONFIG_FILE = "config.json"
DRAFT_FORMAT = "iq4_nl"
"""The format of a draft model: rounding costs it few right guesses, and its bytes are DRAM that the model lacks."""
RELUFY_OFF = "off"
FILES = {"imatrix": "llama-imatrix", "llama_bench": "llama-bench"}
"""Keys that name a file -> what writes it."""


class ModelReference(Record):
    """The named model: its origin, and the facts of its config.json that the DAG depends on."""

    name: str = Field(pattern=NAME_PATTERN)
    """Profile name, or the last part of the folder or hub id; names the build folder and the artifact."""
    source: str
    """Hub id, or the absolute path of a folder or GGUF file, also of the one that packages are joined to."""
    revision: str | None
    """Commit of a hub model; None for a folder or file."""
    packages: Packages | None = None
    """Packages that are joined to `source` before the first job."""
    license: str | None
    """The profile's licence; None leaves it to the model card."""
    model_type: str
    """A file of compiler/architectures."""
    num_hidden_layers: PositiveCount
    exact_zeros: bool
    """True if the MLP's activation has exact zeros, as ReLU has for inactive units."""

    @property
    def is_mixture(self) -> bool:
        return self.modules.is_mixture

    @property
    def modules(self) -> Modules:
        return _plugins.load("coldpress.compiler.architectures", Architecture, self.model_type).MODULES


@dataclass(frozen=True)
class BuildConfig:
    """The resolved configuration of one build; it stays in memory and never enters an artifact."""

    model: ModelReference
    device: DeviceProfile
    device_file: Path
    folder: Path
    """Folder of all builds of the model, absolute, without links."""
    values: Mapping[str, Any]
    """Value of every key but plug-ins' options; None where the stage decides itself."""
    options: Mapping[str, Mapping[str, Any]]
    """Package -> the options given for its chosen plug-in."""
    pins: Mapping[str, str]
    """The commits of branches of the hub, for the lock file."""
    draft: "BuildConfig | None" = None
    is_draft: bool = False

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    @property
    def target(self) -> str:
        """The name of build folder and artifact: the device, and the label after a plus, which no device's name has."""
        return self.device.name if self["label"] is None else f"{self.device.name}+{self['label']}"

    @property
    def target_folder(self) -> Path:
        return self.folder / self.target

    @property
    def artifact(self) -> Path:
        return self.target_folder / f"{self.model.name}-{self.target}.coldpress"

    @property
    def workdir(self) -> Path:
        """The folder of all models' builds, build_dir: Snakemake's working directory, with its metadata."""
        return self.folder.parent

    def near(self, path: Path | str) -> str:
        """Returns an absolute path (no links to folders) relative to the working directory, as the rules name it: the
        text does not depend on where Snakemake is called, and moving the whole tree rebuilds nothing."""
        return os.path.relpath(path, self.workdir)

    @property
    def checkpoint(self) -> str:
        """The source for `ingest`: a hub id, or the folder or file as the rules name it."""
        return self.model.source if self.model.revision else self.near(self.model.source)

    def of_stage(self, stage: str) -> dict[str, Any]:
        """Returns the user's settings of a stage by field of its record; leaves out None."""
        record = config_of(stage)
        unused: tuple[str, ...] = () if self["method"] == AUTO else getattr(record, "ONLY_FOR_AUTO", ())
        found = {field: self.values[field] for field in marked(record) if field not in unused}
        for field, named in option_fields(record).items():
            found[field] = dict(self.options[marked(record)[named].plugins]) or None
        return {field: value for field, value in found.items() if value is not None}

    def plugins(self) -> dict[str, tuple[str, ...]]:
        found = _chosen(self.values, self.model)
        for package, option in self._named_by_options(found):
            found[package] = (*found[package], option)
        for key, package in (("method", "coldpress.runtime.sparsity"), ("cache", "coldpress.runtime.cache")):
            if self[key] == AUTO:  # those that a build cannot take are looked at, too
                found[package] = _plugins.names(package)
        formats = "coldpress.runtime.quantization"
        # a search looks at others, too, for single layers and for the head; and a file may keep its own codes
        is_open = AUTO in (self["format"], self["method"]) or self.model.source.endswith(".gguf")
        return {
            **found,
            formats: (
                *(_plugins.names(formats) if is_open else ()),
                *(name for one in formats_for(self["format"]) for name in slice_formats(one)),
                *(stored for name in formats_for(self["format"]) for stored in stored_formats(name)),
                self["predictor_format"],
            ),
            "coldpress.compiler.architectures": (self.model.model_type,),
            ROUTERS: tuple(filter(None, [self.model.modules.router])),
        }

    def _named_by_options(self, chosen: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
        """Returns (package, plug-in) of plug-ins named by others' options, such as the policy inside `linked`."""
        return [
            (key.mark.plugins, self.options[package].get(name, key.default))
            for package, plugins in chosen.items()
            for plugin in plugins
            for name, key in option_keys(package, plugin).items()
            if key.mark.plugins
        ]


def resolve(raw: Mapping[str, Any], known: ModelReference | None = None, *, ask: bool = True) -> BuildConfig:
    """Resolves the raw values of `--config`: the user's value comes first, then the model's profile, then the default.
    `known` is a model that is not looked for; `ask` tells whether the hub is asked which commit a branch is, if the
    lock file of the model's builds does not say it. Raises ColdpressError for an unknown key, name or value; the text
    is one sentence."""
    keys = config_keys()
    said = {key: keys[key].read(value) for key, value in raw.items() if key in keys}
    values = {key: declared.default for key, declared in keys.items()} | said
    check_paths(values)
    pins = Pins(Path(values["build_dir"]).resolve() / _name_of(values["model"]), values["locked"], ask)
    profile, reference, longest_context = (
        (None, known, LONGEST_DEFAULT_CONTEXT) if known else _find_model(values["model"], values["revision"], pins)
    )
    device_path = device_file(values["device"], Path(values["build_dir"]))
    device = read_device(device_path)
    values |= {
        "method": AUTO,
        "context_length": min(longest_context, LONGEST_DEFAULT_CONTEXT),
        "dram_budget": device.dram_budget_bytes.value,
        **(_of_profile(profile) if profile else {}),
        **said,
    }
    if values["relufy"] != RELUFY_OFF:
        reference = reference.model_copy(update={"exact_zeros": True})
    values |= _corpus(values, said, pins)
    values["layers_per_job"] = values["layers_per_job"] or _whole_groups(reference, values["layers_per_group"])
    values["method"] = _method(values["method"], reference)
    named = {*said, *(profile.settings if profile else ())}
    values |= _left_open(values, named, reference)
    _check_format(values["format"], reference)
    _check_cache(values["cache"])
    _check_routing(values, reference)
    chosen = _chosen(values, reference)
    options = _profile_options(profile, chosen) if profile else {}
    options |= {key: value for key, value in raw.items() if key not in keys}
    read_options = _options(options, chosen)
    families_for(values["method"], read_options["coldpress.runtime.sparsity"], _smallest(reference))
    folder = Path(values["build_dir"]).resolve() / reference.name
    draft = _draft_of(values, ask)
    values |= {key: os.path.relpath(file, folder.parent) for key, file in _named_files(values).items()}
    found = BuildConfig(
        model=reference,
        device=device,
        device_file=device_path.resolve(),
        folder=folder,
        values=MappingProxyType(values),
        options=MappingProxyType(read_options),
        pins=MappingProxyType(pins.used),
        draft=draft,
    )
    check_artifact_name(found.artifact.name)
    return found


def _draft_of(values: Mapping[str, Any], ask: bool) -> BuildConfig | None:
    """Returns the build of the draft model: dense, with all of its weights in DRAM, on the same text."""
    named = values["draft_model"]
    if named is None:
        if values["draft"] == MODEL:
            raise ColdpressError("draft=model needs a draft model, and there is none; give draft_model=NAME")
        return None
    if values["draft"] == NO_DRAFT:
        raise ColdpressError(
            f"draft_model={named} was asked for, and draft=off leaves it unused; leave one of them out"
        )
    shared = ("device", "build_dir", "locked", "context_length", *marked(config_of("tokenize")))
    given = {name: values[name] for name in shared if values[name] is not None}
    own = {"model": named, "label": f"draft-{values['context_length']}", "method": "dense", "format": DRAFT_FORMAT}
    try:
        found = resolve({**given, **own, "dram_budget": "100%", "draft": NO_DRAFT}, ask=ask)
    except ColdpressError as error:
        raise ColdpressError(f"draft_model={named}: {error}") from error
    return replace(found, is_draft=True)


def _corpus(values: Mapping[str, Any], said: Mapping[str, Any], pins: Pins) -> dict[str, Any]:
    named = ("corpus_revision", "corpus_field")
    # the profile's commit and fields belong to the profile's corpus
    found = {key: (said if "corpus" in said else values).get(key) for key in named}
    if is_dataset(values["corpus"]):
        hub_id = values["corpus"].partition(":")[0]
        found["corpus_revision"] = pins.commit("dataset", hub_id, found["corpus_revision"], "corpus_revision")
    else:
        check_dataset(values["corpus"], found["corpus_revision"])
    return found


def _named_files(values: Mapping[str, Any]) -> dict[str, Path]:
    files = {key: _file(key, values[key], writer) for key, writer in FILES.items() if values[key]}
    if "llama_bench" in files:
        llama_cpp_runs(files["llama_bench"])  # a bad file is refused now, and not after the long stages
    if values["corpus"] != PYDOC and (corpus := Path(values["corpus"]).expanduser()).exists():
        files["corpus"] = corpus.resolve()
    return files


def flags(config: BuildConfig, stage: str, **facts: Any) -> str:
    """Returns a stage's settings as flags, quoted for a shell: a changed setting is a changed text. `facts` are
    internal settings, such as paths; one replaces the setting of its name, and None leaves it out."""
    given = {name: value for name, value in (config.of_stage(stage) | facts).items() if value is not None}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
    return " ".join(f"{flag(name)} {shlex.quote(text)}" for name, text in texts.items())


def of_all_stages(config: BuildConfig) -> dict[str, dict[str, Any]]:
    """Returns stage -> its settings, for stages' needs and for `preflight`, which tries all later stages."""
    return {stage: config.of_stage(stage) for stage in STAGES}


def chunks(config: BuildConfig) -> list[str]:
    """Returns the chunks of layers by their first and last layer, such as 000-003."""
    num_layers, step = config.model.num_hidden_layers, config["layers_per_job"]
    return [f"{first:03d}-{min(first + step, num_layers) - 1:03d}" for first in range(0, num_layers, step)]


def exports(name: str) -> tuple[str, ...]:
    """Returns the files that `export` may write for an artifact, one for each format."""
    return tuple(f"{name}.{kind}" for kind in _plugins.names("coldpress.compiler.stages.export"))


def needs_predictors(config: BuildConfig) -> bool:
    methods = methods_for(config["method"], config.model.exact_zeros, config.model.is_mixture)
    return any(_plugins.load("coldpress.runtime.sparsity", Selector, method).NEEDS_PREDICTORS for method in methods)


def needs_gram(config: BuildConfig) -> bool:
    return _plugins.load("coldpress.compiler.rounding", Algorithm, config["algorithm"]).NEEDS_GRAM


def needs_routing(config: BuildConfig) -> bool:
    """Tells whether routers of the build may choose otherwise than the model was trained."""
    return config["routing"] != EXACT


def _check_routing(values: Mapping[str, Any], model: ModelReference) -> None:
    """Refuses a routing that is not exact where routers have nothing to choose by, or where nothing may change a
    token's units; raises ColdpressError naming both settings."""
    named, draft, method = values["routing"], values["draft"], values["method"]
    if named == EXACT:
        return
    if not model.is_mixture:
        raise ColdpressError(f"routing={named} chooses among experts, and {model.name} has none; leave it out")
    if named == AUTO:
        return
    if draft not in (None, NO_DRAFT):
        raise ColdpressError(
            f"routing={named} lets DRAM decide which experts a token uses, and draft={draft} needs tokens that do not "
            "change each other; leave one of them out"
        )
    if method != AUTO and not _is_whole(method):
        raise ColdpressError(
            f"routing={named} prefers whole experts in DRAM, and method={method} leaves out units of experts; use "
            "method=dense"
        )


def _of_profile(profile: ModelProfile) -> dict[str, Any]:
    keys = config_keys()
    try:
        for name in set(NOT_IN_PROFILES) & profile.settings.keys():
            raise ColdpressError(f"a profile cannot set '{name}'; give it with --config")
        return {name: keys[name].read(value) for name, value in profile.settings.items() if name in keys}
    except ColdpressError as error:
        raise _in_profile(profile, error) from error


def _profile_options(profile: ModelProfile, chosen: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    others = profile.settings.keys() - config_keys().keys()
    found = {name: profile.settings[name] for name in others if owners_of(name, chosen)}
    for name in others - found.keys():
        if not owners_of(name):
            raise _in_profile(profile, unknown_key(name, chosen))
    return found


def _in_profile(profile: ModelProfile, error: ColdpressError) -> ColdpressError:
    return ColdpressError(f"profiles/models/{profile.name}.yaml: settings: {error}")


def _chosen(values: Mapping[str, Any], model: ModelReference) -> dict[str, tuple[str, ...]]:
    """Returns package -> the plug-ins that keys name; for an open method or cache its candidates."""
    named = {package: values[key.name] for package, key in plugin_keys().items()}
    found = {package: () if name is None else (name,) for package, name in named.items()}
    return found | {
        "coldpress.runtime.sparsity": methods_for(values["method"], model.exact_zeros, model.is_mixture),
        "coldpress.runtime.cache": caches_for(values["cache"]),
        "coldpress.runtime.drafts": drafts_for(values["draft"]),
        "coldpress.runtime.routing": routings_for(values["routing"], model.is_mixture) or (EXACT,),
        "coldpress.runtime.quantization": tuple(
            name for one in formats_for(values["format"]) for name in slice_formats(one)
        ),
    }


def _options(raw: Mapping[str, Any], chosen: Mapping[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {package: {} for package in chosen}
    for name, value in raw.items():
        owners = owners_of(name, chosen)
        if not owners:
            raise unknown_key(name, chosen)
        for package, plugin in owners:
            found[package][name] = option_keys(package, plugin)[name].read(value)
    return found


def _whole_groups(model: ModelReference, layers_per_group: int) -> int:
    """Returns the layers per job: at most `DEFAULT_CHUNKS` jobs, and none cuts a layer group."""
    num_groups = -(-model.num_hidden_layers // layers_per_group)
    return -(-num_groups // DEFAULT_CHUNKS) * layers_per_group


def _method(requested: str, model: ModelReference) -> str:
    """Checks the requested method; `auto` stays open until `allocate` compares."""
    if requested == AUTO:
        return AUTO
    if _plugins.load("coldpress.runtime.sparsity", Selector, requested).NEEDS_EXACT_ZEROS and not model.exact_zeros:
        raise ColdpressError(
            f"method={requested} needs a model whose MLP activation is ReLU, and {model.name}'s is not; "
            "use method=topk or method=dense"
        )
    return requested


def _left_open(values: Mapping[str, Any], named: Collection[str], model: ModelReference) -> dict[str, str]:
    """Returns the formats of weights, and of keys and values, and the routing of a mixture: `auto` where nobody names
    one, for the search of an open method, and for the formats that a dense run keeps of a GGUF file; and `auto` drafts
    where there is a draft model. Raises ColdpressError if one is `auto` otherwise."""
    has_draft_model = values["draft_model"] is not None and values["draft"] is None
    found: dict[str, str] = {"draft": AUTO} if has_draft_model else {}
    method = values["method"]
    keeps_codes = method != AUTO and model.source.endswith(".gguf") and _is_whole(method)
    is_searched = method == AUTO
    is_open = {
        "format": is_searched or keeps_codes,
        "kv_cache": is_searched,
        "routing": is_searched and model.is_mixture,
    }
    for name, default in (("format", DEFAULT_FORMAT), ("kv_cache", DEFAULT_KV_CACHE), ("routing", EXACT)):
        if name not in named:
            found[name] = AUTO if is_open[name] else default
        elif values[name] == AUTO and not (is_searched or is_open[name]):
            raise ColdpressError(
                f"{name}=auto was asked for, and method={method}: the search that would choose it is that of "
                f"method=auto; leave {name} out, or use method=auto"
            )
    return found


def _is_whole(method: str) -> bool:
    return _plugins.load("coldpress.runtime.sparsity", Selector, method).is_whole


def _check_format(name: str, model: ModelReference) -> None:
    roles = [piece.role.removesuffix("_proj") for piece in slices(WHOLE_MLP, _smallest(model))]
    count = len(slice_formats(name))
    if count not in (1, len(roles)):
        expected = f"one, or one for each of {', '.join(roles)}"
        raise ColdpressError(f"format={name} names {count} formats, expected {expected}")


def _smallest(model: ModelReference) -> ModelSpec:
    """The smallest model with such layers: families follow from the matrices that a layer has, not from their sizes. A
    profile has no sizes, and only transformers can tell them all from config.json; it takes seconds to import."""
    taps = model.modules.taps
    return ModelSpec(
        model_type=model.model_type,
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=1,
        max_position_embeddings=1,
        hidden_act="relu" if model.exact_zeros else "silu",
        gated_mlp="mlp_up" in taps,
        num_experts=2 if model.is_mixture else 1,
        norm="rms_norm",
        norm_eps=1e-5,
        position="rotary",
        rotary_dim=0,
        tie_word_embeddings=True,
    )


def _check_cache(cache: str) -> None:
    if cache != AUTO and _plugins.load_class("coldpress.runtime.cache", CachePolicy, cache).looks_ahead:
        raise ColdpressError(
            f"cache={cache} has to know all requests to come, which no run does; it is for "
            f"`coldpress simulate --cache {cache}`: use cache=lfu or another"
        )


def _name_of(named: str) -> str:
    """Returns the name of the folder of a model's builds, before anything is known of a hub model but its id."""
    if named in model_names():
        return named
    folder = Path(named).expanduser()
    if folder.is_file():
        return _safe(name_of(unpacked(folder)))
    return _safe(folder.resolve().name if folder.is_dir() else named.rpartition("/")[2])


def _find_model(named: str, revision: str | None, pins: Pins) -> tuple[ModelProfile | None, ModelReference, int]:
    """Returns (profile if one has that name, the model, the longest context its config.json allows, in tokens)."""
    if named in model_names():
        profile = load_model(named)
        return profile, _reference_of(profile, revision, pins), LONGEST_DEFAULT_CONTEXT
    folder = Path(named).expanduser()
    if folder.is_file():
        return None, *_read_file(unpacked(folder), revision)
    if folder.is_dir() or named.startswith((".", "/", "~")):
        return None, *_read_folder(folder, revision)
    if HUB_ID.fullmatch(named):
        try:
            return None, *_read_hub(named, revision, pins)
        except CheckpointError as error:
            raise CheckpointError(f"there is no folder {named}; as a model of the hub: {error}") from error
    known = model_names()
    unknown = UnknownNameError("model", named, known)
    raise ColdpressError(f"{unknown} A folder or GGUF file (./path or /path) or a hub id (owner/name) will do as well.")


def _file(key: str, named: str, writer: str) -> Path:
    file = Path(named).expanduser()
    if not file.is_file():
        raise ColdpressError(f"{key}={named} is no file; give the path of what {writer} wrote, or leave it out")
    return file.resolve()


def _reference_of(profile: ModelProfile, revision: str | None, pins: Pins) -> ModelReference:
    is_local = profile.source.startswith("./")
    packages = profile.packages if revision is None else None
    if is_local and revision is not None:
        raise ColdpressError(
            f"revision={revision} has no meaning for {profile.name}, which is a folder of this repository"
        )
    if is_local or packages:
        source, commit = str(place_of(packages)) if packages else str(ROOT / profile.source), None
    else:
        source = profile.source
        commit = pins.commit("model", source, revision or profile.revision, "revision")
    return ModelReference(
        name=profile.name,
        source=source,
        revision=commit,
        packages=packages,
        license=profile.license,
        model_type=profile.model_type,
        num_hidden_layers=profile.num_hidden_layers,
        exact_zeros=_common.activation(profile.hidden_act) in EXACT_ZEROS,
    )


def _read_file(file: Path, revision: str | None) -> tuple[ModelReference, int]:
    if revision is not None:
        raise ColdpressError(f"revision={revision} has no meaning for the file {file}; leave it out")
    return _describe(source_config_of(open_gguf(file)), name_of(file), str(file.resolve()), None)


def _read_folder(folder: Path, revision: str | None) -> tuple[ModelReference, int]:
    if not folder.is_dir():
        raise ColdpressError(f"model folder {folder} does not exist")
    if revision is not None:
        raise ColdpressError(f"revision={revision} has no meaning for the model folder {folder}; leave it out")
    if not (folder / CONFIG_FILE).is_file():
        known = kind_of(folder) or f"holds no {CONFIG_FILE}, so it is no Hugging Face checkpoint"
        raise ColdpressError(f"{folder} {known}")
    config = read_object(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    return _describe(config, folder.resolve().name, str(folder.resolve()), None)


def _read_hub(hub_id: str, revision: str | None, pins: Pins) -> tuple[ModelReference, int]:
    """Fetches config.json of a hub model and nothing else, or takes it from the local cache."""
    commit = pins.commit("model", hub_id, revision, "revision")
    folder = snapshot(hub_id, commit, offline=False, patterns=(CONFIG_FILE,))
    config = read_object(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    return _describe(config, hub_id.partition("/")[2], hub_id, commit)


def _describe(config: Mapping[str, Any], name: str, source: str, revision: str | None) -> tuple[ModelReference, int]:
    """Returns (the model, its longest context in tokens) from the values of config.json; `ingest` checks the rest.
    transformers would fill in missing fields, but it takes seconds to import."""
    architecture, believed = checked_config(config)
    named = believed.get(architecture.MODULES.activation_key) or architecture.MODULES.activation
    safe = _safe(name)
    if not re.fullmatch(NAME_PATTERN, safe):
        raise ColdpressError(f"the model's name {name!r} has no letter or digit to name the build folder by; rename it")
    reference = ModelReference(
        name=safe,
        source=source,
        revision=revision,
        license=None,
        model_type=config["model_type"],
        num_hidden_layers=believed["num_hidden_layers"],
        exact_zeros=_common.activation(named) in EXACT_ZEROS,
    )
    return reference, believed["max_position_embeddings"]


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")
