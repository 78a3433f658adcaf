"""Monitors: readings of steps in, signals out, one estimator a file."""
