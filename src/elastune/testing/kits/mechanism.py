"""Tests that every mechanism must pass, for inheritance, with reference answers on layouts.

class TestMine(MechanismKit):
    mechanism = Mine()  # of a module that worker processes can import
    meshes = (Mesh(tensor=2), Mesh(data=2, tensor=2))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastune.core.layout import Box, Layout, ParamBlock, Piece, Unrecoverable, intersection, volume, without
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings
from elastune.core.slots import shares
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms, form_comms, replicated
from elastune.parallel.mechanisms.base import Mechanism, Replica, Replicated
from elastune.parallel.mechanisms.owned.mechanism import Owned
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.mechanisms.owned.store import has_storage
from elastune.parallel.sync.base import Sync
from elastune.parallel.sync.registry import sync_of
from elastune.testing.worker_processes import LIMIT_S, Worker, processes

# Reference answers on layouts for the kits: which boxes must move from one layout to another, and who holds each.
#
# Mechanisms move their state by plans of their own, along the axes of a mesh. The kits compare them with these
# answers.


@dataclass(frozen=True)
class Move:
    """``source`` sends ``piece`` to ``target``."""

    piece: Piece
    source: int
    target: int


def whole(name: str, shape: Sequence[int]) -> Piece:
    """All of a tensor."""
    return Piece(name, tuple((0, size) for size in shape))


def moves(have: Layout, want: Layout) -> list[Move]:
    """Return the moves from ``have`` to ``want``; the plan is equal on every worker.

    Elements that a worker holds stay there. Every other element comes to it once, from the owner that has sent least so
    far. Raises ``Unrecoverable`` if no worker holds an element.
    """
    owners = _owners(have)
    sent = dict.fromkeys(have, 0)
    plan: list[Move] = []
    lost: list[Piece] = []
    for target in sorted(want):
        present: dict[str, list[Box]] = {}
        for piece in have.get(target, ()):
            present.setdefault(piece.name, []).append(piece.box)
        for piece in want[target]:
            boxes = present.setdefault(piece.name, [])
            for missing in without([piece.box], boxes):
                fetched, absent = _fetch(Piece(piece.name, missing), target, owners.get(piece.name, ()), sent)
                plan += fetched
                lost += absent
            boxes.append(piece.box)
    if lost:
        raise Unrecoverable(lost)
    return plan


def _fetch(
    piece: Piece, target: int, owners: Sequence[tuple[int, Box]], sent: dict[int, int]
) -> tuple[list[Move], list[Piece]]:
    """Moves that bring ``piece`` to ``target``, and the parts of it that no worker holds."""
    plan: list[Move] = []
    left = [piece.box]
    # A stable sort: of equally busy holders the first comes first, on every worker.
    for source, owned in sorted(owners, key=lambda owner: sent[owner[0]]):
        for box in left:
            if (part := intersection(box, owned)) is not None:
                plan.append(Move(Piece(piece.name, part), source, target))
                sent[source] += volume(part)
        left = without(left, [owned])
    return plan, [Piece(piece.name, box) for box in left]


def redundancy(layout: Layout) -> int:
    """Return the smallest number of workers that hold any one element; 0 for an empty layout.

    With 2 or more, the loss of one worker loses no element.
    """
    least: list[int] = []
    for boxes in _owners(layout).values():
        counted: list[tuple[Box, set[int]]] = []  # disjoint boxes, each with its holders
        for worker, box in boxes:
            new = without([box], [other for other, _ in counted])
            split: list[tuple[Box, set[int]]] = []
            for other, workers in counted:
                if (part := intersection(other, box)) is not None:
                    split.append((part, workers | {worker}))
                split += [(rest, workers) for rest in without([other], [box])]
            counted = split + [(rest, {worker}) for rest in new]
        least += [len(workers) for _, workers in counted]
    return min(least, default=0)


def _owners(layout: Layout) -> dict[str, list[tuple[int, Box]]]:
    """The (worker, box) pairs of each tensor, in order of workers."""
    boxes: dict[str, list[tuple[int, Box]]] = {}
    for worker in sorted(layout):
        for piece in layout[worker]:
            boxes.setdefault(piece.name, []).append((worker, piece.box))
    return boxes


# Tests that every mechanism must pass, for inheritance.
#
# class TestMine(MechanismKit):
#     mechanism = Mine()  # of a module that worker processes can import
#     meshes = (Mesh(tensor=2), Mesh(data=2, tensor=2))

SLOTS, BATCH, STEPS, EVENT_STEP, CLIP = 8, 16, 5, 2, 0.5
ALONE = Mesh()
Event = Literal["nothing", "abandon", "regroup", "replace"]
State = dict[Piece, torch.Tensor]
ParamBlocks = dict[str, ParamBlock]


@dataclass(frozen=True)
class Case:
    """A small training run, in which something happens before step ``EVENT_STEP``."""

    mechanism: Mechanism
    mesh: Mesh
    event: Event = "nothing"
    clips: bool = False
    copies: int = 2


def network() -> nn.Sequential:
    """A network with even sizes, in double precision."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of ``step``."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator).double(), torch.randint(0, 4, (BATCH,), generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with moments, so that each parameter has state."""
    return torch.optim.AdamW(model.parameters(), lr=0.05)


class Run:
    """The training of one worker."""

    def __init__(self, case: Case, comms: Comms) -> None:
        self._case = case
        self._mesh = case.mesh
        self.sync = self._attached(comms)

    def _attached(self, comms: Comms) -> Sync:
        model = network()
        execution = ExecutionSettings(mesh=comms.mesh, num_slots=SLOTS, copies=self._case.copies)
        return sync_of(self._case.mechanism.attach(model, optimizer_of(model), comms, execution), comms, execution)

    @property
    def replica(self) -> Replica:
        """This worker's part."""
        return self.sync.replica

    def step(self, step: int, passes: int = SLOTS) -> None:
        """Take one step, or abandon it after its first ``passes``."""
        x, y = data(step)
        rank = self._mesh.batch_rank(self.replica.comms.rank)
        slicing = {"even": self.replica.equal_passes, "in_turn": self.replica.in_turn}
        plan = shares(BATCH, SLOTS, self._mesh.batch, rank, "exact", None, **slicing)
        for i, share in enumerate(plan[:passes]):
            self.sync.begin(share, starts_step=i == 0)
            part = slice(share.samples.start, share.samples.stop)
            self.sync.backward(F.cross_entropy(self.replica.model(x[part]), y[part]), share)
        if passes < len(plan):
            before = [b.clone() for b in self.replica.module.buffers()]
            self.sync.abandon()
            assert all(p.grad is None for p in self.replica.params), "an abandoned step leaves no gradient"
            assert any(not torch.equal(a, b) for a, b in zip(before, self.replica.module.buffers(), strict=True))
            return
        if self._case.clips:
            self.replica.clip(CLIP)
        self.replica.optimizer.step()
        self.replica.optimizer.zero_grad()

    def forget(self) -> None:
        """Replace this worker's training by a newly started one."""
        torch.manual_seed(1)
        self.sync = self._attached(self.replica.comms)
        for tensor in (*self.replica.module.parameters(), *self.replica.module.buffers()):
            if has_storage(tensor):
                tensor.detach().zero_()
        for group in self.replica.optimizer.param_groups:
            for p in group["params"]:
                p.detach().zero_()

    def state(self) -> State:
        """The pieces that this worker holds."""
        return {piece: self.replica.read(piece).clone() for piece in self.replica.layout()}

    def param_blocks(self) -> ParamBlocks:
        """The parameter blocks of state in flat pieces; empty for other state."""
        return (
            {param_block.name: param_block for param_block in self.replica.split.param_blocks}
            if isinstance(self.replica, OwnedReplica)
            else {}
        )


def work(worker: Worker, case: Case) -> None:
    """The work of each process; the last worker is lost if workers are replaced."""
    factory = GlooFactory("lo", LIMIT_S)
    run = Run(case, form_comms(factory, worker.store, "first", worker.rank, case.mesh))
    for step in range(STEPS):
        if step == EVENT_STEP and case.event == "abandon":
            run.step(step, passes=1)
        elif step == EVENT_STEP and case.event != "nothing":
            if case.event == "replace":
                replace_last(worker, run)
            run.sync.regroup(form_comms(factory, worker.store, "second", worker.rank, case.mesh))
            run.replica.spread()
        run.step(step)
    worker.send("state", run.state(), run.param_blocks())
    worker.receive()


def replace_last(worker: Worker, run: Run) -> None:
    """The last worker loses its state; the others send it the pieces of the plan of ``moves``."""
    worker.send("layout", {piece: run.replica.read(piece).dtype for piece in run.replica.layout()})
    if worker.rank == worker.size - 1:
        run.forget()
    plan: list[Move]
    types: dict[str, torch.dtype]
    plan, types = worker.receive()
    group = run.replica.comms.everyone
    for move in plan:
        if worker.rank == move.source:
            group.send(run.replica.read(move.piece).contiguous(), move.target)
        elif worker.rank == move.target:
            values = torch.empty([stop - start for start, stop in move.piece.box], dtype=types[move.piece.name])
            group.receive(values, move.source)
            run.replica.write(move.piece, values)


def alone(clips: bool = False) -> State:
    """The result of one undisturbed worker with a whole replica."""
    run = Run(Case(Replicated(), ALONE, clips=clips), replicated(Group()))
    for step in range(STEPS):
        run.step(step)
    return run.state()


def in_plain_torch() -> dict[str, torch.Tensor]:
    """The same training in plain PyTorch: a pass for each slot, with weighted gradients added up."""
    model = network()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        x, y = data(step)
        for part in torch.arange(BATCH).chunk(SLOTS):
            (F.cross_entropy(model(x[part]), y[part]) * len(part) / BATCH).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def part(whole: dict[str, torch.Tensor], piece: Piece, param_blocks: ParamBlocks) -> torch.Tensor:
    """The values of ``piece``, out of the ``whole`` tensors."""
    name, colon, key = piece.name.partition(":")
    if name not in param_blocks:
        return whole[piece.name][tuple(slice(*edge) for edge in piece.box)]
    tensor = whole[f"{param_blocks[name].tensor}{colon}{key}"]
    if not piece.box:
        return tensor
    return tensor[tuple(slice(*edge) for edge in param_blocks[name].box)].reshape(-1)[slice(*piece.box[0])]


def as_param_blocks(pieces: Iterable[Piece], param_blocks: ParamBlocks) -> Iterator[Piece]:
    """The pieces of whole tensors as pieces of their parameter blocks."""
    for piece in pieces:
        name, colon, key = piece.name.partition(":")
        blocks = [param_block for param_block in param_blocks.values() if param_block.tensor == name]
        for param_block in blocks:
            yield Piece(f"{param_block.name}{colon}{key}", ((0, param_block.size),) if piece.box or not colon else ())
        if not blocks:
            yield piece


class MechanismKit:
    """A mechanism trains as one process does, and knows and moves the layout of its state."""

    mechanism: ClassVar[Mechanism]
    meshes: ClassVar[Sequence[Mesh]]
    copies: ClassVar[int] = 2

    @pytest.fixture(params=[0, 1], ids=["one mesh", "another"])
    def mesh(self, request: pytest.FixtureRequest) -> Mesh:
        """Each of two meshes."""
        mesh: Mesh = self.meshes[request.param]
        return mesh

    def trained(
        self, mesh: Mesh, event: Event = "nothing", *, clips: bool = False
    ) -> tuple[dict[int, State], ParamBlocks]:
        """The final states, by worker. Raises ``Unrecoverable`` where a lost worker's pieces are nowhere else."""
        case = Case(self.mechanism, mesh, event, clips, self.copies)
        with processes(mesh.workers, work, case) as them:
            if event == "replace":
                results = [them.receive(rank)[1] for rank in range(mesh.workers)]
                layout = {rank: tuple(pieces) for rank, pieces in enumerate(results)}
                types = {piece.name: dtype for pieces in results for piece, dtype in pieces.items()}
                lost = mesh.workers - 1
                remaining = {rank: pieces for rank, pieces in layout.items() if rank != lost}
                plan = moves(remaining, {lost: layout[lost]})
                assert redundancy(layout) > 1
                for rank in range(mesh.workers):
                    them.send(rank, (plan, types))
            replies = {rank: them.receive(rank) for rank in range(mesh.workers)}
            return {rank: state for rank, (_, state, _) in replies.items()}, replies[0][2]

    def same(self, actual: tuple[dict[int, State], ParamBlocks], wanted: State) -> None:
        """Assert that all pieces equal those of ``wanted``: to the bit if the mechanism is exact."""
        states, param_blocks = actual
        whole = {piece.name: values for piece, values in wanted.items()}
        for state in states.values():
            for piece, values in state.items():
                if self.mechanism.exact:
                    assert torch.equal(values, part(whole, piece, param_blocks)), piece
                else:
                    torch.testing.assert_close(values, part(whole, piece, param_blocks))

    def test_trains_as_plain_torch_does(self, mesh: Mesh) -> None:
        """Clipped by the norm of the whole gradient, and up to the order of additions."""
        (states, param_blocks), wanted = self.trained(mesh, clips=True), in_plain_torch()
        for state in states.values():
            for piece, values in state.items():
                if piece.name in wanted or piece.name in param_blocks:
                    torch.testing.assert_close(values, part(wanted, piece, param_blocks), rtol=1e-9, atol=1e-12)

    def test_layout_covers_everything(self, mesh: Mesh) -> None:
        """All pieces together cover those of one worker, with equal values."""
        (states, param_blocks), wanted = self.trained(mesh), alone()
        layout = {rank: tuple(state) for rank, state in states.items()}
        all_of_it = tuple(as_param_blocks(wanted, param_blocks))
        assert {piece.name for pieces in layout.values() for piece in pieces} == {piece.name for piece in all_of_it}
        assert moves(layout, {mesh.workers: all_of_it})
        self.same((states, param_blocks), wanted)

    @pytest.mark.parametrize("event", ["abandon", "regroup"])
    def test_nothing_shows_of(self, mesh: Mesh, event: Event) -> None:
        """A step that was dropped halfway; other groups of the same workers."""
        self.same(self.trained(mesh, event), alone())

    def test_a_lost_workers_pieces_come_back(self, mesh: Mesh) -> None:
        """The owners of the pieces send them; the plan names pieces without an owner."""
        copied = self.copies > 1 and isinstance(self.mechanism, Owned)
        if mesh.data == 1 and not copied:
            with pytest.raises(Unrecoverable):
                self.trained(mesh, "replace")
            return
        self.same(self.trained(mesh, "replace"), alone())

    def test_accepts_its_meshes(self) -> None:
        """The check runs before a worker starts."""
        for mesh in self.meshes:
            self.mechanism.check(ExecutionSettings(workers=mesh.workers), mesh)
