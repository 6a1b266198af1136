"""Makes hostile and damaged checkpoints, and runs the compiler on them.

The commands are the workflow's check of settings and checkpoint, `ingest`, `tokenize`, and `preflight`, which tries
every other stage on two layers. Each runs only if the one before it has accepted the checkpoint.
"""

import contextlib
import importlib
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coldpress.compiler.__main__ import main
from coldpress.compiler.io import save_record
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.profiles import device_file
from coldpress.compiler.workflow import settings
from coldpress.compiler.workflow.inputs import checkpoint_files
from coldpress.runtime.device_profiles.devices import read_device
from coldpress.schemas.errors import ColdpressError
from tests.support.dag import inputs_for
from tests.support.gguf_cases import exported, with_vocabulary
from tests.support.models import write_corpus, write_model
from tests.support.vocabularies import of_characters
from tools.fuzz import file_edits, gguf_edits, tensor_edits, tokenizer_edits
from tools.fuzz.campaign import Edit, Mutant, Run, copy_tree
from tools.fuzz.json_edits import Unfit, dump, edit_text, edit_value, regular, strange
from tools.fuzz.limited import run_limited

CONFIG = "config.json"
MODULES = "modules.txt"
DEVICE = "pixel6"
TEXTS = ("---\nlicense: mit\n---\n", "---\nlicense: " + "x" * 100_000 + "\n---\n", "---\n" * 1000, "\x1b[2J", "\ud800")
TOKENS = ("<s>", "absent", "", None, 5, ["<s>"], {"content": "<s>", "__type": "AddedToken"}, "\ud800", "\x1b[2J")
ODD_WEIGHTS = (0.0, 1e-45, 3.0e38, -3.0e38, 1e19, np.nan, np.inf)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(regular(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Unfit from error
    if not isinstance(value, dict) or not value:
        raise Unfit
    return value


def config_value(folder: Path, chance: random.Random) -> str:
    """Edits a random value of config.json."""
    config = _read(folder / CONFIG)
    done = edit_value(config, chance)
    (folder / CONFIG).write_bytes(dump(config))
    return f"config.json: {done}"


def config_key(folder: Path, chance: random.Random) -> str:
    """Sets a key that the compiler knows to a value that a model may have, or that none should have."""
    config = _read(folder / CONFIG)
    key = chance.choice(sorted(KNOWN))
    config[key] = chance.choice((*KNOWN[key], strange(chance)))
    (folder / CONFIG).write_bytes(dump(config))
    return f"config.json: {key} is {str(config[key])[:60]}"


def settings_value(folder: Path, chance: random.Random) -> str:
    """Edits a random value of another settings file: generation, tokenizer, special tokens, the index of shards."""
    found = [path for path in sorted(folder.glob("*.json")) if path.name not in (CONFIG, "tokenizer.json")]
    if not found:
        raise Unfit
    path = chance.choice(found)
    value = _read(path)
    done = edit_value(value, chance)
    path.write_bytes(dump(value))
    return f"{path.name}: {done}"


def settings_file(folder: Path, chance: random.Random) -> str:
    """Writes a settings file: generation, special tokens, tokenizer or model card."""
    name = chance.choice(("generation_config.json", "special_tokens_map.json", "tokenizer_config.json", "README.md"))
    token = chance.choice(TOKENS)
    contents: dict[str, Any] = {
        "generation_config.json": {
            "eos_token_id": chance.choice((1, [1, 2], [[1]], [10**30], -1, "x", None, list(range(1000)))),
            "bos_token_id": chance.choice((0, [0], 10**9, True)),
        },
        "special_tokens_map.json": {
            "bos_token": token,
            "additional_special_tokens": [token] * chance.choice((1, 5000)),
        },
        "tokenizer_config.json": {"add_bos_token": chance.choice((True, "yes", 1)), "bos_token": token}
        | {"chat_template": chance.choice(("{{ x", "{% for a in range(10**9) %}{% endfor %}", 5, "x" * 100_000))}
        | {"model_max_length": chance.choice((10**30, -1, 1e30, "x"))},
        "README.md": chance.choice(TEXTS),
    }
    value = contents[name]
    text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else dump(value)
    if os.path.lexists(folder / name):
        regular(folder / name)
    (folder / name).write_bytes(text)
    return f"{name}: {text[:80]!a}"


def settings_text(folder: Path, chance: random.Random) -> str:
    """Edits the text of a settings file."""
    found = [path for path in file_edits.files(folder) if path.suffix == ".json"]
    if not found:
        raise Unfit
    path = chance.choice(found)
    text, done = edit_text(path.read_bytes(), chance)
    path.write_bytes(text)
    return f"{path.name}'s text: {done}"


def odd_weights(folder: Path, chance: random.Random) -> str:
    """Sets one weight, or a whole tensor, to a value that may break arithmetic."""
    found = [path for path in file_edits.files(folder) if path.suffix == ".safetensors"]
    if not found:
        raise Unfit
    path = chance.choice(found)
    header, data = tensor_edits.split(path)
    names = sorted(name for name in header if name != "__metadata__")
    name, value = chance.choice(names), chance.choice(ODD_WEIGHTS)
    try:
        start, stop = header[name]["data_offsets"]
        array = np.frombuffer(data[start:stop], tensor_edits.NUMPY[header[name]["dtype"]]).copy()
        place = slice(None) if chance.random() < 0.5 else chance.randrange(array.size)
        with np.errstate(all="ignore"):
            array[place] = np.float64(value).astype(array.dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise Unfit from error
    tensor_edits.join(path, dump(header), data[:start] + array.tobytes() + data[stop:])
    return f"{path.name}: {name}[{place}] = {value}"


def _source(folder: Path) -> Path:
    """Returns what `model=` names: a folder, or the only GGUF file in it."""
    found = sorted(folder.glob("*.gguf"))
    return found[0] if len(found) == 1 and not (folder / CONFIG).exists() else folder


KNOWN: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "opt", "phi3", "qwen3", "bamboo", "nemotron", "gpt2", "mixtral", "../llama", "_common", ""),
    "architectures": (["LlamaForCausalLM"], [], None, ["X"] * 2000),
    "hidden_act": ("relu", "relu2", "silu", "gelu", "gelu_new", "x"),
    "num_hidden_layers": (1, 3, 998, 999, 1000),
    "num_attention_heads": (1, 3, 8, 4096),
    "num_key_value_heads": (1, 4, 3, None),
    "head_dim": (1, 2, 15, 4096, None),
    "vocab_size": (1, 383, 385, 1 << 22),
    "max_position_embeddings": (1, 2, 1 << 27),
    "rms_norm_eps": (1e-300, 0.999, 1e-5),
    "tie_word_embeddings": (True, False),
    "attention_bias": (True,),
    "mlp_bias": (True,),
    "sliding_window": (1, 2, None),
    "num_experts_per_tok": (0, 1, 4, 5, None),
    "n_routed_experts": (0, 1, 3, 4, 1 << 20),
    "num_local_experts": (0, 1, 3, 4, 1 << 20),
    "moe_intermediate_size": (0, 1, 95, 97),
    "n_shared_experts": (0, 2, None),
    "first_k_dense_replace": (0, 1, 2, 3),
    "n_group": (0, 2, 3, 4),
    "topk_group": (0, 2, 5),
    "routed_scaling_factor": (0, -1.0, 1e300),
    "swiglu_limit": (0, -7.0, 1e-30, 1e300),
    "bos_token_id": (None, 383, 384),
    "eos_token_id": (None, [], [1] * 64, [1] * 65, [[1]]),
    "rope_theta": (1e-300, 1e11, 10000.0),
    "rope_scaling": (
        {"type": "linear", "factor": 4.0},
        {"type": "yarn", "factor": 1e-9},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}
        | {"original_max_position_embeddings": 1},
        {"rope_type": "x"},
    ),
    "auto_map": ({"AutoModel": "x.Y"}, "x"),
    "trust_remote_code": (True,),
    "quantization_config": ({},),
    "torch_dtype": ("float16", "x"),
    "layer_types": (["full_attention"] * 2, ["sliding_attention"] * 3, []),
    "use_cache": (False,),
}
"""Keys of config.json that the compiler knows, with valid and invalid values."""

EDITS: dict[str, tuple[Edit, int]] = {
    "config_value": (config_value, 6),
    "config_key": (config_key, 8),
    "settings_value": (settings_value, 3),
    "settings_file": (settings_file, 4),
    "settings_text": (settings_text, 2),
    "odd_weights": (odd_weights, 3),
    "gguf_bytes": (gguf_edits.header_bytes, 8),
    "gguf_key": (gguf_edits.key, 12),
    "gguf_tensor": (gguf_edits.tensor, 4),
    "tensor_values": (tensor_edits.values, 2),
    "header_value": (tensor_edits.header_value, 3),
    "header_text": (tensor_edits.header_text, 2),
    "header_move": (tensor_edits.header_move, 1),
    "rename_tensor": (tensor_edits.rename_tensor, 1),
    "flip_bits": (file_edits.flip_bits, 2),
    "cut_or_extend": (file_edits.cut_or_extend, 2),
    "overwrite": (file_edits.overwrite, 1),
    "remove_file": (file_edits.remove_file, 1),
    "add_file": (file_edits.add_file, 4),
    "change_kind": (file_edits.change_kind, 2),
    "rename": (file_edits.rename, 1),
    "tokenizer_component": (tokenizer_edits.component, 6),
    "tokenizer_value": (tokenizer_edits.value_inside, 2),
    "vocabulary": (tokenizer_edits.vocabulary, 2),
}
OF_ANY_FILE = ("flip_bits", "cut_or_extend", "overwrite", "remove_file", "add_file", "change_kind", "rename")
OF_GGUF = {name: edit for name, edit in EDITS.items() if name in OF_ANY_FILE or name.startswith("gguf")}
BASES = ("llama", "shards", "opt", "shared", "stacked", "gguf", "gguf-characters")


class Checkpoints:
    """The target: checkpoints of several architectures, and commands of the compiler."""

    MENDINGS = ("none",)
    """A checkpoint has no digests to mend."""

    def __init__(self, folder: Path, bases: Sequence[str] = BASES) -> None:
        """Writes the bases, text and device into `folder`, and runs every command once on each unchanged base.

        Bases that are all GGUF files are changed only as such files can be.
        """
        for stage in STAGES:
            importlib.import_module(f"coldpress.compiler.stages.{stage}")
        self._folder, self._corpus, self._device = folder, folder / "text.txt", folder / "device.json"
        small = {"num_hidden_layers": 2, "intermediate_size": 96}
        write_model(folder / "llama", "llama", relu=True, **small)
        write_model(folder / "shards", "qwen2", num_shards=2, dtype="bfloat16", **small)
        write_model(folder / "opt", "opt", relu=True, dtype="float16", **small)
        write_model(folder / "shared", "glm4_moe", **small)
        write_model(folder / "stacked", "gpt_oss", dtype="bfloat16", **small)
        (folder / "llama" / "LICENSE").write_text("Do with it what you like.\n")
        _, file = exported(folder / "made", "llama", {"intermediate_size": 96})
        for base in BASES[-2:]:
            (folder / base).mkdir()
        vocabulary = of_characters(("<|a|>", "<|b|>"))
        with_vocabulary(file, folder / "gguf-characters" / "model.gguf", **vocabulary)
        file.rename(folder / "gguf" / "model.gguf")
        self.bases = bases
        self.EDITS = OF_GGUF if all(base.startswith("gguf") for base in bases) else EDITS
        write_corpus(self._corpus, 400)
        save_record(read_device(device_file(DEVICE, folder)), self._device)
        for base in self.bases:
            scratch = folder / f"{base}-scratch"
            scratch.mkdir()
            for run in self._commands(folder / base, scratch):
                if run.ended.kind != "fine":
                    raise RuntimeError(f"{run.command} on the unchanged checkpoint {base}: {run.ended}")
            _import_all(scratch / MODULES)

    def copy(self, base: str, folder: Path) -> None:
        """Makes `folder` a copy of a base."""
        copy_tree(self._folder / base, folder)

    def mend(self, folder: Path, mending: str) -> None:
        """Does nothing: see MENDINGS."""

    def runs(self, mutant: Mutant, folder: Path, scratch: Path) -> Iterator[Run]:
        """Runs all commands up to the first that does not end with exit code 0."""
        yield from self._commands(folder, scratch)

    def _commands(self, folder: Path, scratch: Path) -> Iterator[Run]:
        model, corpus, folder = scratch / "ingest.json", scratch / "tokenize.json", _source(folder)
        config: dict[str, object] = {"model": str(folder), "corpus": str(self._corpus), "device": DEVICE}
        config |= {"calibration_tokens": 1024, "evaluation_tokens": 256, "block_tokens": 64, "context_length": 64}
        config |= {"method": "topk", "dram_budget": "1MB", "preflight": "always"}
        tokenize = ["--corpus", str(self._corpus), "--calibration-tokens", "1024", "--evaluation-tokens", "256"]
        commands = {
            "settings": partial(_resolve, config),
            "ingest": partial(main, ["ingest", "--model", str(folder), "--output", str(model)]),
            "tokenize": partial(
                main, ["tokenize", *tokenize, "--block-tokens", "64", "--model", str(model), "--output", str(corpus)]
            ),
            "preflight": partial(self._preflight, config, scratch),
        }
        for name, command in commands.items():
            run = Run(name, run_limited(command, scratch, logs=True))
            yield run
            if run.ended.kind != "fine":
                return

    def _preflight(self, config: dict[str, object], scratch: Path) -> int:
        """Runs `preflight` as its rule does; notes the modules that it has imported."""
        resolved = settings.resolve(config)
        flags = {
            "preflight": "always",
            "folder": scratch / "build",
            "settings": json.dumps(settings.of_all_stages(resolved)),
            "inputs": json.dumps(inputs_for(resolved)),
            "model": scratch / "ingest.json",
            "corpus": scratch / "tokenize.json",
            "device": self._device,
            "output": scratch / "preflight.json",
        }
        code = main(["preflight", *(text for name, value in flags.items() for text in (f"--{name}", str(value)))])
        (scratch / MODULES).write_text("\n".join(sys.modules))
        return code


def _import_all(names: Path) -> None:
    """Imports the modules that a child has imported: later children inherit them, which saves most of their time."""
    for name in names.read_text().splitlines():
        with contextlib.suppress(Exception):  # some modules only their package can import
            importlib.import_module(name)


def _resolve(config: dict[str, object]) -> int:
    """Checks settings and checkpoint as a build does before its first job; returns the exit code."""
    try:
        settings.resolve(config)
        checkpoint_files(settings.resolve(config))
    except ColdpressError as error:
        print(f"error: {error}", file=sys.stderr)  # as the workflow prints it
        return 2
    return 0
