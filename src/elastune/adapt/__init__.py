"""Monitors and policies: what changes while a training runs."""
