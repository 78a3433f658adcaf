"""No client takes a message from a server that lacks the token, even if the server speaks the protocol properly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.impostor import Impostor

from elastune.core.errors import UserError
from elastune.core.run import Place, Program, RunSpec
from elastune.elastic.wire import messages as run
from elastune.elastic.wire.contact import Contact, ask
from elastune.elastic.wire.transport import ProtocolError
from elastune.elastic.worker.client import CoordinatorClient
from elastune.runtime.agents import messages as agents
from elastune.runtime.agents import transfer_messages as files
from elastune.runtime.agents.agent import join
from elastune.runtime.agents.transfer_client import FilesLink

TOKEN, ANOTHER = "a token of this test", "another token of this test"
TASK = run.WorkerSpec("os:abort", RunSpec(Program(Path("p")), Path("o")), Place(), {}, "/", [])


def work(address: str, token: str) -> Any:
    return CoordinatorClient(address, token, 0)


def command(address: str, token: str) -> Any:
    return ask(Path("out"), run.ResizeAsked(3), Contact(address, token))


def agent(address: str, token: str) -> Any:
    return join(address, token, agents.AgentHello({"torch": "2"}, "host", 1), 5.0)


def send_files(address: str, token: str) -> Any:
    return FilesLink(address, token)


Client = Callable[[str, str], Any]
CLIENTS: list[tuple[Client, str, bytes]] = [
    (work, run.PURPOSE, run.encode(run.Welcome(False, 60.0, silence_s=600.0, spec=TASK))),
    (command, run.PURPOSE, run.encode(run.Answer(True, "done"))),
    (agent, agents.PURPOSE, agents.FROM_CONTROLLER.encode(agents.AgentWelcome(1.0, 15.0))),
    (send_files, files.PURPOSE, files.FROM_CONTROLLER.encode(files.FilesWelcome())),
]
NAMES = [client.__name__ for client, _, _ in CLIENTS]


@pytest.mark.parametrize(("client", "purpose", "welcome"), CLIENTS, ids=NAMES)
@pytest.mark.parametrize("token", [ANOTHER, None], ids=["another token", "the client's own proof"])
def test_a_server_without_the_token_is_refused(client: Client, purpose: str, welcome: bytes, token: str | None) -> None:
    with Impostor(purpose, welcome, token) as server:
        with pytest.raises((UserError, ProtocolError)):
            client(server.address, TOKEN)
        assert server.clients == 1, "it got as far as its proof"


@pytest.mark.parametrize(("client", "purpose", "welcome"), CLIENTS, ids=NAMES)
def test_the_same_server_with_the_token_is_taken(client: Client, purpose: str, welcome: bytes) -> None:
    """Nothing but the proof makes the difference."""
    with Impostor(purpose, welcome, TOKEN) as server:
        taken = client(server.address, TOKEN)
        for connection in (taken, getattr(taken, "socket", None)):
            if hasattr(connection, "close"):
                connection.close()


def test_a_server_for_something_else_is_refused() -> None:
    """It has the token, but proves it for another purpose."""
    with Impostor(agents.PURPOSE, CLIENTS[1][2], TOKEN) as server, pytest.raises(UserError, match="a run must answer"):
        command(server.address, TOKEN)
