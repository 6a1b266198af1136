"""Makes hostile and damaged artifacts, mends their digests, and runs every command of `coldpress` on them."""

import hashlib
import importlib
import json
import os
import pkgutil
import random
import re
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coldpress import runtime
from coldpress.cli.main import main
from coldpress.runtime import _native
from coldpress.schemas.experts import ExpertCurve
from coldpress.schemas.manifest import EXPERTS_FILE, FLASH_FILE, MANIFEST_FILE, TABLES_FILE
from tests.support.artifacts import Recipe, build_artifact, change_manifest, small_spec
from tests.support.models import write_tokenizer
from tests.support.tiny import word_tokenizer
from tools.fuzz import file_edits, tensor_edits, tokenizer_edits
from tools.fuzz.campaign import SILENT, Edit, Mutant, Run, copy_tree
from tools.fuzz.json_edits import STRANGE, Unfit, dump, edit_text, edit_value, pick, regular, show, strange
from tools.fuzz.limited import Ended, run_limited

FIGURES = (
    *("read_buffer_bytes", "preload_buffer_bytes", "collapse_gap_bytes", "queue_depth", "dram_budget_bytes"),
    *("context_length", "kv_cache"),
)
KV_CACHES = ("fp16", "int8", "int8", "int4", "", 8, None)
PROMPTS = ({"prompt_ids": [1, 2, 3]}, {"prompt_ids": [4]}, {"prompt_ids": [5, 6, 7, 8, 9]})
COUNTS = (0, 1, 2, 3, 64, 4096, 65536, 10**6, 10**8, 10**9, 2**31, 2**40, 2**53 - 1)
SEAL = re.compile(rb'(?<!\s)\s*"body_sha256": "[^"]*",?(?=\n)')
NAMES = ("../x", "/etc/passwd", "a/../b", "x\x1b[2J", "con", "a//b", "a\\b", ".", "", "MANIFEST.json", "é", "a" * 101)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads(regular(folder / MANIFEST_FILE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise Unfit from error
    if not isinstance(value, dict):
        raise Unfit
    return value


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / MANIFEST_FILE).write_bytes(dump(manifest, 1))


def manifest_value(folder: Path, chance: random.Random) -> str:
    """Edits a random value, key or entry of the manifest."""
    manifest = _manifest(folder)
    done = edit_value(manifest, chance)
    _write_manifest(folder, manifest)
    return f"manifest: {done}"


def manifest_text(folder: Path, chance: random.Random) -> str:
    """Edits the manifest's text."""
    path = regular(folder / MANIFEST_FILE)
    text, done = edit_text(path.read_bytes(), chance)
    path.write_bytes(text)
    return f"manifest's text: {done}"


def listed_name(folder: Path, chance: random.Random) -> str:
    """Puts an unsafe name into the list of files; no file is ever written under such a name."""
    manifest = _manifest(folder)
    try:
        entry = chance.choice(manifest["files"])
        old, entry["path"] = entry["path"], chance.choice(NAMES)
    except (TypeError, KeyError, IndexError) as error:
        raise Unfit from error
    _write_manifest(folder, manifest)
    return f"{old!r} is listed as {entry['path']!r}"


def plan_figure(folder: Path, chance: random.Random) -> str:
    """Changes a figure of a plan, with the budget and the figures that depend on it."""
    manifest = _manifest(folder)
    figure, count = chance.choice((*FIGURES, "num_pinned", "cache_slots")), chance.choice(COUNTS)
    try:
        plan, spec = chance.choice(manifest["plans"]), manifest["model"]
        unit_bytes = {entry["family"]: entry["unit_bytes"] for entry in manifest["families"]}
        if figure in ("num_pinned", "cache_slots"):
            part = chance.choice(plan["parts"])
            count = min(count, 64)
            more, part[figure] = (count - part[figure]) * unit_bytes[part["family"]], count
        elif figure in ("context_length", "kv_cache"):
            if figure == "kv_cache":
                count = plan[figure] = chance.choice(KV_CACHES)
            else:
                spec["max_position_embeddings"] = max(count, spec["max_position_embeddings"])
                plan[figure] = count
            size = _kv_cache_bytes(plan, spec)
            more, plan["kv_cache_bytes"] = size - plan["kv_cache_bytes"], size
        else:
            more = count - plan[figure] if figure.endswith("buffer_bytes") else 0
            plan[figure] = count
        plan["dram_budget_bytes"] += max(0, more)
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise Unfit from error
    _write_manifest(folder, manifest)
    return f"plan: {figure} is {count}, and the budget follows"


def _kv_cache_bytes(plan: dict[str, Any], spec: dict[str, Any]) -> int:
    """Returns the bytes of the plan's KV cache, by the format's description (schemas/FORMAT.md)."""
    size = spec["head_dim"]
    head_bytes = 34 * -(-size // 32) if plan.get("kv_cache") == "int8" else 2 * size
    return 2 * head_bytes * spec["num_hidden_layers"] * spec["num_key_value_heads"] * plan["context_length"]


def generation(folder: Path, chance: random.Random) -> str:
    """Changes the tokens that begin and end a text."""
    manifest = _manifest(folder)
    try:
        spec = manifest["model"]
        size = spec["vocab_size"]
        spec["eos_token_ids"] = chance.choice(([], [0], [size - 1], [size], list(range(1000)), [[1]], [-1], 5))
        spec["bos_token_id"] = chance.choice((None, 0, size - 1, size, -1, True, 2**40))
    except (TypeError, KeyError) as error:
        raise Unfit from error
    _write_manifest(folder, manifest)
    return f"bos {spec['bos_token_id']}, eos {str(spec['eos_token_ids'])[:40]}"


def layer_format(folder: Path, chance: random.Random) -> str:
    """Changes the format of a layer's units, a section's own or its family's."""
    manifest = _manifest(folder)
    try:
        holder = chance.choice((*manifest["flash"]["sections"], *manifest["families"]))
        names = ("int8_group32", "q4_1", "int4_group32", "fp16", "dense", "")
        several = "+".join(chance.choices(names, k=chance.randint(1, 5)))
        holder["format"] = chance.choice((*names, None, several, "int4_group32+int8_group32+int4_group32"))
        if chance.random() < 0.5:
            required = set(manifest["features"]["required"]) ^ {chance.choice(("layer-formats", "slice-formats"))}
            manifest["features"]["required"] = sorted(required)
    except (TypeError, KeyError, IndexError) as error:
        raise Unfit from error
    _write_manifest(folder, manifest)
    return f"units of {holder.get('family')} in {holder['format']}, features {str(manifest['features'])[:60]}"


def row_table(folder: Path, chance: random.Random) -> str:
    """Changes a matrix that is read by row: its role, format, place or size, or its feature."""
    manifest = _manifest(folder)
    try:
        tables = manifest["flash"]["tables"]
        table = chance.choice(tables)
        name = chance.choice(("role", "format", "offset_bytes", "num_rows", "row_bytes", "again", "feature"))
        if name == "again":
            tables.append(dict(table))
        elif name == "feature":
            manifest["features"]["required"].remove("row-tables")
        elif name == "role":
            table[name] = chance.choice(("lm_head.weight", "embed_positions.weight", "norm.weight", "", "../x", None))
        elif name == "format":
            table[name] = chance.choice(("fp16", "int4_group32", "int8_group32", "int4_2_2", "dense", "", None))
        else:
            table[name] = chance.choice((*COUNTS, -1, table[name] + 1, table[name] - 1, table[name] + 65536))
        if chance.random() < 0.5:
            manifest["model"]["vocab_size"] = table["num_rows"]
    except (TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
        raise Unfit from error
    _write_manifest(folder, manifest)
    return f"table: {name} is {str(table.get(name))[:40]}"


def device_figure(folder: Path, chance: random.Random) -> str:
    """Changes a figure of the device, which simulations use."""
    manifest = _manifest(folder)
    try:
        figures = manifest["device"]["flash"] if chance.random() < 0.6 else manifest["device"]
        name = chance.choice(sorted(figures))
        holder, key = (figures[name], "value") if isinstance(figures[name], dict) else (figures, name)
        while isinstance(holder[key], list | dict):
            holder, key = holder[key], chance.choice(pick(holder[key], chance)[:1])
        holder[key] = chance.choice((5e-324, 1e308, -1.0, 0.0, 1, strange(chance, holder[key])))
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise Unfit from error
    _write_manifest(folder, manifest)
    return f"device: {name} has {str(holder[key])[:40]}"


def curve_value(folder: Path, chance: random.Random) -> str:
    """Edits a random value, key or entry of what the artifact says of its experts."""
    path = regular(folder / EXPERTS_FILE)
    try:
        curve = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Unfit from error
    if not isinstance(curve, dict):
        raise Unfit
    done = edit_value(curve, chance)
    path.write_bytes(dump(curve, 1))
    return f"{EXPERTS_FILE}: {done}"


def repeated_key(folder: Path, chance: random.Random) -> str:
    """Writes a key at a random depth twice, the first time with another value."""
    manifest = _manifest(folder)
    path = pick(manifest, chance)
    text = dump(manifest, 1)
    key = f'"{path[-1]}": '.encode()
    if key not in text:
        raise Unfit
    again = key + dump(chance.choice(STRANGE)) + b", "
    (folder / MANIFEST_FILE).write_bytes(text.replace(key, again + key, 1))
    return f"manifest: {show(path)} occurs twice"


EDITS: dict[str, tuple[Edit, int]] = {
    "manifest_value": (manifest_value, 14),
    "manifest_text": (manifest_text, 2),
    "listed_name": (listed_name, 1),
    "plan_figure": (plan_figure, 4),
    "generation": (generation, 1),
    "layer_format": (layer_format, 2),
    "row_table": (row_table, 2),
    "device_figure": (device_figure, 2),
    "curve_value": (curve_value, 1),
    "repeated_key": (repeated_key, 1),
    "flip_bits": (file_edits.flip_bits, 4),
    "cut_or_extend": (file_edits.cut_or_extend, 2),
    "overwrite": (file_edits.overwrite, 3),
    "remove_file": (file_edits.remove_file, 1),
    "add_file": (file_edits.add_file, 2),
    "change_kind": (file_edits.change_kind, 1),
    "rename": (file_edits.rename, 1),
    "header_value": (tensor_edits.header_value, 3),
    "header_text": (tensor_edits.header_text, 2),
    "header_move": (tensor_edits.header_move, 1),
    "tensor_values": (tensor_edits.values, 6),
    "rename_tensor": (tensor_edits.rename_tensor, 1),
    "tokenizer_component": (tokenizer_edits.component, 4),
    "tokenizer_value": (tokenizer_edits.value_inside, 2),
    "vocabulary": (tokenizer_edits.vocabulary, 2),
    "tokenizer_text": (tokenizer_edits.text, 1),
}


_spec = partial(small_spec, num_hidden_layers=2, intermediate_size=64)
_EXPERTS = {"intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 32}
_MIXED = {0: "int8_group32", 1: "int4_group32+int8_group32+int4_group32"}
_SHARED: dict[str, Any] = {
    "shared_intermediate_size": 32,
    "dense_layers": (0,),
    "dense_intermediate_size": 64,
    "router_scores": "sigmoid",
    "num_expert_groups": 2,
    "num_expert_groups_per_tok": 1,
    "hidden_act": "swiglu_oai",
    "activation_threshold": 7.0,
    "attention_sinks": True,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 1,
    "rotary_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
RECIPES = {
    "relu": Recipe(spec=_spec(vocab_size=384, bos_token_id=0, eos_token_ids=(1,))),
    "topk": Recipe(spec=_spec(), method="topk", format="int4_group32", cache="lfu", layers_per_group=2),
    "cats": Recipe(spec=_spec(), method="cats", format="q5_1"),
    "dip": Recipe(spec=_spec(), method="dip_ca"),
    "predictor": Recipe(spec=_spec(bos_token_id=2), method="predictor", format="int8_group32"),
    "opt": Recipe(
        spec=_spec(norm="layer_norm", position="learned", rotary_dim=0, position_offset=2, gated_mlp=False),
        method="dense",
        cache="static",
    ),
    "rows": Recipe(spec=_spec(tie_word_embeddings=False), method="dense", format="int4_group32", rows_on_flash=True),
    "kv_int8": Recipe(spec=_spec(head_dim=32, rotary_dim=32), kv_cache="int8"),
    "experts": Recipe(spec=_spec(**_EXPERTS), method="dense", kv_cache="int8"),
    "routed": Recipe(spec=_spec(**_EXPERTS), families=("neuron",), method="dense", pinned_share=0.0, slots_share=0.6),
    "shared": Recipe(spec=_spec(**_EXPERTS, **_SHARED), method="dense"),
    "latent": Recipe(spec=_spec(**{**_EXPERTS, **_LATENT}), method="dense"),
    "mixed": Recipe(spec=_spec(), method="dense", format="int4_group32", layer_formats=_MIXED),
    "drafts": Recipe(spec=_spec(), method="dense", format="int4_group32", density=1.0),
    "predicted_experts": Recipe(spec=_spec(**_EXPERTS), method="predictor", format="int4_group32"),
}
"""Every format, methods with arrays, options and predictors, and experts; small, since six commands run on a mutant."""
CURVES = ("experts", "predicted_experts")
"""Bases that say how well DRAM serves their experts."""
CURVE = ExpertCurve(
    num_experts_per_tok=2,
    lru_misses=(1.0, 0.6, 0.3, 0.0),
    static_misses=(0.7, 0.5, 0.2, 0.0),
    persistence=0.4,
    predictability=0.8,
)
PRELOADING = ("experts", "predictor")
"""Bases whose plans preload units."""
ROUTED = ("routed",)
"""Bases whose routers prefer experts in DRAM."""
DRAFTS = ("drafts",)
"""Bases whose plans draft."""
ONE_SEQUENCE = ("dip", "routed")
"""Bases whose tokens use what is in the cache, so that they serve one sequence at a time."""


class Artifacts:
    """The target: artifacts of every kind, and the commands of `coldpress`."""

    EDITS = EDITS
    MENDINGS = ("none", "seal", "all", "all")

    def __init__(self, folder: Path) -> None:
        """Builds the bases in `folder`, and runs every command once on each unchanged base."""
        for module in pkgutil.walk_packages(runtime.__path__, "coldpress.runtime."):
            if not module.name.endswith((".__main__", ".harness")):  # no command uses the harness
                importlib.import_module(module.name)  # children inherit what is loaded here
        self._folder = folder
        self.bases = tuple(RECIPES)
        self._said: dict[str, str] = {}
        for name, recipe in RECIPES.items():
            path = build_artifact(folder / name, recipe).path
            if name in CURVES:
                (path / EXPERTS_FILE).write_text(CURVE.to_json())
            add_files(path, recipe.spec.vocab_size)
            if name in PRELOADING:
                change_manifest(path, _preload)
            if name in DRAFTS:
                change_manifest(path, _draft)
            if name in ROUTED:
                change_manifest(path, _route)
            scratch = folder / f"{name}-scratch"
            scratch.mkdir()
            for run in self._commands(name, path, scratch, True):
                if run.ended.kind != "fine":
                    raise RuntimeError(f"{run.command} on the unchanged artifact {name}: {run.ended}")
                if run.command == "generate":
                    self._said[name] = _said(run.ended)
            (scratch / "trace").rename(self._trace(name))

    def _trace(self, base: str) -> Path:
        return self._folder / f"{base}.trace"

    def copy(self, base: str, folder: Path) -> None:
        """Makes `folder` a copy of a base."""
        copy_tree(self._folder / base, folder)

    def mend(self, folder: Path, mending: str) -> None:
        """Updates the manifest's digest of itself (`seal`), or first page checksums, file sizes and digests (`all`)."""
        if mending == "all":
            _mend_pages(folder)
            _mend_files(folder)
        if mending != "none":
            _mend_seal(folder)

    def runs(self, mutant: Mutant, folder: Path, scratch: Path) -> Iterator[Run]:
        """Runs all commands; damage that `verify` accepts, although nothing was mended, counts as silent."""
        verified = False
        for run in self._commands(mutant.base, folder, scratch, False):
            if run.command == "verify" and mutant.mending == "none" and run.ended.kind == "fine":
                verified = True
                differs = _difference(self._folder / mutant.base, folder)
                if differs:
                    run = Run(run.command, Ended(SILENT, f"verify finds nothing, but {differs} differs", ""))
            if run.command == "generate" and verified and not run.failed:
                said = _said(run.ended)
                if said != self._said[mutant.base]:
                    run = Run(run.command, Ended(SILENT, f"verify finds nothing, generate says {said[:100]!r}", said))
            yield run

    def _commands(self, base: str, folder: Path, scratch: Path, record: bool) -> Iterator[Run]:
        prompt = ["--prompt-ids", "1,2,3"] if base in ("topk", "cats") else ["--prompt", "w1 w2 the map"]
        trace = scratch / "trace" if record else self._trace(base)
        recording = ["--trace", str(trace)] if record else []
        prompts = scratch / "prompts.jsonl"
        prompts.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS))
        commands = {
            "inspect": [],
            "verify": [],
            "generate": [*prompt, "--max-new-tokens", "4", "--json", *recording],
            "generate many": ["--prompts", str(prompts), "--max-new-tokens", "3", "--json"],
            "bench": ["--tokens", "2", "--runs", "1"],
            "simulate": ["--trace", str(trace)],
        }
        if base in ONE_SEQUENCE:
            del commands["generate many"]
        for name, flags in commands.items():
            yield Run(name, run_limited(partial(main, [name.split()[0], str(folder), *flags]), scratch))


def _preload(manifest: dict[str, Any]) -> None:
    for plan in manifest["plans"]:
        plan["preload_buffer_bytes"] = 2 * manifest["flash"]["page_bytes"]
        plan["dram_budget_bytes"] += plan["preload_buffer_bytes"]


def _draft(manifest: dict[str, Any]) -> None:
    for plan in manifest["plans"]:
        plan["draft"], plan["draft_tokens"] = "lookup", 3


def _route(manifest: dict[str, Any]) -> None:
    for plan in manifest["plans"]:
        plan["routing"], plan["routing_strengths"] = "cache_prior", [0.4] * manifest["model"]["num_hidden_layers"]


def _said(ended: Ended) -> str:
    """Returns tokens and text of a `generate --json`, or the class of its end if it failed."""
    if ended.kind != "fine":
        return ended.kind
    found = json.loads(ended.output)
    return json.dumps([found["prompt_token_ids"], found["token_ids"], found["text"]])


def _difference(one: Path, other: Path) -> str | None:
    """Returns the path of a file or folder that differs between two folders, None if they are equal.

    A folder that only one of them has is not entered, since it may be nested too deeply.
    """
    names = {path.name for path in one.iterdir()} | {path.name for path in other.iterdir()}
    for name in sorted(names):
        here, there = one / name, other / name
        if not os.path.lexists(here) or not os.path.lexists(there):
            return name
        kinds = {stat.S_IFMT(path.lstat().st_mode) for path in (here, there)}
        if len(kinds) > 1 or (here.is_file() and here.read_bytes() != there.read_bytes()):
            return name
        found = _difference(here, there) if here.is_dir() else None
        if found:
            return f"{name}/{found}"
    return None


def add_files(path: Path, vocab_size: int) -> Path:
    """Adds the files that the compiler's artifacts have besides weights; returns `path`."""
    (path / "README.md").write_text("# A model\n")
    (path / "LICENSE").write_text("Do with it what you like.\n")
    folder = path / "tokenizer"
    folder.mkdir()
    if vocab_size > 300:
        write_tokenizer(folder, vocab_size)
    else:
        (folder / "tokenizer.json").write_text(json.dumps(word_tokenizer(vocab_size)))
        (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "model_max_length": 10**30}))
    change_manifest(path, lambda manifest: None, relist=True)
    return path


def _mend_pages(folder: Path) -> None:
    """Updates the checksums of flash.img's pages, as far as the tables have room for them."""
    path = folder / TABLES_FILE
    try:
        header, data = tensor_edits.split(regular(path))
        start, stop = header["page_crc32c"]["data_offsets"]
        page_bytes = _manifest(folder)["flash"]["page_bytes"]
        image = np.fromfile(regular(folder / FLASH_FILE), np.uint8)
        found = _native.crc32c_pages(image[: image.size // page_bytes * page_bytes], page_bytes).astype("<u4").tobytes()
        whole = bytearray(path.read_bytes())
        base = len(whole) - len(data)
        if not 0 <= start <= stop <= len(data) or image.size > 1 << 24:
            return
        length = min(stop - start, len(found))
        whole[base + start : base + start + length] = found[:length]
        if path.stat().st_nlink == 1:
            path.write_bytes(whole)
    except (Unfit, TypeError, KeyError, ValueError, OSError, ZeroDivisionError, OverflowError):
        return  # a broken part cannot be mended


def _mend_files(folder: Path) -> None:
    try:
        manifest = _manifest(folder)
        before = json.dumps(manifest)
        for entry in manifest["files"]:
            path = folder / entry["path"]
            if path.is_file() and not path.is_symlink():
                data = path.read_bytes()
                entry["size_bytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
        if json.dumps(manifest) != before:
            _write_manifest(folder, manifest)
    except (Unfit, TypeError, KeyError, ValueError, OSError, AttributeError):
        return


def _mend_seal(folder: Path) -> None:
    """Updates the manifest's digest of itself in its text, so that other errors in the text remain."""
    path = folder / MANIFEST_FILE
    if not path.is_file() or path.is_symlink() or path.stat().st_nlink > 1:
        return
    text = SEAL.sub(b"", path.read_bytes())
    if text.startswith(b"{"):
        body = text[1:].lstrip(b"\n")
        digest = hashlib.sha256(b"{\n" + body).hexdigest().encode()
        path.write_bytes(b'{\n  "body_sha256": "' + digest + b'",\n' + body)
