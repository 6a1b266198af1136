"""Measures what an error of each weight costs: the diagonal of the Fisher information, two factors for each matrix.

A matrix with inputs x_t that is changed by E moves next-token distributions by about ½ mean_t (g_tᵀ E x_t)² nats, where
g_t is the gradient, by the matrix's output, of the log likelihood of a token drawn from the model's own distribution.
Products of different weights' errors are left out, since errors of rounding hardly depend on each other, and the sum
over t of g_tr² x_tc² is taken to be a_r b_c, by its sums over rows and columns. One pass runs forward, one back, each a
layer at a time; memory holds a layer and the text's hidden states before every layer.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from coldpress.compiler.activity.forward import LayerStream
from coldpress.compiler.activity.rounded import Variation

if TYPE_CHECKING:
    from torch import Tensor, nn

SENSITIVITY_TOKENS = 512
"""Most tokens, in whole blocks; 2,048 gave formats that were no better (docs/experiments/product.md)."""
Sums = dict[str, "tuple[Tensor, Tensor]"]
"""Parameter of a linear module -> sums over tokens for its outputs [m] and its inputs [n]."""


@dataclass(frozen=True)
class Sensitivity:
    """The divergence that errors E of a matrix cause is about outputsᵀ E² inputs, in nats per token."""

    outputs: np.ndarray
    """float32 [rows]."""
    inputs: np.ndarray
    """float32 [columns]."""


def sensitivities(source: LayerStream, tokens: np.ndarray) -> Mapping[str, Sensitivity]:
    """Returns the sensitivity of each matrix of the layers, by role, on the first of token blocks, int [num_blocks, T];
    none of an expert that no token uses."""
    tokens = tokens[: max(1, SENSITIVITY_TOKENS // tokens.shape[1])]
    stream = _Backward(source)
    before = [source.embed(tokens)]
    for layer in range(source.spec.num_hidden_layers):
        before.append(source.run_layer(layer, before[-1]))
    gradient = stream.from_head(before.pop())
    found: dict[str, Sensitivity] = {}
    for layer in reversed(range(source.spec.num_hidden_layers)):
        gradient, sums = stream.through(layer, before.pop(), gradient)
        for parameter, of_module in sums.items():
            found |= _by_role(source, stream.roles_of(parameter), *of_module, num_tokens=tokens.size)
    return found


def _by_role(
    source: LayerStream, roles: tuple[str, ...], outputs: "Tensor", inputs: "Tensor", num_tokens: int
) -> dict[str, Sensitivity]:
    """Cuts the sums of a module into those of the matrices whose rows it stacks, in the order of `fused`."""
    total = max(float(inputs.sum()), float(np.finfo(np.float32).tiny))
    scaled, columns, start = (outputs / (2 * num_tokens * total)).numpy(), inputs.numpy(), 0
    rows: dict[str, list[np.ndarray]] = {}
    for role in roles:
        stop = start + source.model.tensors[role].shape[0] // Counter(roles)[role]
        rows.setdefault(role, []).append(scaled[start:stop])
        start = stop
    return {role: Sensitivity(np.concatenate(parts), columns) for role, parts in rows.items()}


class _Backward(Variation):
    """A model that returns the gradients of what it computes."""

    @property
    def _multiplies_with_onednn(self) -> bool:
        return False  # torch has no gradient of that product

    def roles_of(self, parameter: str) -> tuple[str, ...]:
        return self._parameters[parameter]

    def from_head(self, hidden: "Tensor") -> "Tensor":
        """Draws a token for every position, and returns the gradient of its log likelihood by the hidden states after
        the last layer, [num_blocks, T, hidden_size]."""
        import torch

        log_sums, drawn = self._drawn(hidden)
        norm = self._loaded_norm()
        leaves = [norm(block.to(self.device)).detach().requires_grad_() for block in hidden]
        start = 0
        for weight in self.head_weights():
            product = self._head_product(weight, start)

            def run(block: int, product: Any = product, start: int = start) -> None:
                with torch.inference_mode(False), torch.enable_grad():
                    logits = product(leaves[block])
                    own = drawn[block] - start
                    inside = (own >= 0) & (own < logits.shape[1])
                    by_logits = -(logits.detach().cpu().double() - log_sums[block][:, None]).exp()
                    by_logits[inside, own[inside]] += 1
                    logits.backward(by_logits.to(logits))

            self.each(run, len(hidden))
            start += len(weight)
        return torch.stack([_gradient(norm, block, leaf.grad) for block, leaf in zip(hidden, leaves, strict=True)])

    def _drawn(self, hidden: "Tensor") -> "tuple[Tensor, Tensor]":
        """Returns the logarithm of the sum of exponentials of logits, float64, and a token drawn by them (the largest
        logit after Gumbel noise is added), int64, each [num_blocks, T]."""
        import torch

        log_sums = torch.full(hidden.shape[:2], -torch.inf, dtype=torch.float64)
        highest, drawn = log_sums.clone(), torch.zeros(hidden.shape[:2], dtype=torch.int64)
        for part in self.head_parts(hidden):

            def run(block: int, part: Any = part) -> None:
                logits = part.logits(block).double()
                log_sums[block] = torch.logaddexp(log_sums[block], torch.logsumexp(logits, dim=-1))
                noise = np.random.default_rng((block, part.start)).gumbel(size=tuple(logits.shape))
                value, at = (logits + torch.from_numpy(noise)).max(dim=-1)
                drawn[block] = torch.where(value > highest[block], at + part.start, drawn[block])
                highest[block] = torch.maximum(highest[block], value)

            self.each(run, len(hidden))
        return log_sums, drawn

    def through(self, layer: int, hidden: "Tensor", gradient: "Tensor") -> "tuple[Tensor, Sums]":
        """Returns the gradient by the hidden states before a layer, from that after it, and sums over tokens of
        g_tr² |x_t|² and x_tc² |g_t|² for each of its linear modules."""
        import torch

        loaded = self.load_layer(layer, hidden.shape[1])
        for name, module in loaded.module.named_modules():
            self._watch(module, f"{self._path(layer)}.{name}", loaded.running)
        sums: list[Sums] = [{} for _ in hidden]
        found = torch.empty_like(gradient)

        def run(block: int) -> None:
            with torch.inference_mode(False), torch.enable_grad():
                loaded.running.sums = sums[block]
                found[block] = _gradient(
                    lambda x: loaded.run(x, {}), hidden[block : block + 1], gradient[block : block + 1]
                )[0]

        self.each_block(loaded, run, len(hidden))
        names = dict.fromkeys(name for one in sums for name in one)
        return found, {name: _added([one[name] for one in sums if name in one]) for name in names}

    def _lent(self, path: str, running: threading.local) -> "nn.Module":
        module = super()._lent(path, running)
        self._watch(module, path, running)
        return module

    def _watch(self, module: "nn.Module", path: str, running: threading.local) -> None:
        import torch

        if isinstance(module, torch.nn.Linear) and f"{path}.weight" in self._parameters:
            module.register_forward_hook(_watching(running, f"{path}.weight"))


def _gradient(function: Any, at: "Tensor", gradient: "Tensor | None") -> "Tensor":
    """Returns the gradient by a function's argument, from that by its value."""
    assert gradient is not None
    argument = at.clone().requires_grad_()
    value = function(argument)
    value.backward(gradient.to(value))
    assert argument.grad is not None
    return argument.grad


def _added(sums: "list[tuple[Tensor, Tensor]]") -> "tuple[Tensor, Tensor]":
    """Adds the sums of all blocks, in their order, so that the number of threads changes no bit."""
    import torch

    outputs, inputs = zip(*sums, strict=True)
    return torch.stack(outputs).sum(dim=0), torch.stack(inputs).sum(dim=0)


def _watching(running: Any, name: str) -> Any:
    def watch(_: "nn.Module", inputs: "tuple[Tensor, ...]", output: "Tensor") -> None:
        squares = inputs[0].detach().flatten(end_dim=-2).float().square()
        sums: Sums = running.sums

        def add(gradient: "Tensor") -> None:
            own = gradient.flatten(end_dim=-2).float().square()
            sums[name] = ((own.T @ squares.sum(dim=1)).cpu(), (squares.T @ own.sum(dim=1)).cpu())

        output.register_hook(add)

    return watch
