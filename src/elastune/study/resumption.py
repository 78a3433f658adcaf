"""Going on with a study: what is asked for is compared with its journal before anything starts or is written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError
from elastune.core.sync_choice import SyncChoice
from elastune.job.output_dir import check_out
from elastune.journal.reader import read
from elastune.journal.records import StudyStarted

_WORDS = {"sync_schedule": "--sync-schedule", "num_slots": "--slots", "virtual_tensor": "--virtual-tensor"}
_OPTIONS = ("seed", "epochs", "sampler", "target", "stopping", "prices", "sync", "mode", "precision", "compress")
_WORDS |= {name: f"--{name}" for name in _OPTIONS} | {"price_per_worker_hour": "--price", "threads": "--threads"}
_WARM = "warm-start another study of it with --warm-start"


def begun_slots(out: Path) -> int | None:
    """Return the slots that the trials of the study in ``out`` have; None where there is no study.

    Raises:
        UserError: For a bad journal.
    """
    path = check_out(out, resume=True)
    entries = read(path) if path.exists() else []
    started = next((entry.record for entry in entries if isinstance(entry.record, StudyStarted)), None)
    return None if started is None else started.settings.get("means", {}).get("num_slots")


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[UserError]:
    """Yield what differs of two studies' settings, as their journals hold them, and would change a study's result.

    Bounds, workers, and the rules by which a study ends, what it keeps and how it is judged may differ.
    """
    tune, simulated = now["kind"] == "tune", {True: "simulated", False: "trained"}
    for name in ("kind", "program", "objectives", "constraints"):
        yield from _of(name, then.get(name), now[name])
    for name in ("seed", "epochs", "prices"):
        yield from _of(name, then.get(name), now[name])
    old, new = then.get("config") or {}, now["config"]
    for name in sorted({*old, *new}):
        yield from _of(f"setting {name}", old.get(name, "not set"), new.get(name, "not set"))
    unsaid = {**SyncChoice().to_json(), "stopping": "none", "sampler": now.get("sampler")}
    unsaid |= {"target": None, "price_per_worker_hour": now.get("price_per_worker_hour")} if tune else {}
    for name, value in unsaid.items():
        if name != "price_per_worker_hour" or now["prices"] is None:
            yield from _of(name, then.get(name, value), now.get(name, value))
    old, new = then.get("start_from"), now.get("start_from")
    if (old and {**old, "source": ""}) != (new and {**new, "source": ""}):  # they may have been moved
        yield from _of("weights", old and old["source"], f"other ones, {new['source']}" if new else None)
    yield from _of_means(then.get("means", {}), now.get("means", {}))
    was, wanted = (simulated[bool(told.get("simulated"))] for told in (then, now))
    if was != wanted:
        yield UserError(f"a study goes on with {wanted} trials only", f"{was} ones there", "use another --out")


def _of_means(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[UserError]:
    yield from _of("compress", then.get("compress"), now.get("compress"))
    if not (then and now):
        return
    exact = now.get("mode") == "exact"
    for name in ("mode", "num_slots", "precision", "virtual_tensor", *(["threads"] if exact else [])):
        if then.get(name) is not None and now.get(name) is not None:
            yield from _of(name, then[name], now[name])


def _of(name: str, old: Any, new: Any) -> Iterator[UserError]:
    if json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True):
        return
    begun, asked = (_short(value) for value in (old, new))
    unsaid = old in (None, "", [], (), {})
    fix = "leave it out" if unsaid else f"use {begun}"
    if name in _WORDS:
        fix = f"leave out {_WORDS[name]}" if unsaid else f"use {_WORDS[name]} {shlex.quote(begun)}"
    elif name in ("objectives", "constraints") and not unsaid:
        told = [f"{key}:{value}" for key, value in old.items()] if isinstance(old, Mapping) else list(old)
        fix = f"use {shlex.join(word for each in told for word in (f'--{name[:-1]}', each))}"
    elif name.startswith("setting "):
        setting = name.removeprefix("setting ")
        fix = f"leave out --set {setting}" if old == "not set" else f"use --set {shlex.quote(f'{setting}={begun}')}"
    more = f", or {_WARM}" if name == "sampler" else ", or another --out for another study"
    yield UserError(f"a study resumes with the {name} it was begun with", f"{asked}, begun with {begun}", fix + more)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(None if value == "" else value)
    return "none" if text == "null" else text if len(text) <= 80 else f"{text[:80]}..."
