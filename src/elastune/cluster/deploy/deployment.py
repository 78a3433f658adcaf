"""What is to be deployed, checked; and the command lines that all systems run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from elastune.core.errors import UserError

FAILED, WRONG, TRY_AGAIN = 1, 2, 75  # exit codes of the command line
OURS = ("--cluster", "--interface", "--out", "--resume", "--token-file", "--workers", "--gather")
"""Options of ``elastune run`` that a deployment sets itself."""

Label = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Deployment:
    """``hosts`` agents with ``workers`` each, and a controller for them.

    Args:
        command: the program, as a path in ``image``, and options of ``elastune run``.
        name: of the job; 40 characters at most, as Kubernetes makes host names of it.
        image: a container image that has elastune, torch, the program and its data.
        hosts: agents, each on a machine of its own.
        workers: of each agent.
        gpus: of each host; ``accelerator``: what SkyPilot calls them.
        port: where the controller listens for agents.
        volume: the name of a volume that all hosts share, for checkpoints and results.
    """

    command: tuple[str, ...]
    image: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$", max_length=512)]
    name: Label = "train"
    hosts: Annotated[int, Field(ge=1, le=10_000)] = 2
    workers: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    gpus: Annotated[int, Field(ge=0, le=1024)] = 0
    accelerator: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$")] = "H100"
    port: Annotated[int, Field(ge=1024, le=65535)] = 7070
    volume: Label = "results"

    def run(self, interface: str, token_file: str, shared: str) -> list[str]:
        """The controller's command. It goes on with what an earlier start has left."""
        where = ["--cluster", f"hosts:{self.port}", "--interface", interface, "--token-file", token_file]
        room = ["--workers", f"1:{self.hosts * self.workers}", "--gather", "60m"]
        return ["elastune", "run", *self.command, *where, *room, "--out", f"{shared}/{self.name}", "--resume"]

    def agent(self, controller: str, token_file: str, grace_s: int) -> list[str]:
        """An agent's command; ``controller``: the host where that listens."""
        join = ["--join", f"{controller}:{self.port}", "--token-file", token_file, "--workers", str(self.workers)]
        return ["elastune", "agent", *join, "--grace", f"{grace_s}s", "--patience", "60m"]


def deployment(command: Sequence[str], **facts: object) -> Deployment:
    """A checked one. Raises ``UserError``."""
    if not command or command[0].startswith("-"):
        fix = "such as: elastune deploy jobset --image IMAGE -- train.py --epochs 10"
        raise UserError("a deployment runs a program", " ".join(command) or "nothing", fix)
    if ours := [word for word in command if word.partition("=")[0] in OURS]:
        raise UserError("a deployment says itself where workers run", ours[0], "leave it out; see --hosts, --workers")
    if bad := [word for word in command if not word.isprintable()]:
        raise UserError("a command line is of printable characters", ascii(bad[0]), "leave it out")
    try:
        return Deployment(tuple(command), **facts)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        said = first["msg"][:1].lower() + first["msg"][1:]
        raise UserError(f"--{first['loc'][0]}: {said}", repr(first["input"]), "choose another") from None
