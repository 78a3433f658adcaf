"""The workers that reduce together, behind one small interface over a raw process group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

DRAIN_S = 10.0
STUCK_S = 0.02  # after its connections are closed, what does not end within this never will
LOOK = timedelta(milliseconds=20)
POINT_TO_POINT_TAG = 1  # one for all, so that what is sent in order is received in order
POST_TAG = 2


class Lifeline(Protocol):
    """What a group's traffic goes through, and how it is ended: sockets (gloo), or a communicator (NCCL)."""

    def sever(self) -> None:
        """End it; from any thread, at any time, as often as one likes."""
        ...

    def all_closed(self) -> bool:
        """Whether the library has let go of it: it will neither read nor write any more."""
        ...


class GroupBroken(Exception):
    """A collective failed here, or its group was abandoned; nothing more comes of this group."""


class GathersDiffer(Exception):
    """Workers met in one gather and meant different ones. All of them are told, and the group is as good as before."""


class Work:
    """A collective that was started."""

    def __init__(self, group: Group, work: Any) -> None:
        self._group = group
        self._work = work

    def wait(self) -> None:
        """Return once the result is here. Raises ``GroupBroken`` where it will not come."""
        if self._work is None:
            return
        try:
            self._wait()
        except RuntimeError as error:
            raise self._group._broke(error) from None
        if self._group.backend == "gloo":  # on a GPU the stream waits, and the buffers are still at work
            self._work = None

    def _wait(self) -> None:
        if self._group.backend != "gloo":  # its wait is the stream's, and its library's watchdog ends what hangs
            self._work.wait()
            return
        # Gloo forgets to wake what was in the middle of a message when its connection died (Pair::signalException
        # leaves out the operations that are being transmitted), so the wait must not be gloo's alone.
        while True:
            try:
                self._work.wait(LOOK)
                return
            except RuntimeError:
                if self._work.is_completed():  # well or not, perhaps only just now
                    self._work.wait()
                    return
                if self._group._abandoned:
                    raise

    def is_completed(self) -> bool:
        """Whether it has ended, well or not: no buffer of it changes any more."""
        return self._work is None or bool(self._work.is_completed())


class _Transfer:
    """A ``dist.Work`` between two workers, in the shape of a collective's: one whose wait may time out harmlessly."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, name="transfer", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._work = None
        self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("not yet")
        if self._error is not None:
            raise self._error


class Group:
    """``size`` workers, of which this one is ``rank``. ``wire`` is the device that collectives want tensors on.

    ``pg`` has the methods of a ``dist.ProcessGroup``; a group of one needs none: its collectives return at once.
    ``connections``: its own, where it is not a static run's.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        pg: Any = None,
        backend: str = "",
        device: torch.device | None = None,
        connections: Lifeline | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.backend = backend
        self.wire = device if backend == "nccl" and device is not None else torch.device("cpu")
        self._pg = pg
        self._connections = connections
        self._why = ""
        self._abandoned = False
        self._spoilt = False
        self._outstanding: dict[Work, None] = {}

    # -- collectives: started, not awaited, unless they say so --------------------------------------------------------

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> Work:
        """Send the next ``sizes[w]`` elements of ``data`` to each worker ``w``; receive alike into ``out``."""
        return self._start(lambda pg: pg.alltoall_base(out, data, list(out_sizes), list(sizes)))

    def all_gather(self, out: torch.Tensor, chunk: torch.Tensor) -> Work:
        """Every worker's ``chunk`` (equal sizes), in rank order, into ``out``.

        On gloo an all-to-all of copies takes half the time of its all-gather.
        """
        if self.backend == "gloo":
            copies = chunk.expand(self.size, -1).contiguous().view(-1)
            return self._start(lambda pg: pg.alltoall_base(out, copies, [], []))
        return self._start(lambda pg: pg._allgather_base(out, chunk))

    def all_reduce(self, data: torch.Tensor) -> Work:
        """Sum ``data`` over workers in place (in the backend's own order)."""
        return self._start(lambda pg: pg.allreduce([data])) if self.size > 1 else Work(self, None)

    def broadcast(self, data: torch.Tensor, source: int = 0) -> None:
        """Overwrite ``data`` with that of ``source``; blocks."""
        if self.size > 1:
            wire = data.to(self.wire).contiguous()
            options = dist.BroadcastOptions()
            options.rootRank = source
            self._start(lambda pg: pg.broadcast([wire], options)).wait()
            data.copy_(wire)

    def gather_tensors(self, mine: torch.Tensor, kind: int = 0) -> list[torch.Tensor]:
        """Every worker's flat tensor, by rank, on every worker's CPU; blocks. Sizes may differ, dtypes not.

        ``kind``: what is gathered, as a number. Raises ``GathersDiffer`` on every worker where it is not the same.
        """
        if self.size == 1:
            return [mine.detach().cpu().clone()]
        # An all-gather, because nothing else here is one: where other workers are in a step's reduction, gloo lets
        # both wait, while it ends the process where two collectives of one kind differ in size.
        heads = torch.zeros(2 * self.size, dtype=torch.int64, device=self.wire)
        head = torch.tensor([len(mine), kind], dtype=torch.int64, device=self.wire)
        self._start(lambda pg: pg._allgather_base(heads, head)).wait()
        sizes, kinds = heads.view(-1, 2).T.tolist()
        if len(set(kinds)) > 1:
            raise GathersDiffer
        table = torch.zeros(self.size, max(1, *sizes), dtype=mine.dtype, device=self.wire)
        table[self.rank, : len(mine)] = mine
        # Adding zeros changes no value (and keeps NaN and infinities), so a sum gathers what is unequally long.
        self.all_reduce(table).wait()
        return [row[:size] for row, size in zip(table.cpu(), sizes, strict=True)]

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Every worker's ``values`` (their numbers may differ), in rank order, on every worker; blocks."""
        return [row.tolist() for row in self.gather_tensors(torch.tensor(values, dtype=torch.float64))]

    # -- from one worker to another -----------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send ``tensor`` to rank ``to``; blocks. Pairs with that rank's next ``receive``."""
        data = tensor.to(self.wire).contiguous()
        self._start(lambda pg: _Transfer(pg.send([data], to, POINT_TO_POINT_TAG))).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` (contiguous) with what rank ``source`` sends next; blocks."""
        data = tensor.to(self.wire)
        self._start(lambda pg: _Transfer(pg.recv([data], source, POINT_TO_POINT_TAG))).wait()
        if data is not tensor:
            tensor.copy_(data)

    def send_here(self, tensor: torch.Tensor, to: int) -> None:
        """As ``send`` of a tensor on the CPU, for a thread of its own that may wait for ever: it costs no other one.

        Pairs with ``receive_here``.
        """
        self._run_here(lambda pg: pg.send([tensor], to, POST_TAG))

    def receive_here(self, tensor: torch.Tensor, source: int) -> None:
        """As ``receive``, for a thread of its own; see ``send_here``."""
        self._run_here(lambda pg: pg.recv([tensor], source, POST_TAG))

    def _run_here(self, start: Callable[[Any], Any]) -> None:
        pg = self._pg
        if self._why or pg is None:
            raise GroupBroken(self._why or "the group was let go")
        try:
            start(pg).wait()
        except RuntimeError as error:
            raise self._broke(error) from None

    # -- the end of a group -------------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Whether every further collective will raise ``GroupBroken``."""
        return bool(self._why)

    @property
    def why(self) -> str:
        """Why it is broken; "" while it is not."""
        return self._why

    def abandon(self, why: str = "the group was abandoned") -> None:
        """Give the group up, from any thread: whatever blocks on it raises ``GroupBroken``, as does all that follows.

        A group without connections of its own (a static run's) is only marked.
        """
        self._why = self._why or why
        self._abandoned = True
        if self._connections is not None:
            self._connections.sever()

    def drain(self) -> bool:
        """Wait until no collective of this group reads or writes any more; abandons it where one is under way.

        False where the library holds on to one for ever: then the buffers of all that had not ended must never be used
        again. Raises ``RuntimeError`` where nothing ends within ``DRAIN_S``.
        """
        if self._still_out():
            self.abandon()
            self._wait_for(self._all_closed, DRAIN_S)
            if not self._wait_for(lambda: not self._still_out(), STUCK_S if self._connections else DRAIN_S):
                if self._connections is None or not self._all_closed():
                    raise RuntimeError(f"a collective of an abandoned group did not end within {DRAIN_S} s")
                self._spoilt = True
        return not self._spoilt

    def _all_closed(self) -> bool:
        return self._connections is None or self._connections.all_closed()

    def _still_out(self) -> bool:
        for work in [w for w in self._outstanding if w.is_completed()]:
            del self._outstanding[work]
        return bool(self._outstanding)

    @staticmethod
    def _wait_for(true: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not true():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    def _release(self) -> list[Any]:
        """Everything that keeps the process group alive; this object is of no use any more."""
        pg, works, self._pg, self._outstanding = self._pg, list(self._outstanding), None, {}
        return [pg, *works]

    def _start(self, start: Callable[[Any], Any]) -> Work:
        if self._why:
            raise GroupBroken(self._why)
        try:
            work = Work(self, start(self._pg))
        except RuntimeError as error:
            raise self._broke(error) from None
        self._still_out()
        self._outstanding[work] = None
        return work

    def _broke(self, error: RuntimeError) -> GroupBroken:
        self._why = self._why or " ".join(str(error).split("\n", 1)[0].split()) or type(error).__name__
        return GroupBroken(self._why)


def drop(group: Group) -> None:
    """Let go of ``group``, which nobody will use again. Its end may take seconds, so it happens on another thread."""
    group.abandon()
    held = group._release()  # no name here may outlive the thread: who lets go last, waits
    threading.Thread(target=held.clear, name="drop group", daemon=True).start()
