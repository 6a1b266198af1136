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

from tests.support.models import write_model, write_tokenizer
from tests.support.workflow import Server, Workflow

REPOSITORY = Path(__file__).parents[2]
FILES = {
    "runtime/sparsity/over_threshold.py": '''
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
    "compiler/architectures/ernie4_5_moe.py": '''
"""ERNIE 4.5 with experts: a router of its own, experts that every token uses, and layers without experts at the
start."""

from coldpress.compiler.architectures import _common, _experts

NAMES = _experts.Names(correction="e_score_correction_bias", shared="shared_experts")
SIZES = {"moe_intermediate_size", "moe_num_experts", "moe_num_shared_experts", "moe_k", "moe_layer_start_index"}


class Plugin(_experts.Mixture):
    KEYS = _common.LLAMA_KEYS | SIZES | {"moe_norm_min"}
    NAMES = NAMES
    MODULES = _experts.modules("Ernie4_5_Moe", NAMES, "corrected_softmax")

    def spec(self, config):
        return _experts.mixture_spec(
            self.MODULES,
            config,
            "moe_num_experts",
            num_experts_per_tok=config.moe_k,
            intermediate_size=config.moe_intermediate_size,
            shared_intermediate_size=config.moe_intermediate_size * config.moe_num_shared_experts,
            rotary_pairs="neighbours",
            **_experts.layers_without(config, range(config.moe_layer_start_index)),
        )

    def places(self, spec):
        mlps = [f"model.layers.{layer}.mlp" for layer in range(spec.num_hidden_layers)]
        places = [_common.Place(f"{mlp}.moe_statics.{NAMES.correction}", index=0, num_entries=1) for mlp in mlps]
        return {f"{mlp}.gate.{NAMES.correction}": place for mlp, place in zip(mlps, places)}
''',
    "runtime/routers/corrected_softmax.py": '''
"""Experts by their softmax over all experts, plus a correction; weighted by it over the sum of the chosen ones."""

import numpy as np
from pydantic import Field

from coldpress.runtime.routers import Router
from coldpress.runtime.routers.softmax import softmax
from coldpress.schemas.base import Record


class Options(Record):
    """How small a sum may be."""

    moe_norm_min: float = Field(default=1e-12, gt=0, description="least sum that weights are divided by")


class Plugin(Router):
    OPTIONS = Options

    def rank(self, logits_TE):
        return softmax(logits_TE, np.ones_like(logits_TE, bool))

    def weigh(self, logits_TE, chosen_TE):
        weights_TE = np.where(chosen_TE, self.rank(logits_TE), np.float32(0))
        return weights_TE / np.maximum(weights_TE.sum(axis=1, keepdims=True), np.float32(self._options.moe_norm_min))
''',
}
DEVICE = "profiles/devices/gadget.yaml"
CHOSEN = {
    "method": "over_threshold",
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
    assert (sparsity["method"], sparsity["options"], sparsity["format"]) == (
        "over_threshold",
        {"threshold": 1e-6},
        "fp16",
    )
    manifest = json.loads((folder / "after-gadget.coldpress" / "manifest.json").read_text())
    (plan,) = manifest["plans"]
    assert (plan["cache"], plan["method"]) == ("mru", "over_threshold")
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
def test_a_mixture_with_a_router_of_its_own(workflow: Workflow, started_anew: Server, tmp_path: Path) -> None:
    """It takes two new files, of the model and of the router; `verify` and `publish` as above."""
    assert not [name for name in FILES if (REPOSITORY / name).exists()], "an edit"
    model = write_ernie(tmp_path / "ernie")
    other = replace(workflow, server=started_anew).at(
        tmp_path / "work", model=model, method="dense", cache="lru", format="fp16", dram_budget="90%"
    )
    other.build()
    folder = other.folder / "build" / "ernie" / "pixel6"
    spec = json.loads((folder / "ernie-pixel6.coldpress" / "manifest.json").read_text())["model"]
    assert (spec["model_type"], spec["router_scores"]) == ("ernie4_5_moe", "corrected_softmax")
    assert spec["router_options"] == {"moe_norm_min": 0.9}
    assert spec["dense_layers"] == [0]
    assert spec["shared_intermediate_size"] > 0
    verified = json.loads((folder / "verify.json").read_text())
    assert verified["simulated_equals_real"]
    assert verified["max_logit_error"] < 0.1
    assert verified["run"]["reads"] > 0


def write_ernie(folder: Path) -> Path:
    """Writes a checkpoint as transformers does, with random weights; most weights of experts are not divided by their
    sum, which is below `moe_norm_min`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    sizes |= {"moe_intermediate_size": 32, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1}
    config = AutoConfig.for_model(
        "ernie4_5_moe", **sizes, moe_norm_min=0.9, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    with torch.no_grad():
        for values in model.parameters():
            if values.ndim > 1:
                values.normal_(0, 0.08)
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return folder
