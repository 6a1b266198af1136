"""The source model's forward pass, one layer at a time, with transformers' own modules in float32.

The model is built without memory (on torch's meta device); a layer's weights are read when it runs and dropped after.
Blocks of tokens are independent, so they are what threads share: each runs on one core, and the number of threads
changes no bit of the result. Hooks see, and may replace, what goes through the MLP.
"""

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compiler._json import read_object
from compiler.architectures import _common
from compiler.checkpoint import MAX_CONFIG_BYTES, read_role, read_rows
from runtime._plugins import load
from schemas.errors import ColdpressError
from schemas.model import Model

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)

HEAD_ROWS = 16384
"""Rows of the head that are in memory at a time."""

Change = Callable[["Tensor"], "Tensor | None"]


@dataclass(frozen=True)
class MlpHooks:
    """What is called with parts of one block's MLP, float32 [T, size]; a tensor that comes back replaces the part."""

    on_input: Change | None = None
    """The MLP's input after its norm, [T, hidden_size]."""
    on_activation: Change | None = None
    """act(gate), or act(up) without a gate, [T, intermediate_size]."""
    on_inner: Change | None = None
    """act(gate) * up, or act(up): what the down projection takes, [T, intermediate_size]."""


BlockHooks = Callable[[int], MlpHooks]
"""Gives the hooks of a block, by its number; called in the thread that runs the block."""


class LayerStream:
    """A model whose layers run one after another.

    Hidden states are float32 [num_blocks, T, hidden_size] on the CPU, whatever the device is.
    """

    def __init__(
        self,
        model: Model,
        threads: int = 1,
        device: str = "cpu",
        read: Callable[[Model, str], np.ndarray] = read_role,
    ) -> None:
        """Reads the configuration only.

        Args:
            model: From `ingest` or `distill`.
            threads: Blocks that run at a time, each on one core.
            device: torch's name of the device that computes.
            read: Where weights come from; another one runs other weights through the same model.

        Raises:
            ColdpressError: if there is no such device.
        """
        import torch
        from transformers import AutoModelForCausalLM

        if device != "cpu" and not torch.cuda.is_available():
            raise ColdpressError(f"device {device} is not available on this machine; use cpu")
        self.model, self.spec, self._device, self._read = model, model.spec, torch.device(device), read
        self._threads = threads if device == "cpu" else 1
        self._architecture = load("compiler.architectures", model.spec.model_type)
        self._config = _common.source_config(read_object(Path(model.folder) / "config.json", MAX_CONFIG_BYTES))
        self._parameters = self._architecture.parameters(self._config, model.spec)
        with torch.device("meta"):
            self._skeleton = AutoModelForCausalLM.from_config(
                self._config, dtype=torch.float32, attn_implementation="sdpa"
            ).eval()
        self._config = self._skeleton.config  # which knows the attention implementation, for the masks
        self._hooks = threading.local()

    def embed(self, tokens: np.ndarray) -> "Tensor":
        """Hidden states before the first layer, from int token ids [num_blocks, T]."""
        import torch

        rows = self._rows_of("embed_tokens.weight", np.unique(tokens))
        hidden = rows[np.searchsorted(np.unique(tokens), tokens)]
        if self.spec.position == "learned":
            positions = self._read(self.model, "embed_positions.weight")[self.spec.position_offset :]
            hidden = hidden + positions[: tokens.shape[1]]
        return torch.from_numpy(np.ascontiguousarray(hidden)).clone()  # torch's own memory: aligned, hence repeatable

    def run_layer(self, layer: int, hidden: "Tensor", hooks: BlockHooks | None = None) -> "Tensor":
        """Hidden states after `layer`, from those before it."""
        import torch

        module = self._layer(layer)
        self._attach(module)
        mask, keywords = self._context(hidden.shape[1])
        out = torch.empty_like(hidden)

        def run(block: int) -> None:
            self._hooks.current = hooks(block) if hooks else MlpHooks()
            out[block] = module(hidden[block : block + 1].to(self._device), attention_mask=mask, **keywords)[0].cpu()

        self.each(run, len(hidden))
        return out

    def head(self, hidden: "Tensor") -> "Tensor":
        """Logits float32 [num_blocks, T, vocab_size], from the hidden states after the last layer."""
        import torch

        normed = self._final_norm(hidden)
        parts = []
        for weight in self._head_blocks():
            part = torch.empty(*hidden.shape[:2], len(weight))

            def run(block: int, weight: "Tensor" = weight, part: "Tensor" = part) -> None:
                part[block] = (normed[block].to(self._device) @ weight.T).cpu()

            self.each(run, len(hidden))
            parts.append(part)
        return torch.cat(parts, dim=-1)

    def last_hidden(self, tokens: np.ndarray, hooks: Callable[[int], BlockHooks | None] | None = None) -> "Tensor":
        """Hidden states after the last layer, from token ids [num_blocks, T]; `hooks` gives a layer's block hooks."""
        hidden = self.embed(tokens)
        for layer in range(self.spec.num_hidden_layers):
            hidden = self.run_layer(layer, hidden, hooks(layer) if hooks else None)
        return hidden

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits float32 [num_blocks, T, vocab_size] of token ids [num_blocks, T]."""
        return self.head(self.last_hidden(tokens)).numpy()

    def nll(self, tokens: np.ndarray, hooks: Callable[[int], BlockHooks | None] | None = None) -> tuple[float, int]:
        """(summed negative log likelihood in nats, number of predicted tokens) of token ids [num_blocks, T].

        Every token of a block but the first is predicted. Logits are in memory for one part of the vocabulary and one
        block at a time.
        """
        import torch

        normed = self._final_norm(self.last_hidden(tokens, hooks))[:, :-1]
        targets = torch.from_numpy(np.asarray(tokens[:, 1:], np.int64))
        log_sums = torch.full(targets.shape, -torch.inf, dtype=torch.float64)
        chosen = torch.zeros(targets.shape, dtype=torch.float64)
        start = 0
        for weight in self._head_blocks():

            def run(block: int, weight: "Tensor" = weight, start: int = start) -> None:
                logits = (normed[block].to(self._device) @ weight.T).cpu().double()
                log_sums[block] = torch.logaddexp(log_sums[block], torch.logsumexp(logits, dim=-1))
                column = targets[block] - start
                inside = (column >= 0) & (column < logits.shape[1])
                found = logits.gather(1, column.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
                chosen[block] += torch.where(inside, found, 0.0)

            self.each(run, len(tokens))
            start += len(weight)
        # one block after another: the sum must not depend on how many cores add it up
        return float(sum(block.item() for block in (log_sums - chosen).cumsum(1)[:, -1])), targets.numel()

    def each(self, work: Callable[[int], None], count: int) -> None:
        """Calls `work` with 0 … count - 1, without gradients, in threads of one core each."""
        import torch

        def one(index: int) -> None:
            torch.set_num_threads(1)  # holds for the calling thread; a sum is split by the number of threads otherwise
            with torch.inference_mode():
                work(index)

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(one, range(count)))

    def _rows_of(self, role: str, ids: np.ndarray) -> np.ndarray:
        if self._read is not read_role:
            return self._read(self.model, role)[ids]
        return np.concatenate([read_rows(self.model, role, int(row), int(row) + 1) for row in ids])

    def _tensor(self, name: str) -> "Tensor":
        """A parameter of transformers' module, in torch's own aligned memory."""
        import torch

        parts = [self._read(self.model, role) for role in self._parameters[name]]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).clone().to(self._device)

    def _loaded(self, module: "nn.Module", prefix: str) -> "nn.Module":
        """A copy of a module of the skeleton with its weights."""
        loaded = copy.deepcopy(module)
        state = {name: self._tensor(f"{prefix}.{name}") for name in loaded.state_dict()}
        loaded.load_state_dict(state, strict=True, assign=True)
        return loaded.requires_grad_(False)

    def _layer(self, layer: int) -> "nn.Module":
        base = self._architecture.MODULES.base
        layers: Any = self._skeleton.get_submodule(base).layers
        return self._loaded(layers[layer], f"{base}.layers.{layer}")

    def _final_norm(self, hidden: "Tensor") -> "Tensor":
        import torch

        modules = self._architecture.MODULES
        path = f"{modules.base}.{modules.norm}"
        norm = self._loaded(self._skeleton.get_submodule(path), path)
        out = torch.empty_like(hidden)

        def run(block: int) -> None:
            out[block] = norm(hidden[block].to(self._device)).cpu()

        self.each(run, len(hidden))
        return out

    def _head_blocks(self) -> Iterator["Tensor"]:
        """The head's rows, [at most HEAD_ROWS, hidden_size] at a time."""
        import torch

        role = "embed_tokens.weight" if self.spec.tie_word_embeddings else "lm_head.weight"
        whole = None if self._read is read_role else self._read(self.model, role)
        for start in range(0, self.spec.vocab_size, HEAD_ROWS):
            stop = min(start + HEAD_ROWS, self.spec.vocab_size)
            rows = read_rows(self.model, role, start, stop) if whole is None else whole[start:stop]
            yield torch.from_numpy(np.ascontiguousarray(rows, np.float32)).clone().to(self._device)

    def _context(self, length: int) -> tuple[Any, dict[str, Any]]:
        """(attention mask, further arguments of a layer) for blocks of `length` tokens."""
        import torch
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        positions = torch.arange(length, device=self._device)[None]
        sample = torch.empty(1, length, self.spec.hidden_size, device=self._device)
        make = create_sliding_window_causal_mask if self.spec.sliding_window else create_causal_mask
        mask = make(
            config=self._config,
            inputs_embeds=sample,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        keywords: dict[str, Any] = {"position_ids": positions}
        if self.spec.position == "rotary":
            rotary = _common.rotary_module(self._architecture.MODULES, self._config).to(self._device)
            keywords["position_embeddings"] = rotary(sample, positions)
        return mask, keywords

    def _attach(self, layer: "nn.Module") -> None:
        """Lets the hooks of the running thread's block see the layer's MLP."""
        modules = self._architecture.MODULES

        def before(name: str) -> Callable[..., Any]:
            return lambda _module, inputs: self._changed(name, inputs[0])

        def after(_module: Any, _inputs: Any, output: Any) -> Any:
            return self._changed("on_activation", output)

        layer.get_submodule(modules.mlp_input).register_forward_pre_hook(before("on_input"))
        layer.get_submodule(modules.activation).register_forward_hook(after)
        layer.get_submodule(modules.mlp_output).register_forward_pre_hook(before("on_inner"))

    def _changed(self, name: str, part: "Tensor") -> "Tensor | None":
        change: Change | None = getattr(self._hooks.current, name)
        changed = change(part.reshape(-1, part.shape[-1])) if change else None
        return None if changed is None else changed.reshape(part.shape)
