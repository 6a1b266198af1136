"""A Hugging Face checkpoint: where it comes from, which parts are believed, and its tensors by role."""
