"""What a run has cost, from its journal."""

import time
from pathlib import Path

import pytest

from elastune.core.cost import ANY, ON_DEMAND, SPOT, UNKNOWN, Paid, Prices
from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter, read
from elastune.core.journal.folds import RunMoney, money, paid_for
from elastune.core.journal.records import Adopted, Entry, HostsHeld, Record, Regrouped, Reported, RunFailed, RunStarted

BEGUN = 1_700_000_000.0
HOUR = 3600.0


def started(workers: int) -> RunStarted:
    return RunStarted("f.py", {}, 0, {"workers": workers, "mechanism": "replicated", "mesh": None})


def entries(*results: tuple[float, Record]) -> list[Entry]:
    return [Entry(BEGUN + at, record) for at, record in results]


def held(workers: dict[str, int], room: dict[str, int] | None = None) -> HostsHeld:
    return HostsHeld(workers, workers if room is None else room)


def times(paid: tuple[Paid, ...]) -> list[tuple[str, float, float, float]]:
    return [(each.kind, each.workers, each.begin_s - BEGUN, each.end_s - BEGUN) for each in paid]


FAILED = RunFailed("exception", "no luck", 0)
SAID = Reported(1, 3, 12, 1.0, {})
CHANGED = Regrouped(1, [0, 1, 2], planned=False, step=3, pause_s=0.1, discarded=1)


def test_workers_and_idle_room_are_paid_for_by_the_kind_of_host() -> None:
    run = entries(
        (0, started(4)),
        (1, held({SPOT: 3, ON_DEMAND: 1}, {SPOT: 4, ON_DEMAND: 2})),
        (600, CHANGED),  # members change; processes are what is paid for
        (601, held({SPOT: 3}, {SPOT: 3, ON_DEMAND: 2})),
        (900, SAID),
        (1201, FAILED),
    )
    paid = paid_for(run)
    assert times(paid.workers) == [(SPOT, 3, 1, 601), (ON_DEMAND, 1, 1, 601), (SPOT, 3, 601, 1201)]
    assert times(paid.idle) == [(SPOT, 1, 1, 601), (ON_DEMAND, 1, 1, 601), (ON_DEMAND, 2, 601, 1201)]
    cost = money(run, Prices({SPOT: ((0.0, 1.0),), ON_DEMAND: ((0.0, 6.0),)}))
    assert cost.data == {
        "cost": pytest.approx((6 * 1.0 + 1 * 6.0) / 6),
        "worker_hours": pytest.approx(7 / 6),
        "idle_cost": pytest.approx((1 * 1.0 + 3 * 6.0) / 6),
        "idle_hours": pytest.approx(4 / 6),
    }
    assert cost.line == "money   $2 for 1.2 h of workers' time; $3.167 for 40.0 min of room that nobody used"
    with pytest.raises(UserError, match="every kind of host needs a price"):
        money(run, Prices({SPOT: ((0.0, 1.0),)}))


def test_prices_change_by_the_run_s_own_time_or_by_dates() -> None:
    run = entries((0, started(2)), (0, held({UNKNOWN: 2})), (7200, FAILED))
    steps = ((0.0, 1.0), (HOUR, 4.0))
    assert money(run, Prices({ANY: steps})) == RunMoney(pytest.approx(10.0), pytest.approx(4.0), 0.0, 0.0)
    dated = Prices({ON_DEMAND: tuple((BEGUN + at - 1800.0, price) for at, price in steps)}, absolute=True)
    assert money(run, dated.assuming(ON_DEMAND)).cost == pytest.approx(2 * (0.5 * 1.0 + 1.5 * 4.0))
    assert "nobody used" not in money(run, Prices.constant(1.0)).line


def test_between_a_controller_s_death_and_the_resume_nothing_is_known_and_nothing_is_paid() -> None:
    two, three = held({SPOT: 2}), held({SPOT: 3})
    run = entries((0, started(2)), (0, two), (60, SAID), (5000, started(3)), (5000, three), (5060, SAID))
    assert times(paid_for(run).workers) == [(SPOT, 2, 0, 60), (SPOT, 3, 5000, 5060)]


def test_workers_that_outlive_their_controller_are_paid_for_meanwhile() -> None:
    run = entries((0, started(2)), (0, held({SPOT: 2})), (60, SAID), (500, held({SPOT: 1})), (560, FAILED))
    assert times(paid_for(run).workers) == [(SPOT, 2, 0, 500), (SPOT, 1, 500, 560)]


def test_a_controller_whose_clock_is_an_hour_ahead_costs_no_hour() -> None:
    """Workers that it takes over were without one for no longer than they look for one."""
    two, back = held({SPOT: 2}), Adopted([0, 1], 7, 0.1, [], grace_s=60.0)
    ahead = entries((0, started(2)), (0, two), (100, SAID), (3700, two), (3700, back), (3750, FAILED))
    assert times(paid_for(ahead).workers) == [(SPOT, 2, 0, 160), (SPOT, 2, 3700, 3750)]
    behind = entries((0, started(2)), (0, two), (100, SAID), (40, two), (40, back), (90, FAILED))
    assert times(paid_for(behind).workers) == [(SPOT, 2, 0, 40), (SPOT, 2, 40, 90)]


@pytest.mark.parametrize("jump_s", [HOUR, -HOUR])
def test_a_date_that_is_set_while_a_run_trains_costs_nothing(
    jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    with JournalWriter(path) as journal:
        journal.write(started(2))
        journal.write(held({SPOT: 2}))
        date = time.time
        monkeypatch.setattr(time, "time", lambda: date() + jump_s)
        journal.write(SAID)
        journal.write(FAILED)
    cost = money(read(path), Prices.constant(3.06))
    assert 0 <= cost.worker_hours < 0.1
    assert 0 <= cost.cost < 0.5
