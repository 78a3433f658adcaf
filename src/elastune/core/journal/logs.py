"""Logging: what elastune's modules report to Python's ``logging``, and how a process of its command line writes it.

Every module logs to ``logging.getLogger(__name__)``, below the logger ``elastune``. As a library elastune is silent:
that logger has a ``NullHandler`` alone, and a program's own handlers receive the records by the usual rules. A process
of the command line calls ``begin``. Its workers find level and format in their environment, which is a part of the
request that starts them.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from elastune.core.errors import UserError
from elastune.core.formatting import cut, printable

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]
LEVEL, FORMAT = "ELASTUNE_LOG_LEVEL", "ELASTUNE_LOG_FORMAT"  # environment variables
ROOT = logging.getLogger("elastune")
FACTS = ("run", "rank", "host", "step")
"""What each written record says about its process, beside time, level, logger and message."""
Fact = str | int | None


@dataclass(frozen=True)
class LogSettings:
    """How a process writes log records.

    Attributes:
        level: The lowest level that is written; None: nothing is written.
        format: The form of a line.

    Raises:
        UserError: For another level or format.

    Example:
        >>> LogSettings("info", "json").variables
        {'ELASTUNE_LOG_LEVEL': 'info', 'ELASTUNE_LOG_FORMAT': 'json'}
    """

    level: str | None = None
    format: str = "text"

    def __post_init__(self) -> None:
        for option, value, known in (("--log-level", self.level, Level), ("--log-format", self.format, Format)):
            if value is not None and value not in get_args(known):
                rule = f"{option} (or its environment variable) is one of {', '.join(get_args(known))}"
                raise UserError(rule, repr(value), f"such as {option} {get_args(known)[1]}")

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that give other processes the same settings; empty without a level."""
        return {} if self.level is None else {LEVEL: self.level, FORMAT: self.format}


def from_environment(variables: Mapping[str, str]) -> LogSettings:
    """The settings in ``variables``. Raises ``UserError`` for a wrong value."""
    return LogSettings(variables.get(LEVEL) or None, variables.get(FORMAT) or "text")


def begin(settings: LogSettings) -> None:
    """Write this process's records to stderr from now on, in place of what an earlier call set up."""
    for handler in [each for each in ROOT.handlers if isinstance(each, StderrHandler)]:
        ROOT.removeHandler(handler)
    if settings.level is None:
        ROOT.setLevel(logging.NOTSET)
        ROOT.propagate = True
        return
    handler = StderrHandler()
    handler.addFilter(_add_facts)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
    ROOT.addHandler(handler)
    ROOT.setLevel(settings.level.upper())
    ROOT.propagate = False  # a program's own handler for all loggers would write each record again


def active() -> bool:
    """Whether this process writes log records."""
    return any(isinstance(each, StderrHandler) for each in ROOT.handlers)


def describe(**facts: Fact | Callable[[], Fact]) -> None:
    """Set facts about this process (``FACTS``) that each record is to have. A function is called for each record."""
    _FACTS.update(facts)


def run_logger(name: str, run: str) -> logging.LoggerAdapter[logging.Logger]:
    """The logger ``name``, whose records are about ``run``: a controller may have several runs."""
    return _RunLogger(logging.getLogger(name), {"run": run})


LEVELS_OF_RECORDS = {
    **dict.fromkeys(("run_failed", "checkpoint_failed", "state_lost"), logging.ERROR),
    **dict.fromkeys(
        ("worker_gone", "restarted", "policy_failed", "straggler_detected", "connections_refused", "learner_left_out"),
        logging.WARNING,
    ),
    **dict.fromkeys(
        ("run_started", "run_finished", "adopted", "regrouped", "checkpointed", "decided", "sync_changed",
         "topology_changed", "fault_injected", "changes_accepted"),
        logging.INFO,
    ),
}  # fmt: skip
"""The level of each kind of journal record; the others are logged at the level debug."""
LONGEST_VALUE = 200


def log_record(logger: logging.Logger | logging.LoggerAdapter[logging.Logger], record: Any) -> None:
    """Log a record of the journal: its kind and its fields that are not empty. Membership events log themselves."""
    level = LEVELS_OF_RECORDS.get(record.kind, logging.DEBUG)
    if logger.isEnabledFor(level) and record.kind != "membership_event":
        logger.log(level, "%s %s", record.kind, _FilledFields(record))


@dataclass(frozen=True)
class _FilledFields:
    """The fields of a record that are not empty, as text. It is made where a handler writes it, and nowhere else."""

    record: Any

    def __str__(self) -> str:
        values = {each.name: getattr(self.record, each.name) for each in fields(self.record) if each.name != "kind"}
        filled = {name: value for name, value in values.items() if value is not None and value not in ("", [], (), {})}
        return " ".join(f"{name}={cut(printable(str(value)), LONGEST_VALUE)}" for name, value in filled.items())


def logged(name: str, notify: Callable[[str], None]) -> Callable[[str], None]:
    """``notify``, whose lines are logged, too, by the logger ``name``."""
    logger = logging.getLogger(name)

    def both(line: str) -> None:
        logger.info("%s", line)
        notify(line)

    return both


class StderrHandler(logging.StreamHandler[Any]):
    """Writes to the ``sys.stderr`` of the moment. Training never fails for want of a log line."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # a worker replaces it
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say once that lines are lost, such as on a full disk, and go on."""
        if self._failed:
            return
        self._failed = True
        try:
            os.write(2, f"elastune: log lines are lost from here on: {sys.exc_info()[1]}\n".encode())
        except OSError:
            return


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the facts of ``FACTS``, and ``error`` for a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        columns: dict[str, Any] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: getattr(record, name, None) for name in FACTS},
        }
        if record.exc_info:
            columns["error"] = self.formatException(record.exc_info)
        return json.dumps(columns, default=str)


class TextFormatter(logging.Formatter):
    """One line: time, level, logger, the known facts of ``FACTS``, message."""

    def format(self, record: logging.LogRecord) -> str:
        known = {name: getattr(record, name, None) for name in FACTS}
        facts = " ".join(f"{name}={value}" for name, value in known.items() if value is not None)
        line = f"{_time_of(record)} {record.levelname:7} {record.name} [{facts}] {record.getMessage()}"
        if record.exc_info:
            line += f": {self.formatException(record.exc_info)}"
        return printable(line)


class _RunLogger(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {**kwargs, "extra": {**(self.extra or {}), **kwargs.get("extra", {})}}


_FACTS: dict[str, Fact | Callable[[], Fact]] = {"host": socket.gethostname}


def _add_facts(record: logging.LogRecord) -> bool:
    """Give ``record`` the facts of this process that it does not have. A fact that cannot be known now is None."""
    for name in FACTS:
        if getattr(record, name, None) is None:
            fact = _FACTS.get(name)
            try:
                setattr(record, name, fact() if callable(fact) else fact)
            except Exception:  # noqa: BLE001 - a session between two views; no log line may break a training
                setattr(record, name, None)
    return True


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
