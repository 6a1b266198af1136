"""Provides what several benchmarks share: models with text, planted artifacts, devices, baselines."""
