"""Clusters: one launcher a file."""
