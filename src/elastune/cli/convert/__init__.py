"""Rewrites a plain training script as a program for a session."""
