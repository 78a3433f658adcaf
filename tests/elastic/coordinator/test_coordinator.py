from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from tests.support.members_kit import LIMIT_S, Events, Raw, begun, coordinating, eventually, members
from tests.support.membership_events import decode_event, replay

from elastune.core.journal.records import (
    ConnectionsRefused,
    MembershipEvent,
    Restarted,
    StepsCompleted,
    StragglerDetected,
)
from elastune.elastic.coordinator import machine
from elastune.elastic.coordinator import machine as instructions
from elastune.elastic.coordinator.controller_interface import RecordSent
from elastune.elastic.coordinator.coordinator import Coordinator, RestartCosts, wait_for_others_s
from elastune.elastic.wire import server as hub
from elastune.elastic.wire.contact import BUSY, TokenRefused, new_nonce, respond
from elastune.elastic.wire.messages import (
    PURPOSE,
    Answer,
    Beat,
    Broken,
    Bye,
    InstallView,
    Publish,
    Ready,
    ResizeAsked,
    Running,
    Welcome,
)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with coordinating() as one:
        yield one
        assert one._thread.is_alive(), "it must survive whatever was done to it"


def answers(coordinator: Coordinator, workers: int = 3) -> Answer:
    """What a client is answered."""
    with Raw(coordinator) as client:
        client.hello(coordinator, None)
        client.send(ResizeAsked(workers))
        answer = client.receive()
        assert isinstance(answer, Answer)
        assert client.receive() is None
        return answer


# -- what the machine is told, and what it says ------------------------------------------------------------------------


def test_the_events_of_a_run_replay(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1, 2) as found:
        number = begun(found)
        found[2].close()
        version = found[0].await_view(number, LIMIT_S)
        found[0].broken(version.number, "a hiccup")
        version = found[0].await_view(version.number, LIMIT_S)
        for member in found[:2]:
            member.running(version.number, 4)
        coordinator.ask(ResizeAsked(1, "as a test"))
        planned = eventually(lambda: found[0].pending(version.number))
        assert planned.members == (0,)
        found[0].running(planned.number, 5)
        found[0].done()
        assert found[0].await_bye(planned.number) is None
        records = [r.event for r in coordinator.take_records() if isinstance(r, MembershipEvent)]
        replayed = replay(range(3), 1, 8, 8, map(decode_event, records))
        assert replayed == coordinator._state


def test_a_death_is_heard_before_the_failure_that_it_caused(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1, 2) as found:
        number = begun(found)
        found[0].broken(number, "connection reset by peer")
        found[2].close()
        version = found[0].await_view(number, LIMIT_S)
        assert version.members == (0, 1)
        events = Events(coordinator)
        eventually(lambda: "'broken'" in events.text())
        assert events.text().index("'lost'") < events.text().index("'broken'")
        assert found[0].latest == version, "one death, one version"


def test_workers_that_fall_together_are_one_message() -> None:
    with coordinating(6) as coordinator, members(coordinator, *range(5)) as found, Raw(coordinator) as last:
        last.hello(coordinator, 5)
        last.send(Ready())
        for member in found:
            member.ready()
        heard = iter(last.receive, None)
        first = next(m for m in heard if isinstance(m, InstallView))

        def fall() -> None:  # in one round of the thread, as those of a host do
            for worker in range(4):
                coordinator._lose(worker, "its host is gone")

        coordinator._call(fall)
        assert next(m for m in heard if isinstance(m, InstallView)).view.members == (4, 5)
        assert Events(coordinator).text().count("'lost'") == 4
        assert coordinator.membership.next_view > first.view.number + 4, "they were four events"


def test_what_only_the_controller_can_do_wakes_it(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1, 2) as found:
        begun(found)
        coordinator.capacity(2)
        eventually(lambda: "capacity" in Events(coordinator).text())
        coordinator.take()
        coordinator.take_records()
        assert not select.select([coordinator], [], [], 0)[0]
        coordinator.ask(ResizeAsked(5))
        assert select.select([coordinator], [], [], LIMIT_S)[0]
        assert eventually(coordinator.take) == [instructions.Start((3, 4))]
        coordinator.take_records()
        coordinator.lost(3, "it could not be started")
        assert select.select([coordinator], [], [], LIMIT_S)[0]
        assert eventually(coordinator.take)[0].worker == 3
        eventually(lambda: coordinator.take_records())
        coordinator.take()
        assert not select.select([coordinator], [], [], 0)[0]


def test_the_last_words_of_a_worker_come_before_the_news_of_its_end() -> None:
    """The controller sees the process's end, perhaps before this thread has read what it sent."""
    with coordinating(2) as coordinator, members(coordinator, 0, 1) as found:
        number = begun(found)
        coordinator.ask(ResizeAsked(1))
        eventually(lambda: found[1].pending(number))
        busy = threading.Event()

        def hinder() -> None:  # the thread is at work while all of this happens
            busy.set()
            time.sleep(0.2)

        coordinator._call(hinder)
        assert busy.wait(LIMIT_S)
        found[1].left()
        found[1].close()
        coordinator.lost(1, "exit code 0")
        events = Events(coordinator)
        eventually(lambda: "'left'" in events.text())
        time.sleep(0.1)
        assert "'lost'" not in events.text()


def test_a_noticed_worker_of_too_few_stops_the_run() -> None:
    with coordinating(2, low=2) as coordinator, members(coordinator, 0, 1) as found:
        begun(found)
        events = Events(coordinator)
        found[1].noticed(0.6, "spot")
        eventually(lambda: "'seconds': 0.6, 'why': 'spot'" in events.text())
        assert coordinator.take() == [], "it waits for a replacement"
        (stop,) = eventually(coordinator.take)
        assert stop == instructions.StopRun(
            1, "notice to worker 1 (spot): 1 worker would remain, the fewest allowed are 2"
        )
        assert "'notice_ending'" in eventually(events.text)


def test_a_restart_says_what_it_repeats_and_how_long_nobody_trained() -> None:
    costs = RestartCosts()
    costs.step_reached(40)
    claim = StepsCompleted(0, 1, 2, 0, 0, 100, 140, 1, 42)
    assert costs.record_received(claim, 1.0) == claim
    costs.all_lost(10.0)
    assert costs.record_received(Restarted(22), 17.5) == Restarted(22, repeated=20, pause_s=7.5)
    assert costs.record_received(Restarted(22), 18.0) == Restarted(22), "nothing was trained since"


@pytest.mark.parametrize(("notice_s", "wait_s"), [(120, 90), (60, 45), (25, 18.75), (12, 7), (8, 4), (0, 0)])
def test_a_part_of_a_notice_is_kept_for_the_checkpoint(notice_s: float, wait_s: float) -> None:
    assert wait_for_others_s(notice_s) == wait_s


def test_a_worker_that_is_to_be_replaced_goes_on_until_another_is_ready() -> None:
    with coordinating(2, low=2) as coordinator, members(coordinator, 0, 1) as found:
        number = begun(found)
        coordinator.capacity(1)
        found[1].replace()
        assert eventually(coordinator.take) == [instructions.Start((2,))]
        assert found[0].pending(number) is None
        with members(coordinator, 2) as (joiner,):
            joiner.ready()
            planned = eventually(lambda: found[1].pending(number))
            assert (planned.members, planned.joiners) == ((0, 2), (2,))
        assert "'replace_asked'" in Events(coordinator).text()


def test_a_released_worker_is_told_to_end() -> None:
    with coordinating(2) as coordinator, members(coordinator, 0, 1) as found:
        number = begun(found)
        coordinator.notice(1, 30, "revoked")
        planned = eventually(lambda: found[0].pending(number))
        assert planned.members == (0,)
        found[0].running(planned.number, 3)
        assert found[1].await_bye(planned.number) is None
        assert not found[0].superseded(planned.number)


def test_a_broken_rule_of_the_protocol_gives_the_run_up(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1, 2) as found:
        begun(found)
        found[0].running(77, 1)
        (given_up,) = eventually(coordinator.take)
        assert isinstance(given_up, instructions.GiveUp)
        assert "77" in given_up.why


def test_a_bug_in_the_thread_gives_the_run_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinating(1) as coordinator:
        monkeypatch.setattr(machine, "transition", lambda state, worker, event: 1 / 0)
        coordinator.capacity(1)
        (given_up,) = eventually(coordinator.take)
        assert "ZeroDivisionError" in given_up.why


@pytest.mark.parametrize("call", ["capacity", "ask"])
def test_what_no_event_may_hold_is_the_callers_error(coordinator: Coordinator, call: str) -> None:
    with pytest.raises(ValueError, match="greater"):
        getattr(coordinator, call)(-1 if call == "capacity" else ResizeAsked(-1))


def test_a_worker_that_neither_beats_nor_closes_is_lost() -> None:
    with coordinating(2, heartbeat_s=1.0) as coordinator, Raw(coordinator) as mute, members(coordinator, 0) as found:
        mute.hello(coordinator, 1)
        mute.send(Ready())
        found[0].ready()
        number = found[0].await_view(0, LIMIT_S).number
        assert found[0].await_view(number, LIMIT_S).members == (0,)
        assert mute.ended()
        assert "silent for 1 s" in Events(coordinator).text()


def test_a_controller_that_takes_nothing_stops_no_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """More reports lie there than anybody should keep: workers wait with theirs, hear that the run lives, and live."""
    monkeypatch.setattr("elastune.elastic.coordinator.controller_interface.BACKLOG_LIMIT_BYTES", 1 << 16)
    with coordinating(2, heartbeat_s=0.5, silence_s=1.0) as coordinator, members(coordinator, 0, 1) as found:
        number = begun(found)
        for _ in range(8):
            found[0].report(StragglerDetected(0, "x" * (1 << 15)))
        time.sleep(2.5)  # the workers' patience is 1 s, this side's half a second
        assert not found[0].superseded(number)
        assert not found[1].superseded(number)
        heard: list[RecordSent] = []
        while len(heard) < 8:
            heard += eventually(lambda: [told for told in coordinator.take() if isinstance(told, RecordSent)])
        assert coordinator.members == [0, 1], Events(coordinator).text()


def test_beats_keep_a_worker(coordinator: Coordinator) -> None:
    with coordinating(1, heartbeat_s=0.2) as coordinator, members(coordinator, 0) as found:
        number = begun(found)
        time.sleep(0.8)
        assert not found[0].superseded(number)


def test_time_in_which_the_controller_did_not_run_is_no_silence() -> None:
    with coordinating(2, heartbeat_s=0.3) as coordinator, Raw(coordinator) as peer, members(coordinator, 0) as found:
        peer.hello(coordinator, 1)
        peer.send(Ready())
        found[0].ready()
        number = found[0].await_view(0, LIMIT_S).number
        peer.send(Beat())
        coordinator._call(lambda: time.sleep(1.0))  # as if all were stopped: nobody beats meanwhile
        time.sleep(0.9)
        for _ in range(5):
            peer.send(Beat())
            time.sleep(0.1)
        assert not found[0].superseded(number)


def test_addresses_reach_those_who_come_later(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1, 2) as found:
        number = begun(found)
        found[0].publish(f"{number}/0/0", "aGk=")
        found[0].publish(f"{number - 2}/0/0", "aGk=")
        assert found[1].read([f"{number}/0/0"], LIMIT_S) == ["aGk="]
        coordinator.capacity(1)
        coordinator.ask(ResizeAsked(4))
        eventually(coordinator.take)
        with Raw(coordinator) as late:
            late.hello(coordinator, 3)
            welcome, proclaim, publish = late.receive(), late.receive(), late.receive()
            assert isinstance(welcome, Welcome)
            assert welcome.joins
            assert isinstance(proclaim, InstallView)
            assert publish == Publish(f"{number}/0/0", "aGk=")


# -- who keeps the others waiting --------------------------------------------------------------------------------------


def test_a_straggler_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastune.elastic.stragglers.LEAST_PATIENCE_S", 0.1)
    monkeypatch.setattr("elastune.elastic.coordinator.liveness.LONGEST_BEAT_S", 0.02)
    told: list[StragglerDetected] = []
    settings = {"last_line": lambda worker: f"loading file {worker}"}
    with coordinating(2, **settings) as coordinator, members(coordinator, 0, 1) as found:
        begun(found)
        found[0].doing("reducing", 3, 1 << 20)
        found[1].doing("computing", 3)

        def look() -> bool:
            told.extend(r for r in coordinator.take_records() if isinstance(r, StragglerDetected))
            return bool(told)

        eventually(look)
        time.sleep(0.3)
        look()
    assert [(r.worker, "1 other waiting" in r.line, "loading file 1" in r.line) for r in told] == [(1, True, True)]


# -- attacks -----------------------------------------------------------------------------------------------------------

RUBBISH = {
    "no proof": b"hello\n",
    "binary": bytes(range(256)) * 8 + b"\n",
    "a hello": b'{"kind":"hello","worker":0}\n',
    "too long": b"x" * 10_000_000,
    "no nonce": b"\xff" * 32 + b" " + b"0" * 64 + b"\n",
    "a nonce too short": b"0" * 31 + b" " + b"0" * 65 + b"\n",
    "no space": b"0" * 97 + b"\n",
    "empty lines": b"\n" * 1000,
}


@pytest.mark.parametrize("rubbish", RUBBISH.values(), ids=RUBBISH.keys())
def test_a_stranger_that_talks_rubbish_is_cut_off(coordinator: Coordinator, rubbish: bytes) -> None:
    with Raw(coordinator) as stranger:
        try:
            stranger.socket.sendall(rubbish)
        except ConnectionError:
            return
        assert stranger.receive() is None
    assert answers(coordinator).taken


def test_who_was_not_let_in_is_told_with_the_cause(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, however often they come; who connects and goes without a word is no news."""
    monkeypatch.setattr(hub, "GUEST_LIMIT_S", 0.3)
    for _ in range(5):
        with Raw(coordinator) as thief, pytest.raises(TokenRefused):
            thief.prove("no such token")
        with Raw(coordinator) as lost:
            lost.socket.sendall(b"GET / HTTP/1.1\r\n")
            assert lost.receive() is None
        Raw(coordinator).socket.close()
    with Raw(coordinator) as half:
        half.socket.sendall(b"0123")
        assert half.receive() is None
    told: list[ConnectionsRefused] = []
    eventually(lambda: told.extend(coordinator.take_records()) or len(told) == 3)
    assert {(refused.host, refused.times) for refused in told} == {("127.0.0.1", 1)}
    assert [refused.why for refused in told] == [
        "it has another token",
        "it broke the protocol: it does not speak elastune-2",
        "it has not proved within 0.3 s that it has the token",
    ]


GREETINGS = {
    "no json": b"hello\n",
    "no hello": b'{"kind":"ready"}\n',
    "a worker of another type": b'{"kind":"hello","worker":"0"}\n',
    "too long by one": b"x" * (hub.HELLO_LIMIT_BYTES + 1),
    "nested": b"[" * 4000 + b"\n",
}


@pytest.mark.parametrize("rubbish", GREETINGS.values(), ids=GREETINGS.keys())
def test_who_has_the_token_and_no_greeting_is_cut_off(coordinator: Coordinator, rubbish: bytes) -> None:
    with Raw(coordinator) as peer:
        peer.prove(coordinator.token)
        peer.socket.sendall(rubbish)
        assert peer.receive() is None
    assert answers(coordinator).taken


INSIDE = {
    "no json": b"hello\n",
    "binary": b"\x00\xff\n",
    "a line without end": b"x" * 10_000_000,
    "hello again": b'{"kind":"hello"}\n',
    "what only a coordinator says": b'{"kind":"bye"}\n',
    "a field too many": b'{"kind":"ready","now":true}\n',
    "a number below zero": b'{"kind":"running","version":1,"step":-1}\n',
    "a number beyond all bounds": b'{"kind":"beat","step":' + b"9" * 100_000 + b"}\n",
    "not a number": b'{"kind":"noticed","seconds":NaN,"why":""}\n',
    "infinite": b'{"kind":"noticed","seconds":1e999,"why":""}\n',
    "an address of a version to come": b'{"kind":"publish","key":"99/0","value":""}\n',
    "an address of no version": b'{"kind":"publish","key":"x/0","value":""}\n',
    "a negative resize": b'{"kind":"resize_asked","workers":-5}\n',
    "deep": b'{"kind":' + b"[" * 500_000 + b"\n",
}


@pytest.mark.parametrize("rubbish", INSIDE.values(), ids=INSIDE.keys())
def test_a_worker_that_talks_rubbish_is_lost_and_the_others_go_on(coordinator: Coordinator, rubbish: bytes) -> None:
    with members(coordinator, 0, 1) as found, Raw(coordinator) as bad:
        bad.hello(coordinator, 2)
        bad.send(Ready())
        for member in found:
            member.ready()
        number = found[0].await_view(0, LIMIT_S).number
        with contextlib.suppress(ConnectionError):
            bad.socket.sendall(rubbish)
        assert found[0].await_view(number, LIMIT_S).members == (0, 1)
        assert bad.ended()
        assert "it sent what is no message" in (text := Events(coordinator).text()) or "broke the protocol" in text


def test_too_many_addresses_are_a_violation(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1) as found, Raw(coordinator) as bad:
        bad.hello(coordinator, 2)
        bad.send(Ready())
        for member in found:
            member.ready()
        number = found[0].await_view(0, LIMIT_S).number
        value = "A" * (1 << 17)
        try:
            for key in range(100):
                bad.send(Publish(f"{number}/{key}", value))
        except ConnectionError:
            pass
        assert found[0].await_view(number, LIMIT_S).members == (0, 1)


@pytest.mark.parametrize("worker", [3, 1 << 62, 0])
def test_a_number_that_is_not_awaited_is_refused(coordinator: Coordinator, worker: int) -> None:
    with members(coordinator, 0), Raw(coordinator) as raw:
        raw.hello(coordinator, worker)
        raw.send(Ready())
        assert raw.receive() is None
        assert "'ready'" not in Events(coordinator).text()


def test_a_worker_that_was_lost_is_not_let_in_again(coordinator: Coordinator) -> None:
    coordinator.lost(1, "killed")
    eventually(lambda: "killed" in Events(coordinator).text())
    with Raw(coordinator) as raw:
        raw.hello(coordinator, 1)
        assert raw.receive() is None


def test_a_client_may_ask_for_a_size_and_nothing_else(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1, 2) as found:
        begun(found)
        eventually(lambda: coordinator.members == [0, 1, 2])
        assert answers(coordinator, 2) == Answer(True, "from 3 to 2 workers", [0, 1, 2])
        answer = answers(coordinator, 99)
        assert "to 8 workers" in answer.detail
        assert "99 asked for; from 1 to 8 are allowed; a run with --workers 1:99 may have them" in answer.detail
        for message in (Ready(), Broken(1, ""), Running(1, 1), Bye()):
            with Raw(coordinator) as client:
                client.hello(coordinator, None)
                client.send(message)
                assert client.receive() is None
        assert not found[0].superseded(1)


def test_one_byte_at_a_time_is_not_waited_for(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "GUEST_LIMIT_S", 0.3)
    with Raw(coordinator) as slow, Raw(coordinator) as silent:
        line, _ = respond(coordinator.token, PURPOSE, slow.challenge, new_nonce())
        ended = False
        for byte in line:
            try:
                slow.socket.sendall(bytes([byte]))
            except ConnectionError:
                ended = True
                break
            time.sleep(0.02)
        assert ended or slow.receive() is None
        assert silent.receive() is None


def test_a_crowd_of_strangers_keeps_nobody_out(coordinator: Coordinator) -> None:
    crowd = [Raw(coordinator) for _ in range(hub.GUESTS_LIMIT + 100)]
    try:
        with members(coordinator, 0, 1, 2) as found:
            begun(found)
            for stranger in crowd[:100]:  # the oldest had to go
                assert stranger.socket.recv(len(BUSY)) == BUSY
                assert stranger.receive() is None
            assert answers(coordinator).taken
            assert len(coordinator._hub._connections) <= hub.GUESTS_LIMIT + 4
    finally:
        for stranger in crowd:
            stranger.socket.close()


def test_who_does_not_read_is_cut_off_and_delays_nobody(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "OUTPUT_LIMIT_BYTES", 1 << 20)
    with members(coordinator, 0, 1) as found, Raw(coordinator) as deaf:
        deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.hello(coordinator, 2)
        deaf.send(Ready())
        for member in found:
            member.ready()
        number = found[0].await_view(0, LIMIT_S).number
        key, value = f"{number}/0/0", "A" * (1 << 17)

        def cut() -> bool:
            deaf.send(Beat())
            found[0].publish(key, value)
            return found[0].superseded(number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deaf, "send", lambda *_: None)
            eventually(cut)
        assert found[0].latest is not None
        assert found[0].latest.members == (0, 1)
        assert "does not read" in Events(coordinator).text()


def test_it_answers_quickly_under_attack(coordinator: Coordinator) -> None:
    """Peers that flood, stall and break off all the time; a member's word still reaches another one."""
    over = threading.Event()

    def attack(seed: int) -> None:
        dice = random.Random(seed)
        kept: list[socket.socket] = []
        host, port = coordinator.address.split(":")
        while not over.is_set():
            try:
                stranger = socket.create_connection((host, int(port)), timeout=1.0)
                stranger.sendall(dice.randbytes(dice.randrange(8000)))
                kept.append(stranger)
            except OSError:
                pass
            if len(kept) > 50:
                kept.pop(dice.randrange(50)).close()
        for stranger in kept:
            stranger.close()

    threads = [threading.Thread(target=attack, args=(seed,)) for seed in range(2)]
    with members(coordinator, 0, 1, 2) as found:
        number = begun(found)
        for thread in threads:
            thread.start()
        try:
            took = []
            for key in range(30):
                started = time.monotonic()
                found[0].publish(f"{number}/{key}", "")
                assert found[1].read([f"{number}/{key}"], LIMIT_S) == [""]
                took.append(time.monotonic() - started)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert sorted(took)[len(took) // 2] < 1.0
        assert not found[0].superseded(number)


def test_random_bytes_never_end_it(coordinator: Coordinator) -> None:
    dice = random.Random(11)
    for worker in range(3):
        with Raw(coordinator) as raw:
            raw.hello(coordinator, worker)
            assert isinstance(raw.receive(), Welcome)
            line = bytearray(b'{"kind":"running","version":1,"step":1}\n')
            for _ in range(5):
                line[dice.randrange(len(line))] = dice.randrange(256)
            with contextlib.suppress(ConnectionError):
                raw.socket.sendall(line)
    # All three were lost before they had begun: that is the machine's to judge, and it still does.
    eventually(lambda: Events(coordinator).text().count("'lost'") or coordinator.take())


def test_nothing_stays_open_after_close() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with coordinating(1) as coordinator, members(coordinator, 0) as found, Raw(coordinator):
            begun(found)
        coordinator.close()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not [thread for thread in threading.enumerate() if thread.name in ("coordinator", "member")]


def test_a_run_that_is_over_takes_nobody_in_and_no_request() -> None:
    with coordinating(1) as coordinator, members(coordinator, 0) as (one,):
        number = begun([one])
        one.done()
        assert one.await_bye(number) is None
        assert not answers(coordinator).taken
        coordinator.lost(0, "exit code 0")
        assert coordinator.take() == []


def test_a_resize_that_every_worker_asks_for_is_one_event(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1, 2) as found:
        begun(found)
        eventually(lambda: coordinator.members == [0, 1, 2])
        for member in found:
            member.resize(2, "policy GNSPolicy")
        for member in found:
            member.resize(3, "policy GNSPolicy")
        events = Events(coordinator)
        eventually(lambda: "'workers': 3" in events.text())
        found[0].resize(4, "the last")
        eventually(lambda: "'workers': 4" in events.text())
        asked = [event["workers"] for event in events.all if event["event"] == "resize_asked"]
        assert asked[:1] == [2]
        assert asked[-1:] == [4]
        assert all(one != other for one, other in pairwise(asked)), asked
