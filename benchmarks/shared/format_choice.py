"""Chooses formats by matrix from measured sensitivities: the bytes go where they save most divergence.

A matrix's error D = rounded - W changes a token's output by D x, and the divergence by half the square of g . D x on
average, with g the gradient of a drawn token's log likelihood (Fisher information). The mean of g_i^2 x_j^2 is taken
for a product of what its rows and its columns say, and errors of different weights for independent of each other.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from coldpress.compiler.cost_model import slice_bytes
from coldpress.compiler.search.by_layer import Options, path_of
from coldpress.runtime.plugins import load, names
from coldpress.runtime.quantization import Format
from coldpress.schemas.families import FormatName
from tests.support.hf import load_hf

BLOCKS = 4
"""Blocks of calibration text that gradients are taken on."""
Sensitivity = tuple[np.ndarray, np.ndarray]
"""Weights of a matrix's rows, and of its columns; the product is that of a squared error."""
Losses = Mapping[str, Mapping[FormatName, tuple[int, float]]]
"""Role -> format -> (bytes, divergence of the model with this matrix alone in the format)."""


def sensitivities(file: Path, blocks: np.ndarray) -> dict[str, Sensitivity]:
    """Returns those of all matrices of the layers of a model's file, by role, on token blocks int [num_blocks, T]."""
    import torch

    torch.manual_seed(0)
    model = load_hf(file)
    linears = {role: module for name, module in model.named_modules() if (role := _role(name))}
    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    rows, columns = ({role: np.zeros(module.weight.shape[axis]) for role, module in linears.items()} for axis in (0, 1))
    for block in torch.from_numpy(blocks[:BLOCKS].astype(np.int64)):
        for role, x, g in _squares(model, linears, block):
            rows[role] += (g * x.sum(-1, keepdim=True)).sum(0).numpy()
            columns[role] += (x * g.sum(-1, keepdim=True)).sum(0).numpy()
    count = blocks[:BLOCKS].size
    return {role: (rows[role] / (2 * count), columns[role] / columns[role].sum()) for role in linears}


def losses(
    shapes: Mapping[str, tuple[int, ...]],
    sensitivity: Mapping[str, Sensitivity],
    error: Callable[[str, FormatName], np.ndarray],
    threads: int,
) -> Losses:
    """Returns what each format loses in each matrix, from the `error` of a role in a format, float32."""

    def of_role(role: str) -> dict[FormatName, tuple[int, float]]:
        count, length = shapes[role]
        rows, columns = sensitivity[role]
        found: dict[FormatName, tuple[int, float]] = {}
        for name in names("coldpress.runtime.quantization"):
            if length % load("coldpress.runtime.quantization", Format, name).MULTIPLE == 0:
                loss = float(rows @ np.square(error(role, name), dtype=np.float64) @ columns)
                found[name] = count * slice_bytes(length, name), loss
        return found

    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(shapes, pool.map(of_role, shapes), strict=True))


def within(known: Losses, limit_bytes: int) -> dict[str, FormatName]:
    """Returns the formats of all matrices that take at most so many bytes."""
    ladders = {role: _useful(formats) for role, formats in known.items()}
    options = [
        Options(tuple(known[role][name][0] for name in ladder), tuple(known[role][name][1] for name in ladder))
        for role, ladder in ladders.items()
    ]
    at = path_of(options, limit_bytes)[-1]
    return {role: ladder[place] for (role, ladder), place in zip(ladders.items(), at, strict=True)}


def _useful(formats: Mapping[FormatName, tuple[int, float]]) -> list[FormatName]:
    """Returns the formats that lose less than all with fewer bytes, the smallest first."""
    found: list[FormatName] = []
    for name in sorted(formats, key=lambda name: formats[name]):
        if not found or formats[name][1] < formats[found[-1]][1]:
            found.append(name)
    return found


def _squares(model: Any, linears: Mapping[str, Any], block: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields (role, squared inputs [T, columns], squared gradients of outputs [T, rows]) of a block [T]."""
    import torch

    inputs: dict[str, Any] = {}
    gradients: dict[str, Any] = {}

    def keep(role: str) -> Callable[[Any, Any, Any], None]:
        def hook(_: Any, given: Any, output: Any) -> None:
            inputs[role] = given[0].detach()[0].square()
            output.register_hook(lambda gradient: gradients.__setitem__(role, gradient[0].square()))

        return hook

    hooks = [module.register_forward_hook(keep(role)) for role, module in linears.items()]
    likely = torch.log_softmax(model(block[None]).logits[0].float(), dim=-1)
    drawn = torch.multinomial(likely.detach().exp(), 1)
    likely.gather(-1, drawn).sum().backward()
    model.zero_grad(set_to_none=True)
    for hook in hooks:
        hook.remove()
    for role in linears:
        yield role, inputs[role], gradients[role]


def _role(name: str) -> str | None:
    """Returns the role of a module of transformers' name, such as `model.layers.3.mlp.up_proj`."""
    parts = name.split(".")
    return f"layers.{parts[2]}.{parts[-1]}.weight" if "layers" in parts and name.endswith("_proj") else None
