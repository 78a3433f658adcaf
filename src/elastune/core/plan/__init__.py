"""Predict without running: pure formulas and fits."""
