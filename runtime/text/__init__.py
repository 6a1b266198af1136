"""Turns text into token ids and back."""
