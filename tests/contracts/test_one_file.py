"""One thing is one file: a plug-in of every kind and a device, each a new file in a copy of the checkout, with no edit.

What is not chosen changes nothing; then one build takes all of them: a model of the new architecture, in the new
format, chosen by the new selector, placed, ordered and cached by the new ones, for the new device.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import write_model
from tests.support.workflow import Workflow

FILES = {
    "runtime/sparsity/above.py": '''
"""The units whose inner activation is above a threshold, which an option sets."""

import numpy as np
from pydantic import Field

from coldpress.runtime.sparsity import Kept
from coldpress.schemas.base import Record

CHOOSES = ("mlp_mid",)
KEPT = {"threshold": Kept("float32")}
NEEDS_PREDICTORS = False
NEEDS_EXACT_ZEROS = True
EXACT = False
MISSED_SHARE = 0.0
SEES_RESIDENCY = False


class Options(Record):
    """How small is nothing."""

    threshold: float = Field(default=0.0, ge=0, description="magnitude up to which a unit is left out")


def families(spec, options):
    return ("mlp_mid",)


def densities(exact_zeros):
    return "measured"


def fit(num_units, density, statistics, options):
    return {"threshold": np.array([options.threshold], np.float32)}


def select(signal, arrays, residency):
    return np.flatnonzero(np.abs(signal) > arrays["threshold"][0]).astype(np.int32)


def select_many(activity, arrays):
    return np.abs(activity) > arrays["threshold"][0]
''',
    "runtime/cache/mru.py": '''
"""Gives up the unit that was used last."""

from coldpress.runtime.cache._policy import Policy, smallest


class Cache(Policy):
    def _victims(self, candidates):
        old = self._evictable()
        return old[smallest(-self._last_request[old] * self._cached.size + old, candidates.size)]
''',
    "runtime/quantization/bfloat.py": '''
"""The upper half of a float32."""

import numpy as np

from coldpress.runtime.quantization._groups import decode_blocks, encode_blocks

MAX_LOGIT_ERROR = 0.1
MAX_WEIGHT_ERROR = 0.02


def nbytes(length):
    return 2 * length


def encode(values):
    return encode_blocks(values, nbytes(values.shape[1]), _encode)


def finite(codes):
    return bool(np.isfinite(decode(codes, codes.shape[-1] // 2)).all())


def decode(codes, length):
    return decode_blocks(codes, length, nbytes(length), _decode)


def _encode(values, codes):
    codes[...] = (np.ascontiguousarray(values).view("<u4") >> 16).astype("<u2").view(np.uint8)


def _decode(codes, values):
    halves = np.ascontiguousarray(codes).view("<u2").astype("<u4")
    values[...] = (halves << 16).view("<f4")
''',
    "compiler/stages/order/backwards.py": '''
"""Ids from the last to the first."""

import numpy as np

from coldpress.compiler.stages.order._task import Arranged

COUNT_SQUARES = 0


def arrange(task):
    return Arranged(np.arange(task.activity.totals.size, dtype=np.int32)[::-1].copy(), "backwards")
''',
    "compiler/stages/place/scipy_milp.py": '''
"""The placement program with scipy."""

from coldpress.compiler.stages.place._program import Answer


def solve(program, gap):
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    rows = np.zeros((len(program.constraints), len(program.value)))
    for row, constraint in zip(rows, program.constraints):
        for index, weight in constraint.terms:
            row[index] += weight
    least = [-np.inf if c.least is None else c.least for c in program.constraints]
    most = [np.inf if c.most is None else c.most for c in program.constraints]
    found = milp(
        -np.array(program.value, float),
        integrality=np.ones(len(program.value)),
        bounds=Bounds(program.lower, program.upper),
        constraints=LinearConstraint(rows, least, most),
        options={"mip_rel_gap": gap},
    )
    if found.x is None:
        return None
    return Answer(tuple(int(round(x)) for x in found.x), -found.mip_dual_bound)
''',
    "compiler/architectures/seed_oss.py": '''
"""Seed-OSS: Llama with biases, which config.json names one by one, and dropout that only training has."""

from coldpress.compiler.architectures import _common

KEYS = _common.LLAMA_KEYS | {"head_dim", "attention_bias", "attention_out_bias", "mlp_bias", "residual_dropout"}
MODULES = _common.llama_modules("SeedOss")


def spec(config):
    return _common.llama_spec(MODULES, config)


def parameters(config, spec):
    biased = ("q_proj", "k_proj", "v_proj") if config.attention_bias else ()
    biased += ("o_proj",) if config.attention_out_bias else ()
    return _common.llama_parameters(spec, biased)
''',
}
DEVICE = "profiles/devices/gadget.yaml"
CHOSEN = {
    "method": "above",
    "threshold": 1e-6,
    "cache": "mru",
    "format": "bfloat",
    "predictor_format": "bfloat",
    "order": "backwards",
    "place": "scipy_milp",
    "device": "gadget",
    "dram_budget": "90%",
}


@pytest.fixture
def extended(edited: Path) -> Iterator[Path]:
    """The copy of the checkout with all of them."""
    for name, text in FILES.items():
        (edited / name).write_text(text.lstrip())
    pixel = (edited / "profiles/devices/pixel6.yaml").read_text()
    (edited / DEVICE).write_text(pixel.replace("name: pixel6", "name: gadget").replace("Google Pixel 6", "A gadget"))
    yield edited
    (edited / DEVICE).unlink()


@pytest.mark.slow
def test_what_is_not_chosen_changes_nothing(built: Workflow, extended: Path) -> None:
    assert built.planned() == {}


@pytest.mark.slow
def test_a_build_of_nothing_but_new_files(workflow: Workflow, extended: Path, tmp_path: Path) -> None:
    """`verify` runs it against transformers' model and `publish` holds it to the gates."""
    model = write_model(
        tmp_path / "seed",
        num_hidden_layers=4,
        relu=True,
        overrides={
            "model_type": "seed_oss",
            "architectures": ["SeedOssForCausalLM"],
            "attention_bias": True,
            "attention_out_bias": True,
            "mlp_bias": False,
            "head_dim": 16,
            "residual_dropout": 0.0,
        },
    )
    other = workflow.at(tmp_path / "work", model=model, preflight="always", **CHOSEN)
    other.build()
    folder = other.folder / "build" / "seed" / "gadget"
    placement = json.loads((folder / "place.json").read_text())
    assert placement["solver"] == "scipy_milp"
    sparsity = json.loads((folder / "allocate.json").read_text())
    assert (sparsity["method"], sparsity["options"], sparsity["format"]) == ("above", {"threshold": 1e-6}, "bfloat")
    manifest = json.loads((folder / "seed-gadget.coldpress" / "manifest.json").read_text())
    (plan,) = manifest["plans"]
    assert (plan["cache"], plan["method"]) == ("mru", "above")
    assert (manifest["model"]["model_type"], manifest["device"]["name"]) == ("seed_oss", "gadget")
    orders = [json.loads(path.read_text()) for path in (folder / "order").glob("*.json")]
    assert {entry["heuristic"] for order in orders for entry in order["entries"]} == {"backwards"}
    verified = json.loads((folder / "verify.json").read_text())
    assert verified["simulated_equals_real"]
    assert verified["top1_agreement"] > 0.9, "what is left out is nearly nothing, and bfloat is nearly exact"
    assert verified["max_logit_error"] < 0.1
    assert verified["run"]["reads"] > 0
