"""Fuzzing of artifacts, checkpoints and tokenizers."""
