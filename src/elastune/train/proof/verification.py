"""A worker that computes wrong is found: some slots of some steps are computed by a second worker, too.

``core.plan.verification`` has the decisions; here is the work of one worker. In a verified step it first runs the
passes of another worker's slot again (``passes_of``), then its own. Digests of both gradients travel in that step's
control vector, in places of their own. If they differ, the step is lost and done again (``accepts``), with a third
worker where there is one. The verdict follows from all digests alike on every worker: the worker that is wrong waits
for its end, and the others go back to the newest checkpoint that is known to be good.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from elastune.core.errors import UserError
from elastune.core.journal.records import Record, StepsVerified, VerificationEnded, WorkerWrong
from elastune.core.plan.verification import (
    Check,
    SlotVerdict,
    checks_of,
    decoded,
    encoded,
    judge,
    odd_one_out,
)
from elastune.core.run import RunSpec
from elastune.core.slots import PLACE, ROLES, BatchSlice, VerifyPlan, shares
from elastune.elastic.wire.transport import host_name
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.mechanisms.base import Ready
from elastune.parallel.mechanisms.owned.placement import digest
from elastune.parallel.sync.base import Sync
from elastune.train.checkpoints.run_state import RunState
from elastune.train.data.source import StepPlan
from elastune.train.progress import Progress
from elastune.train.proof.corruption import Corruptions
from elastune.train.training_state import TrainingState

STATE_EVERY = 4  # verified steps between two comparisons of weights and optimizer state, which read all memory
STATE = "weights and optimizer state"
END_LIMIT_S = 60.0  # how long a worker that is wrong waits for its controller to end it
_LEAF = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


@dataclass
class _Doubt:
    """A step whose digests differed, until it was done again."""

    step: int
    view: int
    check: Check
    computed: list[tuple[int, int]]  # worker and digest, in order of time
    leaves: dict[int, dict[int, list[int]]] = field(default_factory=dict)


class Verification:
    """One worker's part in verification, and a part of the run's state: up to which step each worker was right.

    Args:
        spec: The run.
        workers: The group of this worker.
        progress: How far the run is.
        device: This worker's device.
        send: Takes records for the journal.
        state: Returns the run's state, which has its checkpoints.
        first: The place of the digests in a control vector.

    Attributes:
        corruptions: Errors on purpose.
        redoing: The pass of another worker's slot that the program's lines have just received.
    """

    name, optional = "verification", True

    def __init__(
        self,
        spec: RunSpec,
        workers: WorkerGroup,
        progress: Progress,
        device: torch.device,
        send: Callable[[Record], None],
        state: Callable[[], RunState],
        first: int,
    ) -> None:
        self._spec, self._workers, self._progress, self._device = spec, workers, progress, device
        self._send, self._state, self._first = send, state, first
        self._plan: VerifyPlan | None = spec.verify
        if self._plan is not None and spec.spool is not None:
            rule = "with --verify workers share the folder of checkpoints, to which training may go back"
            raise UserError(rule, "a folder of each host's own", "use a cluster without folder=local")
        self.corruptions = Corruptions()
        self.redoing: BatchSlice | None = None
        self._verified: dict[int, int] = {}  # by worker, the newest step in which it was found right
        self._kinds: tuple[int, list[str]] = (-1, [])  # of processors, by rank, in a view
        self._doubt: _Doubt | None = None
        self._checks: list[Check] = []  # of the open step
        self._leaves: dict[tuple[int, int], list[int]] = {}  # digests of gradients, by check and role
        self._slots = 0

    # -- its place in the run -----------------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Whether slots are computed twice in this run."""
        return self._plan is not None

    @property
    def numbers(self) -> int:
        """How many numbers of the control vector hold digests; always the same in a run."""
        return 0 if self._spec.verify is None else self._spec.verify.numbers

    def state_dict(self) -> dict[str, Any]:
        """Up to which step each worker was verified, and how many slots."""
        return {"verified": dict(self._verified), "slots": self._slots, "on": self.on}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self._verified = {int(worker): int(step) for worker, step in state["verified"].items()}
        self._slots = int(state["slots"])
        if not state["on"]:
            self._plan = None

    def enter(self) -> bool:
        """At a step boundary: let workers compare their processors, once in a view. Returns whether they have."""
        workers = self._workers
        if not self.on or workers.size < 2 or self._kinds[0] == workers.view:
            return False
        rows = workers.gather_bytes(kernels(self._device).encode(), "the bits of a few kernels")
        if len(rows) == workers.size:
            self._kinds = workers.view, [row.decode(errors="replace") for row in rows]
        for worker in workers.members:
            self._verified.setdefault(worker, self._progress.position.step)
        return True

    @property
    def known_good(self) -> int:
        """The newest step up to which every worker was verified."""
        return min((self._verified.get(worker, 0) for worker in self._workers.members), default=0)

    def due(self, step: int) -> bool:
        """Whether step ``step``, counted from 1, is verified."""
        if self._plan is None or self._workers.size == 1:
            return False
        return step <= self._workers.doubted_until or step % self._plan.every == 0

    # -- a verified step ----------------------------------------------------------------------------------------------

    def passes_of(self, plan: StepPlan, step: int, execution: Any, least: int) -> list[BatchSlice]:
        """The passes of other workers' slots that this worker makes in ``step``, before its own."""
        rank, passes = self._workers.rank, list[BatchSlice]()
        for check in self._checks_of(plan, step, execution, least):
            if rank in self._again(check, step)[1:]:
                owned = self._slices(plan, check.ranks[0], execution, least)
                passes += [replace(each, ends_step=False) for each in owned if each.slot == check.slot]
        return passes

    def _slices(self, plan: StepPlan, rank: int, execution: Any, least: int) -> list[BatchSlice]:
        options = execution.mode, execution.micro_batch, least
        parts = shares(plan.size, execution.num_slots, self._workers.size, rank, *options)
        return [each for each in parts if each.weight]

    def _checks_of(self, plan: StepPlan, step: int, execution: Any, least: int) -> list[Check]:
        view, kinds = self._kinds
        if not self.due(step) or view != self._workers.view or self._plan is None:
            return []
        turn = step if step <= self._workers.doubted_until else step // self._plan.every

        def slots_of(rank: int) -> list[int]:
            return list(dict.fromkeys(each.slot for each in self._slices(plan, rank, execution, least)))

        return checks_of(self._plan, turn, slots_of, kinds)

    def _again(self, check: Check, step: int) -> tuple[int, ...]:
        """The ranks that compute ``check`` now: the third one only where the first two have differed."""
        return check.ranks if self._doubts(step) is not None else check.ranks[:2]

    def _doubts(self, step: int) -> _Doubt | None:
        doubt = self._doubt
        same = doubt is not None and (doubt.step, doubt.view) == (step, self._workers.view)
        return doubt if same else None

    def begin(self, plan: StepPlan, step: int, sync: Sync, execution: Any, least: int) -> None:
        """A step begins: watch the slots that are to be compared."""
        for request in self._workers.take_corruptions():
            self.corruptions.add(request)
        if self.corruptions:
            self.corruptions.step(sync.replica)
        self._checks = self._checks_of(plan, step, execution, least)
        self._leaves, self.redoing = {}, None
        self._step, self._params = step, len(sync.replica.params)
        sync.tap = self if self._checks or self.corruptions else None

    def state_digest(self, step: int, trained: TrainingState) -> str:
        """The digest of weights and optimizer state, where workers compare it in ``step``; "" elsewhere."""
        if self._plan is None or not self.due(step):
            return ""
        every = self._plan.every * STATE_EVERY
        if step > self._workers.doubted_until and step % every:
            return ""
        if not trained.replica.has_all:  # shares of the state differ by design; copies have digests of their own
            return ""
        return f"{combined(leaves_of(state_tensors(trained))):016x}"

    def ready(self, slot: int, put: Ready) -> Ready:
        """See ``SlotTap``: digests of this worker's own slots, where they are compared."""
        for number, check in enumerate(self._checks):
            if check.slot == slot and check.ranks[0] == self._workers.rank:
                put = _digesting(self._leaves.setdefault((number, 0), [0] * self._params), put)
        return self.corruptions.ready(self._params, put) if self.corruptions else put

    def redone(self, slot: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """This worker has computed another worker's ``slot``."""
        for number, check in enumerate(self._checks):
            if check.slot == slot and self._workers.rank in check.ranks[1:]:
                role = check.ranks.index(self._workers.rank)
                put = _digesting(self._leaves.setdefault((number, role), [0] * self._params), lambda i, gradient: None)
                put = self.corruptions.ready(self._params, put) if self.corruptions else put
                for i, gradient in reversed(list(enumerate(gradients))):
                    put(i, gradient)

    def fill(self, control: list[float]) -> None:
        """See ``SlotTap``: put this worker's digests into its control vector."""
        for (number, role), leaves in self._leaves.items():
            first = self._first + (number * ROLES + role) * PLACE
            control[first : first + PLACE] = encoded(combined(leaves))

    # -- after the sums -----------------------------------------------------------------------------------------------

    def accepts(self, sums: Sequence[float], step: int, trained: TrainingState) -> bool:
        """Whether the step may count; else it is done again. All workers decide alike.

        Raises:
            Rewind: A worker computes wrong: the others go back to a state that is known to be good.
        """
        doubt, members = self._doubts(step), self._workers.members
        self._doubt = None
        for number, check in enumerate(self._checks):
            places = [sums[(number * ROLES + role) * PLACE :][:PLACE] for role in range(ROLES)]
            found = [(members[rank], decoded(place)) for rank, place in zip(check.ranks, places, strict=False)]
            computed = [(worker, number_) for worker, number_ in found if number_ is not None]
            if doubt is not None and doubt.check == check:
                computed = doubt.computed + computed
            if len({digest_ for _, digest_ in computed}) < 2:
                if len(computed) > 1:
                    self._slots += 1
                    self._verified |= {worker: step for worker, _ in computed}
                    self._state().spare(self.known_good)
                continue
            if doubt is None:
                self._doubt = _Doubt(step, self._workers.view, check, computed)
                return False
            self._decide(number, check, computed, step, trained)
        return True

    def _decide(
        self, number: int, check: Check, computed: list[tuple[int, int]], step: int, trained: TrainingState
    ) -> None:
        verdict = judge(computed)
        own = next((leaves for (at, _), leaves in self._leaves.items() if at == number), [])
        rows = self._told(own)
        differing = [row for row in rows.values() if row["leaves"]]
        places = [
            i
            for i, column in enumerate(zip(*(row["leaves"] for row in differing), strict=False))
            if len(set(column)) > 1
        ]
        leaf = _name(trained, places[0]) if places else ""
        self._conclude(verdict, check.slot, leaf, computed, step, rows)

    def state_differs(self, digests: Sequence[str], step: int) -> bool:
        """Workers hold different weights or optimizer state before ``step``. Returns False where nobody can be named.

        Raises:
            Rewind: One worker differs from all others.
        """
        by_worker = {worker: int(text, 16) for worker, text in zip(self._workers.members, digests, strict=True)}
        worker = odd_one_out(by_worker)
        if worker is None:
            return False
        verdict = SlotVerdict("wrong", worker, always=True)
        rows = self._told([])
        self._conclude(verdict, None, STATE, list(by_worker.items()), step, rows)
        return True

    def _told(self, leaves: Sequence[int]) -> dict[int, dict[str, Any]]:
        """By worker, what only it knows. Before that each drops what may be spoilt."""
        self._state().distrust()
        row = json.dumps({"leaves": list(leaves), "device": str(self._device), "host": host_name()}).encode()
        return dict(
            zip(
                self._workers.members,
                map(json.loads, self._workers.gather_bytes(row, "the digests of a slot")),
                strict=False,
            )
        )

    def _conclude(
        self,
        verdict: SlotVerdict,
        slot: int | None,
        leaf: str,
        computed: list[tuple[int, int]],
        step: int,
        rows: Mapping[int, Mapping[str, Any]],
    ) -> None:
        workers = self._workers
        if verdict.worker is None:
            self._plan = None
            self._send(VerificationEnded(step, leaf, verdict.words))
            return
        good, row = self._verified.get(verdict.worker, 0), rows.get(verdict.worker, {})
        why = verdict.words if slot is not None else f"worker {verdict.worker} holds other {STATE} than all others"
        self._send(
            WorkerWrong(
                worker=verdict.worker,
                step=step,
                slot=slot,
                leaf=leaf,
                digests=[(worker, f"{number:016x}") for worker, number in computed],
                always=verdict.always,
                host=str(row.get("host", "")),
                device=str(row.get("device", "")),
                good_step=good,
                why=why,
            )
        )
        if workers.worker == verdict.worker:
            _await_end()
        self._state().forget(good)
        workers.go_back()

    def doubt_divergence(self, step: int) -> None:
        """A loss has exploded in ``step``. Returns only where every step up to it was verified.

        Raises:
            Rewind: It may be the work of a worker that computes wrong: the steps since the newest state that is known
                to be good are done again, each one verified.
        """
        workers = self._workers
        if not self.on or workers.size < 2 or not workers.elastic or step <= workers.doubted_until:
            return
        self._told([])
        workers.doubted_until = step
        self._state().forget(self.known_good)
        workers.go_back()

    def report(self, step: int) -> None:
        """At the end of training: record what was verified."""
        if self._spec.verify is not None and self._workers.rank == 0:
            self._send(StepsVerified(step, self._slots))


def _await_end() -> NoReturn:
    """Take part in nothing more: the controller ends this process."""
    time.sleep(END_LIMIT_S)
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)


def _name(trained: TrainingState, place: int) -> str:
    names = {id(p): name for name, p in trained.replica.module.named_parameters()}
    return names.get(id(trained.replica.params[place]), f"parameter {place}")


# --- digests ---


def _digesting(leaves: list[int], put: Ready) -> Ready:
    def watch(i: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            leaves[i] = digest(gradient.detach().reshape(-1), 0)
        put(i, gradient)

    return watch


def combined(leaves: Sequence[int]) -> int:
    """One number below 2**64 of the digests of several tensors; a difference in one of them always shows."""
    return sum(leaf * (2 * i + 1) * _LEAF for i, leaf in enumerate(leaves)) % _MODULUS


def leaves_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The digest of each tensor's bits."""
    return [digest(t.detach().reshape(-1), 0) for t in tensors]


def state_tensors(trained: TrainingState) -> list[torch.Tensor]:
    """The tensors of weights, buffers and optimizer state, in an order that is the same on all workers."""
    module, optimizer = trained.replica.module, trained.optimizer
    kept = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    values = [value for state in kept for _, value in sorted(state.items())]
    return [*module.parameters(), *module.buffers(), *(value for value in values if isinstance(value, torch.Tensor))]


def kernels(device: torch.device) -> str:
    """A digest of what a few kernels give on ``device``: processors of one kind have the same."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(96, 96, generator=generator).to(device) for _ in range(2))
    image = torch.randn(2, 3, 16, 16, generator=generator).to(device)
    weight = torch.randn(8, 3, 3, 3, generator=generator).to(device)
    results = [a @ b, torch.softmax(a, 1), torch.exp(b), F.conv2d(image, weight), (a * b).sum(0), F.gelu(a).mean(1)]
    return f"{combined(leaves_of(results)):016x}"
