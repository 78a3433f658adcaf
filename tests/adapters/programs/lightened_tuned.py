"""The script of ``lightened.py`` with what a search needs beside it."""

from __future__ import annotations

from lightened import ElastuneStrategy, config, main

__all__ = ["ElastuneStrategy", "config", "main"]
objectives = {"accuracy": "max"}


def space(trial) -> dict:
    return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}
