"""Strategies with learners: one SHA-256 for any number of workers, any interruption between rounds, and for learners
written out in plain PyTorch."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.parity.test_exact import PROGRAM, largest_gap, load_program
from tests.soaked import soaked

from elastune.core.communication import Topology
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import Measured, SyncChanged
from elastune.core.run import ExecutionSettings, Program, RunSpec, derive
from elastune.core.slots import tree_sum
from elastune.core.sync_plan import SyncPlan, SyncSchedule
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import run_job
from elastune.train.checkpoints.tree import fingerprint

SEED, STEPS, SLOTS, BATCH = 3, 12, 8, 100


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> str:
    images, labels = load_program().data().tensors
    file = tmp_path_factory.mktemp("samples") / "samples"
    save_file({"images": images, "labels": labels}, file)
    return str(file)


@pytest.fixture(scope="module")
def eight() -> Iterator[LocalCluster]:
    """Room for as many workers as there are learners."""
    with LocalCluster(capacity=8) as place:
        yield place


def spec(out: Path, workers: int, sync: str, steps: int = STEPS, mode: Any = "exact", **config: Any) -> RunSpec:
    execution = ExecutionSettings(workers=workers, num_slots=SLOTS, mode=mode)
    return RunSpec(
        Program(PROGRAM), out, config, seed=SEED, execution=execution, sync=SyncPlan.parse(sync), max_steps=steps
    )


def added(rows: list[torch.Tensor]) -> torch.Tensor:
    """Along the canonical tree."""
    return tree_sum([(range(i, i + 1), row) for i, row in enumerate(rows)], len(rows), lambda a, b: a + b)


class Learner:
    """Plain PyTorch: a model with an optimizer and a schedule of its own."""

    def __init__(self, program: Any, optimizer: str) -> None:
        torch.manual_seed(derive(SEED, "init"))
        self.model = program.LeNet()
        self.optimizer = program.optimizer_of(optimizer, self.model)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)

    def numbers(self) -> list[torch.Tensor]:
        moments = [
            value
            for p in self.model.parameters()
            for value in self.optimizer.state[p].values()
            if isinstance(value, torch.Tensor)
        ]
        return [
            *(p.data for p in self.model.parameters()),
            *(b for b in self.buffers if b.is_floating_point()),
            *moments,
        ]

    @property
    def buffers(self) -> list[torch.Tensor]:
        return list(self.model.buffers())

    def step(self, parts: list[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
        """One optimizer step on the mean over all samples of ``parts``, one a slot: images, labels, and a seed."""
        total, params = sum(len(y) for _, y, _ in parts), list(self.model.parameters())
        start = [b.clone() for b in self.buffers]
        grads, moves = [], []
        for x, y, seed in parts:
            for b, s in zip(self.buffers, start, strict=True):
                b.copy_(s)
            torch.manual_seed(seed)
            grads.append(torch.autograd.grad(F.cross_entropy(self.model(x), y) * (len(y) / total), params))
            pairs = zip(self.buffers, start, strict=True)
            moves.append([(b - s) * (len(y) / total) for b, s in pairs if b.is_floating_point()])
        for p, *own in zip(params, *grads, strict=True):
            p.grad = added(own)
        moved = iter([added(list(each)) for each in zip(*moves, strict=True)])
        for b, s in zip(self.buffers, start, strict=True):
            if b.is_floating_point():
                b.copy_(s + next(moved))
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        self.optimizer.step()
        self.schedule.step()


def mix(plan: SyncPlan, crowd: list[Learner], rounds: int, turn: int, history: list[Any]) -> None:
    """What learners do in a round's ``turn``-th mix, by their strategy, which may need the ``history`` of the round."""
    learners = len(crowd)
    before = [[p.data.clone() for p in learner.model.parameters()] for learner in crowd]
    if plan.strategy == "parameter_server":
        steps = [[now - then for now, then in zip(*each, strict=True)] for each in zip(before, history[0], strict=True)]
        history.append(steps)
        if len(history) - 1 > plan.staleness:
            oldest = history.pop(1)
            execution = [added(list(rows)) / learners for rows in zip(*oldest, strict=True)]
            for learner, own in zip(crowd, oldest, strict=True):
                for p, mean, step in zip(learner.model.parameters(), execution, own, strict=True):
                    p.data.add_(mean - step)
        history[0] = [[p.data.clone() for p in learner.model.parameters()] for learner in crowd]
        return
    if plan.strategy == "averaging":
        execution = [added(list(rows)) / learners for rows in zip(*before, strict=True)]
        for learner in crowd:
            for p, mean in zip(learner.model.parameters(), execution, strict=True):
                p.data.lerp_(mean, plan.pull)
        return
    sources = list(range(learners))
    if plan.strategy == "gossip":
        hops = [hop for hop in (1, 2, 4, 8) if hop < learners]
        sources = [(i - hops[turn % len(hops)]) % learners for i in range(learners)]
    if plan.strategy == "pair_averaging":
        drawn = list(range(learners))
        random.Random(derive(SEED, "pairs", rounds, turn)).shuffle(drawn)
        for one, other in zip(drawn[::2], drawn[1::2], strict=False):
            sources[one], sources[other] = other, one
    for learner, source in enumerate(sources):
        if source != learner:
            for p, own, other in zip(crowd[learner].model.parameters(), before[learner], before[source], strict=True):
                p.data.copy_((own + other) / 2)


def lightest(params: list[torch.Tensor], count: int) -> list[list[int]]:
    """Fragments, written out: from the heaviest tensor on, each to where there are fewest bytes."""
    results: list[list[int]] = [[] for _ in range(count)]
    for place in sorted(range(len(params)), key=lambda i: -params[i].nbytes):
        min(results, key=lambda own: sum(params[i].nbytes for i in own)).append(place)
    return results


def coded(send: str, way: torch.Tensor, *, state: bool) -> torch.Tensor:
    """What is left of a tensor that travels rounded, in blocks of 256 numbers; written out."""
    flat = way.detach().flatten()
    if len(flat) < 256:
        return way
    if send == "bf16":
        shorter = (flat.view(torch.int32) & -65536).view(torch.float32)
        return (shorter if state else flat.bfloat16().float()).view_as(way)
    blocks = torch.cat([flat, flat.new_zeros(-len(flat) % 256)]).view(-1, 256)
    scale = blocks.abs().max(dim=1, keepdim=True).values * (1 / (57344 if state else 127 if send == "int8" else 7))
    steps = blocks / scale.where(scale > 0, torch.tensor(1.0))
    if state:
        grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float()
        grid = grid[grid.isfinite() & (grid >= 0)].unique()
        below = grid[torch.searchsorted(grid, (steps.abs() * (1 + 5e-7)).contiguous(), right=True) - 1]
        result = torch.copysign(below, steps) * (scale * (1 - 2e-6))
    else:
        result = steps.round() * scale
    return result.flatten()[: len(flat)].view_as(way)


class SimulatedWorkers:
    """Learners side by side, as one strategy brings them together; the first of them goes on from ``begin``."""

    def __init__(self, plan: SyncPlan, begin: Learner) -> None:
        self.plan, self.rounds = plan, 0
        self.learners = [begin, *(copy.deepcopy(begin) for _ in range(plan.learners - 1))]
        self._centre = [torch.nn.Parameter(p.detach().clone()) for p in begin.model.parameters()]
        rates = {"lr": plan.outer_lr, "momentum": plan.outer_momentum}
        self._outer = torch.optim.SGD(self._centre, **rates, nesterov=True)
        self._fragments = lightest(self._centre, plan.fragments)
        self._sent: tuple[int, list[int], list[torch.Tensor]] = (0, [], [])
        self.adopted: list[list[int]] = []

    def keep(self, before: SimulatedWorkers) -> SimulatedWorkers:
        """Go on from what ``before`` kept from round to round, with other settings of its strategy."""
        if self.plan.strategy == before.plan.strategy:
            self.rounds = before.rounds
            for own, other in zip(self._centre, before._centre, strict=True):
                self._outer.state[own] = before._outer.state[other]
        return self

    def round(self, batches: list[torch.Tensor], begun: int, data: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Over ``batches``, the first of which is step ``begun``."""
        plan, each, offset, (images, labels) = self.plan, SLOTS // self.plan.learners, 0, data
        history = [[[p.data.clone() for p in learner.model.parameters()] for learner in self.learners]]
        start = [number.clone() for number in self.learners[0].numbers()]
        for taken, batch in enumerate(batches):
            if plan.streams:
                self.stream(taken)
            elif taken and plan.mixes and taken % plan.mix == 0:
                mix(plan, self.learners, self.rounds, taken // plan.mix - 1, history)
            cuts = [len(batch) * slot // SLOTS for slot in range(SLOTS + 1)]
            for number, learner in enumerate(self.learners):
                parts = []
                for slot in range(number * each, (number + 1) * each):
                    own = batch[cuts[slot] : cuts[slot + 1]]
                    seed = derive(SEED, "slot", begun, slot, offset + cuts[slot])
                    parts.append((images[own], labels[own], seed))
                learner.step(parts)
            offset += len(batch)
        self._sent = (0, [], [])
        execution = self.execution(start)
        if plan.strategy == "diloco":
            for p, mean in zip(self._centre, execution, strict=False):
                p.grad = p.detach() - mean
            self._outer.step()
            execution[: len(self._centre)] = [p.detach() for p in self._centre]
        for learner in self.learners:
            for number, mean in zip(learner.numbers(), execution, strict=True):
                number.copy_(mean)
            if plan.moments == "fresh":
                learner.optimizer.state.clear()
        self.rounds += 1

    def execution(self, start: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of each number, over the learners of a round that began at ``start``, the optimizer perhaps without state."""
        numbers, send = [each.numbers() for each in self.learners], self.plan.send
        first = len(self._centre)
        if send == "whole":
            return [added(list(row)) / len(numbers) for row in zip(*numbers, strict=True)]
        buffers = range(first, first + sum(b.is_floating_point() for b in self.learners[0].buffers))
        execution = []
        for i, row in enumerate(zip(*numbers, strict=True)):
            state = i >= first
            if i in buffers or row[0].numel() < 256:
                execution.append(added(list(row)) / len(numbers))
                continue
            begun = start[i] if i < len(start) else torch.zeros_like(row[0])
            ways = [coded(send, value - begun, state=state) for value in row]
            execution.append(begun + coded(send, added(ways), state=state) / len(numbers))
        return execution

    def stream(self, taken: int) -> None:
        """Fragments, between two steps of a round of which so many were taken."""
        plan, (left, places, execution) = self.plan, self._sent
        crowd = [list(each.model.parameters()) for each in self.learners]
        if places and taken == left + plan.delay:
            self.adopted.append(places)
            self._outer.zero_grad()
            for place, mean in zip(places, execution, strict=True):
                self._centre[place].grad = self._centre[place].detach() - mean
            self._outer.step()
            for params in crowd:
                for place in places:
                    params[place].data.lerp_(self._centre[place].detach(), 1 - plan.blend)
        number = plan.cycles * plan.fragments
        for turn in range(number - 1):
            if taken == (turn + 1) * plan.every // number:
                places = self._fragments[turn % plan.fragments]
                execution = [
                    added([params[place].detach().clone() for params in crowd]) / len(crowd) for place in places
                ]
                self._sent = taken, places, execution


def reference(optimizer: str, samples: str, plan: SyncPlan, changes: Sequence[tuple[int, SyncPlan]] = ()) -> str:
    """In one process, slots, mixes and means written out."""
    program = load_program()
    images, labels = program.data(samples).tensors
    crowd, left = SimulatedWorkers(plan, Learner(program, optimizer)), list(changes)
    step, epoch = 0, 0
    while step < STEPS:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(derive(SEED, "order", epoch)))
        batches = list(order.split(BATCH))[: STEPS - step]
        while batches:
            if left and left[0][0] == step:
                crowd = SimulatedWorkers(left.pop(0)[1], crowd.learners[0]).keep(crowd)
            now = min(crowd.plan.every, left[0][0] - step if left else STEPS)
            crowd.round(batches[:now], step, (images, labels))
            step += len(batches[:now])
            batches = batches[now:]
        epoch += 1
    assert bool(crowd.adopted) == crowd.plan.streams or changes
    one = crowd.learners[0]
    return fingerprint({"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("optimizer", "sync"),
    [
        ("adamw", "local:learners=4,every=3"),
        ("adamw", "diloco:learners=4,every=3,moments=fresh"),
        ("adamw", "local:learners=4,every=3,send=int8"),
        *soaked(("sgd", "diloco:learners=8,every=5,send=bf16"), ("sgd", "local:learners=4,every=5,send=int4")),
        *soaked(("sgd", "local:learners=8,every=5"), ("adamw", "diloco:learners=4,every=10,fragments=3")),
        ("sgd", "diloco:learners=8,every=8,fragments=2,cycles=2,delay=1,blend=0.3"),
        ("sgd", "averaging:learners=4,every=5,pull=0.3"),
        ("adamw", "gossip:learners=8,every=6"),
        ("sgd", "pair_averaging:learners=4,every=6,mix=2"),
        ("adamw", "parameter_server:learners=4,every=7,staleness=2"),
    ],
)
def test_workers_do_not_show(cluster: LocalCluster, tmp_path: Path, samples: str, optimizer: str, sync: str) -> None:
    """Steps 10 and 12 end rounds early: a pass ends, and the run."""
    config = {"optimizer": optimizer, "schedule": "step"}
    results = {
        workers: run_job(spec(tmp_path / f"w{workers}", workers, sync, samples=samples, **config), cluster=cluster)
        for workers in (1, 3)
    }
    expected = reference(optimizer, samples, SyncPlan.parse(sync))
    assert {workers: run.sha256 for workers, run in results.items()} == dict.fromkeys(results, expected)
    assert {run.steps for run in results.values()} == {STEPS}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("sync", "carried"),
    [
        ("local:learners=8,every=5", {(2, "binary_tree"), (3, "ring"), (8, "native"), (8, "tree:chunk_kib=32")}),
        ("diloco:learners=8,every=5,send=int8", {(1, "native"), (3, "ring"), (8, "native")}),
        *soaked(
            ("averaging:learners=4,every=4,mix=2", {(1, "native"), (2, "ring"), (3, "binary_tree"), (4, "native")}),
        ),
    ],
)
def test_neither_workers_nor_topologies_show(
    eight: LocalCluster, tmp_path: Path, samples: str, sync: str, carried: set[tuple[int, str]]
) -> None:
    """Of up to one worker for each learner."""
    expected, result = reference("sgd", samples, SyncPlan.parse(sync)), {}
    for workers, topology in sorted(carried):
        out = tmp_path / f"{workers}-{topology}"
        run_spec = spec(out, workers, sync, samples=samples, optimizer="sgd", schedule="step")
        run_spec = replace(run_spec, execution=replace(run_spec.execution, topology=Topology.parse(topology)))
        result[workers, topology] = run_job(run_spec, cluster=eight).sha256
    assert result == dict.fromkeys(carried, expected)


@pytest.mark.soak
def test_rounded_numbers_are_fewer_bytes(cluster: LocalCluster, tmp_path: Path, samples: str) -> None:
    """In ``fast`` mode however many learners a worker has; in ``exact`` mode each learner's go by themselves."""
    config = {"samples": samples, "optimizer": "sgd", "schedule": "step"}

    def sent(mode: str, send: str) -> float:
        sync = f"local:learners=8,every=4,send={send}"
        return run_job(spec(tmp_path / f"{mode}-{send}", 2, sync, mode=mode, **config), cluster=cluster).sent_bytes

    whole = sent("fast", "whole")
    assert sent("fast", "bf16") / whole == pytest.approx(1 / 2, rel=0.02)
    assert sent("fast", "int8") / whole == pytest.approx(1 / 4, rel=0.04)
    assert sent("fast", "int4") / whole == pytest.approx(3 / 16, rel=0.04), "the momentum takes a byte"
    assert sent("exact", "int8") / whole == pytest.approx((4 + 1) / 2 / 4, rel=0.04), "four rows come, a sum goes"


def test_a_parameter_server_without_staleness_takes_the_steps_of_all_reduce(
    cluster: LocalCluster, tmp_path: Path, samples: str
) -> None:
    config = {"samples": samples, "optimizer": "adamw", "schedule": "step"}
    ways = (2, "parameter_server"), (3, "parameter_server"), (2, "allreduce")
    ran = {way: run_job(spec(tmp_path / "-".join(map(str, way)), *way, **config), cluster=cluster) for way in ways}
    assert {way: each.sha256 for way, each in ran.items()} == dict.fromkeys(
        ways, reference("adamw", samples, SyncPlan.parse("allreduce"))
    )


@pytest.mark.parametrize("workers", [3, *soaked(1)])
def test_strategies_take_each_others_place(cluster: LocalCluster, tmp_path: Path, samples: str, workers: int) -> None:
    """Many become one and one many; a round ends where the next strategy begins, at step 8."""
    begin, text = (
        "allreduce",
        "3=local:learners=4,every=2; 6=diloco:learners=8,every=5; 8=allreduce; 9=gossip:learners=4,every=3",
    )
    schedule = SyncSchedule.parse(text)
    config = {"optimizer": "adamw", "schedule": "step", "samples": samples}
    changed = replace(spec(tmp_path / "run", workers, begin, **config), sync_schedule=schedule)
    ran = run_job(changed, cluster=cluster)
    assert ran.sha256 == reference("adamw", samples, SyncPlan.parse(begin), schedule.changes)
    records = [entry.record for entry in read(changed.out / "journal.jsonl")]
    results = [record for record in records if isinstance(record, SyncChanged)]
    assert [(each.step, each.sync, each.why) for each in results] == [
        (step, str(plan), "schedule") for step, plan in schedule.changes
    ]
    signals = [record.signals for record in records if isinstance(record, Measured)]
    assert 0 < signals[-1]["learners_distance"][0] < 1
    assert (max(each["sent_bytes"][0] for each in signals if "sent_bytes" in each) > 0) == (workers > 1)


@pytest.mark.parametrize(
    ("begin", "text"),
    [
        (
            "diloco:learners=4,every=3",
            "3=diloco:learners=8,every=2,outer_lr=0.4,outer_momentum=0.7; "
            "6=diloco:learners=2,every=4,fragments=2,delay=1",
        ),
        *soaked(
            ("pair_averaging:learners=4,every=3", "3=pair_averaging:learners=8,every=4,mix=2"),
            ("averaging:learners=4,every=3,pull=0.3", "3=averaging:learners=8,every=4,pull=0.6,moments=fresh"),
        ),
    ],
)
def test_a_strategy_whose_settings_change_keeps_what_it_has(
    cluster: LocalCluster, tmp_path: Path, samples: str, begin: str, text: str
) -> None:
    """The outer momentum, and how many rounds there were, by which pairs are drawn."""
    schedule = SyncSchedule.parse(text)
    config = {"optimizer": "adamw", "schedule": "step", "samples": samples}
    changed = replace(spec(tmp_path / "run", 2, begin, **config), sync_schedule=schedule)
    assert run_job(changed, cluster=cluster).sha256 == reference(
        "adamw", samples, SyncPlan.parse(begin), schedule.changes
    )


def test_a_run_is_cut_between_rounds_and_goes_on_with_other_workers(
    cluster: LocalCluster, tmp_path: Path, samples: str
) -> None:
    """The outer momentum, too, is in the checkpoint."""
    sync, config = "diloco:learners=4,every=3", {"optimizer": "adamw", "schedule": "step", "samples": samples}
    whole = run_job(spec(tmp_path / "whole", 1, sync, **config), cluster=cluster)
    half = run_job(spec(tmp_path / "cut", 3, sync, steps=6, **config), cluster=cluster)
    assert (half.steps, half.stopped) == (6, "max_steps")
    rest = replace(spec(tmp_path / "cut", 2, sync, **config), resume=True)
    assert run_job(rest, cluster=cluster).sha256 == whole.sha256
    assert half.sha256 != whole.sha256


def test_another_strategy_does_not_go_on_from_its_checkpoint(
    cluster: LocalCluster, tmp_path: Path, samples: str
) -> None:
    config = {"samples": samples}
    run_job(spec(tmp_path, 2, "local:learners=4,every=3", steps=3, **config), cluster=cluster)
    other = replace(spec(tmp_path, 2, "local:learners=2,every=3", **config), resume=True)
    with pytest.raises(UserError, match="sync"):
        run_job(other, cluster=cluster)


def test_the_sum_of_fast_mode_is_that_of_exact_mode_up_to_rounding(
    cluster: LocalCluster, tmp_path: Path, samples: str
) -> None:
    """Without what looks at a slot by itself: dropout and BatchNorm."""
    config = {"optimizer": "sgd", "plain": True, "double": True, "samples": samples}
    sync = "local:learners=2,every=2"
    for mode in ("exact", "fast"):
        run_job(spec(tmp_path / mode, 2, sync, steps=4, mode=mode, **config), cluster=cluster)
    assert largest_gap(tmp_path / "exact", tmp_path / "fast") < 1e-12
