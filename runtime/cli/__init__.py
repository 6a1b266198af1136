"""The command `coldpress-run`."""
