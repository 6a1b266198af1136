"""Measures what leaving out units, formats and drafts cost a model in quality."""
