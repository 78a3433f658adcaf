"""What training measures of itself: readings in, signals out, one estimator a file."""
