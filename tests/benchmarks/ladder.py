"""What each mechanism brings, on emulated devices: layers of a 7B with planted activity, one setting more at a step.

`python -m tests.benchmarks.ladder [--cases relu-10 …] [--devices pixel6 …] [--dram 0.1 …] [--scale 0.25] [--layers 2]
[--tokens 12]`, as root. Models are planted (tests/support/planted.py): neurons fire by the topic of the text and by how
hot they are; matrices are int4. `dram` is the share of the bytes on flash that DRAM holds, beside what is always
resident. The steps are those of runtime/_ladder.py, and `+ordering` among them: another artifact of the same model,
whose units lie by planted topic and frequency instead of by their number, what Ripple's order finds in statistics.
Pinned are the units of the highest planted frequency. Units are bundles in all steps: no family without bundles has the
same slices.

Each combination runs in a process of its own under the kernel's caps of the device, scaled by one factor for all; all
steps of it in turn, on the same tokens of one topic, of which the first ones fill the caches and are not counted. A
step that loses is shown and not taken along. The last line is {rows: [{case, device, dram, scale, steps: [{name,
tokens_per_s, gain, total_gain, kept, reads_per_token, read_bytes_per_token, hit_rate, flash_s_per_token}]}],
total_gains: {case: [of each combination]}}.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime import _ladder, budget
from runtime.artifact.reader import open_artifact
from runtime.device_file import load_device
from runtime.emulation import emulate
from runtime.generate import Session
from tests.benchmarks._report import finish, show
from tests.support.artifacts import Recipe, build_artifact, small_spec
from tests.support.methods import families_of
from tests.support.planted import COMMON_WORDS_SHARE, HOT_SHARE, Plant, plant_of

CASES = {"relu-10": ("relu", "relu", 0.1), "swiglu-50": ("topk", "silu", 0.5)}
"""Case -> selector, activation, density."""
ROUNDS = 3
ORDERS = ("numbered", "by-topic")
PINNED_SHARE = 0.4
"""Of the units in DRAM, those that are pinned."""
VOCAB_SIZE, NUM_TOPICS, TOPIC = 2048, 64, 5
OTHER_BYTES = 768 << 20
"""Memory of the process beside its budget: interpreter, libraries, checksums, the artifact's tables."""


def write_artifacts(case: str, layers: int, folder: Path) -> None:
    """The case's artifacts, one for each order."""
    method, act, density = CASES[case]
    plant = plant_of("mistral-7b", layers, density, hidden_act=act, vocab_size=VOCAB_SIZE, num_topics=NUM_TOPICS)
    shape = plant.shape
    spec = small_spec(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=128,
        rotary_dim=128,
        vocab_size=VOCAB_SIZE,
        hidden_act=act,
        tie_word_embeddings=True,
    )
    weights = planted_weights(plant)
    keys = [(layer, family) for layer in range(layers) for family in families_of(method, spec)]
    rank = {key: order_of(plant, "by-frequency", *key) for key in keys}
    for order in ORDERS:
        recipe = Recipe(
            spec=spec,
            method=method,
            format="int4_group32",
            pinned_share=0,
            slots_share=0.5,
            read_buffer_bytes=8 << 20,
            collapse_gap_bytes=16384,
            context_length=64,
            density=density,
            order={key: order_of(plant, order, *key) for key in keys},
            rank=rank,
        )
        build_artifact(folder / f"{case}-{order}", recipe, weights)


def planted_weights(plant: Plant) -> dict[str, np.ndarray]:
    """Role -> float32, of a planted model."""
    from tests.support._planted_tensors import layer_tensors, shared_tensors

    tensors = shared_tensors(plant)
    for layer in range(plant.shape.num_hidden_layers):
        tensors |= layer_tensors(plant, layer)
    roles = {
        name.removeprefix("model.").replace("mlp.", "").replace("self_attn.", ""): tensor.float().numpy()
        for name, tensor in tensors.items()
    }
    return roles | {"rotary.inv_freq": (1 / 10000 ** (np.arange(64) / 64)).astype(np.float32)}


def order_of(plant: Plant, kind: str, layer: int, family: str) -> np.ndarray:
    """int32 ids of the units of a family in an order, as the planting gives it."""
    count = plant.shape.hidden_size if family == "mlp_in" else plant.shape.intermediate_size
    if kind == "numbered":
        return np.arange(count, dtype=np.int32)
    if family == "mlp_in":  # inputs have no topic: those that are large for every token come first
        return np.argsort(-np.abs(plant.directions()[-1].numpy()), kind="stable").astype(np.int32)
    frequencies = plant.frequencies(layer)
    by_frequency = np.argsort(-frequencies, kind="stable").astype(np.int32)
    if kind == "by-frequency":
        return by_frequency
    num_hot = round(HOT_SHARE * count)
    cold = by_frequency[num_hot:]
    return np.concatenate([by_frequency[:num_hot], cold[np.argsort(plant.home_topics(layer)[cold], kind="stable")]])


def topic_tokens(num_tokens: int) -> np.ndarray:
    """int64 [2, num_tokens]: two passages of one document, to fill the caches and to be measured."""
    random = np.random.default_rng(3)
    topics = np.full((2, num_tokens), TOPIC)
    strays = random.random(topics.shape) < COMMON_WORDS_SHARE
    topics[strays] = random.integers(NUM_TOPICS, size=int(strays.sum()))
    return topics + NUM_TOPICS * random.integers(1, VOCAB_SIZE // NUM_TOPICS, topics.shape)


@dataclass(frozen=True)
class Placed(_ladder.Setting):
    """A setting, and which of the case's artifacts it runs on."""

    path: Path


@dataclass(frozen=True)
class Measured:
    """Per decoded token."""

    tokens_per_s: float
    reads_per_token: float
    read_bytes_per_token: float
    hit_rate: float
    flash_s_per_token: float


def measure(setting: Placed, tokens: np.ndarray) -> Measured:
    """Decodes the second passage behind the first, some times over; the run of the median speed."""
    with Session(setting.path, plan=setting.plan, flash=setting.flash) as session:
        session.perplexity(tokens[:1], sparse=True)
        runs = [session.perplexity(tokens[1:], sparse=True).metrics for _ in range(ROUNDS)]
    found = sorted(runs, key=lambda run: run.decode_s)[ROUNDS // 2]
    count = found.num_tokens
    return Measured(
        count / found.decode_s, found.reads / count, found.read_bytes / count, found.hit_rate, found.flash_s / count
    )


def plan_of(path: Path, dram: float) -> tuple[Any, Any]:
    """(manifest, its plan with that share of the units in DRAM)."""
    manifest = open_artifact(path).manifest
    plan = manifest.plans[0]
    counts = {section.family: section.num_units for section in manifest.flash.sections}
    parts = tuple(
        part.model_copy(
            update={
                "num_pinned": round(dram * PINNED_SHARE * counts[part.family]),
                "cache_slots": round(dram * (1 - PINNED_SHARE) * counts[part.family]),
            }
        )
        for part in plan.parts
    )
    changed = plan.model_copy(update={"parts": parts})
    return manifest, changed.model_copy(update={"dram_budget_bytes": budget.used_bytes(manifest, changed)})


def climb(case: str, dram: float, num_tokens: int, folder: Path) -> list[_ladder.Step]:
    """All steps of a combination, in this process."""
    structural, ordered = (folder / f"{case}-{order}" for order in ORDERS)
    manifest, plan = plan_of(structural, dram)
    first, changes = _ladder.steps(manifest, plan)

    def placed(change: _ladder.Change) -> _ladder.Change:
        def changed(before: Placed) -> Placed:
            setting = change(before)
            return Placed(setting.plan, setting.flash, before.path)

        return changed  # pyright: ignore[reportReturnType]

    steps = [(name, placed(change)) for name, change in changes]
    where = next(number for number, (name, _) in enumerate(steps) if name.startswith("+collapse"))
    steps.insert(where, ("+ordering", lambda before: replace(before, path=ordered)))
    tokens = topic_tokens(num_tokens + 2)
    return _ladder.run(Placed(first.plan, first.flash, structural), steps, lambda setting: measure(setting, tokens))


def emulated_row(case: str, device: str, dram: float, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The row of a combination, measured in a process under the device's caps."""
    budget_bytes = plan_of(folder / f"{case}-{ORDERS[0]}", dram)[1].dram_budget_bytes
    emulation = emulate(load_device(device), folder.resolve(), arguments.scale, budget_bytes + OTHER_BYTES)
    print(f"{case}, {dram:.0%} in DRAM, {emulation.title()}", flush=True)
    output = folder / "steps.json"
    what = ["--one", case, str(dram), str(arguments.tokens), str(output), "--folder", str(folder)]
    code = emulation.run([sys.executable, "-m", "tests.benchmarks.ladder", *what])
    if code:
        raise SystemExit(f"the measuring process ended with {code}")
    steps = json.loads(output.read_text())
    return {"case": case, "device": device, "dram": dram, "scale": emulation.caps.scale, "steps": steps}


def as_data(step: _ladder.Step) -> dict[str, Any]:
    """A step of the last line."""
    found = asdict(step)
    return found | found.pop("row")


def main() -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    parser.add_argument("--devices", nargs="+", default=["pixel6", "oneplus12"], metavar="DEVICE")
    parser.add_argument("--dram", nargs="+", type=float, default=[0.1, 0.5], metavar="SHARE")
    parser.add_argument("--scale", type=float, default=0.25, help="of the devices' rates (default: 0.25)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="where artifacts are kept for the next run")
    parser.add_argument("--one", nargs=4, metavar=("CASE", "SHARE", "TOKENS", "FILE"), help="only the steps, here")
    arguments = parser.parse_args()
    if arguments.one:
        case, dram, num_tokens, output = arguments.one
        found = climb(case, float(dram), int(num_tokens), arguments.folder)
        Path(output).write_text(json.dumps([as_data(step) for step in found]))
        return
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        folder = arguments.folder or Path(temporary)
        for case in arguments.cases:
            if not (folder / f"{case}-{ORDERS[-1]}").exists():
                write_artifacts(case, arguments.layers, folder)
        rows = [
            emulated_row(case, device, dram, arguments, folder)
            for case in arguments.cases
            for device in arguments.devices
            for dram in arguments.dram
        ]
    for row in rows:
        columns = list(row["steps"][0])
        title = f"{row['case']}, {row['device']} × {row['scale']:g}, {row['dram']:.0%} of the units in DRAM"
        show(title, columns, (list(step.values()) for step in row["steps"]))
    totals = {case: [row["steps"][-1]["total_gain"] for row in rows if row["case"] == case] for case in arguments.cases}
    finish({"rows": rows, "total_gains": totals})


if __name__ == "__main__":
    main()
