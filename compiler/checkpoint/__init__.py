"""A Hugging Face checkpoint: where it comes from, what of it is believed, and its tensors by role."""
