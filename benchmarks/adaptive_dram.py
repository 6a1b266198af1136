"""One artifact with 20 to 100 % of its weights in DRAM, changed while one text is under way: memory, speed, tokens.

`python -m benchmarks.adaptive_dram`. A child process generates one text; between tokens it is given another
budget, up and down again. Its memory is read from outside, in /proc/PID/status, before the artifact is opened (and
another, tiny one has run, so that interpreter and libraries have what they take for themselves) and at the end of each
phase: what came on top is held against the budget. Speed is the median of the phase's second half, in
one run, on real flash (O_DIRECT). The text is compared with that of a run in one budget throughout. The model is
random, its layers as alike as trained ones, so that no single unit decides on a token; predictors choose its neurons,
and do not see what is in DRAM. Tokens that were there are penalized: such a model repeats itself otherwise, and soon
needs nothing more of flash.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shared.report import finish, show
from coldpress.runtime.artifact.reader import open_artifact
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
from tests.support.artifacts import Recipe, build_artifact, small_spec
from tests.support.data import ROOT
from tests.support.similar import similar_weights

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0, 0.6, 0.2)
TOKENS_PER_PHASE = 24
PROMPT = [3, 14, 15, 9, 26]
SIMILARITY = 0.6
"""Of a layer's MLP input to the next one's, its cosine (ActiveFlow, Fig. 17a)."""
SAMPLING = {"repetition_penalty": 2.0}
CHILD = """
import json, sys
import coldpress.runtime.cli.main
from coldpress.runtime.generate.sampling import Sampling
from coldpress.runtime.generate.session import Session
tiny, path, prompt, budgets, tokens_per_phase, sampling = json.loads(sys.argv[1])
sampling = Sampling(**sampling)

def wait(**figures):
    print(json.dumps(figures), flush=True)
    sys.stdin.readline()

with Session(tiny) as session:
    session.generate(prompt, 16, sampling=sampling, ignore_eos=True)
wait()
session = Session(path, dram_budget_bytes=budgets[0])
phase = []
for token in session.stream(prompt, len(budgets) * tokens_per_phase, sampling=sampling, ignore_eos=True):
    phase.append([token.id, token.seconds, token.hit_rate])
    if len(phase) == tokens_per_phase:
        wait(tokens=phase, used_bytes=session.store.dram_used_bytes)
        phase = []
        budgets.pop(0)
        if budgets:
            session.resize(budgets[0])
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs it."""
    argparse.ArgumentParser(description=__doc__).parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder) / "a")
        weights = weight_bytes(path)
        budgets = [int(share * weights) for share in SHARES]
        with Session(path, dram_budget_bytes=budgets[0]) as session:
            count = len(SHARES) * TOKENS_PER_PHASE
            expected = session.generate(PROMPT, count, sampling=Sampling(**SAMPLING), ignore_eos=True).token_ids
        tiny = build_artifact(Path(folder) / "tiny", Recipe(method="predictor")).path
        phases = run(tiny, path, budgets)
    rows = [row_of(share, budget, phase) for share, budget, phase in zip(SHARES, budgets, phases, strict=True)]
    show("one text under changing budgets", tuple(rows[0]), [[*row.values()] for row in rows])
    found = [token for phase in phases for token, _, _ in phase["tokens"]]
    rising = [row["tokens_per_s"] for row in rows[: SHARES.index(1.0) + 1]]
    finish(
        {
            "weights_bytes": weights,
            "rows": rows,
            "same_tokens": found == list(expected),
            "most_beyond_bytes": max(row["beyond_bytes"] for row in rows),
            "rising": rising == sorted(rising),
            "fastest_over_slowest": rising[-1] / rising[0],
        }
    )


def build(path: Path) -> Path:
    """A random model of 200 MB, 96 % of it neurons on flash."""
    spec = small_spec(
        hidden_size=768, intermediate_size=4096, num_attention_heads=12, max_position_embeddings=256, hidden_act="silu"
    )
    recipe = Recipe(
        spec=spec,
        method="predictor",
        context_length=256,
        pinned_share=0.0,
        read_buffer_bytes=4 << 20,
        predictor_rank=8,
        format="fp16",
    )
    return build_artifact(path, recipe, similar_weights(spec, SIMILARITY)).path


def weight_bytes(path: Path) -> int:
    """Of the resident tensors and the units."""
    manifest = open_artifact(path).manifest
    return manifest.plans[0].resident_bytes + sum(section.length_bytes for section in manifest.flash.sections)


def run(tiny: Path, path: Path, budgets: list[int]) -> list[dict[str, Any]]:
    """What the child says at the end of each phase, and the memory that it has then beyond what it began with."""
    told = json.dumps([str(tiny), str(path), PROMPT, budgets, TOKENS_PER_PHASE, SAMPLING])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, told], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    at_first, phases = resident_bytes(child.pid), list[dict[str, Any]]()
    for _ in budgets:
        print("", file=child.stdin, flush=True)
        phase = json.loads(child.stdout.readline())
        phases.append(phase | {"resident_bytes": resident_bytes(child.pid) - at_first})
    child.communicate("\n")
    return phases


def resident_bytes(pid: int) -> int:
    """VmRSS of a process."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) << 10


def row_of(share: float, budget: int, phase: dict[str, Any]) -> dict[str, Any]:
    """A line of the table."""
    settled = sorted(seconds for _, seconds, _ in phase["tokens"][TOKENS_PER_PHASE // 2 :])
    hits = [hit_rate for _, _, hit_rate in phase["tokens"][TOKENS_PER_PHASE // 2 :]]
    return {
        "share": share,
        "budget_bytes": budget,
        "used_bytes": phase["used_bytes"],
        "resident_bytes": phase["resident_bytes"],
        "beyond_bytes": phase["resident_bytes"] - budget,
        "hit_rate": sum(hits) / len(hits),
        "tokens_per_s": 1 / settled[len(settled) // 2],
    }


if __name__ == "__main__":
    main()
