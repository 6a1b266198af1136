"""Fuzzes artifacts, checkpoints and tokenizers."""
