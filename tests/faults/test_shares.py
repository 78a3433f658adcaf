"""Workers that hold a part of the state each die at every place of a step; weights and the ledger must not show it."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs, check_same

from elastune.core.journal.records import Checkpointed, CheckpointFailed, Record, Restarted, RunFailed, StateLost
from elastune.core.mesh import Mesh
from elastune.core.mesh_choice import MeshChoice
from elastune.core.run import Elastic, ExecutionSettings, Program
from elastune.runtime.elastic_run import ElasticRun
from elastune.train.checkpoints.checkpoint import complete, of_step

PROGRAM = Program(Path(__file__).parent / "programs" / "shares.py")
SAMPLES = 640


def same(ran: Ran, undisturbed: Ran) -> None:
    """The verdict."""
    check_same(ran, undisturbed)
    assert [seen.once for seen in ran.ledger.epochs] == [SAMPLES] * 2


def kept_on(ran: Ran, undisturbed: Ran) -> None:
    """And nobody went back to a checkpoint."""
    same(ran, undisturbed)
    assert not [r for r in ran.records if isinstance(r, Restarted | StateLost)]


ZERO = {"mechanism": "zero"}


def test_nothing_happens(runs: Runs, undisturbed: Ran) -> None:
    kept_on(runs(4, execution=ZERO), undisturbed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "place",
    ["launched", "gate", "gated", "spreading", *soaked("backward", "added", "applied", "stepped")],
)
def test_killed_at_every_place_of_a_step(runs: Runs, undisturbed: Ran, place: str) -> None:
    """In a slot's backward pass, in either half of the reduction, at the gate, before and while values spread."""
    ran = runs(4, execution=ZERO, faults=[f"kill 1 5 {place}"])
    kept_on(ran, undisturbed)
    assert ran.lost == [1]


@pytest.mark.parametrize("place", ["forward", "leaving", "applied", *soaked("backward", "launched", "gate")])
def test_killed_where_parameters_lie_in_shares_as_well(runs: Runs, undisturbed: Ran, place: str) -> None:
    """In a forward pass, too, others may be waiting for values: their step is lost, and their pass means nothing."""
    ran = runs(4, execution={"mechanism": "sharded"}, faults=[f"kill 1 5 {place}"])
    kept_on(ran, undisturbed)
    assert ran.lost == [1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "faults",
    [
        # One survivor lacks what the gate has told, and others went on: it is served.
        ["break 0 5 gated", "break 2 5 gated", "kill 1 5 stepped"],
        *soaked(["break 2 5 gated", "kill 1 5 applied"]),
        # One has not applied the step when the others meet: they wait for it.
        ["nap 0 5 after", "break 3 5 gated", "kill 1 5 spreading"],
        *soaked(["nap 0 5 after", "kill 1 5 applied"]),
        # One believes that its values did not come; nobody dies.
        ["break 3 5 spreading"],
        # A holder of the only copy left, in the recovery from another death.
        ["kill 1 5 gate", "kill 3 2 placing"],
        *soaked(["kill 1 5 gate", "kill 3 2 placed"], ["kill 0 5 applied", "break 2 2 placed"]),
        # In the last lines of a pass, and with results of an evaluation: back to the snapshot in memory.
        ["kill 2 10 evaluation"],
        *soaked(["kill 1 10 tail"], ["kill 0 20 summing"]),
        # One after the other, down to one.
        ["kill 3 4 launched", "kill 0 8 gate", "kill 1 13 stepped"],
    ],
)
def test_killed_while_others_are_elsewhere(runs: Runs, undisturbed: Ran, faults: list[str]) -> None:
    ran = runs(4, execution=ZERO, faults=faults, elastic=Elastic(low=1, high=4, heartbeat_s=3.0))
    if faults[-1].startswith("kill 3 2"):  # the second death may hit what had no second copy yet: then that is told
        same(ran, undisturbed)
    else:
        kept_on(ran, undisturbed)
    assert sorted(ran.lost) == sorted(int(fault.split()[1]) for fault in faults if fault.startswith("kill"))


@pytest.mark.parametrize(
    "faults",
    [
        ["kill 0 10 written", "kill 2 10 written"],
        ["kill 2 10 saving", "nap 1 9 stepped"],  # who comes late knows of the loss before it begins
        *soaked(["kill 2 10 saving"], ["kill 0 10 publishing"], ["kill 1 10 written", "nap 0 10 publishing"]),
    ],
)
def test_killed_while_a_checkpoint_is_written_in_pieces(
    runs: Runs, undisturbed: Ran, tmp_path: Path, faults: list[str]
) -> None:
    """Survivors train on, perhaps without it. The next one is as whole as any other: other workers go on from it."""
    out, every = tmp_path / "out", {"checkpoint_every_steps": 10}
    ran = runs(4, execution=ZERO, faults=faults, out=out, spec={**every, "max_steps": 11})
    assert sorted(ran.lost) == sorted(int(fault.split()[1]) for fault in faults if fault.startswith("kill"))
    assert not [r for r in ran.records if isinstance(r, Restarted | StateLost)]
    folder = out / "checkpoints"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")], "drafts"
    assert complete(folder)[-1] == of_step(folder, 11)
    rest = runs(3, execution=ZERO, faults=faults, out=out, spec={**every, "resume": True})
    assert rest.sha256 == undisturbed.sha256


@pytest.mark.parametrize(("mechanism", "worker"), [("zero", 2), *soaked(("replicated", 0))])
def test_a_full_disk_costs_a_checkpoint_and_nothing_else(
    runs: Runs, undisturbed: Ran, tmp_path: Path, mechanism: str, worker: int
) -> None:
    """Who has no room need not be who writes the others' down."""
    out = tmp_path / "out"
    faults, spec = [f"full {worker} 8 saving"], {"checkpoint_every_steps": 4}
    ran = runs(3, execution={"mechanism": mechanism}, faults=faults, out=out, spec=spec)
    kept_on(ran, undisturbed)
    (result,) = [r for r in ran.records if isinstance(r, CheckpointFailed)]
    assert result.step == 8
    assert "too large" in result.why
    written = [r.step for r in ran.records if isinstance(r, Checkpointed)]
    assert written == [4, 10, 12, 16, 20]
    assert not [path for path in (out / "checkpoints").iterdir() if path.name.startswith(".")], "drafts"


def test_several_at_once_that_hold_not_the_same(runs: Runs, undisturbed: Ran) -> None:
    kept_on(runs(4, execution=ZERO, faults=["kill 0 7 gate", "kill 2 7 gate"]), undisturbed)


def test_both_holders_at_once_are_told_and_the_newest_checkpoint_is_taken(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(4, execution=ZERO, faults=["kill 1 8 gate", "kill 2 8 gate"], spec={"checkpoint_every_steps": 3})
    same(ran, undisturbed)
    (lost,) = [r for r in ran.records if isinstance(r, StateLost)]
    assert lost.names
    assert [r.step for r in ran.records if isinstance(r, Restarted)] == [6]


def test_one_copy_alone_is_lost_with_its_holder(runs: Runs, undisturbed: Ran) -> None:
    ran = runs(3, execution={**ZERO, "copies": 1}, faults=["kill 1 8 gate"], spec={"checkpoint_every_steps": 3})
    same(ran, undisturbed)
    assert [r.step for r in ran.records if isinstance(r, Restarted)] == [6]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("workers", "reshape", "faults"),
    [
        (4, ["3 data=2,shard=2", "6 data=4", "9 shard=2", "14 shard=4"], []),
        (2, ["2 shard=4", "5 data=1", "12 shard=3"], []),
        (4, ["3 data=2,shard=2", "9 shard=4"], ["kill 2 2 placing", "kill 1 12 gate"]),
        *soaked((4, ["3 data=2,shard=2"], ["kill 0 2 placed"]), (4, ["3 shard=2"], ["kill 3 1 placing"])),
    ],
)
def test_reshaped_live(runs: Runs, undisturbed: Ran, workers: int, reshape: list[str], faults: list[str]) -> None:
    """From holder to holder between two steps; workers that leave hand over what they alone have."""
    ran = runs(workers, execution=ZERO, reshape=reshape, faults=faults, elastic=Elastic(low=1, high=4))
    same(ran, undisturbed)
    if not faults:
        kept_on(ran, undisturbed)
        assert not ran.lost
        assert len([r for r in ran.regrouped if r.planned]) >= len(reshape) - 1


@pytest.mark.parametrize("dies", [1, *soaked(2)], ids=["a member", "a joiner"])
def test_what_came_in_an_attempt_to_join_is_old_when_it_joins(runs: Runs, undisturbed: Ran, dies: int) -> None:
    """Joiners have it all when a worker dies; the members take steps before the joiners come again."""
    # In the first view that the worker comes to: joiners may be ready one after another.
    faults = [f"{what} {dies} {view} placed" for view in (2, 3, 4) for what in ("nap", "kill")]
    ran = runs(2, execution=ZERO, reshape=["2 shard=4"], faults=faults, elastic=Elastic(low=1, high=4))
    kept_on(ran, undisturbed)
    assert ran.lost == [dies]
    assert max(len(r.members) for r in ran.regrouped) > 2


@pytest.mark.parametrize(
    ("execution", "seed"),
    [
        ({"mechanism": "tensor+zero", "mesh": Mesh(shard=2, tensor=2), "virtual_tensor": 2}, 6),
        *soaked(({"mechanism": "zero", "mesh": Mesh(data=2, shard=2)}, 5)),
    ],
)
def test_random_kills_and_reshapes(runs: Runs, execution: dict[str, Any], seed: int) -> None:
    """One hash and an exact ledger, whatever happens; what two deaths in a moment have lost is told."""
    longer = {"epochs": 2, "samples": 1280, "batchnorm": "tensor" not in execution["mechanism"]}
    alone = runs(1, execution={**execution, "mesh": Mesh()}, **longer)
    dice, possible = random.Random(seed), MeshChoice.of(ExecutionSettings(**{"num_slots": 4, **execution})).meshes(1, 4)
    at, done = time.monotonic() + 0.5, []

    def act(handle: ElasticRun, records: list[Record]) -> None:
        nonlocal at
        if time.monotonic() < at or len(done) == 12:
            return
        at = time.monotonic() + dice.uniform(0.1, 0.6)
        living = [worker for worker in handle.members if worker in handle.pids]
        if dice.random() < 0.5 and len(living) > 1:
            done.append(dice.choice(living))
            handle.kill_worker(done[-1])
        else:
            done.append(dice.choice(possible))
            handle.reshape(done[-1], "at random")

    elastic = Elastic(low=1, high=4, most_losses=100)
    often = {"checkpoint_every_steps": 5}
    ran = runs(4, execution=execution, act=act, elastic=elastic, spec=often, pause_s=0.1, **longer)
    assert ran.sha256 == alone.sha256, done
    assert ran.ledger.exact, done
    assert [r["loss"] for r in ran.reports if "loss" in r] == [r["loss"] for r in alone.reports if "loss" in r]
    assert any(r.planned for r in ran.regrouped)
    restarts, lost = (len([r for r in ran.records if isinstance(r, kind)]) for kind in (Restarted, StateLost))
    # Without a loss of state, too: where one dies while others begin, or evaluate before there is a snapshot in memory.
    assert restarts <= lost + len(ran.lost)


def test_what_others_wait_for_comes_before_numbers_are_exchanged(runs: Runs) -> None:
    """Between its sums and the optimizer's step a worker must not ask others for anything."""
    ran = runs(2, execution=ZERO, early=True)
    assert isinstance(ran.outcome, RunFailed)
    assert "session.mean comes after optimizer.step()" in ran.outcome.detail


def test_copies_that_differ_end_the_run(runs: Runs) -> None:
    """Whatever made them so: the reshape finds it, and no result comes of it."""
    ran = runs(4, execution=ZERO, reshape=["3 data=2,shard=2"], tampers=True)
    assert isinstance(ran.outcome, RunFailed)
    assert re.search(r"copies must be equal: (values|optimizer state) of \S+ that ranks .* have", ran.outcome.detail)


def test_what_is_not_loaded_yet_is_not_what_others_have(runs: Runs, undisturbed: Ran, tmp_path: Path) -> None:
    """One worker goes on from a checkpoint, one has not read it yet, and a third is lost: state must move."""
    same_run: dict[str, Any] = {"execution": ZERO, "out": tmp_path / "out", "lost_loading": True}
    runs(3, spec={"max_steps": 5}, **same_run)
    rest = runs(3, spec={"resume": True}, **same_run)
    assert rest.lost == [2]
    assert rest.sha256 == undisturbed.sha256
