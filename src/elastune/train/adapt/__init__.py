"""Monitors and policies at work in the training loop."""
