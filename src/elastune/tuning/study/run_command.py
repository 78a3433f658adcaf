"""The ``elastune run`` command that trains given settings again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastune.core.command import TrainingCommand, provided_values
from elastune.core.divergence import FACTOR

FLAGS = {
    "workers": "--workers",
    "mode": "--mode",
    "num_slots": "--slots",
    "device": "--device",
    "precision": "--precision",
    "micro_batch": "--micro-batch",
    "threads": "--threads",
    "mesh": "--mesh",
    "mechanism": "--mechanism",
    "copies": "--copies",
    "virtual_tensor": "--virtual-tensor",
    "schedule": "--schedule",
    "zero_stage": "--zero-stage",
    "compress": "--compress",
    "topology": "--topology",
    "bucket_bytes": "--bucket-bytes",
    "sync": "--sync",
    "sync_schedule": "--sync-schedule",
}
"""Execution settings that a command names, and their options."""

REPEATED = {"policy": "--policy", "monitor": "--monitor"}
"""Options that may come several times. A journal holds one text, a list of texts, or "none"."""

DEFAULTS = {
    "precision": "fp32",
    "micro_batch": None,
    "threads": 1,
    "mechanism": "replicated",
    "sync": "allreduce",
    "sync_schedule": "",
}
"""Execution settings that a command leaves out."""


def run_command(
    program: object,
    config: Mapping[str, Any],
    execution: Mapping[str, Any],
    seed: int | None = None,
    epochs: int | None = None,
    defaults: Mapping[str, Any] | None = None,
    divergence: float | None = FACTOR,
    data: object = None,
    arguments: Sequence[str] = (),
    training_command: TrainingCommand | None = None,
) -> str:
    """Return the ``elastune run ...`` command for these settings, quoted for a POSIX shell.

    Args:
        program: A path, or ``{"path": ...}``.
        config: The settings.
        execution: The execution settings, as a journal holds them.
        seed: The seed; None leaves it out.
        epochs: Replaces the epochs of the program; None leaves it out.
        defaults: The program's own settings, where known. A setting that is None in both is left out.
        divergence: The factor of ``core.divergence``; None for off.
        data: The folder of data sets, if any.
        arguments: The program's own arguments.
        training_command: The command of a study of ``--command``: it is returned with the settings in it.
    """
    if training_command is not None:
        return filled_command(training_command, config, execution, seed, epochs)
    unset = {name for name, value in _flat(defaults or {}) if value is None}
    words = ["elastune", "run", program_path(program)]
    words += ["--data", str(data)] if data else []
    for name, option in FLAGS.items():
        implied = name == "workers" and "mesh" in execution
        if name in execution and execution[name] != DEFAULTS.get(name, ...) and not implied:
            words += [option, _word(execution[name])]
    words += ["--offload"] if execution.get("offload") else []
    for name, option in REPEATED.items():
        texts = execution.get(name, "none")
        for text in [texts] if isinstance(texts, str) else texts:
            words += [option, str(text)] if text != "none" else []
    for name, value in _flat(config):
        if value is None and name in unset:
            continue
        words += ["--set", f"{name}={_word(value)}"]
    if divergence != FACTOR:
        words += ["--divergence", "off" if divergence is None else _word(divergence)]
    if epochs is not None:
        words += ["--epochs", str(epochs)]
    if seed is not None:
        words += ["--seed", str(seed)]
    return shlex.join(words) + own_arguments(arguments)


def filled_command(
    command: TrainingCommand,
    config: Mapping[str, Any],
    execution: Mapping[str, Any],
    seed: int | None,
    epochs: int | None,
) -> str:
    """Return the command with the settings of a trial in it, quoted for a POSIX shell; its ``{folder}`` is "."."""
    provided = provided_values(config, int(execution.get("workers", 1)), seed or 0, ".")
    length = {} if epochs is None else {"epochs": epochs}
    return shlex.join(command.filled({**provided, **config, **length}))


def training_command_of(settings: Mapping[str, Any]) -> TrainingCommand | None:
    """Return the training command in the settings of a study's journal; None for a program with a function."""
    plain = settings.get("training_command")
    return None if plain is None else TrainingCommand.from_json(plain)


def own_arguments(arguments: Sequence[str]) -> str:
    """The end of a command whose program has these arguments of its own; "" without any."""
    return f" -- {shlex.join(arguments)}" if arguments else ""


def program_path(program: object) -> str:
    """Return the path of a program as a journal holds it: a string, or a mapping with ``path``."""
    return str(program["path"]) if isinstance(program, Mapping) and "path" in program else str(program)


def _flat(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by the names that ``--set`` takes: "optim.lr" of a nested config. An empty nested config has none."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


def _word(value: object) -> str:
    """A value as ``--set`` reads it back: text without quotes, unless ``--set`` would read it as another type."""
    if not isinstance(value, str) or value in ("True", "False", "None"):
        return json.dumps(value)
    try:
        json.loads(value)
    except ValueError:
        return value
    return json.dumps(value)
