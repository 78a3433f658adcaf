"""A run in the small, for trying every order of events: the real machine, the real ``reconcile``, and workers, channels
and collectives reduced to what matters about them. States are tuples; ``moves`` yields all that can happen next.

What the physics allows: messages of one connection keep their order, those of different ones do not. A collective can
complete at a worker only once all members have given their part; whether it does at each of them, when one of them
dies or goes, is open. A death may be noticed before what the dead one had said is read. ``Broken`` is held back for a
moment, so that a death explains it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from elastune.elastic.coordinator.machine import (
    Confirm,
    Dismiss,
    End,
    GiveUp,
    Membership,
    Release,
    Start,
    StopRun,
    transition,
)
from elastune.elastic.wire.messages import Broken, Connected, Done, Event, InstallView, Left, Lost, Ready, Running
from elastune.elastic.wire.view import View
from elastune.elastic.worker.recovery import MemberStatus, RecoveryPlan, reconcile


class Wrong(AssertionError):
    """An invariant does not hold."""


class Worker(NamedTuple):
    """``mode``: starting, waiting, idle, reducing, agreed (but has not heard on what), forming, receiving, unconfirmed,
    broken, done, ended, dead."""

    mode: str = "starting"
    version: int = 0  # that it entered last; 0: none
    heard: int = 0  # the newest it was told of
    at: int = 0  # operations of the program that it has done
    completed: int = 0
    log: tuple[Any, ...] = ()  # of each step: the view in whose group it was reduced
    part: tuple[int, int] | None = None  # of the evaluation since the last step: (of how many, which)
    snapshot: tuple[Any, ...] | None = None
    lost: bool = False
    rewinds: int = 0
    finished: bool = False  # it has said so; a rewind may have sent it back since
    member: bool = False  # it holds state for good
    cut: bool = False  # counts as lost, but lives: frozen or cut off
    up: tuple[Any, ...] = ()
    late: tuple[int, ...] = ()  # versions that it found broken, not passed on yet
    down: tuple[Any, ...] = ()


class Op(NamedTuple):
    """A collective in one group: who gave their part, how many had heard of a version to come, what all must share."""

    given: frozenset[int] = frozenset()
    heard: int = 0
    shared: Any = None
    parts: frozenset[Any] = frozenset()


class State(NamedTuple):
    machine: int
    workers: tuple[Worker, ...]
    ops: tuple[tuple[tuple[int, int], Op], ...] = ()  # by version and operation
    arrived: tuple[tuple[int, tuple[tuple[int, Worker], ...]], ...] = ()  # by version: who came to it, and as what
    passed: frozenset[tuple[int, int]] = (
        frozenset()
    )  # (version, worker) that has seen the whole table and sent its part
    deaths: int = 0
    breaks: int = 0
    freezes: int = 0
    early: int = 0  # how often a break may be told before the death that caused it
    wishes: tuple[int, ...] = ()  # which of the model's may still be made
    over: str = ""


ALIVE = {
    *("starting", "waiting", "idle", "reducing", "agreed", "forming", "receiving", "unconfirmed"),
    "broken",
    "done",
}


@dataclass
class Model:
    """A run of ``program``: a letter an operation; ``s``: a step, ``e``: the gather of an evaluation, ``g``: another
    gather after it.

    ``samples``: how many ranks have samples in each step (the others have no vote). ``wishes``: what may be asked for,
    once each.
    """

    program: str
    samples: tuple[int, ...] = ()
    wishes: tuple[tuple[int | None, Event], ...] = ()

    def __post_init__(self) -> None:
        self.memberships: list[Membership] = []
        self.versions: dict[int, View] = {}
        self._known: list[set[int]] = []
        self._index: dict[str, int] = {}
        self._told: dict[Any, Any] = {}
        self._settled: dict[Any, RecoveryPlan] = {}
        self._version_keys: dict[str, int] = {}

    # -- beginnings ---------------------------------------------------------------------------------------------------

    def beginning(self, membership: Membership, **budgets: Any) -> State:
        """All workers are being started."""
        wishes = tuple(range(len(self.wishes)))
        return State(self._intern(membership), tuple(Worker() for _ in membership.workers), wishes=wishes, **budgets)

    def running(self, membership: Membership, **budgets: Any) -> State:
        """All workers stand before their first operation."""
        state = self.beginning(membership)
        quiet = ("boots", "hears", "says", "passes")
        while any(w.mode != "idle" or w.up or w.down for w in state.workers):
            state = next(after for what, after in self.moves(state) if what.split()[1] in quiet)
        return state._replace(**budgets)

    def _intern(self, membership: Membership) -> int:
        key = repr(membership)
        if key not in self._index:
            self._index[key] = len(self.memberships)
            self.memberships.append(membership)
            self._known.append({worker.number for worker in membership.workers})
        return self._index[key]

    def _intern_version(self, version: View) -> int:
        """Different histories give a version's number to different ones, so those have names of their own."""
        key = repr(version)
        if key not in self._version_keys:
            self._version_keys[key] = len(self._version_keys) + 1
            self.versions[self._version_keys[key]] = version
        return self._version_keys[key]

    # -- all that can happen ------------------------------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """What can happen next without anybody's fault, and without wishes."""
        if state.over:
            yield from self._farewell(state)
            return
        for i, w in enumerate(state.workers):
            yield from self._of_coordinator(state, i, w)
            if w.mode not in ALIVE:
                continue
            if w.down:
                yield f"{i} hears {w.down[0]}", self._tidy(self._hear(state, i))
            if w.mode == "starting":
                yield f"{i} boots", self._tidy(self._boot(state, i))
            elif w.mode == "idle":
                yield self._go_on(state, i, w)
            elif w.mode == "reducing":
                if self._op(state, w).given == set(self.versions[w.version].members):
                    yield f"{i} completes", self._tidy(self._complete(state, i, w))
            elif w.mode == "forming":
                if len(dict(state.arrived).get(w.version, ())) == len(self.versions[w.version].members):
                    yield f"{i} passes", self._tidy(self._pass(state, i, w))
            elif w.mode == "receiving":
                source = self._source(state, i, w)
                if (w.version, source) in state.passed:
                    yield f"{i} receives", self._tidy(self._take(state, i, source))
            if w.mode in ("reducing", "forming", "receiving") and self._missing(state, w):
                yield f"{i} breaks", self._tidy(self._break(state, i, w))

    def _farewell(self, state: State) -> Iterator[tuple[str, State]]:
        """The run is over: who still lives hears so, and in which order does not matter any more."""
        if state.over != "over":
            for w in state.workers:
                if w.mode in ALIVE and not w.cut and ("bye",) not in w.down:
                    raise Wrong(f"the run is over, and nobody tells {w}")
            members = {worker.number for worker in self.memberships[state.machine].members}
            ends = [w for i, w in enumerate(state.workers) if i in members and w.mode in ALIVE and not w.cut]
            logs = {w.log for w in ends if w.at == len(self.program)}
            if state.over == "dismissed" and (len(logs) > 1 or not all(w.finished for w in ends)):
                raise Wrong(f"the run ends with {ends}")
            yield "all end", State(state.machine, tuple(CONNECTION_CLOSED for _ in state.workers), over="over")

    def faults(self, state: State) -> Iterator[tuple[str, State]]:
        """What can go wrong or be wished for next, as far as the budgets go."""
        if state.over:
            return
        for i, w in enumerate(state.workers):
            if w.mode not in ALIVE or w.cut:
                continue
            if state.deaths:
                dead = state._replace(deaths=state.deaths - 1)
                yield f"{i} dies", self._tidy(put(dead, i, mode="dead", down=()))
            if state.freezes and w.mode != "starting":
                frozen = put(state._replace(freezes=state.freezes - 1), i, cut=True, up=(), late=(), down=())
                yield f"{i} counts as lost", self._tidy(self._tell(frozen, (i, Lost())))
            if state.breaks and w.mode in ("reducing", "forming", "receiving"):
                yield f"{i} fails", self._tidy(self._break(state._replace(breaks=state.breaks - 1), i, w))
        for k in state.wishes:
            rest = state._replace(wishes=tuple(other for other in state.wishes if other != k))
            yield str(self.wishes[k]), self._tidy(self._tell(rest, self.wishes[k]))

    # -- the coordinator ----------------------------------------------------------------------------------------------

    def _of_coordinator(self, state: State, i: int, w: Worker) -> Iterator[tuple[str, State]]:
        if w.cut:
            return
        known = self._knows(state, i)
        if w.up:
            event: tuple[int | None, Event]
            match w.up[0]:
                case "left":
                    event = (i, Left())
                case "done":
                    event = (i, Done())
                case (_, version, first_step):
                    event = (i, Running(self.versions[version].number, first_step))
            yield f"{i} says {w.up[0]}", self._tidy(self._tell(put(state, i, up=w.up[1:]), event))
        if known and (w.mode == "dead" or (w.mode == "ended" and not w.up and not state.over)):
            yield f"{i} is lost", self._tidy(self._tell(put(state, i, up=(), late=()), (i, Lost())))
        for version in w.late:
            members = self.versions[version].members
            unseen = any(state.workers[m].mode == "dead" and self._knows(state, m) for m in members)
            if unseen and not state.early:
                continue
            left = put(state, i, late=tuple(v for v in w.late if v != version))
            result = self._tell(left._replace(early=state.early - unseen), (i, Broken(self.versions[version].number)))
            yield f"{i} broke in {version}", self._tidy(result)

    def _knows(self, state: State, i: int) -> bool:
        return i in self._known[state.machine]

    def _boot(self, state: State, i: int) -> State:
        """Nothing can come of a worker that is not warm: its way to there is one move."""
        membership = self.memberships[state.machine]
        state = put(state, i, mode="waiting")
        newest = membership.proposed or membership.current
        if newest is not None:
            state = self._to(state, i, ("version", self._intern_version(newest)))
        return self._tell(self._tell(state, (i, Connected())), (i, Ready()))

    def _tell(self, state: State, event: tuple[int | None, Event]) -> State:
        key = state.machine, event
        if key not in self._told:
            after, instructions = transition(self.memberships[state.machine], *event)
            self._told[key] = self._intern(after), instructions
        machine, instructions = self._told[key]
        state = state._replace(machine=machine)
        for instruction in instructions:
            state = self._obey(state, instruction)
        return state

    def _obey(self, state: State, instruction: Any) -> State:
        match instruction:
            case InstallView(version):
                if version.initial and version.number > 1:
                    self._check_fresh(state, version)
                self._check_size(state, version)
                return self._to_all(state, ("version", self._intern_version(version)))
            case Confirm(worker, version):
                return self._to(state, worker, ("confirmed", version))
            case Release(worker):
                return self._to(state, worker, ("bye",))
            case Dismiss():
                return self._to_all(state._replace(over="dismissed"), ("bye",))
            case GiveUp():
                return state._replace(over="gave up", workers=tuple(CONNECTION_CLOSED for _ in state.workers))
            case StopRun() if not any(worker.due for worker in self.memberships[state.machine].members):
                raise Wrong("the run is stopped, and nobody's notice is nearly over")
            case Start(workers):
                return state._replace(workers=(*state.workers, *(Worker() for _ in workers)))
            case End(worker):
                w = state.workers[worker]
                return put(state, worker, mode="dead", down=()) if w.mode in ALIVE and not w.cut else state
        return state

    def _to(self, state: State, i: int, message: tuple[Any, ...]) -> State:
        w = state.workers[i]
        if w.mode not in ALIVE or w.mode == "starting" or w.cut:
            return state
        if w.mode in ("waiting", "done") and not w.down and message[0] == "version":
            version = self.versions[message[1]]
            if i not in version.members or (w.mode == "done" and version.scheduled):
                return state  # it would do nothing about it
        return put(state, i, down=(*w.down, message))

    def _to_all(self, state: State, message: tuple[Any, ...]) -> State:
        for i in range(len(state.workers)):
            state = self._to(state, i, message)
        return state

    def _check_fresh(self, state: State, version: View) -> None:
        for i, w in enumerate(state.workers):
            gone = w.mode not in ALIVE or w.cut or ("bye",) in w.down  # released: it lacks what was done without it
            if i not in version.members and w.member and w.log and not gone:
                raise Wrong(f"worker {i} holds {len(w.log)} steps, but {version} begins anew")

    def _check_size(self, state: State, version: View) -> None:
        """Nobody is left out by a plan that the run could not spare; but those with notice go."""
        membership = self.memberships[state.machine]
        if version.scheduled and not any(worker.preempted for worker in membership.members):
            assert membership.current is not None
            if len(version.members) < min(membership.low, len(membership.current.members)):
                raise Wrong(f"{version} leaves too few")

    # -- a worker -----------------------------------------------------------------------------------------------------

    def _hear(self, state: State, i: int) -> State:
        w = state.workers[i]
        message, w = w.down[0], w._replace(down=w.down[1:])
        if message[0] == "bye":
            return put_all(state, i, w._replace(mode="ended", down=()))
        if message[0] == "confirmed":
            if w.mode != "unconfirmed" or self.versions[w.version].number != message[1]:
                raise Wrong(f"worker {i} was confirmed while {w.mode} in {w.version}")
            return self._settle_down(put_all(state, i, w._replace(member=True)), i)
        version = self.versions[message[1]]
        w = w._replace(heard=message[1])
        if not w.member:
            if i not in version.members:
                return put_all(state, i, Worker("waiting", up=w.up, late=w.late, down=w.down))
            if not version.initial and i not in version.joiners:
                raise Wrong(f"worker {i} holds no state for {version}")
            w = Worker("waiting", heard=message[1], member=version.initial, up=w.up, late=w.late, down=w.down)
            return self._arrive(put_all(state, i, w), i, message[1])
        if w.mode == "agreed" and version.scheduled:
            return self._cross(put_all(state, i, w), i)
        if version.scheduled:
            return put_all(state, i, w)
        if i not in version.members:
            return put_all(state, i, w._replace(mode="ended", down=()))
        return self._arrive(put_all(state, i, w), i, message[1])

    def _cross(self, state: State, i: int) -> State:
        """At an agreed boundary: into the version that was agreed on, or away."""
        w = state.workers[i]
        version = self.versions[w.heard] if w.heard else None
        if version is None or version.number <= self.versions[w.version].number:
            return put(state, i, mode="agreed")
        if not version.scheduled:
            raise Wrong(f"worker {i} missed {version}")
        if i not in version.members:
            return put(state, i, mode="ended", up=(*w.up, "left"), down=())
        return self._arrive(state, i, w.heard)

    def _arrive(self, state: State, i: int, name: int) -> State:
        w, version = state.workers[i], self.versions[name]
        if w.version and not version.scheduled:
            w = w._replace(lost=w.lost or not set(self.versions[w.version].members) <= set(version.members))
        w = w._replace(mode="forming", version=name)
        arrived = dict(state.arrived)
        arrived[name] = (*arrived.get(name, ()), (i, w._replace(up=(), late=(), down=(), heard=0, mode="")))
        arrived[name] = tuple(sorted(arrived[name]))
        return put_all(state._replace(arrived=tuple(sorted(arrived.items()))), i, w)

    def _settlement(self, state: State, name: int) -> tuple[RecoveryPlan, list[int]]:
        members = self.versions[name].members
        came = dict(dict(state.arrived)[name])
        joiners = self.versions[name].joiners
        key = tuple(_standing(came[m], m in joiners) for m in members)
        if key not in self._settled:
            self._settled[key] = reconcile(key)
        return self._settled[key], list(members)

    def _source(self, state: State, i: int, w: Worker) -> int:
        decided, members = self._settlement(state, w.version)
        rank = members.index(i)
        if rank in decided.rewind_lacking and decided.rewind_source is not None:
            return members[decided.rewind_source]
        if rank in decided.lagging and decided.result_source is not None:
            return members[decided.result_source]
        return members[decided.state_source[rank]]

    def _pass(self, state: State, i: int, w: Worker) -> State:
        decided, members = self._settlement(state, w.version)
        rank = members.index(i)
        state = state._replace(passed=state.passed | {(w.version, i)})
        if rank in decided.lagging or rank in decided.state_source:
            return put(state, i, mode="receiving")
        if rank in decided.rewind_lacking and decided.rewind_source is not None:
            return put(state, i, mode="receiving")
        return self._take(state, i, i)

    def _take(self, state: State, i: int, source: int) -> State:
        """Become what was decided, with what ``source`` has sent."""
        w = state.workers[i]
        decided, members = self._settlement(state, w.version)
        rank, given = members.index(i), dict(dict(state.arrived)[w.version])[source]
        if decided.rewind_to is not None:
            at, log = given.snapshot if decided.rewind_to >= 0 else (0, ())
            if len(log) < len(w.log):
                raise Wrong(f"worker {i} loses a completed step by a rewind")
            after = w._replace(at=at, log=log, part=None, completed=0, rewinds=decided.rewinds)
            after = after._replace(snapshot=given.snapshot)
        elif rank in decided.lagging:
            after = w._replace(at=w.at + 1, completed=w.completed + 1)
            if self.program[w.at] == "s":
                after = after._replace(log=(*w.log, given.log[-1]), part=None)
        elif rank in decided.state_source:
            after = given._replace(heard=w.heard, up=w.up, late=w.late, down=w.down)
            after = after._replace(member=False, finished=False, cut=w.cut)
        else:
            after = w
        if len(after.log) != decided.step:
            raise Wrong(f"worker {i} is at step {len(after.log)}, not {decided.step}")
        after = after._replace(lost=False, up=(*w.up, ("running", w.version, decided.step)))
        if rank in decided.state_source:
            return put_all(state, i, after._replace(mode="unconfirmed"))
        return self._settle_down(put_all(state, i, after), i)

    def _settle_down(self, state: State, i: int) -> State:
        w = state.workers[i]
        if w.at < len(self.program):
            return put(state, i, mode="idle")
        return put(state, i, mode="done", up=w.up if w.finished else (*w.up, "done"), finished=True)

    def _go_on(self, state: State, i: int, w: Worker) -> tuple[str, State]:
        """Evaluate, or give this worker's part to the next operation."""
        kind, version = self.program[w.at], self.versions[w.version]
        if kind in "eg" and w.part is None:
            part = len(version.members), version.ranks[i]
            return f"{i} evaluates", put(state, i, part=part, snapshot=(w.at, w.log))
        op = self._op(state, w)
        shared = kind, w.completed, w.log
        if op.given and op.shared != shared:
            raise Wrong(f"worker {i} brings {shared} where others brought {op.shared}")
        if i in op.given or i not in version.members:
            raise Wrong(f"worker {i} gives its part of {w.at} in {version} twice, or is no member")
        votes = version.ranks[i] < self._voters(w)
        heard = op.heard + (votes and w.heard > 0 and self._pending(w))
        op = Op(op.given | {i}, heard, shared, op.parts | {w.part} if kind in "eg" else frozenset())
        if kind in "eg" and len(op.given) == len(version.members):
            whole = {(len(op.given), k) for k in range(len(op.given))}
            if op.parts != whole:
                raise Wrong(f"an evaluation of the parts {sorted(op.parts, key=str)}")
        ops = {**dict(state.ops), (w.version, w.at): op}
        state = state._replace(ops=tuple(sorted(ops.items())))
        return f"{i} gives its part of {kind}{w.at}", put_all(state, i, w._replace(mode="reducing"))

    def _pending(self, w: Worker) -> bool:
        heard = self.versions[w.heard]
        return heard.scheduled and heard.number > self.versions[w.version].number

    def _voters(self, w: Worker) -> int:
        steps, size = len(w.log), len(self.versions[w.version].members)
        return min(size, self.samples[steps]) if steps < len(self.samples) else size

    def _op(self, state: State, w: Worker) -> Op:
        return dict(state.ops).get((w.version, w.at), Op())

    def _complete(self, state: State, i: int, w: Worker) -> State:
        op, kind = self._op(state, w), self.program[w.at]
        agreed = kind == "s" and op.heard >= self._voters(w)
        w = w._replace(at=w.at + 1, completed=w.completed + 1)
        if kind == "s":
            w = w._replace(log=(*w.log, w.version), part=None)
        state = put_all(state, i, w)
        return self._cross(state, i) if agreed else self._settle_down(state, i)

    def _missing(self, state: State, w: Worker) -> bool:
        """Whether another member is gone from this worker's group, so that its collective may fail."""
        number = self.versions[w.version].number
        for other in self.versions[w.version].members:
            o = state.workers[other]
            beyond = o.version and self.versions[o.version].number > number
            if o.mode not in ALIVE or beyond or (o.mode == "broken" and o.version == w.version):
                return True
        return False

    def _break(self, state: State, i: int, w: Worker) -> State:
        return put(state, i, mode="broken", late=tuple(sorted({*w.late, w.version})))

    def _tidy(self, state: State) -> State:
        """Forget what can matter to nobody any more, so that equal futures are equal states."""
        known = self._known[state.machine]
        workers = tuple(
            CONNECTION_CLOSED if w.mode not in ALIVE and i not in known else w for i, w in enumerate(state.workers)
        )
        within = {(w.version, w.at) for w in workers if w.mode in ("idle", "reducing")}
        forming = {w.version for w in workers if w.mode in ("forming", "receiving")}
        return State(
            state.machine,
            workers,
            tuple([pair for pair in state.ops if pair[0] in within]),
            tuple([pair for pair in state.arrived if pair[0] in forming]),
            frozenset([pair for pair in state.passed if pair[0] in forming]),
            *state[5:],
        )


CONNECTION_CLOSED = Worker(mode="dead")


def _standing(w: Worker, joins: bool) -> MemberStatus:
    dirty = w.part is not None
    snapshot = len(w.snapshot[1]) if w.snapshot is not None else -1
    return MemberStatus(w.completed, len(w.log), dirty, w.lost, snapshot, w.rewinds, joins)


def put(state: State, i: int, **facts: Any) -> State:
    """``state`` with these facts about worker ``i``."""
    return put_all(state, i, state.workers[i]._replace(**facts))


def put_all(state: State, i: int, w: Worker) -> State:
    """``state`` with ``w`` as worker ``i``."""
    return state._replace(workers=(*state.workers[:i], w, *state.workers[i + 1 :]))
