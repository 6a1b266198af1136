"""Training a model by another: what the stages that give a model other weights share (relufy, distill)."""
