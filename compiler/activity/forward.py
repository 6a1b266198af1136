"""The source model's forward pass, one layer at a time, with transformers' own modules.

The model is built without memory (on torch's meta device); a layer's weights are read when it runs and dropped after,
those of its experts one expert at a time (lent_experts.py).
Blocks of tokens are independent, so threads share them: each block runs on one core, and the number of threads changes
no bit of the result. Hooks see, and may replace, the signals of a layer. Arithmetic is float32, or bfloat16 if the
weights are stored in it.
"""

import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from coldpress.compiler.activity import taps
from coldpress.compiler.activity.lent_experts import Lender, blocks_at_once, kept_bytes
from coldpress.compiler.architectures import _common
from coldpress.compiler.checkpoint.private import private_folder
from coldpress.compiler.checkpoint.source_json import read_object
from coldpress.compiler.checkpoint.tensors import (
    MAX_CONFIG_BYTES,
    fits_bfloat16,
    fused,
    read_role,
    read_rows,
    read_stored,
    stored_dtype,
)
from coldpress.runtime.plugins import load
from coldpress.schemas.errors import CheckpointError, ColdpressError
from coldpress.schemas.families import Signal
from coldpress.schemas.model import Model

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

log = logging.getLogger(__name__)

HEAD_ROWS = 16384
"""Rows of the head that are in memory at once."""
GAP_ROWS = 8
"""Rows of embeddings at most so far apart are read together: finding the tensor again takes longer."""
OF_ANY_LAYER: frozenset[Signal] = frozenset(("attention_input", "attention_mixed", "mlp_input"))
"""Signals that a mixture's layer has even without experts: its MLP has no units, so nobody asks for others."""
CORRECTION = ".router.correction"
"""End of the roles that stay float32 in every pass: a token's experts follow from small differences of scores."""
NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16", "sve_bf16")
"""Capabilities of processors that multiply bfloat16; on others torch is slower with it than with float32."""

ComputeDtype = Literal["float32", "bfloat16"]
Hooks = Mapping[Signal, taps.Change]
"""Functions called with the signals of a block, [T, n]; a returned tensor replaces the signal."""
BlockHooks = Callable[[int], Hooks]
"""Returns the hooks of a block, by its number; called in the thread that runs the block."""


def choose_device(asked: str) -> str:
    """Returns torch's name of a device, for `auto` an accelerator if there is one; raises ColdpressError if there is no
    such device."""
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked != "cpu" and not torch.cuda.is_available():
        raise ColdpressError(f"device {asked} is not available on this machine; use cpu")
    return asked


def choose_dtype(model: Model, device: str) -> ComputeDtype:
    """Returns bfloat16 if it holds all matrices as well as their files do and the device multiplies it natively, else
    float32. transformers also computes such a model in bfloat16 by default. It runs 2 to 4 times faster there, and
    activity differs by less than between two calibration texts."""
    import torch

    fits = all(fits_bfloat16(model, role) for role, source in model.tensors.items() if len(source.shape) > 1)
    native = device != "cpu" or any(torch.cpu.get_capabilities().get(name) for name in NATIVE_BFLOAT16)
    return "bfloat16" if fits and native else "float32"


def _onednn_product(weight: "Tensor", bias: "Tensor | None" = None) -> Callable[["Tensor"], "Tensor"]:
    """Computes float32 products by oneDNN, which torch uses by default for bfloat16 only. torch's default library does
    not use 512-bit instructions on every processor that has them: 95 against 230 GFLOP/s per core on one. Both round
    the same way."""
    import torch

    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@dataclass(frozen=True)
class LoadedLayer:
    """One layer with its weights, for blocks of one length; `LayerStream.each_block` runs it in several threads."""

    module: "nn.Module"
    keywords: dict[str, Any]
    running: threading.local
    device: "torch.device"
    lender: Lender | None

    def run(self, hidden: "Tensor", hooks: Hooks) -> "Tensor":
        """Returns hidden states after the layer, [num_blocks, T, hidden_size] on the CPU, from those before it."""
        self.running.hooks = hooks
        found = self.module(hidden.to(self.device), **self.keywords)
        return (found[0] if isinstance(found, tuple) else found).cpu()


@dataclass(frozen=True)
class HeadPart:
    """Rows `start` to `stop` of the head, for the hidden states of some blocks."""

    start: int
    stop: int
    logits: "Callable[[int], Tensor]"
    """Block -> its logits [T, stop - start] on the CPU."""

    def chosen(self, logits: "Tensor", targets: "Tensor") -> "Tensor":
        """Returns the logits of tokens [n] that this part has, and 0 for others, from those of n positions."""
        import torch

        column = targets - self.start
        inside = (column >= 0) & (column < logits.shape[1])
        found = logits.gather(1, column.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        return torch.where(inside, found, 0.0)


def _on_one_core(work: Callable[[int], None]) -> Callable[[int], None]:
    import torch

    def one(index: int) -> None:
        torch.set_num_threads(1)  # set per thread; else the number of threads would change the order of sums
        with torch.inference_mode():
            work(index)

    return one


def _hooked(running: threading.local, signal: Signal, whole: "Tensor") -> "Tensor | None":
    """Calls the hook that the running block has for a signal, if it has one."""
    wanted: taps.Change | None = running.hooks.get(signal)
    found = wanted(whole.reshape(-1, whole.shape[-1])) if wanted else None
    return None if found is None else found.reshape(*whole.shape[:-1], -1)


class LayerStream:
    """Runs a model layer by layer. Hidden states are [num_blocks, T, hidden_size] in `dtype`, always on the CPU."""

    def __init__(self, model: Model, threads: int = 1, device: str = "cpu", dtype: ComputeDtype = "float32") -> None:
        """Reads the configuration only; `threads` blocks run at a time, each on one core. Raises ColdpressError if
        there is no such device."""
        import torch

        self.model, self.spec = model, model.spec
        self.device, self.dtype = torch.device(choose_device(device)), getattr(torch, dtype)
        self.threads = threads if self.device.type == "cpu" else 1
        self._architecture = load("coldpress.compiler.architectures", _common.Architecture, model.spec.model_type)
        raw = read_object(private_folder(model) / "config.json", MAX_CONFIG_BYTES)
        self._config = _common.source_config(self._architecture.MODULES, raw)
        self._parameters = self._architecture.parameters(self._config, model.spec)
        self._skeleton: Any = _common.causal_lm(self._architecture.MODULES, self._config, model.spec)
        self._config = self._skeleton.config  # masks need its attention implementation

    def embed(self, tokens: np.ndarray) -> "Tensor":
        """Returns hidden states before the first layer, from int token ids [num_blocks, T]."""
        import torch

        ids, role = np.unique(tokens), "embed_tokens.weight"
        runs = np.split(ids, np.flatnonzero(np.diff(ids) > GAP_ROWS) + 1)
        rows = np.concatenate([self._rows(role, int(run[0]), int(run[-1]) + 1)[run - run[0]] for run in runs])
        hidden = rows[np.searchsorted(ids, tokens)]
        if self.spec.position == "learned":
            positions = read_role(self.model, "embed_positions.weight")[self.spec.position_offset :]
            hidden = hidden + positions[: tokens.shape[1]]
        # torch's own memory: aligned, hence repeatable
        found = torch.from_numpy(np.ascontiguousarray(hidden)).to(self.dtype, copy=True)
        multiplier = self.spec.embedding_multiplier
        return found if multiplier == 1 else found * torch.tensor(multiplier, dtype=self.dtype)

    def run_layer(self, layer: int, hidden: "Tensor", hooks: BlockHooks | None = None) -> "Tensor":
        """Returns hidden states after `layer`, from those before it; raises CheckpointError if they are not finite."""
        import torch

        loaded = self.load_layer(layer, hidden.shape[1])
        out = torch.empty_like(hidden)

        def run(block: int) -> None:
            out[block] = loaded.run(hidden[block : block + 1], hooks(block) if hooks else {})[0]

        self.each_block(loaded, run, len(hidden))
        if not torch.isfinite(out.sum(dtype=torch.float32)):  # many times as fast as asking each value
            raise CheckpointError(
                f"layer {layer} of {self.model.name} gives hidden states that are NaN or infinite on ordinary text, in "
                f"{str(self.dtype).removeprefix('torch.')}; some of its weights are damaged"
            )
        return out

    def load_layer(self, layer: int, block_tokens: int) -> LoadedLayer:
        path = self._path(layer)
        skeleton = copy.deepcopy(self._skeleton.get_submodule(path))
        running, lender = threading.local(), None
        if self.spec.has_experts(layer):
            lender = self._lender(skeleton, path, running, block_tokens)
        module = self._filled(skeleton, path)
        modules = self._architecture.MODULES
        for signal in modules.taps:
            if not self.spec.is_dense(layer) or signal in OF_ANY_LAYER:
                taps.attach(module, modules, signal, functools.partial(_hooked, running, signal))
        return LoadedLayer(module, self._context(layer, block_tokens), running, self.device, lender)

    def head(self, hidden: "Tensor", weights: "Iterable[Tensor] | None" = None) -> "Tensor":
        """Returns logits [num_blocks, T, vocab_size] in `dtype`, from the hidden states after the last layer. `weights`
        are those of `head_weights`, for callers that keep them; None reads them, and holds a part at a time."""
        import torch

        logits = torch.empty(*hidden.shape[:2], self.spec.vocab_size, dtype=self.dtype)
        for part in self.head_parts(hidden, weights):
            of_part = logits[:, :, part.start : part.stop]

            def run(block: int, part: HeadPart = part, of_part: "Tensor" = of_part) -> None:
                of_part[block] = part.logits(block)

            self.each(run, len(hidden))
        return logits

    def head_parts(self, hidden: "Tensor", weights: "Iterable[Tensor] | None" = None) -> Iterator[HeadPart]:
        """Yields the head a part at a time, from the hidden states after the last layer; `weights` as for `head`."""
        import torch

        norm, normed, start = self._loaded_norm(), torch.empty_like(hidden), 0

        def run(block: int) -> None:
            normed[block] = norm(hidden[block].to(self.device)).cpu()

        self.each(run, len(hidden))
        for weight in self.head_weights() if weights is None else weights:
            product = self._head_product(weight, start)

            def logits(block: int, product: "Callable[[Tensor], Tensor]" = product) -> "Tensor":
                return product(normed[block].to(self.device)).cpu()

            yield HeadPart(start, start + len(weight), logits)
            start += len(weight)

    def last_hidden(self, tokens: np.ndarray, hooks: Callable[[int], BlockHooks | None] | None = None) -> "Tensor":
        """Token ids [num_blocks, T] -> hidden states after the last layer; `hooks` returns a layer's block hooks."""
        hidden = self.embed(tokens)
        for layer in range(self.spec.num_hidden_layers):
            hidden = self.run_layer(layer, hidden, hooks(layer) if hooks else None)
        return hidden

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Returns logits float32 [num_blocks, T, vocab_size] of token ids [num_blocks, T]."""
        return self.head(self.last_hidden(tokens)).float().numpy()

    def nll(self, tokens: np.ndarray, hooks: Callable[[int], BlockHooks | None] | None = None) -> tuple[float, int]:
        """Returns (summed negative log likelihood in nats, number of predicted tokens) of token ids [num_blocks, T]."""
        # one block after another: the sum must not depend on how many cores add it up
        return float(sum(self.block_nll(tokens, hooks).tolist())), tokens[:, 1:].size

    def block_nll(self, tokens: np.ndarray, hooks: Callable[[int], BlockHooks | None] | None = None) -> np.ndarray:
        """Token ids [num_blocks, T] -> each block's summed negative log likelihood in nats, float64 [num_blocks]."""
        return self.token_nll(tokens, hooks).cumsum(1)[:, -1]

    def token_nll(self, tokens: np.ndarray, hooks: Callable[[int], BlockHooks | None] | None = None) -> np.ndarray:
        """Returns the negative log likelihood of every token but the first of each block, float64 [num_blocks, T - 1],
        nats, from ids [num_blocks, T]. Memory holds logits for one part of the vocabulary and one block per thread."""
        return self.score(self.last_hidden(tokens, hooks), tokens)

    def score(self, hidden: "Tensor", tokens: np.ndarray) -> np.ndarray:
        """Returns what `token_nll` does, from the hidden states after the last layer."""
        import torch

        targets = torch.from_numpy(np.asarray(tokens[:, 1:], np.int64))
        log_sums = torch.full(targets.shape, -torch.inf, dtype=torch.float64)
        chosen = torch.zeros_like(log_sums)
        for part in self.head_parts(hidden[:, :-1]):

            def run(block: int, part: HeadPart = part) -> None:
                logits = part.logits(block).double()
                log_sums[block] = torch.logaddexp(log_sums[block], torch.logsumexp(logits, dim=-1))
                chosen[block] += part.chosen(logits, targets[block])

            self.each(run, len(tokens))
        return (log_sums - chosen).numpy()

    def each(self, work: Callable[[int], None], count: int) -> None:
        """Calls `work` with 0 … count - 1, without gradients, in threads of one core each."""
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(_on_one_core(work), range(count)))

    def each_block(
        self, loaded: LoadedLayer, work: Callable[[int], None], count: int, blocks_per_call: int = 1
    ) -> None:
        """Calls `work` as `each` does; each call runs the layer once. Its experts are read once for many calls."""
        if loaded.lender is None:
            self.each(work, count)
        else:
            loaded.lender.each(_on_one_core(work), count, blocks_per_call)

    def _rows(self, role: str, start: int, stop: int) -> np.ndarray:
        """Returns rows of the embeddings or of the head, float32 [stop - start, hidden_size]."""
        return read_rows(self.model, role, start, stop)

    def _path(self, layer: int) -> str:
        modules = self._architecture.MODULES
        return f"{modules.base}.{modules.layers}.{layer}"

    def _loaded_norm(self) -> "nn.Module":
        modules = self._architecture.MODULES
        return self._loaded(f"{modules.base}.{modules.norm}")

    def _tensor(self, name: str) -> "Tensor":
        return fused(self._parameters[name], self._of_role).to(self.device)

    def _of_role(self, role: str) -> "Tensor":
        """Returns a tensor in `dtype`; reads the stored bytes straight into torch's memory."""
        import torch

        kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        shape = self.model.tensors[role].shape
        stored = torch.empty(shape, dtype=kinds[stored_dtype(self.model, role)])
        read_stored(self.model, role, stored.view(torch.uint8).numpy().reshape(-1))
        return stored.to(torch.float32 if role.endswith(CORRECTION) else self.dtype)

    def _loaded(self, path: str) -> "nn.Module":
        return self._filled(copy.deepcopy(self._skeleton.get_submodule(path)), path)

    def _filled(self, module: "nn.Module", path: str) -> "nn.Module":
        from torch import nn

        names = list(module.state_dict())
        with ThreadPoolExecutor(self.threads) as pool:
            tensors = list(pool.map(lambda name: self._tensor(f"{path}.{name}"), names))
        module.load_state_dict(dict(zip(names, tensors, strict=True)), strict=True, assign=True)
        if self._multiplies_with_onednn:
            linears: list[Any] = [part for part in module.modules() if type(part) is nn.Linear]
            for linear in linears:
                # captures no module: one that refers to itself stays in memory, with its weights, until it is collected
                linear.forward = _onednn_product(linear.weight, linear.bias)
        return module.requires_grad_(False)

    def _lender(self, layer: "nn.Module", path: str, running: threading.local, block_tokens: int) -> Lender:
        """Takes the experts out of an empty layer; returns what lends them to it."""
        from torch import nn

        from coldpress.compiler.architectures._expert_block import Block

        ((below, block),) = ((name, part) for name, part in layer.named_modules() if isinstance(part, Block))
        experts = f"{path}.{below}.experts"
        at_once = blocks_at_once(self.spec, block_tokens, self.dtype.itemsize, self.threads)
        keeps = kept_bytes(self.spec, 4) > 0

        def load(number: int, name: str) -> "nn.Module":
            return self._lent(f"{experts}.{number}.{name}", running)

        lender = Lender(load, self.threads, at_once, keeps=keeps)
        seen = {
            tap.path.rpartition(".")[2]: signal
            for signal, tap in self._architecture.MODULES.taps.items()
            if tap.path.rpartition(".")[0] == below
        }
        block.experts = nn.ModuleList()
        block.lend = lender.lend
        block.is_seen = lambda name: seen[name] in running.hooks
        return lender

    def _lent(self, path: str, running: threading.local) -> "nn.Module":
        """Returns a matrix of an expert, for blocks that run with `running`."""
        return self._loaded(path)

    @property
    def _multiplies_with_onednn(self) -> bool:
        import torch

        has_onednn = hasattr(torch.ops.mkldnn, "_linear_pointwise")
        return has_onednn and self.device.type == "cpu" and self.dtype.itemsize == 4

    def _head_product(self, weight: "Tensor", start: int) -> Callable[["Tensor"], "Tensor"]:
        """Returns what computes logits [T, m] from normed hidden states [T, n]; `weight` [m, n] are the head's rows
        from `start` on."""
        import torch

        bias, spec = None, self.spec
        if "lm_head.bias" in self.model.tensors:
            bias = self._of_role("lm_head.bias")[start : start + len(weight)].to(self.device)
        product = (
            _onednn_product(weight, bias)
            if self._multiplies_with_onednn
            else lambda x: torch.nn.functional.linear(x, weight, bias)
        )

        def logits(x: "Tensor") -> "Tensor":
            found, cap = product(x), spec.logits_softcap
            if spec.logits_scaling != 1:
                found = found / spec.logits_scaling
            return found if cap is None else torch.tanh(found / cap) * cap

        return logits

    def head_weights(self) -> Iterator["Tensor"]:
        """Yields the head's rows, at most HEAD_ROWS at a time, [n, hidden_size]."""
        import torch

        for start in range(0, self.spec.vocab_size, HEAD_ROWS):
            rows = self._rows(self.spec.head_role, start, min(start + HEAD_ROWS, self.spec.vocab_size))
            yield torch.from_numpy(np.ascontiguousarray(rows, np.float32)).to(self.dtype, copy=True).to(self.device)

    def _context(self, layer: int, length: int) -> dict[str, Any]:
        """Returns the arguments of a layer beside hidden states, for blocks of `length` tokens."""
        import torch
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        positions = torch.arange(length, device=self.device)[None]
        sample = torch.empty(1, length, self.spec.hidden_size, device=self.device, dtype=self.dtype)
        make = create_sliding_window_causal_mask if self.spec.window_of(layer) else create_causal_mask
        mask = make(
            config=self._config, inputs_embeds=sample, attention_mask=None, past_key_values=None, position_ids=positions
        )
        modules = self._architecture.MODULES
        keywords: dict[str, Any] = {"attention_mask": mask, "position_ids": positions, **modules.layer_arguments}
        if self.spec.position == "rotary":
            rotary, of_kind = _common.rotary_module(modules, self._config).to(self.device), modules.rotary
            kinds = [of_kind[kind] for kind in (self.spec.rotary_of(layer),) if of_kind.get(kind)]
            keywords["position_embeddings"] = rotary(sample, positions, *kinds)
        return keywords
