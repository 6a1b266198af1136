"""Cells of the papers' tables beside ours, one file per paper; benchmarks.paper_tables prints them."""
