"""Contents of llama.cpp's files: GGUF's header and types, and each architecture's tensors and arithmetic."""
