"""Sums of gradients that travel in fewer bytes."""
