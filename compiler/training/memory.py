"""The memory that training takes, in bytes, from shapes alone; no torch, since preflight needs it before the long
stages.

With H the hidden size, F the intermediate size, V the vocabulary and T tokens of a block, one running block holds

    inside a layer     T (14 H + 7 F) and heads T^2 scores, of all layers, or of one if layers are recomputed
    between layers     T H of each if layers are recomputed
    logits             6 T V: the teacher's and the student's, their logarithms, and the gradient

in float32. If an option rounds adapters in the loop, codes of all layers are added; if weights are stored in fewer
bytes, a layer's matrices or the head once more, as they are widened at each use. Writing the result holds a layer in
float32 twice: its tensors, and their bytes.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from coldpress.compiler.checkpoint.tensors import stored_dtype
from coldpress.compiler.device import memory
from coldpress.compiler.shared_settings import Course
from coldpress.runtime.artifact.tensor_files import ITEM_BYTES
from coldpress.runtime.plugins import load
from coldpress.runtime.quantities import show_bytes
from coldpress.runtime.quantization import Format
from coldpress.schemas.corpus import Corpus
from coldpress.schemas.errors import ColdpressError, DoesNotFitError
from coldpress.schemas.families import FamilyName, FormatName
from coldpress.schemas.model import Model, ModelSpec

LOG = logging.getLogger(__name__)
KEPT_BYTES = 1 << 30
"""Most memory that running blocks may hold for the backward pass; if they need more, layers are recomputed."""
BYTES_PER_PARAMETER = 4 * (1 + 1 + 1 + 2 + 1)
"""Teacher, student, gradient, Adam's two moments and the best weights so far."""
STATE_BYTES_PER_PARAMETER = 4 * 4
PROCESS_BYTES = 700 << 20
"""Memory of a process that has imported torch, transformers and peft."""


@dataclass(frozen=True)
class Size:
    spec: ModelSpec
    shapes: Mapping[str, tuple[int, ...]]
    families: tuple[FamilyName, ...]
    block_tokens: int
    threads: int
    weight_bytes: int
    """All tensors as they are stored."""
    format: FormatName

    @staticmethod
    def of(
        model: Model,
        corpus: Corpus,
        threads: int,
        families: tuple[FamilyName, ...] = (),
        format_name: FormatName = "fp16",
    ) -> "Size":
        shapes = {role: source.shape for role, source in model.tensors.items()}
        block_tokens = corpus.split("calibration").block_tokens
        return Size(model.spec, shapes, families, block_tokens, threads, weight_bytes(model), format_name)

    @property
    def num_parameters(self) -> int:
        return sum(map(prod, self.shapes.values()))

    @property
    def recompute(self) -> bool:
        return self.threads * self.spec.num_hidden_layers * self._layer_bytes > KEPT_BYTES

    def running_bytes(self, widened: bool) -> int:
        """Returns the memory of one running block; `widened` if weights are stored in fewer bytes than used."""
        layers, spec = self.spec.num_hidden_layers, self.spec
        recompute = widened or self.recompute
        between = 4 * self.block_tokens * spec.hidden_size * layers
        kept = self._layer_bytes + between if recompute else layers * self._layer_bytes
        logits = 6 * 4 * self.block_tokens * spec.vocab_size
        wide = 4 * max(self._layer_parameters, spec.vocab_size * spec.hidden_size) if widened else 0
        return kept + logits + wide

    @property
    def matrices(self) -> tuple[str, ...]:
        """Returns the roles of a layer's matrices, for example `up_proj`; all layers have the same."""
        first = {name: shape for name, shape in self.shapes.items() if name.startswith("layers.0.")}
        found = (name for name, shape in first.items() if len(shape) > 1)
        return tuple(sorted(name.removeprefix("layers.0.").removesuffix(".weight") for name in found))

    @property
    def code_bytes(self) -> int:
        """Returns the bytes of the layers' matrices in the build's format, rounded up to whole groups."""
        nbytes = load("coldpress.runtime.quantization", Format, self.format).nbytes
        matrices = (shape for role, shape in self.shapes.items() if role.startswith("layers.") and len(shape) > 1)
        return sum(max(rows * nbytes(columns), columns * nbytes(rows)) for rows, columns in matrices)

    @property
    def two_models_bytes(self) -> int:
        """Returns the memory for training all weights of a student beside its teacher, both in float32."""
        copies = (BYTES_PER_PARAMETER + 4 * self.threads) * self.num_parameters
        return copies + max(self.threads * self.running_bytes(widened=False), self.writing_bytes)

    @property
    def two_models_state_bytes(self) -> int:
        return STATE_BYTES_PER_PARAMETER * self.num_parameters

    def disk_bytes(self, state_bytes: int) -> int:
        """Returns the bytes of training in the build folder: weights in float32, and two states while it runs."""
        return 4 * self.num_parameters + 2 * state_bytes

    @property
    def writing_bytes(self) -> int:
        return 2 * 4 * self._layer_parameters

    @property
    def _layer_bytes(self) -> int:
        spec = self.spec
        wide = spec.num_attention_heads * spec.head_dim
        vectors = 10 * spec.hidden_size + 4 * wide + 7 * spec.intermediate_size
        return 4 * self.block_tokens * (vectors + spec.num_attention_heads * self.block_tokens)

    @property
    def _layer_parameters(self) -> int:
        return sum(prod(shape) for role, shape in self.shapes.items() if role.startswith("layers.0."))


def check_one_mlp(spec: ModelSpec, asked: str, without: str) -> None:
    """Refuses to train a mixture of experts: training would have to keep the router from sending all tokens to a few
    experts. Raises ColdpressError naming the setting that asked for it, and the one that builds without it."""
    if spec.is_mixture:
        raise ColdpressError(
            f"{asked} was asked for, and this model is a mixture of {spec.num_experts} experts, which is not trained "
            f"here; build with {without}"
        )


def check_memory(course: Course, needed: int, size: Size, device: str, others: str = "") -> None:
    """Refuses training that does not fit into memory; `others` are further remedies, with a comma after each. Raises
    DoesNotFitError with both figures."""
    free, how = _free_bytes(device), f"{course.key}={course.recipe}"
    LOG.info("%s: %s needs %s of memory, %s are free", course.stage, how, show_bytes(needed), show_bytes(free))
    if needed > free:
        fewer = "fewer --cores, " if size.threads > 1 else ""
        raise DoesNotFitError(
            f"{course.stage} needs {show_bytes(needed)} of memory for the {size.num_parameters:,} parameters of "
            f"{size.spec.model_type} with {how}, {'this machine' if device == 'cpu' else device} has "
            f"{show_bytes(free)} free; build with {others}{fewer}a smaller block_tokens or {course.without}"
        )


def _free_bytes(device: str) -> int:
    if device == "cpu":
        return memory.free_dram_bytes()
    import torch

    return torch.cuda.mem_get_info(device)[0]


def weight_bytes(model: Model) -> int:
    return sum(ITEM_BYTES[stored_dtype(model, role)] * prod(source.shape) for role, source in model.tensors.items())
