"""Serves a small model over HTTP: the same texts, shared rows, clients that vanish, random requests, and warm prompts.

The server runs in a process of its own (`coldpress serve`), and clients talk to it over sockets.

- parity: greedy texts of the server against the Python interface's, one client at a time and all at once, whole and
  streamed, with everything in DRAM, where sums are in one order.
- rows: several clients at once under a tight DRAM budget, against one: they share passes, and so reads.
- drafts: texts of a server whose plan drafts with a smaller model, one client at a time and several at once, greedy and
  drawn, against the Python interface's without drafts.
- vanish: clients that close a stream after its first piece; then nothing may run on, and nothing may be left of them.
- fuzz: schemathesis reads /openapi.json, and sends requests that keep to it and that do not; each answer must have a
  status, a type and a form that it allows, and no wrong request may pass.
- warm_prefix: the first token of a prompt whose beginning is kept on flash, against a cold one, in turn.
"""

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

import coldpress
from benchmarks.harness import Benchmark, Cell, Figures, Row, Rows, gain, main, option
from tests.support.artifacts import Recipe, add_draft_model
from tests.support.command_line import speaking_artifact
from tests.support.schemathesis import schemathesis_run
from tests.support.serving import Server, serving

EVERYTHING = "8GB"
TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
CONTEXT = 2048
PAGE_BYTES = 4096
PARTS = ("parity", "drafts", "vanish", "fuzz", "warm_prefix")


def prompts(count: int, length: int) -> list[list[int]]:
    """Returns prompts of `length` token ids."""
    drawn = random.Random(5)
    return [[drawn.randrange(3, 380) for _ in range(length)] for _ in range(count)]


def text_of(server: Server, prompt: list[int], num_tokens: int, stream: bool = False) -> str:
    """Returns the server's greedy continuation."""
    answer = server.post("/v1/completions", prompt=prompt, max_tokens=num_tokens, temperature=0, stream=stream)
    parts = answer.events if stream else [answer.json]
    return "".join(choice["text"] for part in parts for choice in part["choices"])


def parity(path: Path, options: "Options") -> Row:
    """Compares texts of the server with the Python interface's."""
    asked = prompts(options.prompts, 24)
    with coldpress.load(path, dram=EVERYTHING) as model:
        expected = [model.generate(prompt, options.tokens).text for prompt in asked]
    with serving(path, "--dram", EVERYTHING, "--batch-tokens", CONTEXT * 8, "--max-queue", 1000) as server:
        found = [[text_of(server, prompt, options.tokens, stream) for prompt in asked] for stream in (False, True)]
        with ThreadPoolExecutor(options.prompts) as pool:
            found += [
                list(pool.map(lambda p, s=stream: text_of(server, p, options.tokens, s), asked))
                for stream in (False, True)
            ]
    equal = sum(text == other for texts in found for text, other in zip(texts, expected, strict=True))
    return {"texts": len(found) * len(asked), "equal_texts": equal}


def drafts(folder: Path, options: "Options") -> Row:
    """Compares texts with drafts of a smaller model, of 1, 2 and 4 clients at once, with those without."""
    own: dict[str, Any] = {"method": "dense", "slots_share": 0.0, "pinned_share": 0.25}
    path = speaking_artifact(folder / "large", context_length=64, recipe=own, num_hidden_layers=options.layers).path
    small = speaking_artifact(folder / "small", context_length=64, recipe=own, num_hidden_layers=1).path
    plain = shutil.copytree(path, folder / "plain")
    add_draft_model(path, small)
    asked = [
        {"prompt": prompt, "max_tokens": 4 + number % 13, "temperature": 0.8 * (number % 2), "seed": number}
        for number, prompt in enumerate(prompts(options.drafted, 12))
    ]
    with coldpress.load(plain) as model:
        expected = [model.generate(one["prompt"], one["max_tokens"], **_drawing(one)).text for one in asked]
    found = list[str]()
    with serving(path, "--max-queue", 1000) as server:
        for clients, part in zip((1, 2, 4), np.array_split(np.arange(len(asked)), 3), strict=True):
            with ThreadPoolExecutor(clients) as pool:
                answers = pool.map(lambda number: server.post("/v1/completions", **asked[number]), part.tolist())
                found += [answer.json["choices"][0]["text"] for answer in answers]
        numbers = server.metrics()
    return {
        "texts": len(asked),
        "equal_texts": sum(text == other for text, other in zip(found, expected, strict=True)),
        "drafted": numbers["drafted_total"],
        "accepted": numbers["accepted_total"],
    }


def _drawing(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: asked[name] for name in ("temperature", "seed")}


def served_row(path: Path, clients: int, options: "Options") -> Row:
    """Measures `clients` at once under the plan's own budget."""
    asked = prompts(clients, 24)
    with serving(path, "--batch-tokens", clients * (24 + options.tokens)) as server:

        def ask(prompt: list[int]) -> float:
            return first_token_s(server, prompt, options.tokens)[0]

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(ask, asked))  # warms up
            before, start_s = server.metrics(), time.perf_counter()
            together_s = [one for _ in range(options.rounds) for one in pool.map(ask, asked)]
            seconds, after = time.perf_counter() - start_s, server.metrics()
        alone_s = [ask(prompt) for _ in range(options.rounds) for prompt in asked[:4]]
    grown = {name: after[name] - before[name] for name in after}
    num_tokens = grown["new_tokens_total"]
    return {
        "tokens_per_s": num_tokens / seconds,
        **{f"first_token_p{rank}_s": float(np.percentile(together_s, rank)) for rank in (50, 95)},
        **{f"first_token_p{rank}_over_alone": _over(together_s, alone_s, rank) for rank in (50, 95)},
        "read_bytes_per_token": grown["read_bytes_total"] / num_tokens,
        "tokens_per_pass": num_tokens / (grown["passes_total"] + grown["prefills_total"]),
        "hit_rate": grown["hits_total"] / (grown["hits_total"] + grown["misses_total"]),
    }


def vanish(path: Path, options: "Options") -> Row:
    """Counts what clients leave behind that close a stream after its first piece."""
    prompt = prompts(1, 24)[0]
    with serving(path, "--dram", EVERYTHING) as server:
        assert server.process
        process = psutil.Process(server.process.pid)

        def leave(count: int) -> None:
            for _ in range(count):
                with server.streamed(prompt=prompt, max_tokens=CONTEXT - 24, temperature=0) as answer:
                    answer.readline()
            server.wait_for(lambda now: now["running"] + now["waiting"] == 0)

        leave(max(5, options.vanished // 10))
        before, memory, files = server.metrics(), process.memory_info().rss, process.num_fds()
        leave(options.vanished)
        after = server.metrics()
        return {
            "left": options.vanished,
            "left_running": after["running"] + after["waiting"],
            "ended_early": after["cancelled_total"] - before["cancelled_total"],
            "tokens_per_left": (after["new_tokens_total"] - before["new_tokens_total"]) / options.vanished,
            "rss_growth": process.memory_info().rss / memory,
            "more_open_files": process.num_fds() - files,
        }


def fuzz(path: Path, folder: Path, options: "Options") -> Row:
    """Sends the requests of schemathesis, and counts answers that the server's description does not allow."""
    folder.mkdir(parents=True, exist_ok=True)
    with serving(path, "--dram", EVERYTHING, "--max-tokens", 4) as server:
        expected = text_of(server, [3, 14, 15], 8)
        found = schemathesis_run(server.url, folder, options.phases, options.requests)
        is_whole = text_of(server, [3, 14, 15], 8) == expected
        idle = server.wait_for(lambda now: now["running"] + now["waiting"] == 0)
    return {
        "operations": found.num_operations,
        "requests": found.num_requests,
        "unexpected": len(found.failures),
        "failed": idle["failed_total"],
        "same_text_after": is_whole,
    }


def _over(some: Sequence[float], others: Sequence[float], rank: int) -> float:
    return float(np.percentile(some, rank) / np.percentile(others, rank))


def first_token_s(server: Server, prompt: list[int], num_tokens: int = 8) -> tuple[float, str]:
    """Returns the seconds until the first token of a stream, and the whole stream's text.

    With log-probabilities each token has an event. Without, a token that ends within a character has none.
    """
    start_s = time.perf_counter()
    with server.streamed(prompt=prompt, max_tokens=num_tokens, temperature=0, logprobs=0) as answer:
        first = answer.readline()
        seconds = time.perf_counter() - start_s
        lines = [first, *answer.read().splitlines()]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
    return seconds, "".join(event["choices"][0]["text"] for event in events)


def warm_prefix(path: Path, folder: Path, options: "Options") -> Row:
    """Times the first token of prompts with a known beginning and of the same prompts without."""
    beginning = prompts(1, options.prefix)[0]
    asked = [[*beginning, *ending] for ending in prompts(options.rounds + 1, 16)]
    with serving(path) as cold, serving(path, "--prefixes", folder) as warm:
        first_token_s(warm, asked[0])
        first_token_s(cold, asked[0])
        turns = [(first_token_s(cold, prompt), first_token_s(warm, prompt)) for prompt in asked[1:]]
        numbers = warm.metrics()
    cold_s, warm_s = [one[0] for one, _ in turns], [one[0] for _, one in turns]
    return {
        "cold_s": median(cold_s),
        "warm_s": median(warm_s),
        "cold_over_warm": gain(cold_s, warm_s),
        "same_texts": sum(one[1] == other[1] for one, other in turns),
        "warm_texts": len(turns),
        "restored_share": numbers["prefix_restored_tokens_total"] / (len(turns) * len(asked[0])),
        "written_bytes": numbers["prefix_written_bytes_total"],
    }


@dataclass(frozen=True)
class Options:
    clients: tuple[int, ...] = option((1, 4, 16), smoke=(1, 2), full=(1, 2, 4, 8, 16, 32), help="clients at once")
    prompts: int = option(16, smoke=3, help="prompts whose texts are compared")
    tokens: int = option(48, smoke=6, help="new tokens of a text")
    rounds: int = option(3, smoke=2, full=9, help="rounds of each client, and pairs of cold and warm prompts")
    drafted: int = option(1000, smoke=9, help="prompts whose texts with drafts are compared")
    vanished: int = option(1000, smoke=5, help="streams that are left")
    phases: tuple[str, ...] = option(
        ("coverage", "fuzzing"), smoke=("fuzzing",), choices=("coverage", "fuzzing"), help="phases of schemathesis"
    )
    requests: int = option(50, smoke=2, full=500, help="random requests to each path in each phase")
    prefix: int = option(1024, smoke=256, help="tokens of the beginning that is kept")
    width: int = option(256, smoke=64, full=512, help="hidden_size of the model")
    layers: int = option(8, smoke=2, help="layers of the model")


class Plugin(Benchmark[Options]):
    keys = {
        "rows[].part": "what the row measures: parity, rows, drafts, vanish, fuzz or warm_prefix",
        "rows[].clients?": "rows: clients at once",
        "rows[].tokens_per_s?": "rows: new tokens per second of all clients together, prefills and HTTP included",
        "rows[].first_token_p50_s?": "rows: median seconds to the first token",
        "rows[].first_token_p95_s?": "rows: the same, 95th percentile",
        "rows[].first_token_p50_over_alone?": "rows: the median over that of one client at a time on the same server",
        "rows[].first_token_p95_over_alone?": "rows: the same, 95th percentile",
        "rows[].read_bytes_per_token?": "rows: bytes read from flash per new token, prefills included",
        "rows[].tokens_per_pass?": "rows: new tokens over passes, prefills included",
        "rows[].hit_rate?": "rows: share of used units that were in DRAM",
        "rows[].texts?": "parity, drafts: texts that were compared",
        "rows[].equal_texts?": "parity, drafts: the part of them that equals the Python interface's",
        "rows[].drafted?": "drafts: drafts that passes checked",
        "rows[].accepted?": "drafts: drafts that were right",
        "rows[].left?": "vanish: streams that were left after their first piece",
        "rows[].left_running?": "vanish: sequences that run or wait afterwards",
        "rows[].ended_early?": "vanish: sequences that ended because their client had left",
        "rows[].tokens_per_left?": "vanish: tokens computed for each stream that was left, of about 2,000 asked for",
        "rows[].rss_growth?": "vanish: the server's resident memory after all streams over that after the first ones",
        "rows[].more_open_files?": "vanish: open files after all streams, less those after the first ones",
        "rows[].operations?": "fuzz: paths with their methods",
        "rows[].requests?": "fuzz: requests that were sent",
        "rows[].unexpected?": "fuzz: kinds of answers that the server's description does not allow",
        "rows[].failed?": "fuzz: sequences that ended with an error",
        "rows[].same_text_after?": "fuzz: whether a text is afterwards what it was before",
        "rows[].cold_s?": "warm_prefix: median seconds to the first token of a prompt that is computed whole",
        "rows[].warm_s?": "warm_prefix: the same with the prompt's beginning kept on flash",
        "rows[].cold_over_warm?": "warm_prefix: the first over the second, in each pair",
        "rows[].same_texts?": "warm_prefix: warm prompts whose text is the cold one's",
        "rows[].warm_texts?": "warm_prefix: warm prompts",
        "rows[].restored_share?": "warm_prefix: tokens that were read over tokens of the prompts",
        "rows[].written_bytes?": "warm_prefix: bytes written to keep the prompts",
        "over_one.*": "tokens per second by clients at once, over those of the first of --clients",
        "reads_over_one.*": "bytes read per new token by clients at once, over those of the first of --clients",
        "parity": "share of texts that equal the Python interface's",
        "drafts": "share of texts with drafts that equal those without",
        "vanish": "sequences that run on after their clients have left",
        "fuzz": "kinds of answers that the server's description does not allow",
        "warm_prefix": "median of cold over warm seconds to the first token",
    }
    is_timing = True
    extra = "serve: starlette"
    full_minutes = 15

    def cells(self) -> Iterator[Cell]:
        yield {"part": "parity", "clients": None}
        yield from ({"part": "rows", "clients": clients} for clients in self.options.clients)
        yield from ({"part": part, "clients": None} for part in PARTS[1:])

    def measure(self, cell: Cell) -> Iterator[Row]:
        path, options = self.once("artifact", self.artifact), self.options
        parts: dict[str, Callable[[], Row]] = {
            "parity": lambda: parity(path, options),
            "rows": lambda: served_row(path, cell["clients"], options),
            "drafts": lambda: drafts(self.folder / "drafts", options),
            "vanish": lambda: vanish(path, options),
            "fuzz": lambda: fuzz(self.small(), self.folder / "schemathesis", options),
            "warm_prefix": lambda: warm_prefix(path, self.folder / "kept", options),
        }
        yield parts[cell["part"]]()

    def small(self) -> Path:
        """Writes a model with a context of 64 tokens, so that no random request takes long."""
        shape: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 64}
        return speaking_artifact(self.folder / "small", context_length=64, template=TEMPLATE, **shape).path

    def artifact(self) -> Path:
        """Writes the served model."""
        shape: dict[str, Any] = {"num_hidden_layers": self.options.layers, "hidden_size": self.options.width}
        shape |= {"intermediate_size": 8 * self.options.width, "max_position_embeddings": CONTEXT}
        more: dict[str, Any] = {"template": TEMPLATE, "recipe": {"read_buffer_bytes": self._buffer_bytes()}, **shape}
        return speaking_artifact(self.folder / "served", context_length=CONTEXT, **more).path

    def _buffer_bytes(self) -> int:
        """Returns an eighth of the DRAM for units, which the product's plans read into; at least two pages."""
        units_bytes = self.options.layers * 2 * 8 * self.options.width**2 * 2  # up and down projections in fp16
        held_bytes = units_bytes * (Recipe.pinned_share + Recipe.slots_share)
        return max(2, int(held_bytes / 8 / PAGE_BYTES)) * PAGE_BYTES

    def figures(self, rows: Rows) -> Figures:
        by = {row["part"]: row for row in rows}
        shared = [row for row in rows if row["part"] == "rows"]
        first = shared[0]
        return {
            "over_one": {str(row["clients"]): row["tokens_per_s"] / first["tokens_per_s"] for row in shared},
            "reads_over_one": {
                str(row["clients"]): row["read_bytes_per_token"] / first["read_bytes_per_token"] for row in shared
            },
            "parity": by["parity"]["equal_texts"] / by["parity"]["texts"],
            "drafts": by["drafts"]["equal_texts"] / by["drafts"]["texts"],
            "vanish": by["vanish"]["left_running"],
            "fuzz": by["fuzz"]["unexpected"],
            "warm_prefix": by["warm_prefix"]["cold_over_warm"]["median"],
        }


if __name__ == "__main__":
    main("serve")
