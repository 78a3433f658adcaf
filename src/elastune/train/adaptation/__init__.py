"""What a run's policies decide, and how the training loop applies it."""
