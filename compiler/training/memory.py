"""What training takes of memory, in bytes, from shapes alone; no torch, since preflight asks before anything long.

With H the hidden size, F the intermediate size, V the vocabulary and T tokens of a block, one block that runs holds

    inside a layer     T (14 H + 7 F) and heads T^2 scores, of all layers, or of one where layers run again
    between layers     T H of each where layers run again
    logits             6 T V: the teacher's and the student's, their logarithms, and the gradient

in float32; where an option rounds adapters in the loop, codes of all layers; where weights are kept in fewer bytes, a
layer's matrices or the head once more, as they are widened when they are used. Writing the result holds a layer in
float32 twice: its tensors, and their bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from runtime._plugins import load
from schemas.families import FamilyName, FormatName
from schemas.model import ModelSpec

KEPT_BYTES = 1 << 30
"""What the blocks that run may keep for the backward pass; layers run again where they would keep more."""
PROCESS_BYTES = 700 << 20
"""A process that has imported torch, transformers and peft, before it does anything."""


@dataclass(frozen=True)
class Size:
    """Of a model and of the text that it sees."""

    spec: ModelSpec
    shapes: Mapping[str, tuple[int, ...]]
    """Of each tensor, by role."""
    families: tuple[FamilyName, ...]
    block_tokens: int
    threads: int
    """Blocks that run at a time."""
    weight_bytes: int
    """Of all tensors as they are stored."""
    format: FormatName
    """That the build will hold weights in."""

    @property
    def num_parameters(self) -> int:
        """Of all tensors."""
        return sum(map(prod, self.shapes.values()))

    @property
    def recompute(self) -> bool:
        """Whether the backward pass runs each layer again."""
        return self.threads * self.spec.num_hidden_layers * self._layer_bytes > KEPT_BYTES

    def shape_of(self, role: str) -> tuple[int, int]:
        """(outputs, inputs) of a layer's matrix; all layers are alike."""
        rows, columns = self.shapes[f"layers.0.{role}.weight"]
        return rows, columns

    def running_bytes(self, widened: bool) -> int:
        """What one block takes while it runs.

        Args:
            widened: Whether weights are kept in fewer bytes than they are used in, and layers always run again.
        """
        layers, spec = self.spec.num_hidden_layers, self.spec
        recompute = widened or self.recompute
        between = 4 * self.block_tokens * spec.hidden_size * layers
        kept = self._layer_bytes + between if recompute else layers * self._layer_bytes
        logits = 6 * 4 * self.block_tokens * spec.vocab_size
        wide = 4 * max(self._layer_parameters, spec.vocab_size * spec.hidden_size) if widened else 0
        return kept + logits + wide

    @property
    def code_bytes(self) -> int:
        """Of the layers' matrices in the build's format, rounded up to whole groups."""
        nbytes = load("runtime.quantization", self.format).nbytes
        matrices = (shape for role, shape in self.shapes.items() if role.startswith("layers.") and len(shape) > 1)
        return sum(max(rows * nbytes(columns), columns * nbytes(rows)) for rows, columns in matrices)

    @property
    def writing_bytes(self) -> int:
        """What one file of the result takes while it is written."""
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
