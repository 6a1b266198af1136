"""Builds many models for many devices and floors, and holds the results to those that were accepted.

`cells.py` reads what to build, `results.py` keeps what came out, `gate.py` compares it with `accepted.json`, `pages.py`
writes the index, and `run.py` does all of it.
"""
