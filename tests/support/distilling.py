"""Makes a tiny model, random text and masks for tests of distillation, and measures divergence on other text."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from coldpress.compiler.io import save_arrays
from coldpress.compiler.stages.distill import DistillConfig
from coldpress.compiler.stages.ingest import IngestConfig
from coldpress.compiler.stages.ingest import run as ingest
from coldpress.schemas.corpus import SPLITS, Corpus, TokenBlocks
from coldpress.schemas.model import Model
from coldpress.schemas.sparsity import Sparsity
from tests.support.methods import fitted
from tests.support.models import write_model
from tests.support.statistics import sparsity_of, workspace

LAYERS, HIDDEN, UNITS, VOCAB = 2, 32, 80, 320
QUICK = DistillConfig(
    distill_steps=20,
    distill_blocks=4,
    learning_rate=1e-3,
    validation_blocks=8,
    distill_dense_share=0.0,
    distill_kept_gain=1.0,
    compute_device="cpu",
)
"""A short run that does not move weights back after training."""


def model_at(
    folder: Path, model_type: str = "llama", relu: bool = False, tie: bool = False, dtype: str = "float32"
) -> Model:
    """Writes and ingests a tiny model."""
    write_model(
        folder / "checkpoint",
        model_type,
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=UNITS,
        vocab_size=VOCAB,
        context=64,
        relu=relu,
        tie=tie,
        dtype=dtype,
    )
    return ingest(IngestConfig(model=str(folder / "checkpoint")), workspace(folder / "ingest"))


def corpus_at(folder: Path) -> Corpus:
    """Writes a corpus of 48 random blocks per split, from which only the dense model's outputs can be learned."""
    tokens = np.random.default_rng(0).integers(2, VOCAB, (len(SPLITS), 48, 32)).astype(np.int32)
    splits = tuple(
        TokenBlocks(
            split=name,
            arrays=save_arrays(folder / f"{name}.safetensors", {"tokens": blocks}),
            num_blocks=48,
            block_tokens=32,
        )
        for name, blocks in zip(SPLITS, tokens, strict=True)
    )
    return Corpus(name="random", text_sha256="0" * 64, splits=splits)


def top_k(model: Model, folder: Path, density: float = 0.3) -> Sparsity:
    sparsity = sparsity_of("topk", {"mlp_in": (density,) * LAYERS, "mlp_mid": (density,) * LAYERS})
    return fitted(sparsity, model.spec, folder)


def load(model: Model) -> torch.nn.Module:
    """Loads the model from the record's folder with transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()


def held_out_divergence(teacher: torch.nn.Module, weights: torch.nn.Module, density: float) -> float:
    """Returns the KL divergence, in nats per token, of the masked model from `teacher` on other random blocks.

    The masks are made with sort, not with the top-k under test.
    """

    def mask(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        kept = round(density * inputs[0].shape[-1])
        least = inputs[0].abs().sort(dim=-1).values[..., -kept, None]
        return (inputs[0] * (inputs[0].abs() >= least),)

    for layer in weights.get_submodule("model.layers"):
        layer.mlp.register_forward_pre_hook(mask)
        layer.mlp.down_proj.register_forward_pre_hook(mask)
    tokens = torch.tensor(np.random.default_rng(9).integers(2, VOCAB, (12, 32)))
    with torch.no_grad():
        p, q = (torch.log_softmax(model(input_ids=tokens).logits, dim=-1) for model in (teacher, weights))
    return float((p.exp() * (p - q)).sum(dim=-1).mean())
