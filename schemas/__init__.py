"""The records that stages, compiler and runtime exchange: pure data, no arrays, no I/O, no torch."""
