"""The reference runtime: numpy and a small C++ core, no torch."""
