"""The script of ``fabricated.py`` with what a search needs beside it."""

from __future__ import annotations

from fabricated import Fabric, config, main

__all__ = ["Fabric", "config", "main"]
objectives = {"accuracy": "max"}


def space(trial) -> dict:
    return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}
