"""Parse, call, print."""

from elastune.cli.app import main

__all__ = ["main"]
