"""The workers that reduce together: the collectives of one group, over a raw process group of torch.

A worker may give up a group from any thread. Then all operations of the group raise ``GroupBroken``.
An exchange of many tensors is one ``Work``: it goes from tensor to tensor (gloo), or through buffers (NCCL).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from elastune.core.communication import DEFAULT_CHUNK_KIB, Route

# Each kind of message has its own tag: two kinds with one tag would receive each other's messages.
POINT_TO_POINT_TAG = 1  # one tag for all, so that messages arrive in the order of sending
CHANNEL_TAG = 2
CALLS_TAG = 3  # of named collectives (train.collectives), which may run beside any other message
ASYNC_VALUES_TAG = 4
EXCHANGE_TAG = 5  # of state that moves between workers
FIRST_ROUTE_TAG = 16  # this tag and all above: of sums along the routes of a topology (comm.relay)

DRAIN_S = 10.0
IDLE_S = 0.5  # gloo needs this long to close connections without operations
STUCK_S = 0.02  # an operation that does not end within this after its connections closed never will
LOOK = timedelta(milliseconds=10)  # each look costs 0.1 ms

Addressed = tuple[torch.Tensor, int]
"""A tensor, and the rank that it is sent to, or comes from."""


class GroupBroken(Exception):
    """A collective of the group failed on this worker, or the group was abandoned; it is of no use any more."""


class CollectiveMismatch(Exception):
    """Workers met in one gather with different kinds. All of them raise this, and the group stays usable."""


class Group:
    """``size`` workers that reduce together, of which this worker is ``rank``.

    A group of one worker needs no process group: its collectives return at once.

    Args:
        rank: This worker.
        size: The number of workers.
        pg: An object with the methods of ``dist.ProcessGroup``.
        backend: "gloo" or "nccl".
        device: This worker's device.
        connections: The group's own connections; None in a static run.

    Attributes:
        wire: The device that collectives need tensors on.
        levels: Groups of some of the workers, for hierarchical sums (``comm.exact``), the innermost first. They are
            given up and let go of with this group.
        routes: The routes along which sums go (``comm.relay``), in chunks of ``chunk_kib``. Without routes, sums go
            by ``levels``, or as the backend sums.
        kept: Objects that other code keeps by name as long as the group lives.

    Example::

        group = Group(rank, size, pg, "gloo")
        group.all_reduce(tensor).wait()  # ``tensor`` now has the sum over all workers
    """

    levels: tuple[Group, ...] = ()
    routes: tuple[Route, ...] = ()
    chunk_kib: int = DEFAULT_CHUNK_KIB

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        pg: Any = None,
        backend: str = "",
        device: torch.device | None = None,
        connections: GroupConnections | None = None,
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
        self._sent_bytes = 0
        self.kept: dict[str, object] = {}

    @property
    def sent_bytes(self) -> int:
        """How many bytes this worker's collectives have sent to others since the group was formed, levels included.

        An all-reduce counts as a ring's does. Messages from one worker to another count if they carry sums along
        routes. Broadcasts do not count.
        """
        return self._sent_bytes + sum(level.sent_bytes for level in self.levels)

    def count_sent(self, size_bytes: int) -> None:
        """Count ``size_bytes`` that other code sends for this worker, by messages of its own."""
        self._sent_bytes += size_bytes

    # -- collectives: started, not awaited, unless they block ---------------------------------------------------------

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> Work:
        """Send the next ``sizes[w]`` elements of ``data`` to each worker ``w``; receive ``out_sizes`` into ``out``."""
        kept_size = sizes[self.rank] if sizes else data.numel() // self.size  # without sizes all are equal
        self._sent_bytes += (data.numel() - kept_size) * data.itemsize
        return self._start(lambda pg: pg.alltoall_base(out, data, list(out_sizes), list(sizes)))

    def all_gather(self, out: torch.Tensor, chunk: torch.Tensor) -> Work:
        """Every worker's ``chunk`` (equal sizes), in rank order, into ``out``.

        On gloo an all-to-all of copies takes half the time of its all-gather.
        """
        return self._all_gather(out, chunk)

    def _all_gather(self, out: torch.Tensor, chunk: torch.Tensor) -> Work:
        self._sent_bytes += (self.size - 1) * chunk.nbytes
        if self.backend == "gloo":
            copies = chunk.expand(self.size, -1).contiguous().view(-1)
            return self._start(lambda pg: pg.alltoall_base(out, copies, [], []))
        return self._start(lambda pg: pg._allgather_base(out, chunk))

    def all_reduce(self, data: torch.Tensor) -> Work:
        """Sum ``data`` over workers in place (in the backend's own order)."""
        if self.size == 1:
            return Work(self, None)
        self._sent_bytes += 2 * (self.size - 1) * data.nbytes // self.size
        return self._start(lambda pg: pg.allreduce([data]))

    def broadcast(self, data: torch.Tensor, source: int = 0) -> None:
        """Overwrite ``data`` with the data of rank ``source``; blocks."""
        if self.size > 1:
            wire = data.to(self.wire).contiguous()
            options = dist.BroadcastOptions()
            options.rootRank = source
            self._start(lambda pg: pg.broadcast([wire], options)).wait()
            data.copy_(wire)

    def gather_tensors(self, mine: torch.Tensor, kind: int = 0) -> list[torch.Tensor]:
        """Return every worker's flat tensor, by rank, on every worker's CPU; blocks.

        Args:
            mine: This worker's tensor. Sizes may differ between workers, dtypes not.
            kind: A number for the purpose of the gather.

        Raises:
            CollectiveMismatch: On every worker, if the workers have different ``kind``.
            GroupBroken: If the group has ended.
        """
        if self.size == 1:
            return [mine.detach().cpu().clone()]
        # An all-gather, because no other collective of this class uses it. If other workers are in a step's reduction,
        # gloo lets both wait; two collectives of one kind that differ in size would end the process.
        heads = torch.zeros(2 * self.size, dtype=torch.int64, device=self.wire)
        head = torch.tensor([len(mine), kind], dtype=torch.int64, device=self.wire)
        self._start(lambda pg: pg._allgather_base(heads, head)).wait()
        lengths, kinds = heads.view(-1, 2).T.tolist()
        if len(set(kinds)) > 1:
            raise CollectiveMismatch
        # All workers have met, so one message goes from each to each; around a ring each would wait for all, in turn.
        data = mine.detach().to(self.wire).contiguous().view(torch.uint8)
        sizes = [length * mine.itemsize for length in lengths]
        out = torch.empty(sum(sizes), dtype=torch.uint8, device=self.wire)
        if len(out):
            self._sent_bytes += (self.size - 1) * len(data)
            copies, sent = data.repeat(self.size), [len(data)] * self.size
            self._start(lambda pg: pg.alltoall_base(out, copies, sizes, sent)).wait()
        return list(out.cpu().view(mine.dtype).split(lengths))

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Every worker's ``values`` (their lengths may differ), in rank order, on every worker; blocks."""
        return [row.tolist() for row in self.gather_tensors(torch.tensor(values, dtype=torch.float64))]

    def gather_row(self, values: Sequence[float]) -> list[list[float]]:
        """As ``gather_floats``, but in one message from each worker to each: all must have equally many ``values``."""
        row = torch.tensor(values, dtype=torch.float64, device=self.wire)
        if self.size == 1:
            return [row.tolist()]
        table = torch.zeros(self.size * len(row), dtype=torch.float64, device=self.wire)
        self._all_gather(table, row).wait()
        return [[float(x) for x in gathered] for gathered in table.view(self.size, -1).tolist()]

    # -- from one worker to another -----------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send ``tensor`` to rank ``to``; blocks. Pairs with that rank's next ``receive``."""
        data = tensor.to(self.wire).contiguous()
        self._start(lambda pg: Transfers(lambda out: out.append(pg.send([data], to, POINT_TO_POINT_TAG)))).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite ``tensor`` (contiguous) with the next message of rank ``source``; blocks."""
        data = tensor.to(self.wire)
        self._start(lambda pg: Transfers(lambda out: out.append(pg.recv([data], source, POINT_TO_POINT_TAG)))).wait()
        if data is not tensor:
            tensor.copy_(data)

    def exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Work:
        """Send each tensor of ``sends`` to its rank, and overwrite each of ``receives`` from its rank, all at once.

        All workers call it, as they call a collective. Tensors are flat, contiguous, of bytes, and on ``wire``. No
        caller may touch them before the work has ended. Between two ranks the n-th tensor sent is the n-th received,
        and both have the same size.
        """
        if self.backend != "gloo":
            return self._start(lambda pg: Buffered(pg, sends, receives, self.size, self.wire))
        if not sends and not receives:
            return Work(self, None)
        return self._start(lambda pg: straight(pg, sends, receives))

    def send_blocking(self, tensor: torch.Tensor, to: int, tag: int = CHANNEL_TAG) -> None:
        """As ``send`` of a tensor on the CPU, on the calling thread, which may wait for ever: starts no other thread.

        Pairs with ``receive_blocking``.
        """
        self._run_on_this_thread(lambda pg: pg.send([tensor], to, tag))

    def receive_blocking(self, tensor: torch.Tensor, source: int, tag: int = CHANNEL_TAG) -> None:
        """As ``receive``, on the calling thread; see ``send_blocking``."""
        self._run_on_this_thread(lambda pg: pg.recv([tensor], source, tag))

    def begin_send(self, tensor: torch.Tensor, to: int, tag: int) -> PendingMessage:
        """Begin to send ``tensor``, on the CPU; pairs with ``begin_receive`` of the same ``tag`` on rank ``to``."""
        return PendingMessage(self, self._begin_on_this_thread(lambda pg: pg.send([tensor], to, tag)))

    def begin_receive(self, tensor: torch.Tensor, source: int, tag: int) -> PendingMessage:
        """Begin to receive into ``tensor``, on the CPU; see ``begin_send``."""
        return PendingMessage(self, self._begin_on_this_thread(lambda pg: pg.recv([tensor], source, tag)))

    def _run_on_this_thread(self, start: Callable[[Any], Any]) -> None:
        PendingMessage(self, self._begin_on_this_thread(start)).wait_blocking()

    def _begin_on_this_thread(self, start: Callable[[Any], Any]) -> Any:
        pg = self._pg
        if self._why or pg is None:
            raise GroupBroken(self._why or "the group was let go")
        try:
            return start(pg)
        except RuntimeError as error:
            raise self._broke(error) from None

    # -- the end of a group -------------------------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Whether every further collective will raise ``GroupBroken``."""
        return bool(self._why)

    @property
    def given_up(self) -> bool:
        """Whether a caller has abandoned it, so that operations may never end."""
        return self._abandoned

    @property
    def why(self) -> str:
        """Why it is broken; "" while it is not."""
        return self._why

    def abandon(self, why: str = "the group was abandoned") -> None:
        """Give the group up, from any thread: calls that block on it raise ``GroupBroken``, as do all later calls.

        A group without connections of its own (in a static run) is only marked.
        """
        self._why = self._why or why
        self._abandoned = True
        if self._connections is not None:
            self._connections.sever()
        for level in self.levels:
            level.abandon(why)

    def drain(self) -> bool:
        """Wait until no collective of this group reads or writes any more; abandon the group if one still runs.

        Returns:
            False if the library keeps a collective or a connection. Then the buffers of all collectives that had not
            ended must never be used again.

        Raises:
            RuntimeError: If a collective does not end within ``DRAIN_S``.
        """
        if self._still_out():
            self.abandon()
            if not self._wait_for(self._all_closed, IDLE_S):
                # A connection may stay open after all has ended. This does not wait for it, but a library may read it.
                closed = self._still_out() and self._wait_for(self._all_closed, DRAIN_S)
                self._spoilt = self._spoilt or not closed
            if not self._wait_for(lambda: not self._still_out(), STUCK_S if self._connections else DRAIN_S):
                if self._connections is None or not self._all_closed():
                    raise RuntimeError(f"a collective of an abandoned group did not end within {DRAIN_S} s")
                self._spoilt = True
        drained = [level.drain() for level in self.levels]
        return all(drained) and not self._spoilt

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
        """Return everything that keeps the process group alive; this object is of no use any more."""
        pg, works, self._pg, self._outstanding = self._pg, list(self._outstanding), None, {}
        return [pg, *works, *(held for level in self.levels for held in level._release())]

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
    """Let go of ``group``, which no caller will use again. Its end may take seconds, so another thread ends it."""
    group.abandon()
    held = group._release()  # no name of this function may outlive the thread: the last owner that lets go waits
    threading.Thread(target=held.clear, name="drop group", daemon=True).start()


class Work:
    """A collective that was started."""

    def __init__(self, group: Group, work: Any) -> None:
        self._group = group
        self._work = work

    def wait(self) -> None:
        """Return when the result has arrived. Raises ``GroupBroken`` if it will not arrive."""
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
        # Gloo does not wake an operation that was in the middle of a message when its connection died
        # (Pair::signalException leaves out the operations that are being transmitted). So the wait must look again.
        while True:
            try:
                self._work.wait(LOOK)
                return
            except RuntimeError:
                if self._work.is_completed():  # with success or not, perhaps only just now
                    self._work.wait()
                    return
                if self._group.given_up:
                    raise

    def is_completed(self) -> bool:
        """Whether it has ended, with success or not: no buffer of it changes any more."""
        return self._work is None or bool(self._work.is_completed())


class PendingMessage:
    """A message in flight between two workers, for a thread of its own that may wait for ever."""

    def __init__(self, group: Group, work: Any) -> None:
        self._group, self._work = group, work

    def wait_blocking(self) -> None:
        """Wait until it has passed. Raises ``GroupBroken``; after the group was given up, this may never return."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._group._broke(error) from None


class GroupConnections(Protocol):
    """The connections that a group's messages go through: sockets (gloo), or a communicator (NCCL)."""

    def sever(self) -> None:
        """End them; from any thread, at any time, any number of times."""
        ...

    def all_closed(self) -> bool:
        """Whether the library has let go of them: it will neither read nor write any more."""
        ...


# --- exchanges of many tensors, with the methods of ``dist.Work`` -----------------------------------------------------


class Transfers:
    """Messages in flight between workers, as one work with the methods of ``dist.Work``.

    A wait may time out without harm. ``start`` appends each work that it has started to its argument, a list.
    """

    def __init__(self, start: Callable[[list[Any]], None]) -> None:
        self._works: list[Any] = []
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        try:
            start(self._works)
        except RuntimeError as error:
            self._error = error  # ``wait`` raises it: the works that were started before still read and write
        threading.Thread(target=self._run, name="transfers", daemon=True).start()

    def _run(self) -> None:
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                self._error = self._error or error
        self._works.clear()
        self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("not yet")
        if self._error is not None:
            raise self._error


def straight(pg: Any, sends: Sequence[Addressed], receives: Sequence[Addressed]) -> Transfers:
    """Begin all transfers, each as a message of its own, directly between the tensors' memory."""

    def start(works: list[Any]) -> None:
        for tensor, source in receives:  # first, so that arriving messages find their place
            works.append(pg.recv([tensor], source, EXCHANGE_TAG))
        for tensor, to in sends:
            works.append(pg.send([tensor], to, EXCHANGE_TAG))

    return Transfers(start)


class Buffered:
    """An all-to-all of bytes with the methods of its work; ``wait`` unpacks the bytes into the tensors."""

    def __init__(
        self,
        pg: Any,
        sends: Sequence[Addressed],
        receives: Sequence[Addressed],
        size: int,
        device: torch.device,
    ) -> None:
        outgoing = [tensor for rank in range(size) for tensor, to in sends if to == rank]
        self._targets = [tensor for rank in range(size) for tensor, source in receives if source == rank]
        sizes = [sum(len(tensor) for tensor, to in sends if to == rank) for rank in range(size)]
        out_sizes = [sum(len(tensor) for tensor, source in receives if source == rank) for rank in range(size)]
        self._sent = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *outgoing])
        self._arrived = torch.empty(sum(out_sizes), dtype=torch.uint8, device=device)
        self._work = pg.alltoall_base(self._arrived, self._sent, out_sizes, sizes)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        self._work.wait()
        for target, values in zip(self._targets, self._arrived.split(list(map(len, self._targets))), strict=True):
            target.copy_(values)
