"""The controller's side of the fork server: start it, ask it for workers, hear how they end."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastune.cluster.fork.server import REFUSED_CODE, REQUEST_LIMIT_BYTES
from elastune.cluster.launcher import Bootstrap
from elastune.cluster.processes import vitals_of
from elastune.core.errors import UserError

# One thread in the server whatever these libraries would start; workers set their own numbers.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# torch._dynamo: building the first optimizer imports it, which takes as long as importing torch.
PRELOAD = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data", "torch._dynamo")
# A module that asks at import whether CUDA is there must not thereby initialise it: forked workers could not use it.
NO_CUDA_CONTEXT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
END_LIMIT_S = 5.0


@dataclass(frozen=True)
class Forked:
    """The worker ``key`` runs as process ``pid``, the leader of its own session and process group."""

    key: int
    pid: int


@dataclass(frozen=True)
class Ended:
    """The worker ``key`` ended with ``code`` (negative: the signal), or was never started: ``why``."""

    key: int
    code: int
    why: str = ""


class ServerLost(Exception):
    """The fork server has ended without being asked."""


class Spawner:
    """A running fork server that has imported, or is importing, ``preload``.

    The constructor does not wait for the imports: they go on beside whatever the controller does next. ``prefix``: what
    its command line is the argument of, if that replaces itself by it (``nsenter``).
    """

    def __init__(self, preload: Sequence[str] = PRELOAD, prefix: Sequence[str] = ()) -> None:
        if platform.system() != "Linux":
            raise UserError(
                "local worker processes need Linux", platform.system(), "use Linux, or start the file by torchrun"
            )
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._control, theirs):
            end.setblocking(True)  # whatever time-out the program has set for all new sockets
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        import_path = os.pathsep.join(path for path in sys.path if path)
        # -P: a file in this folder named like a module must not be taken for it
        server = [*prefix, sys.executable, "-P", "-m", "elastune.cluster.fork.server"]
        with theirs:
            self._process = subprocess.Popen(
                [*server, str(theirs.fileno()), str(os.getpid()), *preload],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                env={**os.environ, **ONE_THREAD, **NO_CUDA_CONTEXT, "PYTHONPATH": import_path},
            )

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def fileno(self) -> int:
        """For selectors: readable when ``receive`` has something."""
        return self._control.fileno()

    def fork(self, key: int, bootstrap: Bootstrap, log: int) -> None:
        """Ask for a worker ``key`` that ``bootstrap`` tells where to go and that prints into ``log``, a descriptor.

        ``Forked`` or ``Ended`` will follow. Raises ``ServerLost``.
        """
        try:
            request = json.dumps({"fork": key, "bootstrap": bootstrap.to_json()})
            socket.send_fds(self._control, [request.encode()], [log])
        except ConnectionError as error:
            raise ServerLost(self._story()) from error

    def kill(self, keys: Iterable[int]) -> None:
        """SIGKILL to the process groups of these workers; those that ended already are left alone."""
        try:
            for key in keys:
                self._control.send(json.dumps({"kill": [key]}).encode())
        except ConnectionError as error:
            raise ServerLost(self._story()) from error

    def receive(self) -> Forked | Ended | None:
        """The next reply, or None where there is none yet. Raises ``ServerLost``."""
        try:
            data = self._control.recv(REQUEST_LIMIT_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise ServerLost(self._story()) from error
        if not data:
            raise ServerLost(self._story())
        reply = json.loads(data)
        if "forked" in reply:
            return Forked(reply["forked"], reply["pid"])
        if "ended" in reply:
            return Ended(reply["ended"], reply["code"])
        return Ended(reply["refused"], REFUSED_CODE, f"no worker process could be started: {reply['why']}")

    def wake(self) -> None:
        """Let a server go on that somebody has stopped (SIGSTOP): a run's end waits for it."""
        vitals = vitals_of(self._process.pid)
        if vitals is not None and vitals.state == "T":
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server, and with it every worker that it has."""
        self._control.close()
        self._process.terminate()  # it may still be importing, and so not see that its socket has ended
        self._process.send_signal(signal.SIGCONT)  # or be stopped
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _story(self) -> str:
        try:
            code = self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "the fork server closed its connection"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        said = os.pread(self._log.fileno(), 4096, 0).decode(errors="replace").strip()
        return f"the fork server ended ({how})" + (f": {said.splitlines()[-1]}" if said else "")
