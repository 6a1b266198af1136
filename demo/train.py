"""Decides the demo model: trains it from the standard library's own documentation.

Reads the train and validation splits of coldpress.compiler.stages.tokenize.pydoc, nothing else. Writes a Hugging Face
folder (fp16 safetensors, configuration, tokenizer) and a JSON file with the run's figures.
Of the weights seen at the evaluations, those with the lowest validation loss are kept;
the test split is only measured at the end. Same seed, threads, library versions and kind
of CPU: same weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coldpress.compiler.stages.tokenize import pydoc as corpus
from demo.gates import GatePenalty, ZeroCounter
from demo.tokens import pack, train_tokenizer

HERE = Path(__file__).parent
EVALUATION_ROWS = 16


@dataclass(frozen=True)
class Recipe:
    """Everything the weights depend on, apart from text, library versions and CPU."""

    steps: int = 1600
    seed: int = 20
    threads: int = 1
    batch_rows: int = 8
    context_tokens: int = 256
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 1024
    layers: int = 4
    heads: int = 4
    initial_spread: float = 0.05  # Llama's 0.02 suits far wider layers
    peak_rate: float = 2e-3
    final_rate_share: float = 0.02
    warmup_steps: int = 200
    weight_decay: float = 0.1
    dropout: float = 0.1
    wanted_zeros: float = 0.96
    bfloat16: bool = True


def model_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """A Llama with ReLU gates, one key/value head and tied embeddings."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=1,
        head_dim=recipe.hidden_size // recipe.heads,
        hidden_act="relu",
        max_position_embeddings=recipe.context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        initializer_range=recipe.initial_spread,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, with the output projections of each block scaled down."""
    model = LlamaForCausalLM(model_config(recipe, tokenizer))
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_(1 / math.sqrt(2 * recipe.layers))
    return model


def add_dropout(model: LlamaForCausalLM, share: float) -> None:
    """Drops values of each MLP's output in training; Llama itself has no such place."""

    def drop(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return nn.functional.dropout(output, share, module.training)

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(drop)
    model.model.embed_tokens.register_forward_hook(drop)


def batches(stream: Tensor, recipe: Recipe, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless batches; each pass cuts the stream at a new offset, in a new order."""
    length = recipe.context_tokens + 1  # the last token of a row is only a target
    while True:
        offset = int(torch.randint(length, (1,), generator=generator))
        rows = stream[offset : offset + (len(stream) - offset) // length * length]
        rows = rows.view(-1, length)
        order = torch.randperm(len(rows), generator=generator)
        for picked in order.split(recipe.batch_rows):
            if len(picked) == recipe.batch_rows:
                yield rows[picked]


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to a small share of the peak."""
    if step < recipe.warmup_steps:
        return recipe.peak_rate * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(recipe.steps - recipe.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    share = recipe.final_rate_share
    return recipe.peak_rate * (share + (1 - share) * cosine)


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' scales alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    scales = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.98), fused=True)


def token_loss(model: LlamaForCausalLM, rows: Tensor, bfloat16: bool) -> Tensor:
    """Mean cross-entropy of each row's next tokens, in nats."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, stream: Tensor, context_tokens: int) -> float:
    """Mean loss in nats per token over the whole stream, in rows of the full context."""
    was_training = model.training
    model.eval()
    length = context_tokens + 1
    # Rows overlap by the one token that is the last target of one and the first input
    # of the next.
    rows = stream.unfold(0, length, context_tokens)
    losses = [float(token_loss(model, part, bfloat16=False)) * len(part) for part in rows.split(EVALUATION_ROWS)]
    model.train(was_training)
    return sum(losses) / len(rows)


@torch.no_grad()
def zero_shares(model: LlamaForCausalLM, stream: Tensor, context_tokens: int) -> list[float]:
    """Share of exact zeros of relu(gate), by layer, over the stream."""
    model.eval()
    rows = stream[: len(stream) // context_tokens * context_tokens].view(-1, context_tokens)
    with ZeroCounter(model) as counter:
        for part in rows.split(EVALUATION_ROWS):
            model(input_ids=part, use_cache=False)
    return counter.shares()


class Best:
    """The weights with the lowest validation loss so far, also kept on disk if asked."""

    def __init__(self, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        self.loss = math.inf
        self.step = 0
        self.weights: dict[str, Tensor] = {}

    def offer(self, model: nn.Module, loss: float, step: int) -> None:
        """Keeps a copy if `loss` is the lowest yet."""
        if loss >= self.loss:
            return
        self.loss, self.step = loss, step
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}
        if self.checkpoint is not None:
            torch.save({"step": step, "loss": loss, "weights": self.weights}, self.checkpoint)


def train_step(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    penalty: GatePenalty,
    rows: Tensor,
    rate: float,
    bfloat16: bool,
) -> float:
    """One update; returns the cross-entropy without the penalty."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = token_loss(model, rows, bfloat16)
    (loss + penalty.collect()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train(
    model: LlamaForCausalLM,
    recipe: Recipe,
    streams: dict[str, Tensor],
    evaluate_every: int,
    minutes: float,
    checkpoint: Path | None = None,
) -> dict[str, Any]:
    """Trains in place, leaves the best weights in `model`, returns the run's figures."""
    penalty = GatePenalty(model, recipe.wanted_zeros)
    add_dropout(model, recipe.dropout)
    optimizer = make_optimizer(model, recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    best, losses, history = Best(checkpoint), [], []
    start = time.monotonic()
    model.train()
    endless = batches(streams["train"], recipe, generator)
    for step, rows in zip(range(recipe.steps), endless, strict=False):
        rate = learning_rate(step, recipe)
        losses.append(train_step(model, optimizer, penalty, rows, rate, recipe.bfloat16))
        seconds = time.monotonic() - start
        # The clock is only a brake: a run it stops is not the recipe's run.
        last = step + 1 == recipe.steps or seconds > minutes * 60
        if last or (step + 1) % evaluate_every == 0:
            valid = evaluate(model, streams["validation"], recipe.context_tokens)
            best.offer(model, valid, step + 1)
            recent = losses[-evaluate_every:]
            history.append((step + 1, sum(recent) / len(recent), valid))
            report(history[-1], penalty, seconds, recipe)
        if last:
            break
    model.load_state_dict(best.weights)
    return run_figures(recipe, losses, history, best, time.monotonic() - start)


def report(entry: tuple[int, float, float], penalty: GatePenalty, seconds: float, recipe: Recipe) -> None:
    """One line of progress."""
    step, trained, valid = entry
    speed = step * recipe.batch_rows * recipe.context_tokens / seconds
    low, high = min(penalty.strengths), max(penalty.strengths)
    print(
        f"step {step}/{recipe.steps}  train {trained:.3f}  validation {valid:.3f}"
        f"  {speed:.0f} tokens/s  {seconds / 60:.1f} min  penalty {low:.4f}..{high:.4f}",
        flush=True,
    )


def run_figures(
    recipe: Recipe,
    losses: list[float],
    history: list[tuple[int, float, float]],
    best: Best,
    seconds: float,
) -> dict[str, Any]:
    """What the training loop itself knows."""
    tokens = len(losses) * recipe.batch_rows * recipe.context_tokens
    trained = {step: loss for step, loss, _ in history}
    return {
        "steps": len(losses),
        "kept_step": best.step,
        "tokens_seen": tokens,
        "wall_seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds, 1),
        "train_loss": round(trained[best.step], 4),
        "history": [
            {"step": step, "train_loss": round(a, 4), "validation_loss": round(b, 4)} for step, a, b in history
        ],
    }


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the Hugging Face folder with fp16 weights; touches no other file in it."""
    folder.mkdir(parents=True, exist_ok=True)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, do_sample=False)
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure_saved(folder: Path, texts: dict[str, list[str]], context_tokens: int) -> dict[str, Any]:
    """Figures of the folder as a user would load it, fp16 rounding included."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: dict[str, Any] = {}
    for split in ("validation", "test"):
        stream = pack(tokenizer, texts[split])
        loss = evaluate(model, stream, context_tokens)
        size = sum(len(text.encode("utf-8", "replace")) for text in texts[split])
        found[split] = {
            "loss": round(loss, 4),
            "perplexity": round(math.exp(loss), 3),
            "bits_per_byte": round(loss / math.log(2) * len(stream) / size, 4),
            "tokens": len(stream),
        }
        if split == "validation":
            shares = zero_shares(model, stream, context_tokens)
            found["exact_zeros_per_layer"] = [round(share, 4) for share in shares]
    weights = (folder / "model.safetensors").read_bytes()
    found["weights_sha256"] = hashlib.sha256(weights).hexdigest()
    found["parameters"] = sum(p.numel() for p in model.parameters())
    return found


def seed_everything(recipe: Recipe) -> None:
    """Fixes what can be fixed: the seed, the thread count and the choice of kernels."""
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)


def run(
    recipe: Recipe,
    texts: dict[str, list[str]],
    folder: Path,
    evaluate_every: int,
    minutes: float,
    checkpoint: Path | None = None,
) -> dict[str, Any]:
    """The whole recipe, from texts to a measured folder; returns its figures."""
    seed_everything(recipe)
    tokenizer = train_tokenizer(texts["train"], recipe.vocab_size, recipe.context_tokens)
    streams = {split: pack(tokenizer, texts[split]) for split in ("train", "validation")}
    print(f"{len(streams['train'])} training tokens", flush=True)
    model = build_model(recipe, tokenizer)
    figures = {
        "recipe": asdict(recipe),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "train_tokens": len(streams["train"]),
    }
    figures |= train(model, recipe, streams, evaluate_every, minutes, checkpoint)
    save(model, tokenizer, folder)
    return figures | measure_saved(folder, texts, recipe.context_tokens)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; its defaults are the committed model's recipe."""
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=main.__doc__)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--threads", type=int, default=Recipe.threads)
    parser.add_argument("--peak-rate", type=float, default=Recipe.peak_rate)
    parser.add_argument("--dropout", type=float, default=Recipe.dropout)
    parser.add_argument("--wanted-zeros", type=float, default=Recipe.wanted_zeros)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop early after these")
    parser.add_argument("--evaluate-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--checkpoint", type=Path, help="keep the best weights here meanwhile")
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--figures", type=Path, default=HERE / "training.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Trains the demo model and writes it with its figures."""
    args = parse(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    recipe = Recipe(
        steps=args.steps,
        seed=args.seed,
        threads=args.threads,
        peak_rate=args.peak_rate,
        dropout=args.dropout,
        wanted_zeros=args.wanted_zeros,
    )
    texts = {split: corpus.documents(split) for split in corpus.SPLITS}
    figures = run(recipe, texts, args.out, args.evaluate_every, args.minutes, args.checkpoint)
    args.figures.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    shown = {key: value for key, value in figures.items() if key not in ("recipe", "history")}
    print(json.dumps(shown, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
