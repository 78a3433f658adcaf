"""Optimizers, schedules, networks and data sets by name, and search spaces over them."""
