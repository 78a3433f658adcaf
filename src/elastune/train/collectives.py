"""Collectives that a program starts by name and waits for later: in any order, through changes of the workers.

A worker sends its tensor to all others, and is done when it has heard of every worker that was a member then. It
keeps its message until all have reported that they need it no more.
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

# [call letters] What workers tell each other of a collective that the program has called by name.

Kind = Literal["allreduce", "broadcast", "gather"]
Key = tuple[str, int]
"""A name, and how often it was called before."""
GIVEN, RESULT, DONE = range(3)
"""What a letter has: the sender's tensor, the result, or that the sender needs nothing more of this call."""
DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}


@dataclass(frozen=True)
class BroadcastRoot:
    """Of a broadcast: the ``rank`` that the program named, and which ``worker`` that was then."""

    rank: int
    worker: int


def letter_of(
    what: int, key: Key, kind: Kind, root: BroadcastRoot, tensors: Sequence[torch.Tensor], workers: Sequence[int] = ()
) -> ChannelMessage:
    """A letter with ``tensors``; of a result with the ``workers`` that took part in it."""
    told = {
        "name": key[0],
        "kind": kind,
        "root": [root.rank, root.worker],
        "workers": list(workers),
        "tensors": [[str(t.dtype), list(t.shape)] for t in tensors],
    }
    parts = [t.reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    # One tensor is this worker's own copy, which nobody changes: not to be copied again.
    payload = parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
    return ChannelMessage((what, key[1], 0), json.dumps(told), payload)


def done_letter(key: Key) -> ChannelMessage:
    """A letter without tensors."""
    return ChannelMessage((DONE, key[1], 0), json.dumps({"name": key[0]}), torch.empty(0, dtype=torch.uint8))


def key_of(letter: ChannelMessage) -> Key:
    """Which call it is of."""
    return str(json.loads(letter.text)["name"]), letter.number[1]


def tensors_in(told: Mapping[str, Any], payload: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a letter whose text is ``told``. Raises ``ValueError`` where it does not hold what it says."""
    found, at = [], 0
    for name, shape in told["tensors"]:
        dtype = DTYPES[name]
        size = prod(shape) * dtype.itemsize
        part = payload if (at, size) == (0, len(payload)) else payload[at : at + size].clone()  # aligned
        if len(part) != size:
            raise ValueError(f"a message of {len(payload)} bytes is too short for {told['tensors']}")
        found.append(part.view(dtype).view(shape))
        at += size
    return found


# [collectives] Collectives that a program starts by name and waits for later: in any order, through changes of the workers.
#
# A caller sends what it has to all others, and is done when it has heard of every worker that was a member then. Until
# all have told that they are done, it keeps what it gave, or the result. When the workers change, all send that again to
# those who are left, so a worker that had a result completes the others by it. Calls of a step that was lost are dropped:
# the step is done again, and its calls with it.

T = TypeVar("T")
LONGEST_NAME = 200
REST_S = 0.001  # between two looks, where others' passes are to be seen to as well


class CollectiveLost(Exception):
    """The value of a collective was on a worker that is gone, and no other worker has it."""


@dataclass(frozen=True)
class CollectiveResult(Generic[T]):
    """The result of a collective.

    Attributes:
        value: The sum, the root's tensor, or all workers' tensors in the order of ``workers``.
        workers: The numbers of the workers whose tensors are in it.
        lost: It was called in a step that was lost, and is called again with that step: ``value`` is this worker's own.
    """

    value: T
    workers: tuple[int, ...]
    lost: bool = False


class Members(Protocol):
    """What is asked of ``elastic.worker.group.WorkerGroup``."""

    synchronised: bool

    @property
    def group(self) -> Group: ...

    @property
    def members(self) -> tuple[int, ...]: ...

    @property
    def worker(self) -> int: ...


class MessageChannel(Protocol):
    """What is asked of ``comm.post.Channel``."""

    def send(self, to: int, message: ChannelMessage) -> None: ...

    def next(self, *, wait: bool = True) -> tuple[int, ChannelMessage] | None: ...


@dataclass
class Call:
    kind: Kind
    key: Key
    root: BroadcastRoot
    own: torch.Tensor
    expected: set[int]
    step: int  # the attempt at a step that it belongs to
    heard: dict[int, torch.Tensor] = field(default_factory=dict)
    result: CollectiveResult[list[torch.Tensor]] | None = None
    error: Exception | None = None
    done: set[int] = field(default_factory=set)

    @property
    def settled(self) -> bool:
        return self.result is not None or self.error is not None

    def settle(self) -> None:
        """Where all is here that it takes, come to the result."""
        if self.settled:
            return
        if self.kind == "broadcast" and self.root.worker in self.heard:
            self.result = CollectiveResult([self.heard[self.root.worker]], (self.root.worker,))
        elif self.expected <= self.heard.keys():
            workers = tuple(sorted(self.expected))
            try:
                self.result = CollectiveResult(self._of_all([self.heard[worker] for worker in workers]), workers)
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
    """A collective that was started.

    Example:
        >>> handle = session.gather("hardest", losses.topk(3).values)
        >>> found = handle.wait().value
    """

    def __init__(self, calls: NamedCollectives, call: Call, of: Callable[[list[torch.Tensor]], T]) -> None:
        self._calls, self._call, self._of = calls, call, of

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return at once.

        In an evaluation where workers need each other this waits for the others' next pass, and takes part in it.
        """
        return self._calls.came(self._call)

    def wait(self) -> CollectiveResult[T]:
        """Return the result, once it is here.

        No other worker may need what this one does only after it.

        Raises:
            CollectiveLost: Where the root of a broadcast has gone and no worker has what it sent, or workers changed
                between their calls and the root's rank is another worker's now.
            UserError: Where workers gave tensors that cannot be added up, or called different collectives by one name.
        """
        self._calls.wait(self._call)
        if self._call.error is not None:
            raise self._call.error
        found = self._call.result
        assert found is not None
        own = [value.clone() for value in found.value]  # what is kept may still be sent to others
        return CollectiveResult(self._of(own), found.workers, found.lost)


class NamedCollectives:
    """One worker's named collectives. ``counts``, equal on all workers between steps, is a part of the run's state.

    ``attempt``: a number that is another one for each step that is begun. ``recover``: see ``StepTransaction.recover``.
    ``stand_in``: takes part in others' forward passes until something is so (``Replica.stand_in``): they may be what
    keeps another worker from its call.
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
        self._marked: tuple[int, dict[str, int]] = (0, {})  # counts where the newest step's calls began
        self._calls: dict[Key, Call] = {}
        self._early: dict[Key, list[tuple[int, int, ChannelMessage]]] = {}  # of others, before this worker's own call
        self._channel: MessageChannel | None = None
        self._ranks: tuple[int, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts = {str(name): int(count) for name, count in state["counts"].items()}
        self._calls, self._early = {}, {}

    # -- calls --------------------------------------------------------------------------------------------------------

    def start(self, kind: Kind, name: str, tensor: torch.Tensor, root: int = 0) -> Call:
        """Begin; ``root`` is a rank. Raises ``UserError`` for what cannot be."""
        workers = self._workers
        own = self._checked(name, tensor)
        everyone = workers.members if workers.synchronised else (workers.worker,)
        whole = hasattr(type(root), "__index__") and not isinstance(root, bool)  # NumPy's integers, too
        if kind == "broadcast" and not (whole and (0 <= root < len(everyone) or not workers.synchronised)):
            raise UserError("a root must be the rank of a worker", repr(root)[:40], f"from 0 to {len(everyone) - 1}")
        root = int(root)
        if not workers.synchronised or len(everyone) == 1:
            lost = not workers.synchronised
            call = Call(kind, (name, -1), BroadcastRoot(root, workers.worker), own, {workers.worker}, 0)
            call.result = CollectiveResult([own], (workers.worker,), lost)
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
            kind, key, BroadcastRoot(root, everyone[root]), own, set(everyone), self._attempt()
        )
        call.heard[workers.worker] = own
        self._tell(call)
        for sender, what, letter in self._early.pop(key, []):
            self._hear(call, sender, what, letter)
        self.look()
        return call

    def _checked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
            rule = f"a collective's name is a text of 1 to {LONGEST_NAME} characters"
            raise UserError(rule, repr(name)[:40], 'such as "loss"')
        if not isinstance(tensor, torch.Tensor) or str(tensor.dtype) not in DTYPES or tensor.layout != torch.strided:
            told = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise UserError(
                "a collective is of a dense tensor of numbers", told, "give a torch.Tensor of floats or ints"
            )
        return tensor.detach().to("cpu", copy=True).contiguous()

    def _mark(self) -> None:
        """Where a step's first call comes, remember the counts before it."""
        if self._marked[0] != self._attempt():
            self._marked = self._attempt(), dict(self._counts)

    def wait(self, call: Call) -> None:
        """Until ``call`` is settled, with whom there is by then."""
        while not call.settled:
            try:
                self._stand_in(lambda: self._settles(call))
                if not call.settled:
                    self._take(wait=True)
            except GroupBroken as error:
                self._recover(error)  # has ``regroup`` called
            self._tidy()

    def came(self, call: Call) -> bool:
        """Whether ``call`` is settled; one pass of the others at most is run for that."""
        self.look()
        asked = iter((call.settled,))
        self._stand_in(lambda: next(asked, True))
        self.look()
        return call.settled

    def _settles(self, call: Call) -> bool:
        """Whether ``call`` is settled after a moment."""
        self.look()
        if not call.settled:
            time.sleep(REST_S)
            self.look()
        return call.settled or self._workers.group.broken  # which ``wait`` then finds

    def look(self) -> None:
        """Take what has come. Where the group is broken that is for others to find."""
        try:
            while self._channel is not None and self._take(wait=False):
                pass
        except GroupBroken:
            return
        self._tidy()

    def _tidy(self) -> None:
        others = {key: call.expected - {self._workers.worker} for key, call in self._calls.items()}
        self._calls = {k: call for k, call in self._calls.items() if not (call.settled and others[k] <= call.done)}

    # -- when workers change ------------------------------------------------------------------------------------------

    def regroup(self, *, lost: bool) -> None:
        """These are the workers now; ``lost``: the step that was begun last never counts. Raises ``GroupBroken``."""
        if lost and self._marked[0] == self._attempt():
            self._counts = dict(self._marked[1])
            for key in [key for key, call in self._calls.items() if call.step == self._attempt()]:
                dropped = self._calls.pop(key)
                dropped.result = dropped.result or CollectiveResult([dropped.own], (self._workers.worker,), lost=True)
        self._channel, self._early = None, {}
        if not self._counts:
            return
        here = set(self._workers.members)
        for call in self._calls.values():
            call.expected &= here
            call.heard = {self._workers.worker: call.own}
            call.settle()
        if len(here) > 1:
            self._open()
            for call in self._calls.values():
                self._tell(call)

    def _open(self) -> None:
        self._ranks = self._workers.members
        if self._workers.group.backend == "nccl":
            rule = "named collectives travel between the workers' hosts, over gloo"
            raise UserError(rule, "workers on NCCL", "use session.sum or session.mean")
        self._channel = self._open_channel(self._workers.group)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _tell(self, call: Call) -> None:
        """To all others: what this worker gives, or the result where it has that."""
        if call.result is not None:
            letter = letter_of(RESULT, call.key, call.kind, call.root, call.result.value, call.result.workers)
        else:  # of a broadcast all but the root give nothing
            gives = call.kind != "broadcast" or call.root.worker == self._workers.worker
            letter = letter_of(GIVEN, call.key, call.kind, call.root, [call.own] if gives else [])
        self._post_all(letter)

    def _post_all(self, letter: ChannelMessage) -> None:
        assert self._channel is not None
        for rank, number in enumerate(self._ranks):
            if number != self._workers.worker:
                try:
                    self._channel.send(rank, letter)
                except GroupBroken:
                    return  # all is sent again to those who are left

    def _take(self, *, wait: bool) -> bool:
        """One message, if there is one."""
        if self._channel is None:
            raise RuntimeError("nobody is here to wait for")
        came = self._channel.next(wait=wait)
        if came is None:
            return False
        rank, letter = came
        what, key = letter.number[0], key_of(letter)
        call, sender = self._calls.get(key), self._ranks[rank]
        if call is not None:
            self._hear(call, sender, what, letter)
        elif what == DONE:
            pass
        elif key[1] < self._counts.get(key[0], 0):  # this worker is done with it, or joined later
            self._channel.send(rank, done_letter(key))
        else:
            self._early.setdefault(key, []).append((sender, what, letter))
        return True

    def _hear(self, call: Call, sender: int, what: int, letter: ChannelMessage) -> None:
        told = json.loads(letter.text)
        if what == DONE:
            call.done.add(sender)
            return
        before = call.settled
        tensors = tensors_in(told, letter.payload)
        root = BroadcastRoot(*told["root"])
        here, there = _asked(call.kind, call.root), _asked(told["kind"], root)
        if here != there and not call.settled:
            rule = "workers that use one name call the same collective"
            value = f"{call.key[0]!r}: {here} here, {there} on worker {sender}"
            call.error = UserError(rule, value, "use other names")
        elif what == RESULT:
            call.done.add(sender)
            call.result = call.result or CollectiveResult(tensors, tuple(told["workers"]))
        elif call.kind == "broadcast" and root != call.root and not call.settled:
            why = f"workers changed between the calls of {call.key[0]!r}: rank {root.rank} is not one worker in both"
            call.error = CollectiveLost(why)
        else:
            if tensors:
                call.heard[sender] = tensors[0]
            elif call.kind == "broadcast":
                call.heard[sender] = call.own
            call.settle()
        if call.settled and not before and self._channel is not None:
            self._post_all(done_letter(call.key))


def _asked(kind: str, root: BroadcastRoot) -> str:
    return f"{kind} from rank {root.rank}" if kind == "broadcast" else kind
