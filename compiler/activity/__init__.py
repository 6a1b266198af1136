"""Runs a model on calibration text, layer by layer, and counts the signals of its units."""
