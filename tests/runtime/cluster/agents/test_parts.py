"""What agents are made of: who gets the next workers, the token's file, interfaces, words on the connection."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.elastic.wire.contact import SALT_DIGITS, Contact, derived
from elastune.elastic.wire.transport import MARK, fingerprint_of
from elastune.parallel.comm.sockets import address_of, addresses, interface_with
from elastune.runtime.agents.credentials import certificate_path, credentials, make_token, read_token
from elastune.runtime.agents.hosts import AgentHost, as_kept, pack, spread
from elastune.runtime.agents.launcher import answer
from elastune.runtime.agents.messages import (
    FROM_AGENT,
    FROM_CONTROLLER,
    AgentBeat,
    AgentBye,
    AgentHello,
    AgentRefused,
    AgentWelcome,
    EndWorker,
    FolderProbeRequest,
    FolderProbeResult,
    PreemptionNoticed,
    RunAsked,
    RunFound,
    StartWorker,
    TakeFiles,
    WorkerEnded,
    WorkerKept,
    WorkerSeen,
    WorkerStarted,
)
from elastune.runtime.clusters.hosts import workers_held
from elastune.runtime.launcher import Bootstrap


@pytest.mark.parametrize(
    ("free", "count", "own", "expected"),
    [
        ({1: 4, 2: 4}, 3, {}, [1, 1, 1]),
        ({1: 4, 2: 2}, 2, {}, [2, 2]),  # the smallest that takes them all
        ({1: 4, 2: 8, 3: 2}, 10, {}, [2] * 8 + [3] * 2),
        ({1: 4, 2: 2}, 2, {1: 1}, [1, 1]),  # beside the run's others
        ({1: 1, 2: 2}, 3, {1: 3}, [1, 2, 2]),
        ({1: 0, 2: 1}, 1, {1: 3}, [2]),
        ({}, 0, {}, []),
    ],
)
def test_workers_go_host_by_host(free: dict[int, int], count: int, own: dict[int, int], expected: list[int]) -> None:
    assert pack(free, count, own) == expected


@given(free=st.dictionaries(st.integers(1, 9), st.integers(0, 5)), count=st.integers(0, 50))
def test_nobody_gets_more_than_there_is_room_for(free: dict[int, int], count: int) -> None:
    if count > sum(free.values()):
        with pytest.raises(ValueError, match="room"):
            pack(free, count)
        return
    found = pack(free, count)
    assert len(found) == count
    assert all(found.count(agent) <= free[agent] for agent in found)
    assert found == [agent for agent in dict.fromkeys(found) for _ in range(found.count(agent))]  # host by host


@pytest.mark.parametrize(
    ("free", "count", "expected"),
    [
        ({1: 4, 2: 4}, 2, [1, 2]),
        ({1: 4, 2: 4, 3: 4}, 4, [1, 1, 2, 3]),
        ({1: 1, 2: 4, 3: 0}, 4, [1, 2, 2, 2]),
    ],
)
def test_for_measuring_workers_go_over_all_hosts(free: dict[int, int], count: int, expected: list[int]) -> None:
    assert spread(free, count) == expected
    with pytest.raises(ValueError, match="room"):
        spread(free, 99)


def test_a_token_is_made_once_and_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    token = make_token(path)
    assert read_token(path) == token
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UserError, match="a new token needs a new file"):
        make_token(path)
    os.chmod(path, 0o640)
    with pytest.raises(UserError, match="mode 640"):
        read_token(path)


def test_a_certificate_is_made_with_its_token_and_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = credentials(path, tls=True).token
    beside = certificate_path(path)
    assert token.endswith(MARK + fingerprint_of(token))
    assert beside.stat().st_mode & 0o777 == 0o600
    again = credentials(path)
    assert (again.token, again.tls is not None) == (token, True)
    assert token not in repr(again)
    for spoil, told in (
        (lambda: beside.chmod(0o644), "mode 644"),
        (lambda: beside.write_bytes(b"rubbish"), "must lie beside it"),
        (lambda: credentials(tmp_path / "other", tls=True) and certificate_path(tmp_path / "other").rename(beside),
         "holds another"),
        (beside.unlink, "No such file"),
    ):  # fmt: skip
        spoil()
        with pytest.raises(UserError, match=told):
            credentials(path)
        if beside.exists():
            beside.chmod(0o600)


def test_a_token_gets_no_certificate_later(tmp_path: Path) -> None:
    assert credentials(tmp_path / "token").tls is None
    with pytest.raises(UserError, match="names none"):
        credentials(tmp_path / "token", tls=True)


@pytest.mark.parametrize("content", [b"", b"short", b"with a space in the middle", b"\xff" * 30])
def test_a_file_that_holds_no_token(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UserError, match="16 characters"):
        read_token(path)


def test_interfaces_and_their_addresses() -> None:
    assert "127.0.0.1" in addresses()["lo"]
    assert (interface_with("127.0.0.1"), interface_with("::ffff:127.0.0.1")) == ("lo", "lo")
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(UserError, match="must be this machine's"):
        interface_with("192.0.2.77")
    with pytest.raises(UserError, match="--interface"):
        address_of("none0")


SAID = [
    AgentHello({"torch": "2"}, "host", 4),
    WorkerStarted(1, 77),
    WorkerEnded(1, -9, "its log", "why"),
    WorkerEnded(2, None),
    WorkerKept(3, Bootstrap(1, "a:1", "salt"), 78),
    WorkerKept(4, Bootstrap(2, "a:1", "salt"), None),
    AgentBeat([WorkerSeen(1, "S", 0.5, "epoch 3")]),
    PreemptionNoticed(30.0, "spot"),
    FolderProbeResult(False, 6),
    RunAsked("out"),
]
TOLD = [AgentWelcome(1.0, 15.0), StartWorker(1, Bootstrap(0, "a:1", "t"), "cpu", "/out/logs"), EndWorker(1), AgentBye()]
TOLD += [FolderProbeRequest("/out/mark", "text"), TakeFiles(7071), RunFound("10.0.0.1:40000", "0" * 32)]


def test_what_is_said_is_what_is_heard() -> None:
    assert [FROM_AGENT.decode(FROM_AGENT.encode(message)) for message in SAID] == SAID
    assert [FROM_CONTROLLER.decode(FROM_CONTROLLER.encode(message)) for message in TOLD] == TOLD


def test_what_no_agent_says_is_a_value_error() -> None:
    """And nothing else: whoever reads it cuts the connection."""
    odd = [None, -1, 1.5, "x" * 70000, [], {}, True]
    for message in (json.loads(FROM_AGENT.encode(message)) for message in SAID):
        lines = [json.dumps({**message, name: value}) for name in message for value in odd]
        for line in [*lines, "null", "[" * 9999, "\0"]:
            with contextlib.suppress(ValueError):
                assert FROM_AGENT.decode(line.encode())
        for wrong in ({**message, "more": 1}, {**message, "kind": "other"}, {"kind": message["kind"], "x": 0}):
            with pytest.raises(ValueError, match="validation error"):
                FROM_AGENT.decode(json.dumps(wrong).encode())


def test_a_run_is_asked_for_by_its_folder_or_the_end_of_that() -> None:
    salt = "5" * 32
    runs = {
        Path("/shared/a/out"): Contact("a:1", salt + "secret"),
        Path("/shared/b/out"): Contact("b:2", "6" * 32 + "x"),
    }
    assert answer(RunAsked("/shared/a/out"), runs) == RunFound("a:1", salt)
    assert answer(RunAsked("a/out"), runs) == RunFound("a:1", salt)
    for asked, why in (
        ("out", "out may be each of /shared/a/out, /shared/b/out"),
        ("ut", "ut; it has /shared/a/out, /shared/b/out"),
        ("/out", "/out; it has /shared/a/out, /shared/b/out"),
    ):
        assert answer(RunAsked(asked), runs) == AgentRefused(why)
    assert answer(RunAsked("/out"), {}) == AgentRefused("/out; it has none")


def test_a_kept_workers_run_is_where_its_controller_is_by_now() -> None:
    kept = as_kept(Bootstrap(2, "10.0.0.1:4000", "a" * SALT_DIGITS), "10.0.0.2", "secret")
    assert kept == Bootstrap(2, "10.0.0.2:4000", derived("secret", "a" * SALT_DIGITS))
    agent = AgentHost("n1", 2, None, 0.0, workers={1: kept})  # type: ignore[arg-type]
    assert workers_held([agent], "10.0.0.2:4000") == {"on-demand": 1}
