"""importance: reads a llama.cpp importance matrix by role, so that `quantize` rounds important inputs more exactly.

Reads a file from `llama-imatrix` in either format (compiler/stages/importance/files.py), and writes an array file per
layer: the mean square of every input of every matrix. They take the place of those that `calibrate` measures. Names are
llama.cpp's for every architecture; a tensor that the checkpoint stores fused is fused there, too. A build has this
stage only if it names a file. The stage runs early, so that a file of another model is refused before the long stages.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from coldpress.compiler.io import Workspace, sha256_of
from coldpress.compiler.stages.importance.files import Imatrix, open_imatrix
from coldpress.schemas.base import Record
from coldpress.schemas.config import Key
from coldpress.schemas.errors import ColdpressError, clipped
from coldpress.schemas.gram import Importance, LayerArrays
from coldpress.schemas.model import Model
from coldpress.schemas.preflight import StageNeeds

if TYPE_CHECKING:
    from coldpress.compiler.needs import Build

NAMES: Mapping[frozenset[str], str] = {
    frozenset({"q_proj"}): "attn_q",
    frozenset({"k_proj"}): "attn_k",
    frozenset({"v_proj"}): "attn_v",
    frozenset({"q_proj", "k_proj", "v_proj"}): "attn_qkv",
    frozenset({"o_proj"}): "attn_output",
    frozenset({"gate_proj"}): "ffn_gate",
    frozenset({"up_proj"}): "ffn_up",
    frozenset({"gate_proj", "up_proj"}): "ffn_up",
    frozenset({"down_proj"}): "ffn_down",
}
"""Roles that a tensor holds -> its name in GGUF, after `blk.<layer>.`; tensors of all experts end in `_exps`."""
HEAD = "output.weight"


class ImportanceConfig(Record):
    """Settings of `importance`."""

    imatrix: Annotated[str | None, Key(default="none")] = Field(
        default=None,
        min_length=1,
        description="a file of llama-imatrix, .gguf or .dat: how much each input counts when scales are chosen, in "
        "place of what calibration text says",
    )


def run(config: ImportanceConfig, model: Model, work: Workspace) -> Importance:
    """Returns the importance of every input of the model's matrices.

    Raises:
        ColdpressError: if the file cannot be read, or is not of this model; the text is one sentence.
    """
    if config.imatrix is None:
        raise ColdpressError("importance has no file to read; give imatrix")
    path = Path(config.imatrix)
    found = open_imatrix(path)
    layers = tuple(
        LayerArrays(layer=layer, arrays=work.save(f"layer-{layer}", _layer(found, model, layer)))
        for layer in range(model.spec.num_hidden_layers)
    )
    size = 0 if model.spec.tie_word_embeddings else model.tensors["lm_head.weight"].shape[1]
    head = {"lm_head": _of(found, HEAD, model, size)} if size and HEAD in found.entries else None
    return Importance(imatrix_sha256=sha256_of(path), layers=layers, shared=work.save("shared", head) if head else None)


def needs(build: "Build") -> StageNeeds:
    """Returns what the stage takes: one layer's figures; the file is read in parts."""
    layer = 4 * sum(shape[-1] for shape in build.layer_shapes)
    disk_bytes = build.model.spec.num_hidden_layers * (2 * layer + (32 << 10))
    return StageNeeds(
        stage="importance",
        ram_bytes=build.PYTHON_BYTES + build.BLOCK_BYTES + 8 * layer,
        disk_bytes=disk_bytes,
        runtime_s=build.PYTHON_S,
    )


def _layer(found: Imatrix, model: Model, layer: int) -> dict[str, np.ndarray]:
    """Returns, for each matrix of the layer, the mean squares of its inputs, float32 [inputs]."""
    prefix = f"layers.{layer}."
    matrices = {
        role.removeprefix(prefix).removesuffix(".weight"): source
        for role, source in model.tensors.items()
        if role.startswith(prefix) and role.endswith("_proj.weight")
    }
    fused: dict[str, tuple[str, ...]] = {}
    for role, source in matrices.items():
        name = source.tensor if source.index is None else role  # llama.cpp has gate and up of experts in two tensors
        fused[name] = (*fused.get(name, ()), role)
    read: dict[str, np.ndarray] = {}
    values: dict[str, np.ndarray] = {}
    for roles in fused.values():
        *expert, _ = roles[0].split(".")
        held = frozenset(role.rpartition(".")[2] for role in roles)
        name = f"blk.{layer}.{NAMES[held]}{'_exps' if expert else ''}.weight"
        size, start = matrices[roles[0]].shape[1], 0
        if expert:
            start = int(expert[1]) * size
        if name not in read:
            read[name] = _of(found, name, model, size * (model.spec.num_experts if expert else 1))
        values |= dict.fromkeys(roles, read[name][start : start + size])
    return values


def _of(found: Imatrix, name: str, model: Model, size: int) -> np.ndarray:
    """Returns an entry's values, float32 [size]; raises ColdpressError if it is missing or has more or fewer."""
    if name not in found.entries:
        raise ColdpressError(
            f"the imatrix {found.path} has no entry {name}, expected one for every matrix of {model.name}; its "
            f"{len(found.entries)} entries begin with {clipped(min(found.entries))}; make it of this model"
        )
    if (count := found.entries[name].num_values) != size:
        raise ColdpressError(
            f"the imatrix {found.path} has {count} values for {name}, expected {size}, the inputs of that matrix in "
            f"{model.name}; make it of this model"
        )
    return found.read(name)
