"""Decides how the demo model's text becomes tokens.

Reads the training split's documents. Returns a byte-level BPE tokenizer that no text can
defeat (every byte is in its alphabet), and packed token streams in which every document
stands between <s> and </s>.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]


def train_tokenizer(texts: Sequence[str], vocab_size: int, context_tokens: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE learned from `texts`; it adds no special token by itself."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer, length=len(texts))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """All documents in one stream of token ids."""
    ids: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(list(texts)):
        ids.append(tokenizer.bos_token_id)
        ids.extend(encoding.ids)
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids, dtype=torch.long)
