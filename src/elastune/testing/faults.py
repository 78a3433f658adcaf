"""Faults for the programs of tests, at a named worker, step and place; and rests that pace such a program.

``inject(session)`` arms the faults and returns ``reach``. ``Rests`` lets a program wait for a worker that joins, also
on a busy machine: it rests after each step while something is awaited, longer near the last step.

The program's config holds the faults as text, "KIND WORKER STEP PLACE": ``kill 1 5 gather`` kills worker 1 in the
all-gather of its step 5.

Kinds:
    kill: SIGKILL.
    stop: SIGSTOP.
    nap: half a second, so that other workers come first.
    break: the operation is complete, but this worker takes it as failed.
    full: files of this worker have room for ``ROOM`` bytes only, until it comes to the place again.

Places in the library; STEP is the session's step unless noted:
    scatter, gather: the two halves of an exact reduction.
    sharing: as gather, when every member has given its part. STEP is the view's number.
    reduced: right after a reduction.
    gathered: right after a gather of numbers.
    relaying: before a part of a sum goes on along a route.
    forming: before a group is formed. STEP is the view's number.
    giving, taking: before a state is sent, received.
    saving, written: before and after this worker writes its part of a checkpoint. STEP is the checkpoint's, here and
        in the next three: a thread may write it while training goes on.
    filling: a part of this worker's file is written.
    publishing: all parts are written, and the checkpoint is not yet published.
    renaming: all files are on the disk, and the draft does not yet have the checkpoint's name.
    agreeing: before workers agree on decisions between epochs.
    probing: before the links between hosts are measured.

Places of state in shares:
    launched: this worker has sent its gradients to their owners.
    added: this worker has added up the gradients that it owns.
    lending: before its sums go to a worker outside of its batch group that stores them.
    gate, gated: before and after all workers confirm that their sums are complete.
    applied: the optimizer has updated the shares.
    spreading: some of the updated values have arrived.
    waiting: before this worker looks for a message of another pipeline stage.
    placing, placed: before state moves, and when all of it has arrived here. STEP is the view's number.
    leaving: before the gradients of a block are sent, in a backward pass.

Any other place is one of the program itself, which calls ``reach``.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import TensorDataset

from elastune.core.mesh import Mesh
from elastune.elastic.worker import elastic_group, recovery
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.parallel.comm.owned import CommitBarrier, OwnedReducer, RemoteOwnerSums
from elastune.parallel.comm.streamed import StreamedReducer
from elastune.parallel.mechanisms.owned import state as owned_state
from elastune.parallel.mechanisms.owned.mechanism import ShardedReplica
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.mechanisms.owned.state import Kept
from elastune.parallel.mechanisms.pipeline.stage import StageChannel
from elastune.parallel.sync.owned import OwnedAllReduce
from elastune.recipes.datasets import digits
from elastune.train.adaptation import adapter, routing
from elastune.train.checkpoints import checkpoint, checkpoint_part
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
    """Return the fault of a text such as "kill 1 5 gather"."""
    kind, worker, step, place = text.split()
    return Fault(kind, int(worker), int(step), place)


class Injector:
    """The faults of one session's worker. Each happens once a process."""

    def __init__(self, session: Session, faults: list[Fault]) -> None:
        self._session = session
        self._worker = session.state.workers.worker
        self._faults = [fault for fault in faults if fault.worker == self._worker and fault not in _HAPPENED]
        self._full: list[str] = []
        if any(fault.kind == "full" for fault in self._faults):  # here, as the place may come in another thread
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    @property
    def view(self) -> int:
        """The view that this worker is a member of."""
        return self._session.state.workers.view

    def reach(self, place: str, step: int | None = None) -> None:
        """Let the faults happen that are due at ``place``; the program or the library has come to it."""
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
                resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, resource.RLIM_INFINITY))
                continue
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


_INJECTORS: list[Injector] = []
_HAPPENED: set[Fault] = set()


def inject(session: Session) -> Callable[[str], None]:
    """Arm this worker's faults of ``session.config["faults"]``. Call it after ``session.prepare``.

    Returns:
        The function ``reach`` for places of the program itself.
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
    before(elastic_group, "form_comms", "forming", lambda factory, store, name, *_: int(name))
    before(recovery, "send_packed", "giving")
    before(recovery, "receive_packed", "taking")
    before(checkpoint, "contribute", "saving", _step_of_draft)
    before(checkpoint_part, "append", "filling", lambda file, _: _step_of_draft(Path(file.name).parent))
    before(checkpoint, "publish", "publishing", _step_of_draft)
    before(checkpoint, "complete_draft", "renaming", _step_of_draft)
    _wrap_shares(before)
    contribute, gather = checkpoint.contribute, Group.gather_tensors

    def written(*args: Any, **kwargs: Any) -> checkpoint.Contribution:
        contribution = contribute(*args, **kwargs)
        _INJECTORS[0].reach("written", _step_of_draft(*args))
        return contribution

    checkpoint.contribute = written

    def gathered(group: Group, mine: Any, kind: int = 0) -> Any:
        rows = gather(group, mine, kind)
        _INJECTORS[0].reach("gathered")
        return rows

    Group.gather_tensors = gathered  # type: ignore[method-assign,assignment]
    before(adapter.Adapter, "_agree_now", "agreeing")
    before(routing, "probe_links", "probing")


def _step_of_draft(at: Path, *_: Any) -> int | None:
    """The step of the checkpoint in the draft ``at``: a thread writes it while the session goes on."""
    number = at.name.removeprefix(checkpoint.DRAFT).partition("-")[0]
    return int(number) if number.isdecimal() else None


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
    before(owned_state, "meet", "placed", view)


BASE_S = 0.06
LAST_STEPS = 16
LONGEST_S = 2.0


def rest_s(step: int, asked_at: int, deadline: int, base_s: float) -> float:
    """Seconds to rest after ``step`` for a change requested at step ``asked_at`` that must come before ``deadline``.

    The rest is ``base_s``. In the last ``LAST_STEPS`` (or the second half, if there are fewer) it grows fourfold with
    each step, up to ``LONGEST_S``.
    """
    late = step - (deadline - min(LAST_STEPS, (deadline - asked_at) // 2))
    return base_s if late <= 0 else min(base_s * 4.0 ** min(late, 10), max(LONGEST_S, base_s))


def parse_wishes(texts: list[str]) -> dict[int, str]:
    """Return the requests by step: "3 4" asks for four workers at step 3, "3 data=2,shard=2" for that mesh."""
    pairs = (text.split() for text in texts)
    return {int(step): workers for step, workers in pairs}


class Rests:
    """Rests of ``session``'s program of ``steps`` steps, as its config says.

    ``pause_s``: after every step. With ``wishes`` (by step) only while workers are not as many, or do not stand, as the
    last of them wants. With ``until``, a path, only until that file exists.
    """

    def __init__(self, session: Session, steps: int, requests: Mapping[int, str] | None = None) -> None:
        self._session, self._steps, self._requests = session, steps, dict(requests or {})
        self._pause_s = float(str(session.config["pause_s"]))
        self._until = str(session.config.get("until") or "")

    def rest(self) -> None:
        """Rest after a step."""
        time.sleep(self._seconds(self._session.step))

    def _seconds(self, step: int) -> float:
        base_s = self._pause_s or BASE_S
        if self._until:
            return 0.0 if os.path.exists(self._until) else rest_s(step, 0, self._steps, base_s)
        if not self._requests:
            return self._pause_s
        asked_at = max((at for at in self._requests if at <= step), default=None)
        if asked_at is None or self._stands(self._requests[asked_at]):
            return 0.0
        return rest_s(step, asked_at, min((at for at in self._requests if at > step), default=self._steps), base_s)

    def _stands(self, workers: str) -> bool:
        """Whether the run has as many workers, or the mesh, as ``workers`` asks for."""
        mesh = self._session.state.workers.comms.mesh
        return mesh.workers == int(workers) if workers.isdecimal() else mesh == Mesh.parse(workers)


def digit_rows(count: int, unseen: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Return the first ``count`` digits for training, and ``unseen`` others (None: all) for evaluation."""
    splits = digits()
    (images, labels), (others, names) = splits.train[:count], splits.validation[:unseen]
    return TensorDataset(images.flatten(1), labels), TensorDataset(others.flatten(1), names)
