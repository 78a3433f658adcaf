"""Which trials pause, go on, or begin from another's checkpoint."""
