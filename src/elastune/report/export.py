"""The trials of a study as CSV and JSON, for other programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from elastune.core.text import printable
from elastune.study.results.study import Study
from elastune.study.results.trials import GROUPS, PLAIN, Trial, flat_row

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""How a text begins that a spreadsheet would run (OWASP, "CSV Injection")."""

STAMPS = ("started_at", "ended_at")


def to_csv(study: Study) -> str:
    """One line a trial, columns as ``flat_row`` names them; what a trial lacks is empty, a list is JSON.

    Texts that a spreadsheet would take for a formula get a ' in front. What a terminal would obey or not show is an
    escape such as ``\\x1b``. Times are UTC, ISO 8601.
    """
    rows = [flat_row(trial) for trial in study.trials]
    names = dict.fromkeys(name for row in rows for name in row)
    kept = [*PLAIN, *(n for group in GROUPS for n in names if n.startswith(f"{group}.")), "reason"]
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow([_cell(name) for name in kept])
    for row in rows:
        writer.writerow([_cell(_stamp(row[name]) if name in STAMPS else row.get(name)) for name in kept])
    return file.getvalue()


def to_json(study: Study) -> str:
    """{kind: "trials", objectives, trials: [{number, state, ..., params, config, means, values, metrics, reason}]}.

    Strict JSON: a number that is not finite is null. Times are UTC, ISO 8601.
    """
    objectives = {o.name: o.direction for o in study.objectives}
    data = {"kind": "trials", "objectives": objectives, "trials": [_nested(trial) for trial in study.trials]}
    return json.dumps(_strict(data), indent=1, allow_nan=False) + "\n"


def _nested(trial: Trial) -> dict[str, Any]:
    plain = {name: getattr(trial, name) for name in PLAIN}
    plain |= {name: _stamp(plain[name]) for name in STAMPS}
    return {**plain, **{group: getattr(trial, group) for group in GROUPS}, "reason": trial.reason}


def _stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        text = printable(value)
        return f"'{text}" if value.startswith(FORMULA) else text
    return json.dumps(value) if isinstance(value, (bool, list, dict)) else repr(value)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value
