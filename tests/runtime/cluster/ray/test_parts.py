"""What is asked of Ray, how an agent is run for it, and what a user is told who asks for what cannot be."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elastune.cli import main
from elastune.core.errors import UserError
from elastune.elastic.wire.contact import challenge, new_nonce
from elastune.runtime.clusters import ray_actor as actor
from elastune.runtime.clusters.fleet import check_no_controller, read_controller_address, write_controller_address
from elastune.runtime.clusters.kind import Access
from elastune.runtime.clusters.ray import INSTALL, RayKind, WorkerShape, stay_in, usual_room
from elastune.runtime.clusters.ray_actor import AgentActor, AgentEnd, run_agent
from elastune.runtime.clusters.registry import parse_cluster

PROGRAM = str(Path(__file__).parents[4] / "examples" / "digits.py")
NOWHERE = ["--join", "127.0.0.1:1", "--workers", "1", "--patience", "1s"]


def test_workers_are_given_what_they_ask_for() -> None:
    assert WorkerShape().of(4) == {"num_cpus": 4, "num_gpus": 0}
    assert WorkerShape(cpus=2, gpus=1).of(8) == {"num_cpus": 16, "num_gpus": 8}
    assert WorkerShape(gpus=0.25).of(2) == {"num_cpus": 2, "num_gpus": 0.5}
    assert WorkerShape(gpus=0.25).of(5) == {"num_cpus": 5, "num_gpus": 2}


@pytest.mark.parametrize(
    ("nodes", "shape", "room"),
    [
        ([], WorkerShape(), 0),
        ([{"memory": 1e9}], WorkerShape(), 0),
        ([{"CPU": 2.0}, {"CPU": 64.0}], WorkerShape(), 64),
        ([{"CPU": 8.0}, {"CPU": 8.0}, {"CPU": 64.0}], WorkerShape(), 8),
        ([{"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0}], WorkerShape(gpus=1), 8),
        ([{"CPU": 4.0, "GPU": 8.0}], WorkerShape(cpus=2, gpus=1), 2),
        ([{"CPU": 8.0, "GPU": 1.0}], WorkerShape(gpus=0.25), 4),
    ],
)
def test_the_room_of_most_nodes(nodes: list[dict[str, float]], shape: WorkerShape, room: int) -> None:
    assert usual_room(nodes, shape) == room


def test_what_a_name_says() -> None:
    assert parse_cluster("ray") == RayKind()
    assert parse_cluster("ray:10.0.0.1:6379") == RayKind(address="10.0.0.1:6379")
    asked = parse_cluster("ray:address=head:6379,workers_per_node=4,gpus_per_worker=0.5,idle_s=5")
    assert asked == RayKind(address="head:6379", workers_per_node=4, gpus_per_worker=0.5, idle_s=5)


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ("ray:ray://10.0.0.1:10001", "address: string should match pattern"),
        ("ray:workers=4", "must have settings that it knows (got 'workers')"),
        ("ray:workers_per_node=0", "workers_per_node: input should be greater than or equal to 1"),
        ("ray:cpus_per_worker=0", "cpus_per_worker: input should be greater than 0"),
        ("ray:gpus_per_worker=nan", "gpus_per_worker: input should be"),
        ("ray:127.0.0.1:1", "a Ray cluster must be reached (got 127.0.0.1:1: Connection refused)"),
    ],
)
def test_what_ray_cannot_be_asked_is_told_in_one_line(
    cluster: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", PROGRAM, "--cluster", cluster, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_ray_a_line_tells_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["run", PROGRAM, "--cluster", "ray"]) == 2
    assert f"needs the package ray (got it is not installed): {INSTALL}" in capsys.readouterr().err


def test_a_controller_goes_back_into_a_folder_that_was_unpacked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    stay_in(folder, 0.01)
    folder.rmdir()
    stay_in(folder)  # a node may be unpacking it
    with pytest.raises(UserError, match=f"got {folder} was removed"):
        stay_in(folder, 0.01)
    assert main(["run", "train.py", "--out", "out"]) == 2
    assert f"must exist (got {folder} was removed): go into" in capsys.readouterr().err
    folder.mkdir()
    stay_in(folder)
    assert Path.cwd() == folder


@pytest.mark.soak
def test_an_agent_gets_its_token_and_its_end_is_told() -> None:
    end = run_agent(b"a token that is long enough\n".replace(b" ", b"-"), NOWHERE, lambda: None)
    assert end.code == 2
    assert "a controller must listen there (got 127.0.0.1:1: Connection refused" in end.last_line
    end = run_agent(b"short", NOWHERE, lambda: None)
    assert "a token has 16 characters or more" in end.last_line


def test_an_agent_dies_with_its_actor() -> None:
    waits = [*NOWHERE[:-1], "60s"]
    run = f"from elastune.runtime.clusters.ray_actor import run_agent; run_agent(b'x' * 32, {waits}, lambda: None)"
    with subprocess.Popen([sys.executable, "-c", run]) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until = time.monotonic() + 60
        while not (agents := children.read_text().split()) or b"patience" not in _words(agents[0]):
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    while _words(agents[0]):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_an_actor_runs_one_agent_however_often_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "seconds_left", lambda: None)
    left = threading.Event()
    one = AgentActor(unused_s=60.0, leave=left.set)
    assert one.end(0.0) is None, "nobody has told it to"
    one.begin(b"x" * 32, NOWHERE)
    one.begin(b"short", NOWHERE)  # by a controller that knows nothing of the first time
    end = one.end(60.0)
    assert end is not None
    assert "a controller must listen there" in end.last_line
    assert one.end(0.0) == end
    assert not left.is_set(), "whoever asked ends it"


def test_an_agent_hears_where_its_next_controller_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "LOOK_S", 0.05)
    with socket.create_server(("127.0.0.2", 0)) as there:
        port, ends = there.getsockname()[1], list[AgentEnd]()
        options = ["--join", f"127.0.0.1:{port}", "--workers", "1", "--patience", "60s"]
        where = f"127.0.0.2:{port}"
        run = threading.Thread(target=lambda: ends.append(run_agent(b"x" * 32, options, lambda: None, lambda: where)))
        run.start()
        there.settimeout(60.0)
        there.accept()[0].close()  # it is let in by nobody
    run.join(60.0)
    assert f"a controller must let its agents in (got {where}: " in ends[0].last_line


@pytest.mark.parametrize("begun", [False, True])
def test_an_actor_that_nobody_has_use_for_ends(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "run_agent", lambda *options: AgentEnd(75, "nobody came"))
    left = threading.Event()
    one = AgentActor(unused_s=0.1, leave=left.set)
    if begun:
        one.begin(b"x" * 32, NOWHERE)
    assert left.wait(10.0)


def test_actors_whose_controller_lives_are_left_alone(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as lives:
        write_controller_address(tmp_path, "elastune-0123abcd", f"127.0.0.1:{lives.getsockname()[1]}")
        found = read_controller_address(tmp_path)
        assert found is not None
        says = threading.Thread(target=lambda: lives.accept()[0].sendall(challenge(new_nonce())))
        says.start()
        with pytest.raises(UserError, match="one controller at a time .got one listens at 127.0.0.1"):
            RayKind()._left(tmp_path, "10.0.0.1", Access())
        says.join()
    check_no_controller(found)
    told: list[str] = []
    assert RayKind()._left(tmp_path, "127.0.0.2", Access(notify=told.append)) == found
    assert told == ["actors elastune-0123abcd will connect to 127.0.0.2 instead of 127.0.0.1"]
    with socket.create_server(("127.0.0.1", found.port)) as other:  # somebody else's port by now

        def serve() -> None:
            other.accept()[0].sendall(b"220 mail.example.com\r\n")
            other.accept()[0].close()  # who comes again, to encrypt

        says = threading.Thread(target=serve)
        says.start()
        check_no_controller(found)
        says.join()


def _words(process: str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""
