"""Reads the device profiles that a user names."""
