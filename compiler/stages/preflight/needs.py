"""What each stage of a build takes of memory and disk, in bytes, from shapes alone: the sums that `preflight` checks.

Memory is that of one job, and jobs hold one layer at a time. With L layers, hidden size H, intermediate size F, T
calibration tokens, and U units of the method's families in a layer:

    relufy        two models in float32, with all that training keeps of one of them, or one as it is stored and
                  adapters (compiler/training/memory.py, compiler/training/adapters.py)
    distill       what its recipe says (compiler/stages/distill/<recipe>.py)
    calibrate     a layer's weights and its largest matrix once more (float32, where bfloat16 may do), the MLPs of the
                  blocks that run, bits U T / 8 twice
    allocate      where losses of densities are measured: a layer's weights, the hidden states of all variants of the
                  model twice and of the whole one, the logits of a block of several, MLPs of the blocks that run
    predict       T (6 H + 2 F), bits U T / 8, the deciding matrix twice, the largest predictor with its moments, scores
                  of a batch; of k experts per token labels of k + 2 instead of two, one expert's unpacked at a time
    size          a layer's weights, the down projection once more, all sizes of a predictor, the hidden states of a
                  variant of the model per layer, MLPs of the blocks that run
    place         a record per unit, and what each token that is replayed uses
    order         counts of pairs 2 F^2 (4 F^2 from 65,536 tokens on) as often as the heuristic says, and one run of
                  sorted pairs
    gram          a layer's weights, the text's hidden states twice, a layer's Gram matrices, the signals of the blocks
                  that run
    quantize      the largest matrix in float32 and a layer's codes, or twice the codes of what layers share; with gptq
                  a layer's Gram matrices, the largest twice more, and the largest matrix four times
    package       twice the largest section or tensor
    verify        the DRAM budget, a layer's weights or a part of the head, one block's logits in float64
    export        the largest tensor three times in float32

Disk is what stays in the build folder: statistics L (U T / 8 + 2 T H) once for each pass over the text, again for its
shards, and two layers' hidden states while it runs; predictors of all sizes; orders and tiers; codes of all weights;
the artifact, which is as large again; what is exported of it, as its format says; the weights in float32 if they are
trained, and what training goes on from; Gram matrices in float32 with gptq.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from coldpress.compiler.activity.forward import HEAD_ROWS
from coldpress.compiler.candidates import families_for, methods_for
from coldpress.compiler.cost_model import HasShapes, flash_bytes, resident_bytes, tensor_bytes, unit_bytes
from coldpress.compiler.stages import distill, export, relufy
from coldpress.compiler.stages.allocate._task import Rule
from coldpress.compiler.stages.export._target import Target
from coldpress.compiler.stages.order._task import Heuristic
from coldpress.compiler.stages.quantize._weights import Algorithm
from coldpress.runtime.plugins import load, options_of
from coldpress.runtime.sparsity import DensitySource, Selector
from coldpress.schemas.base import Options
from coldpress.schemas.families import WHOLE_MLP, FamilyName, FormatName, Method, num_experts, num_units
from coldpress.schemas.predictors import matrix_shapes

PYTHON_BYTES = 150 << 20
TORCH_BYTES = 500 << 20
"""A process that has imported numpy, or torch and transformers, before it does anything."""
BLOCK_BYTES = 64 << 20
"""Buffers of fixed size: blocks that are read, encoded, hashed or written at a time."""
SORTED_PAIRS_BYTES = 256 << 20
PREDICTOR_STATE_BYTES = 20
"""Per parameter of a predictor: weights, gradients and two moments in float32, and the best ones so far."""
PREDICTOR_PARAMETER_SHARE = 0.1
"""Of the model's parameters; PowerInfer's predictors have 6 % (5.1)."""
EFFECT_TOKENS = 1024
"""Tokens that `size` runs a variant of the model per layer on (compiler/stages/size)."""
COMPARED_LOGIT_BYTES = 4 * 4 * 4
"""Per logit of a block while `allocate` compares: of four variants in float32, with copies
(compiler/stages/allocate)."""
LADDER_SHARE = 3
"""All sizes of a ladder over its largest: they grow by a third or a half (compiler/stages/predict)."""
LOGIT_BYTES = 32
"""Per logit of a block: the source's and the artifact's in float32, three copies in float64."""
REPLAYED_TOKENS, REPLAYED_LAYERS = 768, 4
"""What `place` replays at most, with the tokens before that warm up the cache (compiler/stages/place/_counts.py)."""
PASS_THREADS = 8
"""Cores that calibrate, distill and recalibrate take at most (rules/calibrate.smk)."""
LAYERWISE = ("predict", "order", "quantize")
"""Stages whose jobs, of some layers each, run side by side."""
TEXT_STAGES = ("calibrate", "recalibrate", "predict", "place", "order")
"""Stages that need less memory where there are fewer calibration tokens."""
UNIT_RECORD_BYTES = 128
"""A unit in `place`: frequency, value, tier, and its share of the solver's rows."""
LAYER_OVERHEAD_BYTES = 32 << 10
"""Headers, histograms and the record's own lines, per layer and family."""
ARTIFACT_OVERHEAD_BYTES = 64 << 20
"""Tokenizer, documents, tables and what the file system keeps for itself."""


@dataclass(frozen=True)
class Build:
    """A build, as far as its needs hang on it."""

    model: HasShapes
    method: Method
    format: FormatName
    num_tokens: int
    block_tokens: int
    dram_budget_bytes: int
    relufy: bool
    distill: bool
    threads: int
    order: str
    shards: int
    algorithm: str = "rtn"
    gram_tokens: int = 32768
    density_allocation: str = "uniform"
    allocation_tokens: int = 2048
    predictor_batch_tokens: int = 256
    relufy_rank: int = 0
    recipe: str = "self"
    recipe_options: Options = field(default_factory=dict)
    export: str | None = None
    export_options: Options = field(default_factory=dict)
    weight_bytes: int | None = None
    """Of all tensors as they are stored; where only shapes are known, two each, as hub models have them."""
    options: Options = field(default_factory=dict)

    @property
    def _methods(self) -> tuple[str, ...]:
        return methods_for(self.method, self.model.spec.exact_zeros, self.model.spec.is_mixture)

    @property
    def families(self) -> tuple[FamilyName, ...]:
        """What a unit is."""
        return families_for(self.method, self.options, self.model.spec)

    @property
    def layer_units(self) -> int:
        """Units of one layer, of all families."""
        return sum(num_units(family, self.model.spec) for family in self.families)

    @property
    def has_predictors(self) -> bool:
        """Whether `predict` is a stage of the build."""
        return any(load("coldpress.runtime.sparsity", Selector, method).NEEDS_PREDICTORS for method in self._methods)

    @property
    def has_gram(self) -> bool:
        """Whether `gram` is a stage of the build."""
        return load("coldpress.compiler.stages.quantize", Algorithm, self.algorithm).NEEDS_GRAM

    @property
    def counts_again(self) -> bool:
        """Whether `recalibrate` passes over the text once more."""
        return self.distill or self.model.spec.is_mixture or bool(self.density_sources - {"whole", "measured"})

    @property
    def density_sources(self) -> set[DensitySource]:
        """Where the densities of its methods come from."""
        exact = self.model.spec.exact_zeros
        return {load("coldpress.runtime.sparsity", Selector, name).densities(exact) for name in self._methods}


def ram_bytes(build: Build) -> dict[str, int]:
    """Stage -> the most that one job of it holds in memory."""
    calibrate = _calibrate_ram(build)
    needs = {
        "relufy": relufy.ram_bytes(_distilled(build), build.relufy_rank) if build.relufy else 0,
        "calibrate": calibrate,
        "distill": distill.ram_bytes(_distilled(build), build.recipe, build.recipe_options) if build.distill else 0,
        "recalibrate": calibrate if build.counts_again else PYTHON_BYTES,
        "allocate": _allocate_ram(build),
        "predict": _predict_ram(build) if build.has_predictors else 0,
        "size": _size_ram(build) if build.has_predictors else 0,
        "place": _place_ram(build),
        "order": _order_ram(build),
        "gram": _gram_ram(build) if build.has_gram else 0,
        "quantize": _quantize_ram(build),
        "package": _package_ram(build),
        "verify": _verify_ram(build),
        "export": _export_ram(build) if build.export else 0,
    }
    return {stage: amount for stage, amount in needs.items() if amount}


def disk_bytes(build: Build) -> dict[str, int]:
    """Stage -> the bytes that it leaves in the build folder, of all layers."""
    spec = build.model.spec
    statistics, copies = _statistics_bytes(build), 2 if build.shards > 1 else 1
    parameters = build.model.num_parameters
    predictors = int(2 * PREDICTOR_PARAMETER_SHARE * parameters) if build.has_predictors else 0
    codes = flash_bytes(build.families, spec, build.format) + resident_bytes(build.model, build.families, build.format)
    units = build.layer_units * spec.num_hidden_layers
    needs = {
        "relufy": relufy.disk_bytes(_distilled(build), build.relufy_rank) if build.relufy else 0,
        "calibrate": statistics * copies,
        "distill": distill.disk_bytes(_distilled(build), build.recipe, build.recipe_options) if build.distill else 0,
        "recalibrate": statistics * copies if build.counts_again else 0,
        "predict": LADDER_SHARE * predictors,
        "place": units,
        "order": 4 * units,
        "gram": spec.num_hidden_layers * sum(_gram_bytes(build)) if build.has_gram else 0,
        "quantize": codes,
        "package": codes + predictors + ARTIFACT_OVERHEAD_BYTES,
        "export": _exported_bytes(build, build.export) + ARTIFACT_OVERHEAD_BYTES if build.export else 0,
    }
    return {stage: amount for stage, amount in needs.items() if amount}


def _distilled(build: Build) -> distill.Size:
    stored = 2 * build.model.num_parameters if build.weight_bytes is None else build.weight_bytes
    shapes = {role: tensor.shape for role, tensor in build.model.tensors.items()}
    threads = min(build.threads, PASS_THREADS)
    return distill.Size(build.model.spec, shapes, build.families, build.block_tokens, threads, stored, build.format)


def _statistics_bytes(build: Build) -> int:
    """Activation bits, counts per unit and block, MLP inputs of every layer; hidden states of two (float32)."""
    spec, tokens = build.model.spec, build.num_tokens
    num_blocks = -(-tokens // build.block_tokens)
    per_unit = -(-tokens // 8) + 2 * num_blocks + 8
    per_layer = build.layer_units * per_unit + 2 * tokens * spec.hidden_size
    overhead = LAYER_OVERHEAD_BYTES * (1 + len(build.families))
    return spec.num_hidden_layers * (per_layer + overhead) + 2 * 4 * tokens * spec.hidden_size


def _layer_weights(build: Build) -> int:
    """A layer's weights in float32, while its largest matrix is read."""
    shapes = _shapes(build.model, 0)
    return 4 * (sum(map(prod, shapes)) + _largest(shapes))


def _calibrate_ram(build: Build) -> int:
    spec, threads = build.model.spec, min(build.threads, PASS_THREADS)
    inner = spec.intermediate_size * spec.num_experts
    running = threads * build.block_tokens * 4 * (6 * inner + 8 * spec.hidden_size * spec.num_experts)
    return TORCH_BYTES + _layer_weights(build) + running + build.layer_units * build.num_tokens // 4


def _allocate_ram(build: Build) -> int:
    spec = build.model.spec
    rule, families = load("coldpress.compiler.stages.allocate", Rule, build.density_allocation), len(build.families)
    variants = rule.num_variants(spec.num_hidden_layers, families)
    if not variants:
        return PYTHON_BYTES
    tokens = min(max(build.allocation_tokens, build.block_tokens), build.num_tokens)
    inner = spec.intermediate_size * spec.num_experts
    running = min(build.threads, PASS_THREADS) * build.block_tokens * 4 * 8 * inner
    hidden = (2 * variants + 1) * 4 * tokens * spec.hidden_size
    logits = COMPARED_LOGIT_BYTES * build.block_tokens * spec.vocab_size
    return TORCH_BYTES + _layer_weights(build) + running + hidden + logits


def _predict_ram(build: Build) -> int:
    spec, tokens, units = build.model.spec, build.num_tokens, num_units(WHOLE_MLP, build.model.spec)
    labels = spec.intermediate_size * (spec.num_experts_per_tok + (2 if spec.is_mixture else 1))
    data = tokens * (6 * spec.hidden_size + labels) + tokens * units // 8
    gate = 2 * 4 * spec.hidden_size * units
    state = PREDICTOR_STATE_BYTES * _largest_predictor(build)
    scored = spec.intermediate_size * spec.num_experts_per_tok
    scores = 4 * 4 * max(min(build.predictor_batch_tokens, tokens), tokens // 10) * scored
    return TORCH_BYTES + data + gate + state + scores


def _largest_predictor(build: Build) -> int:
    """Parameters of the largest that is allowed (compiler/stages/allocate): as many as the matrix whose sign it
    predicts has, of what a token multiplies."""
    spec = build.model.spec
    inner = spec.intermediate_size * spec.num_experts_per_tok
    rank = spec.hidden_size * inner // (spec.hidden_size + inner)
    return sum(map(prod, matrix_shapes(spec, rank).values()))


def _size_ram(build: Build) -> int:
    spec = build.model.spec
    inner = spec.intermediate_size * spec.num_experts
    beside = 8 * spec.hidden_size * spec.num_experts if spec.is_mixture else 0
    running = min(build.threads, PASS_THREADS) * build.block_tokens * 4 * (8 * inner + beside)
    hidden = 2 * 4 * (spec.num_hidden_layers + 1) * EFFECT_TOKENS * spec.hidden_size  # of a variant per layer, twice
    networks = 4 * LADDER_SHARE * _largest_predictor(build)
    return TORCH_BYTES + _layer_weights(build) + running + hidden + 4 * spec.hidden_size * inner + networks


def _place_ram(build: Build) -> int:
    replayed = 8 * min(REPLAYED_TOKENS, build.num_tokens) * build.layer_units
    layers = build.model.spec.num_hidden_layers
    return PYTHON_BYTES + build.layer_units * layers * UNIT_RECORD_BYTES + min(REPLAYED_LAYERS, layers) * replayed


def _order_ram(build: Build) -> int:
    spec = build.model.spec
    units = max(num_units(family, spec) for family in build.families)
    whole = build.density_sources == {"whole"}  # then experts are what is ordered
    counted = [(num_experts(family, spec), num_units(family, spec)) for family in build.families]
    paired = max(experts if whole and experts > 1 else units_of for experts, units_of in counted)
    counts = (2 if build.num_tokens < 1 << 16 else 4) * paired**2
    counts *= load("coldpress.compiler.stages.order", Heuristic, build.order).COUNT_SQUARES
    return PYTHON_BYTES + counts + SORTED_PAIRS_BYTES + build.num_tokens * units // 4


def _gram_bytes(build: Build) -> list[int]:
    """Of one layer's Gram matrices: attention's input and its mixed heads; of one MLP, its input and its inner
    activation."""
    spec = build.model.spec
    heads = spec.num_attention_heads * spec.head_dim
    of_mlp = () if spec.is_mixture else (spec.hidden_size, spec.intermediate_size)
    return [4 * size**2 for size in (spec.hidden_size, heads, *of_mlp)]


def _gram_ram(build: Build) -> int:
    spec, threads = build.model.spec, min(build.threads, PASS_THREADS)
    inner = spec.intermediate_size * spec.num_experts
    running = threads * build.block_tokens * 4 * (8 * inner + 12 * spec.hidden_size * spec.num_experts)
    hidden = 2 * 4 * min(build.gram_tokens, build.num_tokens) * spec.hidden_size
    return TORCH_BYTES + _layer_weights(build) + running + hidden + sum(_gram_bytes(build))


def _quantize_ram(build: Build) -> int:
    reading = (4 + 2) * _largest(_shapes(build.model, 0))
    if build.has_gram:
        grams = _gram_bytes(build)
        reading = 4 * 4 * _largest(_shapes(build.model, 0)) + sum(grams) + 2 * max(grams)
    return PYTHON_BYTES + BLOCK_BYTES + max(reading + _layer_code_bytes(build), 2 * sum(_shared_code_bytes(build)))


def _package_ram(build: Build) -> int:
    return PYTHON_BYTES + BLOCK_BYTES + 2 * max(_largest_section_bytes(build), *_shared_code_bytes(build))


def _verify_ram(build: Build) -> int:
    spec = build.model.spec
    head = 2 * 4 * min(HEAD_ROWS, spec.vocab_size) * spec.hidden_size
    logits = LOGIT_BYTES * build.block_tokens * spec.vocab_size
    return TORCH_BYTES + 2 * BLOCK_BYTES + build.dram_budget_bytes + max(_layer_weights(build), head) + logits


def _export_ram(build: Build) -> int:
    return PYTHON_BYTES + BLOCK_BYTES + 3 * 4 * _largest(source.shape for source in build.model.tensors.values())


def _exported_bytes(build: Build, target_name: str) -> int:
    target = load(export.TARGETS, Target, target_name)
    shapes = {role: source.shape for role, source in build.model.tensors.items()}
    if build.model.spec.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return target.disk_bytes(shapes, build.format, options_of(target, build.export_options))


def _shared_code_bytes(build: Build) -> list[int]:
    """Codes of the tensors outside the layers."""
    shared = ((role, source.shape) for role, source in build.model.tensors.items() if not role.startswith("layers."))
    return [tensor_bytes(role, shape, build.format) for role, shape in shared]


def _layer_code_bytes(build: Build) -> int:
    shapes = {role: source.shape for role, source in build.model.tensors.items() if role.startswith("layers.0.")}
    return sum(tensor_bytes(role, shape, build.format) for role, shape in shapes.items())


def _largest_section_bytes(build: Build) -> int:
    spec = build.model.spec
    return max(num_units(family, spec) * unit_bytes(family, spec, build.format) for family in build.families)


def _shapes(model: HasShapes, layer: int) -> list[tuple[int, ...]]:
    """All layers of a model are alike."""
    return [source.shape for role, source in model.tensors.items() if role.startswith(f"layers.{layer}.")]


def _largest(shapes: Iterable[tuple[int, ...]]) -> int:
    return max(map(prod, shapes))
