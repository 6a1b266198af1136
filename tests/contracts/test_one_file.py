"""One thing is one file: a plug-in of every kind and a device, each a new file in a copy of the checkout, with no edit.

What is not chosen changes nothing; then one build takes all of them: a model of the new architecture, chosen by the new
selector, ordered and cached by the new ones, for the new device. A code format also needs products in the
native core.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.models import write_model
from tests.support.workflow import Server, Workflow

FILES = {
    "runtime/sparsity/above.py": '''
"""The units whose inner activation is above a threshold, which an option sets."""

import numpy as np
from pydantic import Field

from coldpress.runtime.sparsity import Kept, Selector
from coldpress.schemas.base import Record


class Options(Record):
    """How small is nothing."""

    threshold: float = Field(default=0.0, ge=0, description="magnitude up to which a unit is left out")


class Plugin(Selector[Options]):
    CHOOSES = ("mlp_mid",)
    KEPT = {"threshold": Kept("float32")}
    OPTIONS = Options
    NEEDS_EXACT_ZEROS = True

    def families(self, spec, options):
        return ("mlp_mid",)

    def densities(self, exact_zeros):
        return "measured"

    def fit(self, num_units, density, statistics, options):
        return {"threshold": np.array([options.threshold], np.float32)}

    def select_many(self, activity, arrays):
        return np.abs(activity) > arrays["threshold"][0]
''',
    "runtime/cache/mru.py": '''
"""Gives up the unit that was used last."""

from coldpress.runtime.cache._policy import CachePolicy, smallest


class Plugin(CachePolicy):
    def _victims(self, candidates):
        old = self._evictable()
        return old[smallest(self._request - self._last_request[old], candidates.size)]
''',
    "compiler/stages/order/backwards.py": '''
"""Ids from the last to the first."""

import numpy as np

from coldpress.compiler.stages.order._task import Arranged, Heuristic


class Plugin(Heuristic):
    COUNT_SQUARES = 0

    def arrange(self, task):
        return Arranged(np.arange(task.activity.totals.size, dtype=np.int32)[::-1].copy(), "backwards")
''',
    "compiler/architectures/exaone4.py": '''
"""EXAONE 4 without windows: Llama with a norm on what attention and MLP give, and on each head of q and k."""

from coldpress.compiler.architectures import _common
from coldpress.schemas.errors import CheckpointError


class Plugin(_common.Llama):
    KEYS = _common.LLAMA_KEYS | {"sliding_window", "layer_types"}
    MODULES = _common.llama_modules("Exaone4")

    def spec(self, config):
        if config.sliding_window is not None:
            raise CheckpointError("config.json: layers without a window have no positions, which is not supported")
        return _common.llama_spec(self.MODULES, config, norm_placement="after")

    def parameters(self, config, spec):
        return _common.llama_parameters(spec, qk_norm=True)
''',
    "compiler/architectures/dots1.py": '''
"""dots.llm1 without windows: sigmoid routers with a correction, an expert that every token uses, and layers without
experts at the start."""

from coldpress.compiler.architectures import _common, _experts

NAMES = _experts.Names(correction="e_score_correction_bias", shared="shared_experts")
SIZES = {"moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"}


class Plugin(_experts.Mixture):
    KEYS = _common.LLAMA_KEYS | SIZES | {"head_dim", "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor"}
    NAMES = NAMES
    MODULES = _experts.modules("Dots1", NAMES)

    def spec(self, config):
        return _common.llama_spec(
            self.MODULES,
            config,
            intermediate_size=config.moe_intermediate_size,
            router_scores="sigmoid",
            router_normed=config.norm_topk_prob,
            router_scaling=float(config.routed_scaling_factor),
            shared_intermediate_size=config.moe_intermediate_size * config.n_shared_experts,
            **_experts.counts(config, "n_routed_experts"),
            **_experts.layers_without(config, range(config.first_k_dense_replace)),
        )

    def qk_norm(self, config):
        return True
''',
}
DEVICE = "profiles/devices/gadget.yaml"
CHOSEN = {
    "method": "above",
    "threshold": 1e-6,
    "cache": "mru",
    "format": "fp16",
    "predictor_format": "fp16",
    "order": "backwards",
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


@pytest.fixture
def started_anew(extended: Path) -> Iterator[Server]:
    """Runs snakemake and jobs in processes that have imported the checkout as it now is."""
    server = Server(extended)
    yield server
    server.close()


@pytest.mark.slow
def test_what_is_not_chosen_changes_nothing(built: Workflow, extended: Path) -> None:
    assert built.planned()["allocate"] == 1, "a cache policy is a candidate of every build whose cache is open"
    (extended / "runtime/cache/mru.py").unlink()
    assert built.planned() == {}


@pytest.mark.slow
def test_a_build_of_nothing_but_new_files(workflow: Workflow, started_anew: Server, tmp_path: Path) -> None:
    """`verify` runs it against transformers' model and `publish` holds it to the gates."""
    model = write_model(
        tmp_path / "after",
        num_hidden_layers=4,
        relu=True,
        dtype="bfloat16",
        overrides={
            "model_type": "exaone4",
            "architectures": ["Exaone4ForCausalLM"],
            "sliding_window": None,
            "layer_types": ["full_attention"] * 4,
        },
    )
    other = replace(workflow, server=started_anew).at(tmp_path / "work", model=model, preflight="always", **CHOSEN)
    other.build()
    folder = other.folder / "build" / "after" / "gadget"
    sparsity = json.loads((folder / "allocate.json").read_text())
    assert (sparsity["method"], sparsity["options"], sparsity["format"]) == ("above", {"threshold": 1e-6}, "fp16")
    manifest = json.loads((folder / "after-gadget.coldpress" / "manifest.json").read_text())
    (plan,) = manifest["plans"]
    assert (plan["cache"], plan["method"]) == ("mru", "above")
    assert (manifest["model"]["model_type"], manifest["device"]["name"]) == ("exaone4", "gadget")
    assert manifest["model"]["norm_placement"] == "after"
    orders = [json.loads(path.read_text()) for path in (folder / "order").glob("*.json")]
    assert {entry["heuristic"] for order in orders for entry in order["entries"]} == {"backwards"}
    verified = json.loads((folder / "verify.json").read_text())
    assert verified["simulated_equals_real"]
    assert verified["top1_agreement"] > 0.9, "almost nothing is left out, and fp16 is nearly exact for these weights"
    assert verified["max_logit_error"] < 0.1
    assert verified["run"]["reads"] > 0


@pytest.mark.slow
def test_a_mixture_with_a_shared_expert_and_dense_layers(
    workflow: Workflow, started_anew: Server, tmp_path: Path
) -> None:
    """Its tensors have the names of GLM-4.5's; `verify` and `publish` as above."""
    model = write_model(tmp_path / "dots", "glm4_moe", num_hidden_layers=4, dtype="bfloat16")
    config = json.loads((model / "config.json").read_text())
    for key in ("partial_rotary_factor", "use_qk_norm", "num_nextn_predict_layers"):
        del config[key]
    config |= {"model_type": "dots1", "architectures": ["Dots1ForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    other = replace(workflow, server=started_anew).at(
        tmp_path / "work", model=model, method="dense", cache="lru", format="fp16", dram_budget="90%"
    )
    other.build()
    folder = other.folder / "build" / "dots" / "pixel6"
    spec = json.loads((folder / "dots-pixel6.coldpress" / "manifest.json").read_text())["model"]
    assert spec["model_type"] == "dots1"
    assert spec["dense_layers"] == [0]
    assert spec["shared_intermediate_size"] > 0
    verified = json.loads((folder / "verify.json").read_text())
    assert verified["simulated_equals_real"]
    assert verified["max_logit_error"] < 0.1
    assert verified["run"]["reads"] > 0
