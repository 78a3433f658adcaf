"""Figures as data, and their renderers."""
