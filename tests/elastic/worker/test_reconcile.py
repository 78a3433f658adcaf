"""What the members of a new version decide."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.elastic.coordinator.machine import ProtocolViolation
from elastune.elastic.worker.recovery import MemberStatus, RecoveryPlan, reconcile

CALM = MemberStatus(completed=7, step=5, unrepeatable=False, lost=False, snapshot=-1, rewinds=0, joins=False)
BEHIND = replace(CALM, completed=6, step=4)
UNREPEATABLE = replace(CALM, unrepeatable=True, snapshot=5)
JOINER = MemberStatus(completed=0, step=0, unrepeatable=False, lost=False, snapshot=-1, rewinds=0, joins=True)
NOTHING = RecoveryPlan(None, None, (), None, (), {}, 5, 0)


@pytest.mark.parametrize(
    ("rows", "decided"),
    [
        ([CALM], NOTHING),
        ([CALM, CALM, CALM], NOTHING),
        ([replace(CALM, lost=True), CALM], NOTHING),
        ([UNREPEATABLE, UNREPEATABLE], NOTHING),
    ],
)
def test_where_all_are_at_the_same_place_nothing_is_to_be_done(rows: list[MemberStatus], decided: RecoveryPlan) -> None:
    assert reconcile(rows) == decided


def test_who_lacks_the_newest_result_gets_it_from_the_lowest_rank_that_has_it() -> None:
    assert reconcile([BEHIND, CALM, CALM, BEHIND]) == replace(NOTHING, result_source=1, lagging=(0, 3))


def test_a_result_that_is_no_step_leaves_the_step_as_it_is() -> None:
    gathered = replace(BEHIND, step=5)
    assert reconcile([CALM, gathered]) == replace(NOTHING, result_source=0, lagging=(1,))


def test_who_has_loaded_a_checkpoint_behind_a_gather_waits_for_who_lacks_its_result() -> None:
    loaded = replace(CALM, completed=2, step=5, round_steps=5)
    not_yet = replace(CALM, completed=1, step=0)
    assert reconcile([not_yet, loaded]) == replace(NOTHING, result_source=1, lagging=(0,))
    with pytest.raises(ProtocolViolation, match="different steps"):
        reconcile([not_yet, replace(loaded, round_steps=0)])


def test_joiners_are_spread_over_those_with_state() -> None:
    rows = [CALM, CALM, JOINER, JOINER, JOINER]
    assert reconcile(rows) == replace(NOTHING, state_source={2: 0, 3: 1, 4: 0})


def test_between_hosts_the_state_travels_once_for_each_that_lacks_it() -> None:
    rows, hosts = [CALM, CALM, *[JOINER] * 4, JOINER], ["a", "b", "c", "c", "c", "c", "d"]
    sources = reconcile(rows, hosts).state_source
    assert {sources[2], sources[6]} == {0, 1}
    assert [sources[joiner] for joiner in (3, 4, 5)] == [2, 2, 3]
    had = {0, 1}
    for joiner, source in sources.items():  # in this order: who sends has got it
        assert source in had
        had.add(joiner)


def test_a_joiner_gets_the_state_from_its_own_host_where_somebody_there_has_it() -> None:
    rows, hosts = [CALM, CALM, CALM, JOINER, JOINER], ["a", "a", "b", "b", "a"]
    assert reconcile(rows, hosts).state_source == {3: 2, 4: 0}


def test_an_evaluation_that_lacks_a_lost_workers_part_is_done_again() -> None:
    rows = [replace(UNREPEATABLE, lost=True), replace(CALM, lost=True), UNREPEATABLE]
    assert reconcile(rows) == replace(NOTHING, rewind_to=5, rewind_source=0, rewind_lacking=(1,), rewinds=1)


def test_after_the_last_operation_of_all_nobody_goes_back() -> None:
    done = replace(UNREPEATABLE, lost=True, done=True)
    assert reconcile([done, replace(BEHIND, unrepeatable=True, lost=True)]) == replace(
        NOTHING, result_source=0, lagging=(1,)
    )


def test_the_newest_snapshot_counts() -> None:
    rows = [replace(UNREPEATABLE, lost=True, snapshot=3), replace(UNREPEATABLE, lost=True, snapshot=4)]
    decided = reconcile(rows)
    assert (decided.rewind_to, decided.rewind_source, decided.rewind_lacking, decided.step) == (4, 1, (0,), 4)


def test_without_a_snapshot_all_begin_again() -> None:
    rows = [replace(CALM, unrepeatable=True, lost=True), CALM]
    decided = reconcile(rows)
    assert (decided.rewind_to, decided.rewind_source, decided.rewind_lacking) == (-1, None, ())
    assert (decided.step, decided.rewinds) == (0, 1)


def test_a_completed_step_holds_the_evaluation_before_it_so_nothing_is_rewound() -> None:
    """The one behind had given its part to that step after it had evaluated: a rewind would lose the step."""
    behind = replace(BEHIND, unrepeatable=True, lost=True, snapshot=4)
    assert reconcile([replace(CALM, lost=True), behind]) == replace(NOTHING, result_source=0, lagging=(1,))


def test_who_is_behind_in_an_evaluation_is_rewound_with_the_others() -> None:
    furthest = replace(UNREPEATABLE, lost=True, snapshot=5)
    behind = replace(UNREPEATABLE, completed=6, snapshot=5)
    assert reconcile([behind, furthest]).rewind_to == 5


def test_a_rewind_that_broke_half_way_is_done_by_all_again() -> None:
    rewound = replace(CALM, completed=0, step=4, snapshot=4, rewinds=1)
    rows = [rewound, replace(UNREPEATABLE, lost=True, snapshot=4)]
    decided = reconcile(rows)
    assert (decided.rewind_to, decided.rewind_lacking, decided.rewinds) == (4, (), 2)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [JOINER, JOINER],
        [CALM, replace(CALM, completed=5, step=4)],
        [CALM, replace(CALM, step=6)],
        [CALM, replace(BEHIND, step=3)],
        [CALM, replace(BEHIND, step=6)],
        [CALM, BEHIND, JOINER],
        [replace(UNREPEATABLE, lost=True), CALM, JOINER],
        [CALM, replace(CALM, rewinds=1), JOINER],
    ],
)
def test_what_no_history_leads_to_is_refused(rows: list[MemberStatus]) -> None:
    with pytest.raises(ProtocolViolation):
        reconcile(rows)


standings = st.builds(
    MemberStatus,
    completed=st.integers(6, 7),
    step=st.integers(4, 5),
    unrepeatable=st.booleans(),
    lost=st.booleans(),
    snapshot=st.integers(-1, 2),
    rewinds=st.integers(0, 1),
    joins=st.booleans(),
)


@given(st.lists(standings, min_size=1, max_size=5))
def test_every_decision_can_be_carried_out(rows: list[MemberStatus]) -> None:
    try:
        decided = reconcile(rows)
    except ProtocolViolation:
        return
    owners = {rank for rank, row in enumerate(rows) if not row.joins}
    assert set(decided.state_source) == set(range(len(rows))) - owners
    assert set(decided.state_source.values()) <= owners
    if decided.rewind_to is not None:
        assert not decided.lagging
        assert not decided.state_source
        assert all(rows[rank].snapshot < decided.rewind_to for rank in decided.rewind_lacking)
        assert decided.rewinds > max(rows[rank].rewinds for rank in owners)
        if decided.rewind_source is not None:
            assert rows[decided.rewind_source].snapshot == decided.rewind_to
    if decided.lagging:
        assert decided.result_source is not None
        assert all(rows[rank].completed == rows[decided.result_source].completed - 1 for rank in decided.lagging)
