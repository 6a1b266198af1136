"""Reads the believed part of a checkpoint's config.json: an allow-list of keys, checked for type and range, in one
spelling.

Reads config.json itself, before transformers sees anything; returns the object for the private folder that transformers
reads. Keys that name code to load are refused, unknown keys are left out with a notice. Both spellings of the rotary
settings (`rope_theta` + `rope_scaling`, and `rope_parameters`) become the second.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from coldpress.compiler.architectures import _common
from coldpress.runtime.artifact.errors import short
from coldpress.runtime.plugins import load, names
from coldpress.schemas.errors import CheckpointError

log = logging.getLogger(__name__)

ARCHITECTURES = "coldpress.compiler.architectures"
CODE_KEYS = (
    "_attn_implementation",
    "_attn_implementation_internal",
    "attn_implementation",
    "code_revision",
    "custom_pipelines",
    "experts_implementation",
    "trust_remote_code",
)
"""Keys that make some version of transformers download or select code."""
HARMLESS_KEYS = frozenset(
    [
        "_name_or_path",
        "attention_dropout",
        "auto_map",
        "dropout",
        "cache_implementation",
        "classifier_dropout",
        "dtype",
        "embd_pdrop",
        "hidden_dropout",
        "init_std",
        "initializer_range",
        "layerdrop",
        "output_router_logits",
        "prefix",
        "pretraining_tp",
        "quantization_config",
        "resid_pdrop",
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
        "rope_local_base_freq",
        "rotary_emb_base",
        "rotary_pct",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)
"""Keys that change nothing in a forward pass, or are handled elsewhere here: left out without a notice."""
MOST = {
    "num_hidden_layers": 999,
    "vocab_size": 1 << 22,
    "_token_id": 1 << 22,
    "_size": 1 << 20,
    "_dim": 1 << 20,
    "_rank": 1 << 20,
    "_position_embeddings": 1 << 27,
    "sliding_window": 1 << 27,
    "max_window_layers": 1 << 27,
    "": 1 << 12,
}
"""The end of a key -> the greatest whole number that it may have, by the first that fits: numbers of heads and experts
bound loops; file names have three digits for layers."""
LEAST = {
    "num_hidden_layers": 1,
    "_layers": 0,
    "_index": 0,
    "first_k_dense_replace": 0,
    "pad_token_id": -1,
    "_token_id": 0,
    "": 1,
}
"""The same for the least number."""
CLASSES = (
    "Config",
    "Model",
    "ForCausalLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
"""Classes of an architecture that transformers has taken over, by the ends of their names."""
REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
UNDECLARED = frozenset(("int", "None"))
"""The type of the keys that are read and that transformers' class does not declare."""
MAX_NUMBER = 1 << 20
EPSILONS = frozenset(("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"))
OUTSIDE = {
    "rope_theta": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}
"""Keys of config.json, old ones included, that are rotary settings, and their names among these."""
ROPE_NUMBERS = frozenset(
    [
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "low_freq_factor",
        "high_freq_factor",
        "mscale",
        "mscale_all_dim",
    ]
)
ROPE_LISTS = ("short_factor", "long_factor")
KNOWN_ROPE = ROPE_NUMBERS.union(ROPE_LISTS, ("original_max_position_embeddings", "rope_type", "truncate"))
MAX_ROPE_FACTORS = 1 << 11
MAX_ROPE_NUMBER = 10**12


def checked_config(raw: Mapping[str, Any]) -> tuple[_common.Architecture, dict[str, Any]]:
    """Returns (the architecture, the believed part of config.json); raises CheckpointError if the architecture is
    unsupported, a key names code or a value is out of range."""
    kind = raw.get("model_type")
    known = names(ARCHITECTURES)
    if kind not in known:
        raise CheckpointError(
            f"config.json: the architecture {short(kind)} is not supported; supported are {', '.join(known)}"
        )
    architecture = load(ARCHITECTURES, _common.Architecture, kind)
    _refuse_code(raw, architecture)
    quantized = raw.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    if quantized is not None and (method is None or method != architecture.PACKED):
        raise CheckpointError("config.json: the checkpoint is quantized already; give the one in F16, BF16 or F32")
    raw = _in_one_spelling(raw, architecture)
    keys = _common.KEYS | architecture.KEYS
    config = _required(raw, architecture) | {key: raw[key] for key in sorted(keys & raw.keys())}
    if config.get("sliding_window") == 0 and not config.get("use_sliding_window", True):
        config["sliding_window"] = None  # as transformers writes it for Qwen's mixtures
    if "rope_parameters" in keys:
        config["rope_parameters"] = _rope(raw, architecture)
    dropped = sorted(set(raw) - keys - HARMLESS_KEYS)
    if dropped:
        log.info("config.json: unknown keys are left out: %s", short(dropped))
    for key, value in config.items():
        types = architecture.declared().types.get(key, UNDECLARED)
        is_factor = "float" in types and not key.endswith("_softcapping")  # without a cap scores stay as they are
        is_needed = is_factor and architecture.defaults().get(key) is not None
        check_value(key, value, types=types - {"None"} if is_needed else types)
    _check_heads(config)
    _check_layers(config)
    return architecture, config


def _required(raw: Mapping[str, Any], architecture: _common.Architecture) -> dict[str, Any]:
    defaults, missing = architecture.defaults(), [key for key in REQUIRED if key not in raw]
    if not set(missing) <= defaults.keys():
        defaults = vars(_common.source_config(architecture.MODULES, {"model_type": raw["model_type"]}))
    found = {key: defaults[key] for key in missing}
    for key, value in found.items():
        log.info("config.json: %s is missing; transformers' default, %s, is taken", key, value)
    return found


def _in_one_spelling(raw: Mapping[str, Any], architecture: _common.Architecture) -> dict[str, Any]:
    found = dict(raw)
    for other, key in architecture.spellings().items():
        if other in found and found.setdefault(key, found[other]) != found.pop(other):
            raise CheckpointError(
                f"config.json: {key} is {short(raw[key])} and {other} {short(raw[other])}, expected one number: both "
                "are names of the same setting; remove the wrong one"
            )
    return found


def _refuse_code(raw: Mapping[str, Any], architecture: _common.Architecture) -> None:
    found = [key for key in CODE_KEYS if raw.get(key) not in (None, False)]
    if found:
        raise CheckpointError(f"config.json: the key {found[0]} may load code, which is never done; remove the key")
    auto_map = raw.get("auto_map")
    if auto_map is None:
        return
    # Phi-3's own repositories still carry the code that transformers has taken over: same classes, hence the same
    # model. Bamboo's carry the only implementation; our architecture's file has its one difference from Mistral.
    prefix = architecture.MODULES.own_code or architecture.MODULES.prefix
    values = list(auto_map.values()) if isinstance(auto_map, dict) else [auto_map]
    taken_over = [f"{prefix}{name}" for name in CLASSES]
    if not all(isinstance(value, str) and value.rpartition(".")[2] in taken_over for value in values):
        raise CheckpointError("config.json: the key auto_map names the checkpoint's own code, which is never loaded")
    log.info("config.json: auto_map names code of a known architecture; the checkpoint's copy is not loaded")


def check_value(key: str, value: Any, file: str = "config.json", types: Collection[str] = UNDECLARED) -> None:
    """Checks type and range of a key's value; `types` are those of transformers' class. Raises CheckpointError naming
    the file and the key, what was found and what was expected."""
    if value is None and "None" in types:
        return
    fits, expected = _rule(key, types)
    if not fits(value):
        raise _wrong(file, key, value, expected)


def _rule(key: str, types: Collection[str]) -> tuple[Callable[[Any], bool], str]:
    least, most = (next(bounds[end] for end in bounds if key.endswith(end)) for bounds in (LEAST, MOST))
    of_keys = {
        _common.THRESHOLD_KEY: (lambda value: _is_between(value, 1 << 10), "a number above 0 and below 1024"),
        **dict.fromkeys(EPSILONS, (lambda value: _is_between(value, 1), "a number between 0 and 1")),
        "no_rope_layers": (lambda value: _is_list(value, int) and {*value} <= {0, 1}, "a list of 0 and 1"),
        "eos_token_id": (lambda value: _are_ids(value, most), "a token id or a list of them"),
        "mlp_only_layers": (
            lambda value: _is_list(value, int) and min(value, default=0) >= 0,
            "a list of layers' numbers",
        ),
        **dict.fromkeys(("layer_types", "architectures"), (lambda value: _is_list(value, str), "a list of texts")),
    }
    of_types = {
        "bool": (lambda value: type(value) is bool, "true or false"),
        "str": (lambda value: type(value) is str, "a text"),
        "float": (lambda value: _is_between(value, MAX_NUMBER), f"a number above 0 and below {MAX_NUMBER}"),
        "int": (lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}"),
    }
    given = [of_types[name] for name in of_types if name in types]
    return of_keys.get(key) or (given[0] if given else (lambda _: True, ""))


def _are_ids(value: Any, most: int) -> bool:
    ids = value if isinstance(value, list) else [value]
    return _is_list(ids, int) and len(ids) <= 64 and all(0 <= token <= most for token in ids)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and len(value) <= 999 and all(type(entry) is kind for entry in value)


def _is_between(value: Any, limit: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < limit


def _wrong(file: str, key: str, value: Any, expected: str) -> CheckpointError:
    return CheckpointError(f"{file}: {key} is {short(value)}, expected {expected}")


def _check_heads(config: Mapping[str, Any]) -> None:
    hidden_size, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("head_dim") is None and hidden_size % heads:
        raise CheckpointError(f"config.json: hidden_size {hidden_size} is no multiple of {heads} attention heads")


def _check_layers(config: Mapping[str, Any]) -> None:
    layers, flags, kinds = config["num_hidden_layers"], config.get("no_rope_layers"), config.get("layer_types")
    for key, found, fits in (
        ("no_rope_layers", flags, flags is None or len(flags) >= layers),
        ("layer_types", kinds, kinds is None or len(kinds) == layers),
    ):
        if not fits:
            raise CheckpointError(
                f"config.json: {key} has {len(found or ())} entries, expected one for each of {layers} layers"
            )


def _rope(raw: Mapping[str, Any], architecture: _common.Architecture) -> dict[str, Any]:
    old, new = ({} if raw.get(key) is None else raw[key] for key in ("rope_scaling", "rope_parameters"))
    for key, given in (("rope_scaling", old), ("rope_parameters", new)):
        if not isinstance(given, dict):
            raise _wrong("config.json", key, given, "an object")
    outside = {key: raw[old_key] for old_key, key in OUTSIDE.items() if raw.get(old_key) is not None}
    if "main" not in architecture.MODULES.rotary or not architecture.MODULES.rotary["main"]:
        given = old or new or architecture.DEFAULTS.get("rope_parameters", {})
        return _rotation(given, outside, raw["model_type"], architecture.MODULES.partial_rotary)
    main, *others = architecture.MODULES.rotary.values()
    unknown = sorted(set(new) - {main, *others})
    if unknown:
        raise _wrong("config.json", "rope_parameters", new, f"an entry for each of {main}, {', '.join(others)} only")
    local = {"rope_theta": raw["rope_local_base_freq"]} if raw.get("rope_local_base_freq") is not None else {}
    found = {main: _rotation({**(new.get(main) or {}), **old}, outside, raw["model_type"], False)}
    return found | {kind: _rotation(new.get(kind) or {}, local, raw["model_type"], False) for kind in others}


def with_long_factors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gives a checked configuration's longrope its long factors for texts of any length; raises CheckpointError if it
    has no longrope. transformers takes the short ones for texts within the original context; keys that a cache holds
    cannot change while a text grows, so a build has one of both."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") not in ("longrope", "su"):
        raise CheckpointError(
            f"config.json: the rope type is {rope.get('rope_type', 'one for each kind of layer')}, expected longrope, "
            "since longrope=long was asked for; leave it out"
        )
    return {**config, "rope_parameters": rope | {"short_factor": rope["long_factor"]}}


def _rotation(given: Mapping[str, Any], outside: Mapping[str, Any], model_type: str, partial: bool) -> dict[str, Any]:
    rope = dict(given)
    old_name = rope.pop("type", None)
    rope.setdefault("rope_type", old_name or "default")
    rope = {**outside, **{key: value for key, value in rope.items() if value is not None}}
    unknown = sorted(key for key in rope.keys() - KNOWN_ROPE if not isinstance(rope[key], dict))
    if unknown:
        log.info("config.json: unknown rotary settings are left out, as transformers does: %s", short(unknown))
    rope = {key: value for key, value in rope.items() if key not in unknown}
    for key, value in rope.items():
        _check_rope(key, value)
    if not partial and rope.pop("partial_rotary_factor", 1) != 1:
        raise CheckpointError(f"config.json: partial_rotary_factor is not supported for models of type {model_type}")
    return rope


def _check_rope(key: str, value: Any) -> None:
    place = f"rope_parameters.{key}"
    if key in ROPE_NUMBERS:
        if not _is_between(value, MAX_ROPE_NUMBER):
            raise _wrong("config.json", place, value, "a positive number")
    elif key in ROPE_LISTS:
        entries = value if isinstance(value, list) and len(value) <= MAX_ROPE_FACTORS else [None]
        if not all(_is_between(entry, MAX_ROPE_NUMBER) for entry in entries):
            raise _wrong("config.json", place, value, "a list of positive numbers")
    elif key == "original_max_position_embeddings":
        check_value(key, value)
    elif key == "rope_type":
        if not isinstance(value, str) or value not in (*_common.ROPE_TYPES, "su"):
            raise _wrong("config.json", place, value, f"one of {', '.join(_common.ROPE_TYPES)}")
    elif key == "truncate":
        if type(value) is not bool:
            raise _wrong("config.json", place, value, "true or false")
    else:
        raise CheckpointError(f"config.json: the rotary setting {short(key)} is not supported")
