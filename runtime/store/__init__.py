"""Unit ids in, rows in memory out: cache, slots, read plan and reads."""
