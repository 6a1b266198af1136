"""Trains one model to match another: shared by the stages that change weights (relufy, distill)."""
