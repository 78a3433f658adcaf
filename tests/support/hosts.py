"""Several hosts on this machine: network namespaces on one switch, whose links can be cut, healed and made slow.

Needs root and the tools ip, tc, unshare and nsenter. A namespace has no name, only a process that holds it; that one
ends with this process, however this one ends, and with it go the namespace and everything in it.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

INTERFACE = "eth0"
"""A host's end of its link."""
CLONE_NEWNET = 0x40000000  # <linux/sched.h>
LIMIT_S = 20.0
BURST, QUEUE = "32k", "50ms"  # of a slow link
_NUMBERS = itertools.count()


class Namespace:
    """A network namespace, and the process that holds it."""

    def __init__(self) -> None:
        # It reads until its input ends, which is when this process does.
        command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            raise OSError("no network namespace could be made: that takes root, and a kernel that allows it")
        self.pid = self._holder.pid
        self.path = f"/proc/{self.pid}/ns/net"

    def command(self, *words: str) -> list[str]:
        """The command line that runs ``words`` in here."""
        return ["nsenter", f"--net={self.path}", "--", *words]

    def do(self, line: str) -> None:
        """Run ``line``, a command without quotes. Raises ``OSError`` with what it says where it fails."""
        _do(self.command(*line.split()))

    def close(self) -> None:
        """Idempotent."""
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe is not None:
                pipe.close()
        self._holder.kill()
        self._holder.wait()


class Host:
    """One host. ``address``: its own in the network."""

    def __init__(self, space: Namespace, switch: Namespace, port: str, address: str) -> None:
        self.space = space
        self.address = address
        self.is_cut = False
        self._switch = switch
        self._port = port  # the switch's end of its link

    def command(self, *words: str) -> list[str]:
        """The command line that runs ``words`` here, on a machine of this host's name, which is its address."""
        named = ["unshare", "--uts", "sh", "-c", 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"', self.address]
        return self.space.command(*named, *words)

    def cut(self) -> None:
        """From now on nothing arrives, in either direction, and nobody is told."""
        self.is_cut = True
        self._switch.do(f"ip link set {self._port} down")

    def heal(self) -> None:
        """Connect it again."""
        self._switch.do(f"ip link set {self._port} up")
        self.is_cut = False

    def slow(self, rate: str, burst: str = BURST) -> None:
        """Let no more than ``rate`` (``50mbit``) through its link, in each direction.

        ``burst`` may pass at once; a fast link needs more of it than the default, or a busy machine makes it slower.
        """
        self._switch.do(f"tc qdisc replace dev {self._port} root tbf rate {rate} burst {burst} latency {QUEUE}")
        self.space.do(f"tc qdisc replace dev {INTERFACE} root tbf rate {rate} burst {burst} latency {QUEUE}")

    def unslow(self) -> None:
        """As fast as before. Raises ``OSError`` where it was not slow."""
        self._switch.do(f"tc qdisc del dev {self._port} root")
        self.space.do(f"tc qdisc del dev {INTERFACE} root")

    @property
    def processes(self) -> dict[int, str]:
        """What runs here, by process: the names of their programs. Who holds the namespace does not count."""
        own, found = os.readlink(self.space.path), {}
        for path in Path("/proc").glob("[0-9]*/ns/net"):
            process = int(path.parts[2])
            try:
                if process != self.space.pid and os.readlink(path) == own:
                    found[process] = (path.parents[1] / "comm").read_text().strip()
            except OSError:  # it has ended
                continue
        return found

    def kill(self) -> None:
        """SIGKILL to everything that runs here, until nothing does. Its connections are closed by that, not cut."""
        until = time.monotonic() + LIMIT_S
        while processes := self.processes:
            if time.monotonic() > until:
                raise OSError(f"still there after {LIMIT_S:g} s: {processes}")
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.005)

    @property
    def received_bytes(self) -> int:
        """What has arrived here."""
        (link,) = json.loads(_do(self.space.command("ip", "-s", "-j", "link", "show", INTERFACE)))
        return int(link["stats64"]["rx"]["bytes"])


class Network:
    """``count`` hosts on one switch, and this process at ``address``; ``six``: all by IPv6 alone. A context manager.

    Raises ``OSError`` where the system refuses.
    """

    def __init__(self, count: int, *, six: bool = False) -> None:
        number = next(_NUMBERS)
        # 198.18.0.0/15 is set apart for tests of networks (RFC 2544), fd00::/8 for networks of one's own (RFC 4193).
        free = (os.getpid() + 64 * number) % 512
        while (net := _net(free, six)) in _do(["ip", "address"]):
            free = (free + 1) % 512
        # nodad: an address can be used at once; nobody else on this switch can have it.
        length, flags = ("64", "nodad") if six else ("24", "")
        self.address = f"{net}254"
        self.hosts: list[Host] = []
        with ExitStack() as stack:
            self._switch = _space(stack)
            self._switch.do("ip link add bridge type bridge")
            self._switch.do("ip link set bridge up")
            uplink = f"e{os.getpid()}n{number}"
            self._connect("uplink", os.getpid(), uplink)
            stack.callback(_do, ["ip", "link", "delete", uplink])  # it goes with the switch too, but later
            _do(f"ip address add {self.address}/{length} dev {uplink} {flags}".split())
            _do(f"ip link set {uplink} up".split())
            for at in range(1, count + 1):
                space = _space(stack)
                self._connect(f"port{at}", space.pid, INTERFACE)
                space.do(f"ip address add {net}{at}/{length} dev {INTERFACE} {flags}")
                space.do("ip link set lo up")
                space.do(f"ip link set {INTERFACE} up")
                self.hosts.append(Host(space, self._switch, f"port{at}", f"{net}{at}"))
            self._stack = stack.pop_all()

    def _connect(self, port: str, process: int, interface: str) -> None:
        """Lay a link from the switch to the namespace of ``process``."""
        self._switch.do(f"ip link add {port} type veth peer name {interface} netns {process}")
        self._switch.do(f"ip link set {port} master bridge up")

    def close(self) -> None:
        """Idempotent."""
        self._stack.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def enter(path: str) -> None:
    """Let this thread, and those that it starts, be in the network namespace at ``path``."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "this process may not enter the namespace", path)
    finally:
        os.close(descriptor)


def _net(number: int, six: bool) -> str:
    """What all addresses of a network begin with."""
    return f"fd00:e1a5:{number:x}::" if six else f"198.{18 + number // 256}.{number % 256}."


def _space(stack: ExitStack) -> Namespace:
    space = Namespace()
    stack.callback(space.close)
    return space


def _do(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"{' '.join(command)}: no end within {LIMIT_S:g} s") from None
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
