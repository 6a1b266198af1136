"""Benchmarks: each module answers one question and ends in one JSON object."""
