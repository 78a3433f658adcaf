"""``--cluster`` and ``elastune agent``, told wrong things: one line, exit code 2."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastune.cli.app import main
from elastune.elastic.wire.transport import HOST
from elastune.runtime.agents.credentials import make_token

PROGRAM = str(Path(__file__).parents[2] / "examples" / "digits.py")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--cluster", "host:1"], "--cluster must be local or hosts"),
        (["--cluster", "hosts", "--token-file", "x"], "--cluster hosts, port: field required"),
        (["--cluster", "hosts:99999", "--token-file", "x"], "port: input should be less than or equal to 65535"),
        (["--cluster", "hosts:7070,token=x"], "'token'): it has port, token_file, interface"),
        (["--cluster", "hosts:7070,port=7071"], "has a setting once"),
        (["--cluster", "hosts:7070,x"], "has settings KEY=VALUE"),
        (["--cluster", "local:4"], "has settings KEY=VALUE"),
        (["--cluster", "hosts:7070"], "needs a secret"),
        (["--token-file", "x"], "--token-file belongs to a cluster of agents"),
        (["--interface", "lo"], "--interface belongs to a cluster of agents"),
        (["--tls"], "--tls belongs to a cluster of agents"),
        (["--cluster", "hosts:7070", "--token-file", "x", "--interface", "none0"], "--interface must name"),
        (["--cluster", "hosts:7070", "--token-file", "x", "--gather", "soon"], "--gather"),
    ],
)
def test_run(
    options: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", PROGRAM, *options]) == 2
    assert told in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--cluster", f"hosts:{port}", "--token-file", "token", "--gather", "1s", "--workers", "2"]
        assert main(["run", PROGRAM, *options]) == 2
        assert "must be able to listen" in capsys.readouterr().err
    assert main(["run", PROGRAM, *options]) == 2
    assert "room for 2 workers must come within 1 s (got room for 0)" in capsys.readouterr().err


def test_under_another_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("0", "2", "0", "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert main(["run", PROGRAM, "--cluster", "hosts:7070", "--token-file", "x", "--out", "o"]) == 2
    assert "where those started them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--join", "127.0.0.1:1", "--patience", "0.1s"], "a controller must listen there"),
        (["--join", "rubbish"], "must be HOST:PORT"),
        (["--join", "n1..domain:70"], "must name a host"),
        (["--join", "127.0.0.1:1", "--workers", "0"], "room for 1 to 65536 workers"),
        (["--join", "127.0.0.1:1", "--interface", "none0"], "--interface must name"),
    ],
)
def test_agent(options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    assert main(["agent", *options, "--token-file", str(token)]) == 2
    assert "--token-file must name" in capsys.readouterr().err or "none0" in options
    make_token(token)
    assert main(["agent", *options, "--token-file", str(token)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("leaves_log", "left"), [(False, []), (True, ["worker-0.log"])])
def test_an_agent_leaves_no_empty_folder(
    leaves_log: bool, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, token = tmp_path / "temporary", tmp_path / "token"
    folder.mkdir()
    make_token(token)

    class Served:
        leaves = False

        def __init__(self, link: object, launcher: object, logs: Path, **options: object) -> None:
            self._logs = logs

        def serve(self) -> str:
            assert self._logs.parent == folder
            if leaves_log:
                (self._logs / "worker-0.log").touch()
            return ""

    for name in (HOST, "GLOO_SOCKET_IFNAME"):  # put back afterwards
        monkeypatch.setenv(name, "before")
    link = SimpleNamespace(socket=SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1)))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("elastune.cli.commands.agent._join", lambda *_: link)
    monkeypatch.setattr("elastune.runtime.agents.agent.Agent", Served)
    monkeypatch.setattr(
        "elastune.runtime.clusters.fork.ForkLauncher", lambda *_, **__: SimpleNamespace(close=lambda: None)
    )
    assert main(["agent", "--join", "127.0.0.1:1", "--token-file", str(token), "--workers", "1"]) == 0
    assert [path.name for path in folder.glob("*/*")] == left
    assert len(list(folder.iterdir())) == len(left)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--cluster", "hosts:7070"], "needs a secret"),
        (
            ["--cluster", "PORT", "--token-file", "token", "--gather", "0.2s"],
            "a host must join before doctor can describe it",
        ),
        (["--cluster", "PORT", "--token-file", "token", "--out", "token/x"], "the output folder must be writable"),
    ],
)
def test_doctor(
    options: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert main(["doctor", *[option.replace("PORT", f"hosts:{port}") for option in options]]) == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["tune", "frontier"])
def test_studies(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, PROGRAM, "--cluster", "hosts:7070"]) == 2
    assert "needs a secret" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    bound = ["--trials", "1"] if command == "tune" else ["--budget", "1s", "--workers", "1,2"]
    options = ["--cluster", f"hosts:{port}", "--token-file", "token", "--gather", "0.2s", "--out", "out", *bound]
    assert main([command, PROGRAM, *options]) == 2
    assert f"room for {1 if command == 'tune' else 2} workers must come within 0.2 s" in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing was begun"
