"""coldpress: compile a language model once; run it from flash with a fraction of its size in DRAM."""
