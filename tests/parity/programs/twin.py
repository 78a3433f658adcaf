"""Trains the twin that its config names, on whatever workers there are, while they die."""

from __future__ import annotations

from typing import Any

from tests.parity.programs.twins import data, kinds, losses, several, tricks

from elastune.testing.faults import inject

config = {"twin": "", "faults": []}
ROOMS = (several, data, tricks, losses, kinds)


def twins() -> dict[str, Any]:
    """Every program by its name, on a session."""
    found = {name: each for part in ROOMS for name, each in vars(part).items() if f"plain_{name}" in vars(part)}
    return dict(sorted(found.items()))


def plain(name: str) -> Any:
    """The same as a plain loop."""
    return next(vars(part)[f"plain_{name}"] for part in ROOMS if f"plain_{name}" in vars(part))


def train(session) -> None:
    losses: list[float] = []
    prepare = session.prepare

    def prepared(*given: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = prepare(*given)
        inject(session)
        return found

    session.prepare = prepared
    twins()[session.config["twin"]](session, losses)
