"""Benchmarks: each module answers one question and prints the answer as one JSON object."""
