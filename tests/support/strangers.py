"""Strangers on this machine: they connect to whatever a run's processes listen on, and say what they like."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

LISTENS = "0A"  # /proc/net/tcp
KEPT = 100
PAUSE_S = 0.02


class Strangers:
    """From ``with`` until its end: again and again, each port of ``processes()`` on this host's IPv4 gets a connection.

    ``says``: what a stranger says, a connection after the other; b"": it stays silent. Its connections stay open until
    there are many. ``met``: how many ports there were.
    """

    def __init__(self, processes: Callable[[], Iterable[int]], says: Iterable[bytes]) -> None:
        self._processes = processes
        self._says = list(says)
        self._connections: deque[socket.socket] = deque()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="strangers", daemon=True)
        self.met: set[tuple[str, int]] = set()

    def _work(self) -> None:
        while not self._ended.wait(PAUSE_S):
            for address in ports(self._processes()):
                self.met.add(address)
                for words in self._says:
                    self._speak(address, words)

    def _speak(self, address: tuple[str, int], words: bytes) -> None:
        stranger = socket.socket()
        self._connections.append(stranger)
        if len(self._connections) > KEPT:
            self._connections.popleft().close()
        stranger.setblocking(False)
        with contextlib.suppress(OSError):
            with contextlib.suppress(BlockingIOError):
                stranger.connect(address)
            if words:
                stranger.send(words)

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        for stranger in self._connections:
            stranger.close()


def garbage(seed: int = 0) -> list[bytes]:
    """Silence, noise, and what gloo takes for the greeting of its n-th peer."""
    draw = random.Random(seed)
    greetings = [number.to_bytes(8, "little") for number in range(4)]
    rest = [draw.randbytes(200), bytes(200)]
    return [b"", draw.randbytes(1 << 12), *greetings, *(hello + words for hello in greetings for words in rest)]


def ports(processes: Iterable[int]) -> list[tuple[str, int]]:
    """Where these processes listen, by IPv4."""
    own: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for name in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    own.add(os.readlink(f"/proc/{process}/fd/{name}"))
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENS and f"socket:[{fields[9]}]" in own:
            host, port = fields[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found
