"""The demonstration model: its corpus, its training recipe and its weights.

Nothing of the compiler is imported here; the compiler treats demo/model as any other
Hugging Face folder.
"""
