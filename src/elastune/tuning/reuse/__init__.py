"""Use finished trials again: ensembles of them, and averages of their weights."""
