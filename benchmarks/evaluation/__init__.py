"""Evaluates a model under a selector with transformers' modules; benchmarks and tests hold the runtime to it."""
