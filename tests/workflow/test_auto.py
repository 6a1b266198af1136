"""`method=auto` in whole builds: one model, on a device whose flash serves small reads at no cost, and on a phone."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import yaml

from coldpress.compiler.io import load_record
from coldpress.schemas.metrics import Metrics
from coldpress.schemas.quantized import Quantized
from tests.support.gguf_cases import exported, quantized
from tests.support.models import write_model
from tests.support.workflow import Workflow


def without_cost_of_reads(tree: Path, folder: Path) -> Path:
    """A phone whose reads take the time of their bytes alone, so that leaving units out pays."""
    profile = yaml.safe_load((tree / "profiles" / "devices" / "pixel6.yaml").read_text())
    flash = profile["flash"]
    flash["page_bytes"]["value"] = 512
    flash["latency_s"]["value"] = 1e-9
    flash["read_curve"]["value"] = [{"read_bytes": size, "bytes_per_s": 1e8} for size in (512, 1 << 20)]
    path = folder / "smallreads.yaml"
    path.write_text(yaml.safe_dump(profile | {"name": "smallreads"}))
    return path


@pytest.mark.slow
def test_auto_is_sparse_where_that_pays_and_dense_where_not(workflow: Workflow, tmp_path: Path) -> None:
    """And says which; both builds share the model's text and statistics. Two layers, since what is explored of each
    takes seconds; in fp16, since in fewer bits all of so small a model fits."""
    model = write_model(tmp_path / "tiny", num_hidden_layers=2, relu=True, hidden_size=64, intermediate_size=160)
    keys = {"method": "auto", "format": "fp16", "dram_budget": 350_000, "preflight": "off", "explore_tokens": 256}
    auto = workflow.at(tmp_path, model=model, **keys)
    sparse = auto.build(device=without_cost_of_reads(workflow.tree, tmp_path))
    dense = auto.build()
    figures = {
        name: load_record(auto.device.parent / name / "metrics.json", Metrics) for name in ("smallreads", "pixel6")
    }
    assert figures["smallreads"].method != "dense"
    assert figures["smallreads"].ppl_artifact < 1.1 * figures["smallreads"].ppl_source, "within max_ppl_ratio"
    assert figures["smallreads"].gain_over_dense is not None
    assert figures["smallreads"].gain_over_dense > 1
    assert f"tiny on smallreads: {figures['smallreads'].method}, " in sparse
    assert "times as fast\n" in sparse
    assert figures["pixel6"].method == "dense"
    assert "tiny on pixel6: dense, " in dense
    assert "this artifact is dense\n" in dense


@pytest.mark.slow
def test_the_search_counts_on_the_codes_of_the_build(workflow: Workflow, tmp_path: Path) -> None:
    """Other codes are explored anew, and the artifact has those that were explored."""
    model = write_model(tmp_path / "tiny", num_hidden_layers=1, hidden_size=64, intermediate_size=160)
    shared = {"method": "auto", "preflight": "off", "explore_tokens": 256, "max_ppl_ratio": "off"}
    auto = workflow.at(tmp_path, model=model, **shared)
    auto.build(algorithm="gptq")
    assert auto.planned(algorithm="gptq") == {}
    assert {"explore", "allocate", "quantize"} <= set(auto.planned(algorithm="rtn"))
    codes = [load_record(path, Quantized) for path in (auto.device / "quantize").glob("*.json")]
    assert {record.algorithm for record in codes} == {"gptq"}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "auto"])
def test_a_file_with_experts_keeps_its_codes(workflow: Workflow, tmp_path: Path, method: str) -> None:
    """With a part of the experts in DRAM, and with all of them, and back into a file."""
    _, plain = exported(tmp_path / "plain", "qwen2_moe", {}, layers=3)
    file = quantized(plain, tmp_path / "tiny.gguf", lambda name: "Q5_0" if "ffn_down" in name else "Q4_1")
    keys = {"method": method, "format": "auto", "dram_budget": "60%,100%", "export": "gguf", "gguf_tokenizer": "false"}
    keys |= {"routing": "top_k", "kv_cache": "fp16", "max_ppl_ratio": 1.0001}  # others lose a little
    build = workflow.at(tmp_path, model=file, preflight="off", explore_tokens=256, **keys)
    build.build()
    metrics = load_record(build.device / "metrics.json", Metrics)
    assert metrics.method == "dense"
    assert metrics.ppl_artifact == pytest.approx(metrics.ppl_source, rel=2e-3)
    given, (back,) = gguf.GGUFReader(file), build.device.glob("*.gguf")
    found = {one.name: one for one in gguf.GGUFReader(back).tensors}
    for tensor in given.tensors:
        assert np.array_equal(found[tensor.name].data, tensor.data), tensor.name
    counted = (build.device / "recalibrate").glob("*.safetensors")
    assert {path.name.split(".")[1] for path in counted} == {"block"}, "no pass over text counts what is known"
