"""Which plan a run uses, and how many bytes of DRAM each part of it takes."""
