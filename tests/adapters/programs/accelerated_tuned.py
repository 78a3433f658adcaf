"""The script of ``accelerated.py`` with what a search needs beside it."""

from __future__ import annotations

from accelerated import Accelerator, main

__all__ = ["Accelerator", "main"]
objectives = {"accuracy": "max"}


def space(trial) -> dict:
    return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True), "num_epochs": 2}
