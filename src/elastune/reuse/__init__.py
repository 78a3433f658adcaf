"""Finished trials as assets: ensembles of them, averages of their weights."""
