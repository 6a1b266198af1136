"""Surroundings of the stages: settings, inputs, progress, last words and the final screen."""
