"""Compares cells of the papers' tables with ours, one file per paper; benchmarks.paper_tables prints them."""
