"""LLM in a flash: Tables 2, 3 and 5, and the shares of C and F.

Its CPU computes in 32 bits, as C.1 says. A model's rate of computing comes from its own naive row; the rate of copies
from the memory management of OPT 6.7B (Table 5). Table 3's other rows follow from these.
"""

from collections.abc import Iterator

from benchmarks.shared.cache_traces import planted
from benchmarks.shared.papers.llm_in_a_flash import Latency, aggregated_use, incremental_use, latency
from benchmarks.shared.published.cells import FALCON_7B, OPT_6_7B, Cell, computing_at
from coldpress.compiler.cost_model import flash_bytes, kv_cache_bytes, unit_bytes, weight_bytes
from coldpress.runtime.device_profiles.devices import load_device
from coldpress.schemas.families import WHOLE_MLP
from coldpress.schemas.model import Model

LINEAR_BYTES = 1 << 30
"""Bytes of a large sequential read (2.2)."""
NAIVE_S = {"OPT 6.7B": 0.986, "Falcon 7B": 0.800, "Persimmon 8B": 1.184, "Phi-2 2.7B": 0.402, "Llama 2 7B": 0.929}
"""Table 3: seconds of computing in the naive rows, CPU."""
ALL_S = {"OPT 6.7B": 0.506, "Falcon 7B": 0.453, "Persimmon 8B": 0.660, "Phi-2 2.7B": 0.259, "Llama 2 7B": 0.563}
"""Table 3: seconds of computing in the rows `All`, CPU."""
IN_DRAM = {"OPT 6.7B": 0.521, "Falcon 7B": 0.5293, "Persimmon 8B": 0.5, "Phi-2 2.7B": 0.65, "Llama 2 7B": 0.55}
"""C: share of the weights that DRAM holds, with predictors and the window."""
NEW, NEW_FALCON, PREDICTED = 0.024, 0.031, 0.1
"""C: shares of the MLPs that a token loads: with windows of 4 tokens, and as the predictor tells."""
OPT_COPY_S = 0.05779
"""Table 5: seconds of memory management of OPT 6.7B, CPU."""
M1 = "macbook-m1-max"
LINEAR = "throughput of reads of 1 GiB (2.2)"
OTHER_KERNELS = "other kernels for sparse than for dense products (C: shapes must stay static)"
SMALL_MATRICES = "a product of two small matrices may be faster than the mean product of the naive row"
INTERIOR = "between the points of the profile: 4.0 GB/s there, by the published figure"


def cells() -> Iterator[Cell]:
    """Yields all cells."""
    yield from _shares()
    yield from _window()
    yield from _table_2()
    yield from _table_3()


def _window() -> Iterator[Cell]:
    used = planted(PREDICTED, 0)["test"]
    basis = "planted topics; a token uses 10 % of the neurons, as the paper's predictor does"
    ours = aggregated_use(used, 5)
    yield Cell("C.1", "a window of the past 5 tokens", "share of the MLPs", 0.24, ours, basis, 0.15)
    yield Cell("C.1", "new with a window of 4", "share of the MLPs", NEW, incremental_use(used, 4), basis, 0.15)


def mlp_share(model: Model) -> float:
    """Returns the MLPs' share of the weights."""
    return flash_bytes((WHOLE_MLP,), model.spec, "fp16") / weight_bytes(model, "fp16")


def _shares() -> Iterator[Cell]:
    whole, kv_bytes = weight_bytes(OPT_6_7B, "fp16"), kv_cache_bytes(OPT_6_7B.spec, 2048)
    mlp, falcon_mlp = mlp_share(OPT_6_7B), mlp_share(FALCON_7B)
    embeddings = OPT_6_7B.spec.vocab_size * OPT_6_7B.spec.hidden_size * 2 / whole
    opt, falcon = 0.0125 + (1 - mlp) + 0.24 * mlp, 0.04 + (1 - falcon_mlp) + 0.33 * falcon_mlp
    yield Cell("C.1", "OPT 6.7B in DRAM", "share", 0.521, opt, "shape; window 24 %, predictors 1.25 %")
    yield Cell("C.2", "Falcon 7B in DRAM", "share", 0.5293, falcon, "shape; window 33 %, predictors 4 %")
    yield Cell("C", "KV cache of 2,048 tokens, OPT 6.7B", "share", 0.08, kv_bytes / whole, "shape")
    spec = OPT_6_7B.spec
    predictors = spec.num_hidden_layers * 240 * (spec.hidden_size + spec.intermediate_size) * 2 / whole
    yield Cell("B.3", "predictors of rank 240", "share", 0.024, predictors / (1 - embeddings), "shape")
    computed, basis = predictors * NAIVE_S["OPT 6.7B"], "their share of the naive row's computing; Table 3's total"
    yield Cell("B.3", "predictors' time, CPU", "share", 0.0275, computed / 0.669, basis, note=SMALL_MATRICES)
    on_phone = IN_DRAM["OPT 6.7B"] * weight_bytes(OPT_6_7B, "int4_group32") / 1e9
    yield Cell("F", "7B in 4 bits on a phone", "GB", 2.0, on_phone, "shape; 52.1 % in DRAM; the paper: below 2")


def _table_2() -> Iterator[Cell]:
    device, whole = load_device(M1), weight_bytes(OPT_6_7B, "fp16")
    mlp, bundle = mlp_share(OPT_6_7B) * whole, unit_bytes(WHOLE_MLP, OPT_6_7B.spec, "fp16")
    for name, gb, ms, loaded, chunk, basis in (
        ("naive", 13.4, 2196, whole, LINEAR_BYTES, LINEAR),
        ("hybrid", 6.7, 1090, whole / 2, LINEAR_BYTES, LINEAR),
        ("predictor", 0.9, 738, PREDICTED * mlp, bundle // 2, "10 % of the MLPs (C.1), in rows of 8 KiB"),
        ("window", 0.2, 164, NEW * mlp, bundle // 2, "2.4 % of the MLPs (C.1), in rows of 8 KiB"),
        ("bundling", 0.2, 87, NEW * mlp, bundle, "2.4 % of the MLPs (C.1), in bundles of 16 KiB"),
    ):
        found = latency(device, "fp16", loaded, chunk, 0)
        yield Cell("Table 2", f"{name}: flash to DRAM", "GB", gb, loaded / 1e9, basis)
        yield Cell("Table 2", f"{name}: I/O", "ms", ms, 1e3 * found.io_s, basis)


def _table_3() -> Iterator[Cell]:
    opt, falcon = _all("OPT 6.7B", OPT_6_7B, NEW), _all("Falcon 7B", FALCON_7B, NEW_FALCON)
    for name, published, found, basis in (
        ("OPT 6.7B, All, CPU: I/O", 105, opt.io_s, "2.4 % of the MLPs in bundles of 32 KiB"),
        ("Falcon 7B, All, CPU: I/O", 161, falcon.io_s, "3.1 % of the MLPs in bundles of 35.5 KiB"),
    ):
        yield Cell("Table 3", name, "ms", published, 1e3 * found, basis, note=INTERIOR)
    for name, published, found, basis in (
        ("Falcon 7B, All, CPU: memory", 92, falcon.memory_s, "copies at the rate of OPT 6.7B's (Table 5)"),
        ("Metal M1, All: memory", 35, opt.memory_s / 2, "the same, of 16 bits"),
    ):
        yield Cell("Table 3", name, "ms", published, 1e3 * found, basis, 0.3)
    for name, published in ALL_S.items():
        basis = f"its naive row, {NAIVE_S[name]} s; all that DRAM holds is multiplied ({IN_DRAM[name]:.1%}, C)"
        yield Cell("Table 3", f"{name}, All, CPU: compute", "ms", 1e3 * published, 1e3 * _computing(name), basis, 0.3)
    for name, naive_s, published in (("Metal M1", 0.193, 438), ("GPU", 0.022, 20)):
        ours, basis = 1e3 * naive_s * IN_DRAM["OPT 6.7B"], f"its naive row, {naive_s} s; as the CPU's"
        yield Cell("Table 3", f"{name}, All: compute", "ms", published, ours, basis, 0.3, OTHER_KERNELS)
    for name, published, found in (("OPT 6.7B", 669, opt), ("Falcon 7B", 706, falcon)):
        yield Cell(
            "Table 3", f"{name}, All, CPU: total", "ms", published, 1e3 * found.seconds, "the sum of the three", 0.15
        )
    rate = weight_bytes(OPT_6_7B, "fp16") / NAIVE_S["OPT 6.7B"]
    ours, basis = weight_bytes(FALCON_7B, "fp16") / rate, "the rate of OPT 6.7B's naive row"
    yield Cell("Table 3", "Falcon 7B, naive, CPU: compute", "ms", 1e3 * NAIVE_S["Falcon 7B"], 1e3 * ours, basis, 0.3)


def _computing(name: str) -> float:
    """Returns the seconds of computing of the row `All`; the weights' bytes cancel out, so any size serves."""
    size = 1e10
    device = computing_at(M1, "fp32", size / NAIVE_S[name], f"LLM in a flash, Table 3, {name}, naive")
    return latency(device, "fp32", 0, LINEAR_BYTES, IN_DRAM[name] * size).compute_s


def _all(name: str, model: Model, new: float) -> Latency:
    """Returns the row `All` on the CPU, in 32 bits."""
    whole = 2 * weight_bytes(model, "fp16")
    copy_rate = 2 * NEW * mlp_share(OPT_6_7B) * weight_bytes(OPT_6_7B, "fp16") / OPT_COPY_S
    device = computing_at(M1, "fp32", whole / NAIVE_S[name], f"LLM in a flash, Table 3, {name}, naive", copy_rate)
    bundle = 2 * unit_bytes(WHOLE_MLP, model.spec, "fp16")
    return latency(device, "fp32", new * mlp_share(model) * whole, bundle, IN_DRAM[name] * whole)
