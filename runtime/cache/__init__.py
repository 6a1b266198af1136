"""Cache policies, one per file: which units of a layer's family stay in DRAM. Pure decisions on integer ids."""
