"""The user's program: loading its file, its settings, its search space and the digest of its source."""
