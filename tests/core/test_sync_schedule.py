from __future__ import annotations

import pytest

from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan, SyncSchedule

TEXT = "100=local:learners=8,every=16; 500=allreduce; 900=gossip:learners=6,every=4"


def test_what_is_said_is_what_is_read() -> None:
    assert str(SyncSchedule.parse(TEXT)) == TEXT
    assert str(SyncSchedule.parse("")) == ""
    assert SyncSchedule.parse(TEXT.replace("; ", " ;\n")) == SyncSchedule.parse(TEXT)


def test_what_is_due() -> None:
    schedule, local = SyncSchedule.parse(TEXT), SyncPlan("local", learners=8, every=16)
    assert [schedule.due(step) for step in (0, 99, 100, 499)] == [None, None, (100, local), (100, local)]
    assert schedule.due(10**9) == schedule.changes[-1]
    assert [schedule.next_after(step) for step in (0, 99, 100, 899, 900)] == [100, 100, 500, 900, None]
    assert schedule.learners(SyncPlan("local", learners=5)) == 120


def test_what_a_run_does_not_come_to() -> None:
    schedule = SyncSchedule.parse(TEXT)
    assert schedule.beyond(901) == SyncSchedule()
    assert str(schedule.beyond(900)) == "900=gossip:learners=6,every=4", "after its last step nothing changes"
    assert schedule.beyond(100) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local:learners=8", "STEP=STRATEGY"),
        ("x=allreduce", "STEP=STRATEGY"),
        ("0=allreduce", "ascend"),
        ("5=allreduce; 5=local", "ascend"),
        ("7=allreduce; 5=local", "ascend"),
        ("7=nothing", "must be known"),
        ("7=local:every=0", "every must be"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SyncSchedule.parse(text)


@pytest.mark.parametrize("value", [3, None, ["7=allreduce"]])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(UserError, match="is a text"):
        SyncSchedule.parse(value)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="is a text"):
        SyncPlan.parse(value)  # type: ignore[arg-type]
