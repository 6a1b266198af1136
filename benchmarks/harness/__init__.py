"""What all benchmarks share: sizes, kept rows, progress, records, and what makes a record stale."""
