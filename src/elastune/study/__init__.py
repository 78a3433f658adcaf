"""The study loop."""
