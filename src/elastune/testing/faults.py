"""Programs that tests run: faults at a named worker, step and place, and how fast a program trains.

``inject(session)`` and ``reach(...)`` inject faults. ``Rests`` lets a program wait for a worker that joins, for as long
as it takes on a busy machine: it rests after each step while something is awaited, longer near its last step.

The program's config holds them as text, "KIND WORKER STEP PLACE": ``kill 1 5 gather`` kills worker 1 in the all-gather
of its step 5. Kinds: kill, stop (SIGSTOP), nap (half a second: others come first), break (what was done there is
complete, but this worker believes that it failed), full (a file of this worker has no more room than ``ROOM`` bytes,
until it comes to that place again).
Places that the library passes: relaying (a part of a sum is about to go on along a route), scatter, gather (the two
halves of an exact reduction), reduced (right after it),
gathered (right after a gather of numbers), sharing (the second half of an exact reduction, in which every member has
given its part; STEP is the view's number),
forming (a group; STEP is then the version's number), giving and taking (a state; STEP is that of the state), saving
(this worker's part of a checkpoint is about to be written), written (it is, and nobody else knows), publishing (all
parts are there, and no checkpoint yet), agreeing (on what was decided between epochs), probing (the links between
hosts).
Of state that lies in shares: launched (all that this worker has is sent to who adds it up), added (what it adds up is
added), lending (its sums are about to go to who holds them for it, outside of its batch group), gate (before it says
so), gated (all have), applied (the optimizer has updated its shares), spreading (their values, some have arrived),
waiting (it looks whether another stage of a pipeline has sent what it needs), placing (state is about to move; STEP is
the view's number, as in the next one), placed (all of it is here; others may lack theirs).
Of gradients that leave block by block: leaving (those of a block are about to, in a backward pass).
Any other place is one that the program itself passes by ``reach``.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import TensorDataset

from elastune.core.mesh import Mesh
from elastune.elastic.worker import state_transfer
from elastune.elastic.worker import view_groups as view_comms
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.parallel.comm.owned import CommitBarrier, OwnedReducer, RemoteOwnerSums
from elastune.parallel.comm.streamed import StreamedReducer
from elastune.parallel.mechanisms.owned import state as moving
from elastune.parallel.mechanisms.owned.mechanism import ShardedReplica
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.mechanisms.owned.state import Kept
from elastune.parallel.mechanisms.pipeline.messages import StageChannel
from elastune.parallel.sync.owned import OwnedAllReduce
from elastune.recipes.datasets import digits
from elastune.train.adaptation import adapter as adapt
from elastune.train.adaptation import routing
from elastune.train.checkpoints import checkpoint
from elastune.train.session import Session

NAP_S = 0.5
ROOM = 4096


@dataclass(frozen=True)
class Fault:
    """``kind`` happens to ``worker`` at ``place`` of ``step``."""

    kind: str
    worker: int
    step: int
    place: str


def parse(text: str) -> Fault:
    """Of "kill 1 5 gather"."""
    kind, worker, step, place = text.split()
    return Fault(kind, int(worker), int(step), place)


class Injector:
    """The faults of one session's worker. Each happens once a process."""

    def __init__(self, session: Session, faults: list[Fault]) -> None:
        self._session = session
        self._worker = session.state.workers.worker
        self._faults = [fault for fault in faults if fault.worker == self._worker and fault not in _HAPPENED]
        self._full: list[str] = []

    @property
    def view(self) -> int:
        """The view that this worker is a member of."""
        return self._session.state.workers.view

    def reach(self, place: str, step: int | None = None) -> None:
        """This worker has come to ``place``."""
        step = self._session.step if step is None else step
        if place in self._full:
            self._full.remove(place)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for fault in [f for f in self._faults if (f.place, f.step) == (place, step)]:
            self._faults.remove(fault)
            _HAPPENED.add(fault)
            print(f"fault: {fault}", flush=True)
            if fault.kind == "break":
                raise GroupBroken("an injected fault")
            if fault.kind == "nap":
                time.sleep(NAP_S)
                continue
            if fault.kind == "full":
                self._full.append(place)
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))
                continue
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


_INJECTORS: list[Injector] = []
_HAPPENED: set[Fault] = set()


def inject(session: Session) -> Callable[[str], None]:
    """Arm the faults in ``session.config["faults"]`` that are this worker's; call it after ``session.prepare``.

    Returns ``reach`` for the program's own places.
    """
    texts = session.config.get("faults") or []
    assert isinstance(texts, list)
    injector = Injector(session, [parse(str(text)) for text in texts])
    _wrap_library(injector)
    trained = session.trained
    assert trained is not None
    backward = trained.sync.backward

    def reduced(loss: Any, share: Any) -> None:
        backward(loss, share)
        if share.ends_step:
            injector.reach("reduced")

    trained.sync.backward = reduced  # type: ignore[method-assign]
    return injector.reach


def _wrap_library(injector: Injector) -> None:
    first = not _INJECTORS
    _INJECTORS[:] = [injector]  # of the newest session: a rewound worker has several
    if not first:
        return

    def before(owner: Any, name: str, place: str, step_of: Callable[..., int | None] = lambda *_: None) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            _INJECTORS[0].reach(place, step_of(*args))
            return inner(*args, **kwargs)

        setattr(owner, name, outer)

    before(Group, "all_to_all", "scatter")
    before(Group, "begin_send", "relaying")
    before(Group, "all_gather", "gather")
    before(Group, "all_gather", "sharing", lambda *_: _INJECTORS[0].view)
    before(view_comms, "form_comms", "forming", lambda factory, store, name, *_: int(name))
    before(state_transfer, "send_packed", "giving")
    before(state_transfer, "receive_packed", "taking")
    before(checkpoint, "contribute", "saving")
    before(checkpoint, "publish", "publishing")
    _wrap_shares(before)
    contribute, gather = checkpoint.contribute, Group.gather_tensors

    def written(*args: Any, **kwargs: Any) -> checkpoint.Contribution:
        contribution = contribute(*args, **kwargs)
        _INJECTORS[0].reach("written")
        return contribution

    checkpoint.contribute = written

    def gathered(group: Group, mine: Any, kind: int = 0) -> Any:
        rows = gather(group, mine, kind)
        _INJECTORS[0].reach("gathered")
        return rows

    Group.gather_tensors = gathered  # type: ignore[method-assign,assignment]
    before(adapt.Adapter, "_agree_now", "agreeing")
    before(routing, "probe_links", "probing")


def _wrap_shares(before: Callable[..., None]) -> None:
    def view(*_: Any) -> int:
        return _INJECTORS[0].view

    for reducer in (OwnedReducer, StreamedReducer):
        before(reducer, "combine", "launched")
        before(reducer, "squares", "added")
    before(ShardedReplica, "leave", "leaving")
    before(RemoteOwnerSums, "exchange", "lending")
    before(CommitBarrier, "wait_for_all", "gate")
    before(OwnedAllReduce, "_complete", "gated")
    before(OwnedReplica, "settle", "applied")
    before(OwnedReplica, "_take", "spreading")
    before(StageChannel, "has", "waiting")
    before(Kept, "brought", "placing", view)
    before(moving, "meet", "placed", view)


BASE_S = 0.06
LAST_STEPS = 16
LONGEST_S = 2.0


def rest_s(step: int, asked_at: int, deadline: int, base_s: float) -> float:
    """Seconds to rest after ``step`` for what was asked for at step ``asked_at`` and must have come by ``deadline``.

    ``base_s``, but in the ``LAST_STEPS``, or the second half of fewer, four times as long after each step as after the
    one before, up to ``LONGEST_S``.
    """
    late = step - (deadline - min(LAST_STEPS, (deadline - asked_at) // 2))
    return base_s if late <= 0 else min(base_s * 4.0 ** min(late, 10), max(LONGEST_S, base_s))


def parse_wishes(texts: list[str]) -> dict[int, str]:
    """Of "3 4": at step 3, four workers; of "3 data=2,shard=2": at step 3, that mesh."""
    pairs = (text.split() for text in texts)
    return {int(step): workers for step, workers in pairs}


class Rests:
    """Rests of ``session``'s program of ``steps`` steps, as its config says.

    ``pause_s``: after every step. With ``wishes`` (by step) only while workers are not as many, or do not stand, as the
    last of them wants. With ``until``, a path, only until that file exists.
    """

    def __init__(self, session: Session, steps: int, wishes: Mapping[int, str] | None = None) -> None:
        self._session, self._steps, self._wishes = session, steps, dict(wishes or {})
        self._pause_s = float(str(session.config["pause_s"]))
        self._until = str(session.config.get("until") or "")

    def rest(self) -> None:
        """After a step."""
        time.sleep(self._seconds(self._session.step))

    def _seconds(self, step: int) -> float:
        base_s = self._pause_s or BASE_S
        if self._until:
            return 0.0 if os.path.exists(self._until) else rest_s(step, 0, self._steps, base_s)
        if not self._wishes:
            return self._pause_s
        asked_at = max((at for at in self._wishes if at <= step), default=None)
        if asked_at is None or self._stands(self._wishes[asked_at]):
            return 0.0
        return rest_s(step, asked_at, min((at for at in self._wishes if at > step), default=self._steps), base_s)

    def _stands(self, workers: str) -> bool:
        """Whether it came true."""
        mesh = self._session.state.workers.comms.mesh
        return mesh.workers == int(workers) if workers.isdecimal() else mesh == Mesh.parse(workers)


def digit_rows(count: int, unseen: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """The first ``count`` to train on, and ``unseen`` others (None: all) to evaluate."""
    splits = digits()
    (images, labels), (others, names) = splits.train[:count], splits.validation[:unseen]
    return TensorDataset(images.flatten(1), labels), TensorDataset(others.flatten(1), names)
