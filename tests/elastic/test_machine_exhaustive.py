"""Every order of events of small runs: the machine, ``settle`` and workers as they are to behave, tried breadth first.

What is checked on the way is in ``protocol_model``: nobody contradicts anybody, the members of a version agree on its
first step, all that reduce together hold the same steps and parameters, an evaluation counts every part once, no rewind
loses a step, and nobody begins anew while somebody holds the state. Here: that no history ends with workers that wait
for ever, and that those who are done have taken the same steps.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.elastic.machine import ChangeAsked, Noticed, ResizeAsked, begin

_spec = importlib.util.spec_from_file_location("protocol_model", Path(__file__).parent / "protocol_model.py")
assert _spec is not None
assert _spec.loader is not None
protocol_model = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = protocol_model
_spec.loader.exec_module(protocol_model)

MOST_STATES = 150_000
HALVED = ChangeAsked({"lr": 0.5})


def explore(model: Any, start: Any) -> Counter[str]:
    """How the histories from ``start`` end. Raises ``Wrong`` with the shortest history that breaks a rule."""
    came_from: dict[Any, tuple[Any, str] | None] = {start: None}
    queue = deque([start])
    ends: Counter[str] = Counter()
    while queue:
        state = queue.popleft()
        try:
            following = list(model.moves(state))
            if not following:
                ends[_end(model, state)] += 1
            following += model.faults(state)
        except ValueError as error:
            raise protocol_model.Wrong(f"{error}\n" + _history(came_from, state)) from error
        except AssertionError as error:
            raise protocol_model.Wrong(f"{error}\n" + _history(came_from, state)) from None
        for what, after in following:
            if after not in came_from:
                came_from[after] = state, what
                queue.append(after)
        assert len(came_from) <= MOST_STATES, "too large a case for a test"
    return ends


def _end(model: Any, state: Any) -> str:
    if state.over:
        return str(state.over)
    waiting = [worker for worker in state.workers if worker.mode in protocol_model.ALIVE and not worker.cut]
    membership = model.memberships[state.machine]
    if waiting or membership.workers or membership.free:
        raise protocol_model.Wrong(f"nothing more happens: {state.workers}, {membership}")
    return "no room for anybody"


def _history(came_from: dict[Any, tuple[Any, str] | None], state: Any) -> str:
    lines: list[str] = []
    while (step := came_from[state]) is not None:
        state, what = step
        lines.append(what)
    return "\n".join(reversed(lines))


def ends(
    program: str, workers: int, *, samples: tuple[int, ...] = (), high: int = 4, free: int = 0, **budgets: Any
) -> set[str]:
    """How runs end that begin with ``workers`` workers before their first operation."""
    model = protocol_model.Model(program, samples)
    membership = replace(begin(range(workers), 1, high), free=free)
    return set(explore(model, model.running(membership, **budgets)))


GROW, SHRINK = {"free": 1, "wishes": (ResizeAsked(3),)}, {"wishes": (ResizeAsked(2),)}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {}


@pytest.mark.parametrize(("program", "workers", "case"), CASES.values(), ids=CASES)
def test_no_order_of_events_breaks_a_rule(program: str, workers: int, case: dict[str, Any]) -> None:
    assert ends(program, workers, **case) <= {"over", "no room for anybody"}
