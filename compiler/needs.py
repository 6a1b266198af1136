"""Counts the memory and disk of stages: the facts that stages count from, and shared sums.

Every stage module has its own count, `needs(build) -> StageNeeds`, from shapes and settings alone. The rules ask for it
(`mem_mb`), and `preflight` adds it up. Memory is that of one job, and a job holds one layer at a time.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import PurePath
from typing import Any, ClassVar

from coldpress.compiler.activity.forward import HEAD_ROWS
from coldpress.compiler.activity.lent_experts import blocks_at_once, kept_bytes, waiting_bytes
from coldpress.compiler.candidates import AUTO, DEFAULT_FORMAT, caches_for, candidates, compared_formats, families_for
from coldpress.compiler.cost_model import (
    HasShapes,
    flash_bytes,
    resident_bytes,
    row_table_bytes,
    tensor_bytes,
    unit_bytes,
)
from coldpress.compiler.pipeline import STAGES
from coldpress.compiler.sections import Whole
from coldpress.compiler.training.memory import Size
from coldpress.runtime.artifact.contents import nbytes
from coldpress.runtime.dram.kv_cache import DEFAULT_KV_CACHE, formats_of
from coldpress.runtime.plugins import load
from coldpress.runtime.quantization._mixed import VALUES
from coldpress.runtime.sparsity import DensitySource, Selector
from coldpress.schemas.base import Options
from coldpress.schemas.device import DeviceProfile
from coldpress.schemas.families import (
    BLOCKS,
    WHOLE_MLP,
    FamilyName,
    FormatName,
    Method,
    UnitFormat,
    layers_of,
    num_units,
    slice_formats,
)
from coldpress.schemas.layout import KvCacheFormat
from coldpress.schemas.model import Model
from coldpress.schemas.predictors import matrix_shapes
from coldpress.schemas.preflight import StageNeeds

SIGNAL_COPIES = 4
"""Copies of a mixture's signal, over all experts, while a selector chooses among its units."""
PASS_THREADS = 8
"""Most cores that a stage takes to run text through the model (rules/calibrate.smk)."""

Inputs = Mapping[str, Mapping[str, str]]
"""Stage of a build -> record parameter -> the stage that writes the record, from the rules (rules/common.smk)."""


@dataclass(frozen=True)
class Build:
    """The facts of a build that its needs and its trial depend on."""

    PYTHON_BYTES: ClassVar[int] = 150 << 20
    TORCH_BYTES: ClassVar[int] = 500 << 20
    """Memory of an idle process that has imported numpy, or torch and transformers."""
    BLOCK_BYTES: ClassVar[int] = 64 << 20
    """Buffers of fixed size: blocks that are read, encoded, hashed or written at a time."""
    ALL_SIZES_SHARE: ClassVar[int] = 3
    """All sizes of a predictor over its largest size: they grow by a third or a half (compiler/stages/predict)."""
    OVERHEAD_BYTES: ClassVar[int] = 64 << 20
    """Extra bytes of an artifact or an exported file: tokenizer, documents, tables, and the file system's own data."""

    model: HasShapes
    """The model, with the activation that `relufy` gives it."""
    settings: Mapping[str, Mapping[str, Any]]
    """Stage -> its settings."""
    inputs: Inputs
    device: DeviceProfile
    num_tokens: int
    """Tokens of calibration text."""
    block_tokens: int
    threads: int = 1
    shards: int = 1
    """Jobs that calibration text is divided among."""

    def has(self, stage: str) -> bool:
        return stage in self.inputs

    @property
    def stages(self) -> list[str]:
        return [stage for stage in STAGES if self.has(stage)]

    @property
    def method(self) -> Method:
        return self.settings["allocate"]["method"]

    @property
    def options(self) -> Options:
        return self.settings["allocate"].get("options", {})

    @property
    def methods(self) -> tuple[str, ...]:
        return candidates(self.model.spec, self.options) if self.method == AUTO else (self.method,)

    @property
    def families(self) -> tuple[FamilyName, ...]:
        return families_for(self.method, self.options, self.model.spec)

    @property
    def format(self) -> UnitFormat:
        """The format of the weights, or of an MLP's; while it is open, the one in which a budget in percent counts."""
        named = self.settings["allocate"]["format"]
        return DEFAULT_FORMAT if named == AUTO else named

    @property
    def formats(self) -> tuple[UnitFormat, ...]:
        return compared_formats(self.settings["allocate"]["format"], self.model.spec)

    @property
    def widest_format(self) -> FormatName:
        return max(slice_formats(self.format), key=lambda name: nbytes(name, VALUES))

    @property
    def matrix_formats(self) -> tuple[FormatName, ...]:
        return tuple(name for one in self.formats for name in slice_formats(one))

    @property
    def caches(self) -> tuple[str, ...]:
        return caches_for(self.settings["allocate"]["cache"])

    @property
    def context_length(self) -> int:
        return self.settings["allocate"]["context_length"]

    @property
    def kv_cache(self) -> KvCacheFormat:
        """The format of keys and values; while it is open, the one in which a budget in percent counts."""
        named = self.settings["allocate"]["kv_cache"]
        return DEFAULT_KV_CACHE if named == AUTO else named

    @property
    def kv_caches(self) -> tuple[KvCacheFormat, ...]:
        named = self.settings["allocate"]["kv_cache"]
        return formats_of(self.model.spec) if named == AUTO else (named,)

    @property
    def layers_per_group(self) -> int:
        return self.settings["allocate"]["layers_per_group"]

    @property
    def page_bytes(self) -> int:
        return self.device.flash.page_bytes.value

    @property
    def dram_budget_bytes(self) -> int:
        """The largest of the requested DRAM budgets."""
        whole = Whole(self.model, self.format, self.context_length, self.kv_cache, self.page_bytes, self.caches)
        return next(iter(whole.budgets(self.settings["allocate"]["dram_budget"])))

    @property
    def density_sources(self) -> set[DensitySource]:
        exact = self.model.spec.exact_zeros
        return {load("coldpress.runtime.sparsity", Selector, name).densities(exact) for name in self.methods}

    @property
    def counts_again(self) -> bool:
        """Tells whether `recalibrate` runs the text through the model once more: also where `allocate` may decide how
        many units are used, by the user's density or the budget."""
        chooses = self.model.spec.is_mixture and BLOCKS not in self.families
        return self.has("distill") or chooses or bool(self.density_sources - {"whole", "measured"})

    @property
    def weight_bytes(self) -> int:
        """Stored bytes of all tensors; two per value, as in hub models, where only shapes are known, and four of GGUF,
        whose blocks are read as float32."""
        if not isinstance(self.model, Model):
            return 2 * self.model.num_parameters
        used = {PurePath(tensor.file).name for tensor in self.model.tensors.values()}
        if any(name.endswith(".gguf") for name in used):
            return 4 * self.model.num_parameters
        return sum(file.size_bytes for file in self.model.files if file.name.endswith(".safetensors"))

    @property
    def inner_size(self) -> int:
        """The number of values of an MLP's inner activation, over all experts."""
        return self.model.spec.intermediate_size * self.model.spec.num_experts

    @property
    def layer_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of a layer's tensors; all layers whose MLP has units have the same shapes."""
        return self._shapes("")

    def _shapes(self, within: str) -> list[tuple[int, ...]]:
        tensors = self.model.tensors.items()
        return [tensor.shape for role, tensor in tensors if role.startswith(self._of_layer) and within in role]

    @property
    def _of_layer(self) -> str:
        """The beginning of the roles of the first layer whose MLP has units; a mixture's others are smaller."""
        return f"layers.{layers_of(WHOLE_MLP, self.model.spec)[0]}."

    @property
    def largest_of_layer(self) -> int:
        return max(map(prod, self.layer_shapes))

    @property
    def layer_weights_bytes(self) -> int:
        """Bytes of a layer's weights in float32, while its largest matrix is read; of a mixture's experts one is in
        memory, and what the blocks keep that wait for the others."""
        spec, whole = self.model.spec, self.whole_layer_bytes
        if not spec.is_mixture:
            return whole
        others = whole - 4 * (sum(map(prod, self._shapes(".experts."))) * (spec.num_experts - 1) // spec.num_experts)
        at_once = min(
            ceil(self.num_tokens / self.block_tokens), blocks_at_once(spec, self.block_tokens, 4, self.threads)
        )
        return others + kept_bytes(spec, 4) + at_once * waiting_bytes(spec, self.block_tokens, 4)

    @property
    def whole_layer_bytes(self) -> int:
        """Bytes of all of a layer's weights in float32, while its largest matrix is read."""
        return 4 * (sum(map(prod, self.layer_shapes)) + self.largest_of_layer)

    @property
    def layer_code_bytes(self) -> int:
        return sum(size for role, size in self._codes() if role.startswith("layers."))

    @property
    def shared_code_bytes(self) -> list[int]:
        return [size for role, size in self._codes() if not role.startswith("layers.")]

    @property
    def gram_bytes(self) -> list[int]:
        """Bytes of a layer's Gram matrices: attention's input and mixed heads, and one MLP's input and inner part."""
        spec = self.model.spec
        heads = spec.mixed_size
        of_mlp = () if spec.is_mixture else (spec.hidden_size, spec.intermediate_size)
        return [4 * size**2 for size in (spec.hidden_size, heads, *of_mlp)]

    @property
    def head_bytes(self) -> int:
        """Bytes of the whole head in float32, while its last part is read."""
        spec = self.model.spec
        return 4 * (spec.vocab_size + min(HEAD_ROWS, spec.vocab_size)) * spec.hidden_size

    @property
    def code_bytes(self) -> int:
        on_flash = flash_bytes(self.families, self.model.spec, self.format)
        resident = resident_bytes(self.model, self.families, self.format)
        return on_flash + resident + row_table_bytes(self.model.spec, self.format)

    @property
    def largest_section_bytes(self) -> int:
        spec = self.model.spec
        return max(
            num_units(family, spec) * unit_bytes(family, spec, name)
            for family in self.families
            for name in self.matrix_formats
        )

    @property
    def largest_predictor(self) -> int:
        """Parameters of the largest predictor that `allocate` allows: as many as the matrix whose sign it predicts."""
        spec = self.model.spec
        inner = spec.intermediate_size * spec.num_experts_per_tok
        rank = spec.hidden_size * inner // (spec.hidden_size + inner)
        return sum(map(prod, matrix_shapes(spec, rank).values()))

    @property
    def predictor_bytes(self) -> int:
        """Bytes of all predictors in float16, each as large as PowerInfer's largest (10 % of the model); 0 without."""
        return 2 * self.model.num_parameters // 10 if self.has("predict") else 0

    @property
    def training_size(self) -> Size:
        shapes = {role: tensor.shape for role, tensor in self.model.tensors.items()}
        facts = (self.families, self.block_tokens, self.threads, self.weight_bytes, self.widest_format)
        return Size(self.model.spec, shapes, *facts)

    def running_bytes(self, inner_copies: int, hidden_copies: int = 0) -> int:
        """Returns the bytes of float32 activations of one MLP on the running blocks, by copies of its two sizes. A
        mixture's signals are written out for all experts one after another; the experts' inputs only for passes that
        see them, which name hidden copies."""
        spec = self.model.spec
        values = inner_copies * self.inner_size + hidden_copies * spec.hidden_size
        if spec.is_mixture:
            widest = max(spec.intermediate_size, spec.hidden_size * (hidden_copies > 0))
            values = SIGNAL_COPIES * spec.num_experts * widest
        return 4 * self.threads * self.block_tokens * values

    def layer_units(self, families: Iterable[FamilyName]) -> int:
        return sum(num_units(family, self.model.spec) for family in families)

    def statistics_bytes(self, families: Iterable[FamilyName]) -> int:
        """Returns the bytes that a pass over the text leaves on disk: bits and counts of units, MLP inputs of every
        layer, mean squares of its matrices' inputs, and the hidden states of two layers; twice with shards."""
        counted = list(families)
        spec, tokens, num_blocks = self.model.spec, self.num_tokens, ceil(self.num_tokens / self.block_tokens)
        per_unit = -(-tokens // 8) + 2 * num_blocks + 8
        per_layer = self.layer_units(counted) * per_unit + 2 * tokens * spec.hidden_size + self.squares_bytes
        headers = (32 << 10) * (2 + len(counted))
        whole = spec.num_hidden_layers * (per_layer + headers) + 2 * 4 * tokens * spec.hidden_size
        return whole * (2 if self.shards > 1 else 1)

    @property
    def squares_bytes(self) -> int:
        """The bytes of the mean squares of the inputs of a layer's matrices, in each block of calibration text."""
        spec = self.model.spec
        inputs = 2 * spec.hidden_size + spec.mixed_size + self.inner_size
        return 4 * ceil(self.num_tokens / self.block_tokens) * inputs

    def _codes(self) -> Iterator[tuple[str, int]]:
        """Yields (role, bytes in the widest format) of one layer's tensors and of those outside the layers."""
        for role, tensor in self.model.tensors.items():
            if role.startswith(self._of_layer) or not role.startswith("layers."):
                yield role, max(tensor_bytes(role, tensor.shape, name) for name in self.matrix_formats)


def asked_text(settings: Mapping[str, Mapping[str, Any]], model: HasShapes) -> tuple[int, int]:
    """Returns (tokens, tokens per block) of calibration text, if the corpus has as much as the settings want."""
    tokenize = settings["tokenize"]
    block_tokens = min(int(tokenize["block_tokens"]), model.spec.max_position_embeddings)
    return max(1, int(tokenize["calibration_tokens"]) // block_tokens) * block_tokens, block_tokens


def needs_of(stage: str, build: Build) -> StageNeeds:
    return importlib.import_module(f"coldpress.compiler.stages.{stage}").needs(build)


def all_needs(build: Build) -> tuple[StageNeeds, ...]:
    return tuple(needs_of(stage, build) for stage in build.stages)
