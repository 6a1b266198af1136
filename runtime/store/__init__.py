"""Ids in, rows in memory out: cache, slots, read plan and reads under one DRAM budget, and what observes them."""
