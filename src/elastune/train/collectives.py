"""Collectives that a program starts by name and waits for later: in any order, through changes of the workers.

A worker sends its tensor to all others, and is done when it has a message of every worker that was a member when it
called. Until all workers have reported that they are done, it keeps its tensor, or the result. When the workers change,
each sends its message again to the workers that are left, so a worker that has a result completes the others by it.
Calls of a step that was lost are dropped: the step is done again, and its calls with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

from elastune.core.errors import UserError
from elastune.parallel.comm.channel import ChannelMessage
from elastune.parallel.comm.group import Group, GroupBroken

T = TypeVar("T")
Kind = Literal["allreduce", "broadcast", "gather"]
Key = tuple[str, int]
"""A collective's name, and how many calls with this name came before."""
TENSOR, RESULT, DONE = range(3)
"""Kinds of messages: the sender's tensor; the result; the sender needs nothing more of this call."""
DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
LONGEST_NAME = 200
REST_S = 0.001  # between two looks for messages, where this worker also takes part in passes of others


class CollectiveLost(Exception):
    """The value of a collective was on a worker that is gone, and no other worker has it."""


@dataclass(frozen=True)
class CollectiveResult(Generic[T]):
    """The result of a collective.

    Attributes:
        value: The sum, the root's tensor, or all workers' tensors in the order of ``workers``.
        workers: The numbers of the workers whose tensors are in it.
        lost: The collective was called in a step that was lost. ``value`` is this worker's own tensor; the step is done
            again, and calls the collective again.
    """

    value: T
    workers: tuple[int, ...]
    lost: bool = False


class Members(Protocol):
    """The part of ``elastic.worker.group.WorkerGroup`` that collectives use."""

    synchronised: bool

    @property
    def group(self) -> Group: ...

    @property
    def members(self) -> tuple[int, ...]: ...

    @property
    def worker(self) -> int: ...


class MessageChannel(Protocol):
    """The part of ``parallel.comm.channel.Channel`` that collectives use."""

    def send(self, to: int, message: ChannelMessage) -> None: ...

    def next(self, *, wait: bool = True) -> tuple[int, ChannelMessage] | None: ...


@dataclass
class Call:
    """One call of a collective, as this worker sees it.

    Attributes:
        own_tensor: This worker's tensor.
        expected: The numbers of the workers whose tensors belong to it.
        step: The attempt at a step that it belongs to.
        received: The tensors that have come, by the number of their worker.
        result: The result, once it is here.
        error: The error, where there can be no result.
        done: The numbers of the workers that need nothing more of it.
    """

    kind: Kind
    key: Key
    root: BroadcastRoot
    own_tensor: torch.Tensor
    expected: set[int]
    step: int
    received: dict[int, torch.Tensor] = field(default_factory=dict)
    result: CollectiveResult[list[torch.Tensor]] | None = None
    error: Exception | None = None
    done: set[int] = field(default_factory=set)

    @property
    def settled(self) -> bool:
        """Whether there is a result or an error."""
        return self.result is not None or self.error is not None

    def settle(self) -> None:
        """Make the result, if all tensors that it needs are here."""
        if self.settled:
            return
        if self.kind == "broadcast" and self.root.worker in self.received:
            self.result = CollectiveResult([self.received[self.root.worker]], (self.root.worker,))
        elif self.expected <= self.received.keys():
            workers = tuple(sorted(self.expected))
            try:
                self.result = CollectiveResult(self._of_all([self.received[worker] for worker in workers]), workers)
            except (UserError, CollectiveLost) as error:
                self.error = error

    def _of_all(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.kind == "broadcast":
            raise CollectiveLost(f"worker {self.root.worker}, which was to broadcast {self.key[0]!r}, is gone")
        if self.kind == "gather":
            return tensors
        kinds = {(tuple(t.shape), t.dtype) for t in tensors}
        if len(kinds) > 1:
            rule = "workers add up tensors of one shape and type"
            raise UserError(rule, f"{self.key[0]!r}: {sorted(map(str, kinds))}", "use session.gather, or other names")
        total = tensors[0].clone()
        for tensor in tensors[1:]:  # in the order of workers' numbers: the same bits everywhere
            total += tensor
        return [total]


class CollectiveHandle(Generic[T]):
    """A collective that was started: the program waits for its result when it needs it.

    Example:
        >>> handle = session.gather("hardest", losses.topk(3).values)
        >>> tensors = handle.wait().value
    """

    def __init__(self, calls: NamedCollectives, call: Call, of: Callable[[list[torch.Tensor]], T]) -> None:
        self._calls, self._call, self._of = calls, call, of

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once.

        In an evaluation where workers need each other, this waits for the next pass of the others and takes part in it.
        """
        return self._calls.came(self._call)

    def wait(self) -> CollectiveResult[T]:
        """Return the result, once it is here.

        Do not wait for a collective that another worker calls only after it has something that follows here.

        Raises:
            CollectiveLost: Where the root of a broadcast has gone and no worker has what it sent, or workers changed
                between their calls and the root's rank is another worker's now.
            UserError: Where workers gave tensors that cannot be added up, or called different collectives by one name.
        """
        self._calls.wait(self._call)
        if self._call.error is not None:
            raise self._call.error
        result = self._call.result
        assert result is not None
        copies = [value.clone() for value in result.value]  # the kept tensors may still be sent to others
        return CollectiveResult(self._of(copies), result.workers, result.lost)


class NamedCollectives:
    """One worker's named collectives: it sends, collects and keeps their messages.

    How often each name was called is a part of the run's state, equal on all workers between steps.

    Args:
        workers: The workers that take part.
        attempt: Returns another number for each step that is begun.
        recover: Meets the survivors of a broken group, see ``StepTransaction.recover``.
        post: Opens a channel to the members of a group.
        stand_in: Takes part in forward passes of others until a condition holds (``Replica.stand_in``): a worker that
            has not called yet may be waiting in such a pass.
    """

    name = "collectives"

    def __init__(
        self,
        workers: Members,
        attempt: Callable[[], int],
        recover: Callable[[GroupBroken], object],
        post: Callable[[Group], MessageChannel],
        stand_in: Callable[[Callable[[], bool]], None] = lambda until: None,
    ) -> None:
        self._workers, self._attempt, self._recover, self._open_channel = workers, attempt, recover, post
        self._stand_in = stand_in
        self._counts: dict[str, int] = {}
        self._marked: tuple[int, dict[str, int]] = (0, {})  # an attempt at a step, and the counts when it began
        self._calls: dict[Key, Call] = {}
        self._early: dict[Key, list[tuple[int, int, ChannelMessage]]] = {}  # that came before this worker's own call
        self._channel: MessageChannel | None = None
        self._ranks: tuple[int, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts = {str(name): int(count) for name, count in state["counts"].items()}
        self._calls, self._early = {}, {}

    # -- calls --------------------------------------------------------------------------------------------------------

    def start(self, kind: Kind, name: str, tensor: torch.Tensor, root: int = 0) -> Call:
        """Start a collective; ``root`` is a rank. Raises ``UserError`` for arguments that no collective can have."""
        workers = self._workers
        tensor_copy = self._checked(name, tensor)
        everyone = workers.members if workers.synchronised else (workers.worker,)
        whole = hasattr(type(root), "__index__") and not isinstance(root, bool)  # NumPy's integers, too
        if kind == "broadcast" and not (whole and (0 <= root < len(everyone) or not workers.synchronised)):
            raise UserError("a root must be the rank of a worker", repr(root)[:40], f"from 0 to {len(everyone) - 1}")
        root = int(root)
        if not workers.synchronised or len(everyone) == 1:
            lost = not workers.synchronised
            call = Call(kind, (name, -1), BroadcastRoot(root, workers.worker), tensor_copy, {workers.worker}, 0)
            call.result = CollectiveResult([tensor_copy], (workers.worker,), lost)
            if not lost:
                self._mark()
                self._counts[name] = self._counts.get(name, 0) + 1
            return call
        if self._channel is None:
            self._open()
        self._mark()
        key = name, self._counts.get(name, 0)
        self._counts[name] = key[1] + 1
        call = self._calls[key] = Call(
            kind, key, BroadcastRoot(root, everyone[root]), tensor_copy, set(everyone), self._attempt()
        )
        call.received[workers.worker] = tensor_copy
        self._send_all(call)
        for sender, message_kind, message in self._early.pop(key, []):
            self._handle(call, sender, message_kind, message)
        self.look()
        return call

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            rule = f"a collective's name is a text of 1 to {LONGEST_NAME} characters"
            raise UserError(rule, repr(name)[:40], 'such as "loss"')
        if not isinstance(tensor, torch.Tensor) or str(tensor.dtype) not in DTYPES or tensor.layout != torch.strided:
            kind = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise UserError(
                "a collective is of a dense tensor of numbers", kind, "give a torch.Tensor of floats or ints"
            )
        return tensor.detach().to("cpu", copy=True).contiguous()

    def _mark(self) -> None:
        """At the first call of a step, remember the counts before it."""
        if self._marked[0] != self._attempt():
            self._marked = self._attempt(), dict(self._counts)

    def wait(self, call: Call) -> None:
        """Wait until ``call`` is settled, with the workers that there are by then."""
        while not call.settled:
            try:
                self._stand_in(lambda: self._settles(call))
                if not call.settled:
                    self._take(wait=True)
            except GroupBroken as error:
                self._recover(error)  # which calls ``regroup``
            self._tidy()

    def came(self, call: Call) -> bool:
        """Whether ``call`` is settled; this takes part in one pass of the others at most."""
        self.look()
        answers = iter((call.settled,))
        self._stand_in(lambda: next(answers, True))
        self.look()
        return call.settled

    def _settles(self, call: Call) -> bool:
        """Whether ``call`` is settled after a short rest, or ``wait`` has to look at the group."""
        self.look()
        if not call.settled:
            time.sleep(REST_S)
            self.look()
        return call.settled or self._workers.group.broken  # which ``wait`` then finds

    def look(self) -> None:
        """Take the messages that have come. A broken group is left to other calls to report."""
        try:
            while self._channel is not None and self._take(wait=False):
                pass
        except GroupBroken:
            return
        self._tidy()

    def _tidy(self) -> None:
        """Forget the calls that no worker needs any more."""
        others = {key: call.expected - {self._workers.worker} for key, call in self._calls.items()}
        self._calls = {k: call for k, call in self._calls.items() if not (call.settled and others[k] <= call.done)}

    # -- when workers change ------------------------------------------------------------------------------------------

    def regroup(self, *, lost: bool) -> None:
        """Go on among the present workers; ``lost``: the newest step never counts. Raises ``GroupBroken``."""
        if lost and self._marked[0] == self._attempt():
            self._counts = dict(self._marked[1])
            for key in [key for key, call in self._calls.items() if call.step == self._attempt()]:
                dropped = self._calls.pop(key)
                dropped.result = dropped.result or CollectiveResult(
                    [dropped.own_tensor], (self._workers.worker,), lost=True
                )
        self._channel, self._early = None, {}
        if not self._counts:
            return
        present = set(self._workers.members)
        for call in self._calls.values():
            call.expected &= present
            call.received = {self._workers.worker: call.own_tensor}
            call.settle()
        if len(present) > 1:
            self._open()
            for call in self._calls.values():
                self._send_all(call)

    def _open(self) -> None:
        self._ranks = self._workers.members
        if self._workers.group.backend == "nccl":
            rule = "named collectives travel between the workers' hosts, over gloo"
            raise UserError(rule, "workers on NCCL", "use session.sum or session.mean")
        self._channel = self._open_channel(self._workers.group)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _send_all(self, call: Call) -> None:
        """Send all others this worker's tensor, or the result where it is here."""
        if call.result is not None:
            message = message_of(RESULT, call.key, call.kind, call.root, call.result.value, call.result.workers)
        else:  # in a broadcast only the root sends its tensor
            sends = call.kind != "broadcast" or call.root.worker == self._workers.worker
            message = message_of(TENSOR, call.key, call.kind, call.root, [call.own_tensor] if sends else [])
        self._post_all(message)

    def _post_all(self, message: ChannelMessage) -> None:
        assert self._channel is not None
        for rank, number in enumerate(self._ranks):
            if number != self._workers.worker:
                try:
                    self._channel.send(rank, message)
                except GroupBroken:
                    return  # all is sent again to the workers that are left

    def _take(self, *, wait: bool) -> bool:
        """Take one message. Return False if there is none."""
        if self._channel is None:
            raise RuntimeError("nobody is here to wait for")
        received = self._channel.next(wait=wait)
        if received is None:
            return False
        rank, message = received
        kind, key = message.number[0], key_of(message)
        call, sender = self._calls.get(key), self._ranks[rank]
        if call is not None:
            self._handle(call, sender, kind, message)
        elif kind == DONE:
            pass
        elif key[1] < self._counts.get(key[0], 0):  # this worker is done with it, or joined later
            self._channel.send(rank, done_message(key))
        else:
            self._early.setdefault(key, []).append((sender, kind, message))
        return True

    def _handle(self, call: Call, sender: int, kind: int, message: ChannelMessage) -> None:
        """Take in a message of ``call``, of one of the kinds above."""
        header = json.loads(message.text)
        if kind == DONE:
            call.done.add(sender)
            return
        before = call.settled
        tensors = tensors_in(header, message.payload)
        root = BroadcastRoot(*header["root"])
        described, other = _described(call.kind, call.root), _described(header["kind"], root)
        if described != other and not call.settled:
            rule = "workers that use one name call the same collective"
            value = f"{call.key[0]!r}: {described} here, {other} on worker {sender}"
            call.error = UserError(rule, value, "use other names")
        elif kind == RESULT:
            call.done.add(sender)
            call.result = call.result or CollectiveResult(tensors, tuple(header["workers"]))
        elif call.kind == "broadcast" and root != call.root and not call.settled:
            why = f"workers changed between the calls of {call.key[0]!r}: rank {root.rank} is not one worker in both"
            call.error = CollectiveLost(why)
        else:
            if tensors:
                call.received[sender] = tensors[0]
            elif call.kind == "broadcast":
                call.received[sender] = call.own_tensor
            call.settle()
        if call.settled and not before and self._channel is not None:
            self._post_all(done_message(call.key))


def _described(kind: str, root: BroadcastRoot) -> str:
    return f"{kind} from rank {root.rank}" if kind == "broadcast" else kind


# --- messages ---


@dataclass(frozen=True)
class BroadcastRoot:
    """The root of a broadcast: the ``rank`` that the program named, and the number of the ``worker`` that had it."""

    rank: int
    worker: int


def message_of(
    kind_of_message: int,
    key: Key,
    kind: Kind,
    root: BroadcastRoot,
    tensors: Sequence[torch.Tensor],
    workers: Sequence[int] = (),
) -> ChannelMessage:
    """A message with ``tensors``; a result also has the ``workers`` that took part in it."""
    header = {
        "name": key[0],
        "kind": kind,
        "root": [root.rank, root.worker],
        "workers": list(workers),
        "tensors": [[str(t.dtype), list(t.shape)] for t in tensors],
    }
    parts = [t.reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    # A single tensor is this worker's own copy, which nobody changes: it is not copied again.
    payload = parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
    return ChannelMessage((kind_of_message, key[1], 0), json.dumps(header), payload)


def done_message(key: Key) -> ChannelMessage:
    """The message that this worker needs nothing more of the call ``key``."""
    return ChannelMessage((DONE, key[1], 0), json.dumps({"name": key[0]}), torch.empty(0, dtype=torch.uint8))


def key_of(message: ChannelMessage) -> Key:
    """The call that ``message`` belongs to."""
    return str(json.loads(message.text)["name"]), message.number[1]


def tensors_in(header: Mapping[str, Any], payload: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that ``header`` describes. Raises ``ValueError`` where ``payload`` is too short for them."""
    tensors, start = [], 0
    for name, shape in header["tensors"]:
        dtype = DTYPES[name]
        size = prod(shape) * dtype.itemsize
        part = payload if (start, size) == (0, len(payload)) else payload[start : start + size].clone()  # aligned
        if len(part) != size:
            raise ValueError(f"a message of {len(payload)} bytes is too short for {header['tensors']}")
        tensors.append(part.view(dtype).view(shape))
        start += size
    return tensors
