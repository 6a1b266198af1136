"""Evaluates a model under a selector with transformers' modules: the reference of benchmarks and tests for the
runtime."""
