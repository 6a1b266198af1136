"""Device profiles that a user names, as records."""
