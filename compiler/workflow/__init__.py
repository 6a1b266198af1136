"""What surrounds the stages: settings, profiles, the digest of code, the lock, progress and the final screen."""
