"""What training can tell of itself: readings in, signals out, one estimator a file."""
