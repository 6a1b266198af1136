"""Plausible mistakes, applied one at a time, and whether the tests notice them."""
