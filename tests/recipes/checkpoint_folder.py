"""A folder as Hugging Face's hub has them, made here: a tiny Llama and a tokenizer that learned its merges from a text."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def make_checkpoint(folder: Path, text: str, vocabulary_size: int = 320, tie_word_embeddings: bool = False) -> Path:
    """Write model and tokenizer.

    Args:
        folder: where to.
        text: what the tokenizer learns from.
        vocabulary_size: of both; the 256 bytes included.
        tie_word_embeddings: whether embedding and head are one parameter.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=vocabulary_size, initial_alphabet=alphabet))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tie_word_embeddings,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
