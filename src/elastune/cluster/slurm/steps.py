"""Agents as steps of the allocation that the controller is in, one a node."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from elastune.cluster.agents.fleet import NotStarted, Phase, Starter
from elastune.cluster.slurm.commands import last_line
from elastune.cluster.slurm.launch import log_of, srun_arguments

CLOSE_LIMIT_S = 20.0


class Steps(Starter):
    """Starts ``command`` on ``nodes`` by srun; logs lie in ``folder``. Labels are the nodes, with a number from the
    second start there on. A step ends with its agent, and that with its controller. ``token``: what agents are to read.
    """

    def __init__(self, command: Sequence[str], nodes: Sequence[str], folder: Path, token: str | None = None) -> None:
        self._command, self._folder, self._token = command, folder, token
        self._starts = dict.fromkeys(nodes, 0)
        self._on: dict[str, str] = {}  # the label of the step on each node
        self._steps: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, count: int) -> None:
        self.look()
        idle = [node for node in self._starts if node not in self._on]
        for node in sorted(idle, key=self._starts.__getitem__)[:count]:
            self._starts[node] += 1
            label = node if self._starts[node] == 1 else f"{node}-{self._starts[node]}"
            reads = self._token is not None
            command = ["srun", *srun_arguments(node, reads=reads), *self._command, "--label", label]
            stdin = subprocess.PIPE if reads else subprocess.DEVNULL
            try:
                with self._log(label).open("wb") as log:
                    step = subprocess.Popen(command, stdin=stdin, stdout=log, stderr=log, start_new_session=True)
            except OSError as error:
                raise NotStarted(f"srun: {error.strerror}") from None
            self._steps[label] = step
            if step.stdin is not None and self._token is not None:
                with suppress(BrokenPipeError), step.stdin:  # it has ended already, and said why
                    step.stdin.write(self._token.encode())
            self._on[node] = label

    def look(self) -> dict[str, Phase]:
        self._on = {node: label for node, label in self._on.items() if self._steps[label].poll() is None}
        return dict.fromkeys(self._on.values(), "running")

    def cancel(self, labels: Sequence[str]) -> None:
        for label in labels:
            self._steps[label].terminate()

    def why(self, label: str) -> str:
        return last_line(self._log(label))

    def waits(self) -> str:
        return ""

    def close(self) -> None:
        left = [step for step in self._steps.values() if step.poll() is None]
        for step in left:
            step.terminate()
        for step in left:
            try:
                step.wait(CLOSE_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(step.pid, 9)
                step.wait()

    def _log(self, label: str) -> Path:
        return log_of(self._folder, label)
