"""Agents as actors of a Ray cluster."""
