"""The membership machine: random histories."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.membership_events import decode_event, replay

from elastune.elastic.coordinator.machine import (
    Confirm,
    End,
    Membership,
    ProtocolViolation,
    Release,
    Start,
    StopRun,
    begin,
    derive,
    transition,
    waits_for_others,
)
from elastune.elastic.wire.messages import (
    Broken,
    CapacityChanged,
    Connected,
    Done,
    Event,
    InstallView,
    Left,
    Lost,
    Noticed,
    NoticeEnding,
    Ready,
    ReplaceAsked,
    ResizeAsked,
    Running,
    encode_event,
)
from elastune.elastic.wire.view import View


class Histories(RuleBasedStateMachine):
    """Workers that do what workers do, in any order, and say some of it late or again."""

    @initialize(workers=st.integers(1, 4), low=st.integers(1, 2), extra=st.integers(0, 2), free=st.integers(0, 3))
    def start(self, workers: int, low: int, extra: int, free: int) -> None:
        self.arguments = list(range(workers)), low, max(workers, low) + extra, 5
        self.state = begin(*self.arguments)
        self.history: list[tuple[int | None, Event]] = []
        self.proclaimed: list[View] = []
        self.started = set(range(workers))
        self.training = 0  # completed steps
        self.ended: set[int] = set()
        self.feed((None, CapacityChanged(free)))

    def feed(self, event: tuple[int | None, Event]) -> None:
        free, before = self.state.free, self.state
        self.state, instructions = transition(self.state, *event)
        self.history.append(event)
        if self.state.stage != "over" and waits_for_others(self.state, event[1]) and not instructions:
            assert derive(self.state, (), False, "") == (self.state, ()), "it should not have waited"
        free = event[1].free if isinstance(event[1], CapacityChanged) and before.stage != "over" else free
        for instruction in instructions:
            match instruction:
                case Start(workers):
                    assert not set(workers) & self.started, "a number is used once"
                    free -= len(workers)
                    self.started |= set(workers)
                case InstallView(version):
                    assert version.number == len(self.proclaimed) + 1
                    self.check(before, version)
                    self.proclaimed.append(version)
                case Confirm(worker, number):
                    assert worker in self.proclaimed[number - 1].joiners
                case StopRun():
                    assert any(worker.due for worker in self.state.members), "it stops for nothing"
                case End(worker) | Release(worker):
                    assert self.state.stage == "over" or self.state.find(worker) is None
                    self.ended.add(worker)
        assert free >= 0, "more were started than there was room for"
        assert free == self.state.free

    def check(self, before: Membership, version: View) -> None:
        assert version.members
        assert len(set(version.members)) == len(version.members)
        assert not set(version.members) & self.ended, "it has a worker that was ended"
        assert not version.joiners or version.scheduled
        assert set(version.joiners) < set(version.members), "nobody could hand the state over"
        if version.scheduled:
            assert before.stage == "open"
            assert before.proposed is None or self.state.current == before.proposed, "two plans at once"
            if not any(worker.preempted for worker in self.state.members) and self.state.current is not None:
                fewest = min(self.state.low, len(self.state.current.members))
                assert len(version.members) >= fewest, "a plan leaves too few"
        if before.current is not None and not version.initial:
            old = [worker for worker in before.current.members if worker in version.members]
            assert [worker for worker in version.members if worker in old] == old, "ranks keep their order"

    def of_phase(self, phase: str) -> list[int]:
        return [worker.number for worker in self.state.workers if worker.phase == phase]

    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        """Something that a worker does in good order."""
        state, able = self.state, list[tuple[int | None, Event]]()
        able += [(worker, Connected()) for worker in self.of_phase("starting")]
        able += [(worker, Ready()) for worker in self.of_phase("connected")]
        version = state.proposed
        if version is not None:
            first_step = state.first_step if state.running else self.training + data.draw(st.integers(0, 3))
            self.training = max(self.training, first_step)
            silent = [worker for worker in version.members if worker not in state.running]
            able += [(worker, Running(version.number, first_step)) for worker in silent]
        able += [(worker.number, Left()) for worker in state.members if worker.excluded]
        if able:
            self.feed(data.draw(st.sampled_from(able)))

    @rule(data=st.data(), event=st.sampled_from([Lost, Noticed, NoticeEnding, Done, Broken]))
    def mishap(self, data: st.DataObject, event: type[Any]) -> None:
        state = self.state
        if event is Lost and state.workers:
            self.feed((data.draw(st.sampled_from([worker.number for worker in state.workers])), Lost("x")))
        if event is Noticed and state.workers:
            self.feed((data.draw(st.sampled_from([worker.number for worker in state.workers])), Noticed(30)))
        if event is NoticeEnding and (noticed := [worker.number for worker in state.workers if worker.preempted]):
            self.feed((data.draw(st.sampled_from(noticed)), NoticeEnding()))
        if event is Done and state.members and data.draw(st.integers(0, 9)) == 0:
            self.feed((data.draw(st.sampled_from([worker.number for worker in state.members])), Done()))
        if event is Broken and state.live:
            version = data.draw(st.sampled_from(state.live))
            able = [worker for worker in version.members if state.find(worker)]
            if able:
                self.feed((data.draw(st.sampled_from(able)), Broken(version.number)))

    @rule(event=st.one_of(st.builds(ResizeAsked, st.integers(0, 9)), st.builds(CapacityChanged, st.integers(0, 3))))
    def wish(self, event: Event) -> None:
        self.feed((None, event))

    @rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        if self.state.members and self.state.stage != "over":
            self.feed((data.draw(st.sampled_from([worker.number for worker in self.state.members])), ReplaceAsked()))

    @precondition(lambda self: len(self.proclaimed) > 1)
    @rule(data=st.data())
    def late(self, data: st.DataObject) -> None:
        """News of versions that were replaced, and of workers that are gone, changes nothing."""
        gone = [worker for worker in self.started if self.state.find(worker) is None]
        old = [v for v in self.proclaimed if v not in self.state.live]
        news: list[tuple[int | None, Event]] = [(worker, Lost()) for worker in gone] + [
            (worker, Running(1, 0)) for worker in gone
        ]
        news += [(worker, Broken(v.number)) for v in old for worker in v.members]
        if news:
            assert transition(self.state, *data.draw(st.sampled_from(news))) == (self.state, ())

    @rule(number=st.integers(0, 30))
    def garbage(self, number: int) -> None:
        """What cannot be is refused, and the state stays as it was."""
        if self.state.stage != "over":
            with pytest.raises(ProtocolViolation):
                transition(self.state, self.state.next_worker + number, Connected())
            if self.state.workers:
                with pytest.raises(ProtocolViolation):
                    transition(self.state, self.state.workers[0].number, Running(self.state.next_view + number, 0))

    @invariant()
    def what_always_holds(self) -> None:
        if not hasattr(self, "history"):
            return
        state = self.state
        assert state.low <= state.target <= state.high
        assert state.free >= 0
        if state.stage == "over":
            return
        members = {worker.number for worker in state.members}
        newest = state.proposed or state.current
        assert (newest is None) == (not members), "members have a version to be in"
        if newest is not None:
            assert members & set(newest.members), "somebody of the newest version holds the state"
            assert all(state.find(worker) for worker in newest.members), "a version with a dead member is replaced"
        waiting = [w for w in state.workers if w.phase == "ready" and not w.preempted]
        if newest is None and waiting and state.stage == "open":
            assert len(waiting) < len(state.workers), "all are warm, and nothing happens"
        missing = state.target - len(state.wanted)
        if state.stage == "open" and state.failed_starts < state.most_losses:
            assert min(missing, state.free) <= 0, "there is room, and too few are started"
        if state.stage == "open" and state.proposed is None and state.current is not None:
            assert not waiting or len(state.current.members) >= state.target, "one waits, and nobody takes it in"
            staying = [worker for worker in state.members if not worker.preempted]
            slow = any(worker.to_replace for worker in staying)
            assert not (waiting and slow), "one waits, and a slow one keeps its place"
            no_room = not (state.free or state.capacity_stale or state.failed_starts)
            if slow and no_room and len(state.members) == len(state.workers):
                assert len(staying) <= state.low, "a slow one stays where nobody can come"

    def teardown(self) -> None:
        if hasattr(self, "history"):
            events = [decode_event(json.loads(json.dumps(encode_event(*event)))) for event in self.history]
            assert replay(*self.arguments, events) == self.state


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
