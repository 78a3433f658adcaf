"""An agent that still looks for its controller when its machine is taken away."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest
from tests.support.forked import elastune

LIMIT_S = 60.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_an_agent_that_nobody_has_admitted_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "token").write_text("a" * 64)
    (tmp_path / "token").chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as silent, (tmp_path / "said").open("wb") as said:
        silent.settimeout(LIMIT_S)
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        join = ["agent", "--join", where, "--token-file", str(tmp_path / "token"), "--patience", "60s"]
        agent = elastune(*join, out=said, err=said)
        with silent.accept()[0]:  # it has begun, and waits for an answer
            agent.send_signal(number)
            began = time.monotonic()
            assert agent.wait(LIMIT_S) == 75
    assert time.monotonic() - began < 10.0, "it does not use up its patience"
    assert "asked to end before the controller" in (tmp_path / "said").read_text()
