"""The command `coldpress`."""
