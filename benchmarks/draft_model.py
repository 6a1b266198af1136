"""Decodes a real model whose weights do not fit in DRAM, with a smaller one that drafts, and without, in equal DRAM.

Both models are GGUF files that anyone can have. The larger one keeps the file's codes, so that all ways write the same
text: greedy continuations of code, prose and chats. The baseline is a build of its own, without a draft model, in the
same budget; llama.cpp maps the larger model's file and computes our text token by token. All run in turns, each in a
process of its own under the kernel's caps of the device: ours with the memory that the larger of our processes takes,
llama.cpp's with the budget and what it keeps beside the weights. What a 7B shape would gain follows from the passes of
these runs and the law of every device's profile, half of it in DRAM.
"""

import heapq
import inspect
import json
import os
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, gain, main, option
from benchmarks.harness.apart import apart, run_here
from benchmarks.harness.places import data
from benchmarks.shared import llama_mmap
from benchmarks.shared.builds import artifact_in
from benchmarks.shared.emulated import apart_under_caps
from benchmarks.shared.memory_group import drop_pages, memory_group
from benchmarks.shared.real_models import SHORT, SMALL, file_of
from coldpress.compiler.checkpoint.shapes import Shapes, read_shapes
from coldpress.compiler.dense_run import dense_run
from coldpress.runtime import _native
from coldpress.runtime.artifact.contents import nbytes
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.device_profiles.devices import device_names, load_device
from coldpress.runtime.drafts import Draft
from coldpress.runtime.generate.session import Session
from coldpress.runtime.plugins import load
from coldpress.runtime.store.computing import in_pass
from coldpress.runtime.text.chat import ChatTemplate
from coldpress.runtime.text.tokenizer import TextCodec
from coldpress.schemas.device import DeviceProfile
from tests.support.pipeline import build

KINDS = ("code", "prose", "chat")
WAYS = ("off", "lookup", "model")
QUESTION = "Write a Python function that merges two sorted lists, and explain how it works."
PROMPT_TOKENS = 24


@dataclass(frozen=True)
class Options:
    model: str = option("qwen2.5-coder-1.5b-instruct", smoke=SMALL, help="model to build")
    draft: str = option("qwen2.5-coder-0.5b-instruct", smoke=SMALL, help="draft model")
    shares: tuple[float, ...] = option((0.6,), smoke=(0.7,), full=(0.4, 0.6, 0.8), help="DRAM budgets over the file")
    kinds: tuple[str, ...] = option(KINDS, smoke=("prose",), choices=KINDS, help="kinds of text")
    device: str = option("pixel6", help="device profile whose caps hold")
    scale: float = option(0.0, smoke=0.3, help="share of the device's rates; 0: as much as the disk gives")
    tokens: int = option(40, smoke=8, full=320, help="new tokens of a text")
    rounds: int = option(2, smoke=1, full=3, help="rounds in which all ways decode")
    short: bool = option(False, smoke=True, help="calibrate and score on less text")


QWEN_7B = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""The shape of Qwen2.5-7B, the next larger model of the family."""
SHAPE_FORMAT, SHAPE_CONTEXT = "q4_k", 512


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].kind": "kind of text",
        "rows[].budget_bytes": "DRAM budget: the share of the file's bytes",
        "rows[].refused?": "why there is no such build; such a row has no other figure",
        "rows[].draft_bytes?": "the part of the budget that the draft model takes",
        "rows[].identical?": "whether all ways wrote the same tokens",
        "rows[].tokens_per_s.*?": "tokens per second of a way under the caps, the median of rounds; of llama for the "
        "same tokens",
        "rows[].gain.*?": "how many times faster than without drafts a way is, formed in each round",
        "rows[].tokens_per_pass.*?": "new tokens per pass of a way that drafts",
        "rows[].acceptance.*?": "share of its drafts that were right",
        "rows[].read_bytes.*?": "bytes that a way reads per token",
        "rows[].drafts?": "drafts of each pass with the draft model",
        "rows[].over_llama?": "how many times faster than llama.cpp the draft model is, formed in each round",
        "rows[].scale?": "share of the device's rates",
        "identical": "share of rows whose ways all wrote the same tokens",
        "gain.*.*": "gain with the draft model, by kind of text and share",
        "gain_7b.*.median?": "gain of a 7B shape by the law, half of it in DRAM: median over devices",
        "gain_7b.*.worst?": "the same: least over devices",
        "over_llama.*": "median of over_llama at a share",
    }
    is_timing = True
    needs_data = True
    needs_root = True
    extra = "llama: xllamacpp"
    over = {"share": "shares"}
    full_minutes = 120

    def measure(self, cell: Cell) -> Iterator[Row]:
        """Yields a row per kind of text."""
        files = [self.once(name, lambda name=name: file_of(name, self.folder)) for name in self._names]
        row: Row = {"budget_bytes": int(cell["share"] * files[0].stat().st_size)}
        try:
            drafting = self._built(files, row["budget_bytes"], draft="model")
            plain = self._built(files, row["budget_bytes"])
        except RuntimeError as error:
            for kind in self.options.kinds:
                yield row | {"kind": kind, "refused": str(error).strip().splitlines()[-1]}
            return
        paths = {"off": plain, "lookup": plain, "model": drafting}
        (plan,) = open_artifact(drafting).manifest.plans
        limit_bytes, scale = max(self._peak(path) for path in (plain, drafting)), self.options.scale
        alone = apart(self, "mapped", str(files[0]), [[1, 2]])
        llama_limit_bytes = llama_mmap.limit_bytes(row["budget_bytes"], alone)
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in (*WAYS, "llama")}
        for _ in range(self.options.rounds):
            for way, path in paths.items():
                told = "drafted", self.options.device, scale, limit_bytes, str(path), way
                measured, caps = apart_under_caps(self, *told)
                scale = caps.scale
                found[way].append(measured)
            texts = [one["text"] for one in found["off"][-1].values()]
            mapped = "mapped", self.options.device, scale, llama_limit_bytes, str(files[0]), texts
            found["llama"].append(apart_under_caps(self, *mapped)[0])
        for kind in self.options.kinds:
            yield row | {"kind": kind, "draft_bytes": plan.draft_bytes, "scale": scale} | _row(found, kind)

    @property
    def _names(self) -> tuple[str, str]:
        return self.options.model, self.options.draft

    def _built(self, files: Sequence[Path], budget_bytes: int, draft: str | None = None) -> Path:
        config: dict[str, Any] = {"model": files[0], "device": self.options.device, "method": "dense"}
        config |= {"corpus": data() / "corpora" / "wikitext-2", "context_length": 512, "dram_budget": budget_bytes}
        config |= {"draft_model": files[1], "draft": draft} if draft else {"label": "plain"}
        config |= SHORT if self.options.short else {}
        return artifact_in(build(self.folder / "cells", **config))

    def _peak(self, path: Path) -> int:
        """Returns the memory that all ways of an artifact get."""
        drop_pages(path)
        with memory_group() as group:
            group.begin()
            apart(self, "drafted", str(path), "own", run=lambda argv: run_here([*group.words, *argv]))
            return group.peak_bytes + llama_mmap.SLACK_BYTES

    def drafted(self, path: str, way: str) -> dict[str, dict[str, Any]]:
        """Continues all kinds of text in one way, in a process under the caps; `own` drafts as the plan says."""
        _native.set_num_threads(os.cpu_count() or 1)
        draft = None if way in ("own", "model") else load("coldpress.runtime.drafts", Draft, way)
        found: dict[str, dict[str, Any]] = {}
        with Session(path) as session:
            for kind, prompt in _prompts(session, self.options.kinds).items():
                session.generate(prompt, 2, ignore_eos=True, draft=draft)  # caches, and pages of the process
                run = session.generate(prompt, self.options.tokens, ignore_eos=True, draft=draft)
                decoded = run.tokens[1:]
                found[kind] = {
                    "text": [*prompt, *run.token_ids],
                    "token_s": sum(token.seconds for token in decoded) / len(decoded),
                    "read_bytes": sum(token.read_bytes for token in decoded) / len(decoded),
                    "drafts": [token.drafted for token in decoded if token.leads],
                    "accepted": sum(token.accepted for token in decoded),
                }
        return found

    def mapped(self, file: str, texts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Computes the texts by llama.cpp, in a process under the caps."""
        return llama_mmap.follow(Path(file), np.array([texts[0], *texts]))

    def figures(self, rows: Rows) -> Figures:
        known = [row for row in rows if "gain" in row]
        shares, kinds = self.options.shares, self.options.kinds
        return {
            "identical": statistics.mean(row["identical"] for row in known),
            "gain": {
                kind: {f"{row['share']:.0%}": row["gain"]["model"]["median"] for row in known if row["kind"] == kind}
                for kind in kinds
            },
            "gain_7b": {} if self.options.model == SMALL else self._gain_7b(known),
            "over_llama": {
                f"{share:.0%}": statistics.median(row["over_llama"]["median"] for row in known if row["share"] == share)
                for share in shares
                if any(row["share"] == share for row in known)
            },
        }

    def _gain_7b(self, rows: Rows) -> dict[str, dict[str, float]]:
        """Returns what the passes of these runs would bring a 7B shape, each reading what one token reads there."""
        target = _shapes(self.folder, QWEN_7B)
        small = read_shapes(self.once(self.options.draft, lambda: file_of(self.options.draft, self.folder)))
        gains: dict[str, list[float]] = {row["kind"]: [] for row in rows}
        for device in map(load_device, device_names()):
            whole = _dense_s(target, 1, 1.0, device)[1]
            plain_s = _dense_s(target, 1, 0.5, device, whole)[0]
            draft_s, draft_bytes = _dense_s(small, 1, 1.0, device)
            for row in rows:
                drafts = row["drafts"]
                left = 0.5 - draft_bytes / whole
                pass_s = {n: _dense_s(target, 1 + n, left, device, whole)[0] for n in {*drafts}}
                spent_s = sum(pass_s[n] + n * draft_s for n in drafts)
                gains[row["kind"]].append(plain_s * (self.options.tokens - 1) / spent_s)
        return {kind: {"median": statistics.median(found), "worst": min(found)} for kind, found in gains.items()}


def _row(found: dict[str, list[dict[str, Any]]], kind: str) -> Row:
    seconds = {way: [one[kind]["token_s"] for one in found[way]] for way in WAYS}
    llama = [one["token_s"] for one in found["llama"]]
    last = {way: found[way][-1][kind] for way in WAYS}
    drafting = [way for way in WAYS if sum(last[way]["drafts"])]
    return {
        "identical": len({tuple(one["text"]) for one in last.values()}) == 1,
        "tokens_per_s": {way: 1 / statistics.median(each) for way, each in (seconds | {"llama": llama}).items()},
        "gain": {way: gain(seconds["off"], seconds[way]) for way in WAYS[1:]},
        "tokens_per_pass": {
            way: (len(last[way]["drafts"]) + last[way]["accepted"]) / len(last[way]["drafts"]) for way in drafting
        },
        "acceptance": {way: last[way]["accepted"] / sum(last[way]["drafts"]) for way in drafting},
        "read_bytes": {way: last[way]["read_bytes"] for way in WAYS},
        "drafts": last["model"]["drafts"],
        "over_llama": gain(llama, seconds["model"]),
    }


def _prompts(session: Session, kinds: Sequence[str]) -> dict[str, list[int]]:
    """Returns PROMPT_TOKENS tokens of each kind of text."""
    codec, template = TextCodec.of(session.artifact), ChatTemplate.of(session.artifact)
    assert codec is not None
    prose = (data() / "corpora/tinystories/tiny_stories.txt").read_text()[2000:3000]
    texts = {"code": textwrap.dedent(inspect.getsource(heapq.merge)), "prose": prose}
    found = {kind: codec.encode(texts[kind])[:PROMPT_TOKENS] for kind in kinds if kind in texts}
    if "chat" in kinds:
        assert template is not None
        asked = template.render([{"role": "user", "content": QUESTION}])
        found["chat"] = codec.encode(asked, special=False)[-PROMPT_TOKENS:]
    return found


def _shapes(folder: Path, config: dict[str, Any]) -> Shapes:
    path = folder / "7b" / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return read_shapes(path)


def _dense_s(
    shapes: Shapes, num_tokens: int, share: float, device: DeviceProfile, whole_bytes: int | None = None
) -> tuple[float, int]:
    """Returns the law's seconds of a pass with a share of the model in DRAM, and the bytes of the whole model."""
    whole = whole_bytes or sum(
        nbytes(SHAPE_FORMAT, one.shape[-1] + -one.shape[-1] % 256) * prod(one.shape[:-1])
        for one in shapes.tensors.values()
        if len(one.shape) == 2
    )
    run = dense_run(shapes, SHAPE_FORMAT, SHAPE_CONTEXT, int(share * whole), in_pass(device, num_tokens))
    assert run is not None
    return run.token_s, whole


if __name__ == "__main__":
    main("draft_model")
