"""Traces with stated statistics, drawn to simulate what no model at hand does (runtime/simulate.py)."""
