"""Studies that are measured once: a line of a file as each ends, so that a run that is cut loses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Rows:
    """One line a study, written as it ends; with ``resume`` those that ``path`` has already are not measured again."""

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        if path is not None and resume and path.exists():
            whole = path.read_text().rpartition("\n")[0].splitlines()  # what follows was cut while it was written
            lines = [json.loads(line) for line in whole]
            self._known = {json.dumps(line["study"]): line["found"] for line in lines}
            path.write_text("".join(f"{line}\n" for line in whole))
        elif path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def of(self, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was found for ``key``, which says all that the study depends on."""
        name = json.dumps(key)
        if name not in self._known:
            self._known[name] = measure()
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(json.dumps({"study": key, "found": self._known[name]}) + "\n")
        return self._known[name]
