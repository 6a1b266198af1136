"""Applies plausible mistakes, one at a time, and checks whether the tests notice them."""
