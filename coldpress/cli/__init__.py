"""The command `coldpress`: one front door to the compiler and the runtime."""
