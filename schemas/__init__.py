"""The records that stages, compiler and runtime exchange: pure data, no arrays, no I/O, no torch."""

__version__ = "0.1.0"
