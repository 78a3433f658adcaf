"""What a benchmark has found stands in its result (``--out``): cut, the same command goes on from there.

A result is one JSON file, replaced as a whole: the command and the machine of the newest rows, the settings that all of
them were measured under, what they come to, and ``cells``: rows that were measured once, each by a key that says what
it is of, such as "instance sampler seed". Benchmarks that choose what to measure next by themselves name their own.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.common.result_file import CONDITIONS, write_result
from tests.support.agent_runs import CommandRefused

from elastune.core.errors import UserError

Row = dict[str, Any]
Cells = dict[str, Row]


class OutOfTime(Exception):
    """What is to be measured next would end too late."""


class Keyed(Protocol):
    """What a row is of."""

    @property
    def key(self) -> str: ...


def begun(out: Path | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What this benchmark has left in ``out`` under these settings, if anything. Raises ``UserError`` for others."""
    if out is None or not out.exists():
        return {}
    try:
        data = json.loads(out.read_text())
    except ValueError:
        data = None
    script = rf"[/. ]{Path(sys.argv[0]).stem}(\.py)?( |$)"  # older results ran the file, newer ones the module
    mine = isinstance(data, dict) and re.search(script, data.get("command", "")) is not None
    if not mine or data.get("settings", {}) != json.loads(json.dumps(settings)):
        raise UserError("a result goes on with its own settings", out, "use another --out, or remove it")
    return dict(data)


def write(out: Path | None, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """All that is ``told`` by now, under what it was asked and measured with; ``out`` None: nowhere."""
    if out is None:
        return
    write_result(out, {"settings": settings, **results})


class Rows:
    """Rows that are measured once: ``cells``. ``told`` is what they come to, if that is known by now.

    None is begun by ``of`` that would end more than ``limit_s`` from now, if it took as long as the longest before it.
    Raises ``UserError`` where ``out`` has others' rows.
    """

    def __init__(self, out: Path | None, settings: Mapping[str, Any] | None = None, limit_s: float = math.inf) -> None:
        self._out, self._settings = out, settings or {}
        self._until = time.monotonic() + limit_s
        before = begun(out, self._settings)
        self.cells: Cells = before.get("cells", {})
        self.told: dict[str, Any] = {}
        self._head: Row = {name: before[name] for name in CONDITIONS if name in before}  # of the newest row

    def of(self, key: str, measure: Callable[[], Row]) -> Row:
        """The row of ``key``, which with the settings says all that it depends on. Raises ``OutOfTime``."""
        if key not in self.cells:
            began = time.monotonic()
            longest_s = max((row.get("took_s", 0.0) for row in self.cells.values()), default=0.0)
            if began + longest_s > self._until:
                raise OutOfTime(f"time is up after {len(self.cells)} of them; the same command goes on")
            row = measure()
            self._keep(key, {**row, "took_s": round(time.monotonic() - began, 1)})
        return self.cells[key]

    def complete(
        self, wanted: Sequence[Keyed], measure: Callable[[Any], Row], whole: Callable[[Row], bool], processes: int = 1
    ) -> None:
        """Measure those of ``wanted`` that have no ``whole`` row: in order by one process, as they end by several.

        Other processes must find ``measure`` by its name.
        """
        missing = [each for each in wanted if each.key not in self.cells or not whole(self.cells[each.key])]
        print(f"{len(missing)} of {len(wanted)} studies are missing", flush=True)
        of = partial(_row, measure)
        if processes == 1:
            self._keep_all(map(of, missing))
            return
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves the pool, which ends its processes
        ignored = (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: this process alone says what becomes of them
        with multiprocessing.get_context("spawn").Pool(processes, signal.signal, ignored) as pool:
            result = pool.imap_unordered(of, missing)
            try:
                self._keep_all(result)
            finally:  # cut while a row was written: others may have ended since
                with suppress(StopIteration, multiprocessing.TimeoutError):
                    while True:
                        self._keep(*result.next(0))

    def _keep_all(self, found: Iterable[tuple[str, Row]]) -> None:
        for key, row in found:
            self._keep(key, row)
            print(key, row, flush=True)

    def _keep(self, key: str, row: Row) -> None:
        self.cells[key], self._head = row, {}
        try:
            self.write()
        except (KeyboardInterrupt, SystemExit):
            self.write()  # what has ended is not lost
            raise

    def write(self) -> None:
        """The result as it is by now."""
        write(self._out, self._settings, {**self.told, **self._head, "cells": self.cells})


def _row(measure: Callable[[Any], Row], each: Keyed) -> tuple[str, Row]:
    return each.key, measure(each)


def ended(run: Callable[[], int]) -> int:
    """The exit code of ``run``. What the user can mend, here or in a command that it runs, is one line; so is that it
    was cut.
    """
    try:
        return run()
    except (UserError, CommandRefused) as problem:
        print(problem, file=sys.stderr)
        return 2
    except OutOfTime as cut:
        print(cut)
        return 0
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
