"""What llama.cpp's files hold: GGUF's header and types, and each architecture's tensors and arithmetic."""
