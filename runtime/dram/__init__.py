"""Chooses the plan of a run, and counts the bytes of DRAM that each part of it takes."""
