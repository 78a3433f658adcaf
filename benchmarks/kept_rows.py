"""Studies that are measured once: a line of a file as each ends, so that a run that is cut loses nothing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class OutOfTime(Exception):
    """What is to be measured next would end too late."""


class Rows:
    """One line a study, written as it ends; with ``resume`` those that ``path`` has already are not measured again.

    None is begun that would end more than ``limit_s`` from now, if it took as long as the longest before it.
    """

    def __init__(self, path: Path | None, *, resume: bool, limit_s: float = math.inf) -> None:
        self._path = path
        self._until, self._longest_s = time.monotonic() + limit_s, 0.0
        self._known: dict[str, dict[str, Any]] = {}
        if path is not None and resume and path.exists():
            whole = path.read_text().rpartition("\n")[0].splitlines()  # what follows was cut while it was written
            lines = [json.loads(line) for line in whole]
            self._known = {json.dumps(line["study"]): line["found"] for line in lines}
            self._longest_s = max((line.get("took_s", 0.0) for line in lines), default=0.0)
            path.write_text("".join(f"{line}\n" for line in whole))
        elif path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def of(self, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was found for ``key``, which says all that the study depends on. Raises ``OutOfTime``."""
        name = json.dumps(key)
        if name not in self._known:
            began = time.monotonic()
            if began + self._longest_s > self._until:
                raise OutOfTime(f"time is up after {len(self._known)} of them")
            self._known[name] = measure()
            took_s = time.monotonic() - began
            self._longest_s = max(self._longest_s, took_s)
            if self._path is not None:
                with self._path.open("a") as file:
                    line = {"study": key, "found": self._known[name], "took_s": round(took_s, 1)}
                    file.write(json.dumps(line) + "\n")
        return self._known[name]
