"""Optimizers, schedules, networks and data sets by name, and the spaces over them."""
