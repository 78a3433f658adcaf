"""A run that is resumed is compared with its journal, before anything starts or is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter
from elastune.core.journal.records import Checkpointed, Record, Reported, RunFailed, RunStarted, StudyStarted
from elastune.core.mesh import Mesh
from elastune.core.run import Adapt, ExecutionSettings, Program, RunSpec, StartFrom
from elastune.core.sync_plan import SyncChoice
from elastune.runtime.job.resumption import check_resumed, execution_at_start
from elastune.runtime.job.run import run_here, run_job

PROGRAM = 'config = {"lr": 0.1, "epochs": 2, "batch_size": 16}\ndef train(session):\n    pass\n'
PLACE = ExecutionSettings(workers=2, num_slots=4)


@pytest.fixture
def begun(tmp_path: Path) -> RunSpec:
    """The spec of a run whose journal is there, as ``--resume`` asks for it again."""
    (tmp_path / "train.py").write_text(PROGRAM)
    return RunSpec(Program(tmp_path / "train.py"), tmp_path / "out", config={"lr": 0.2}, execution=PLACE, resume=True)


def journal(spec: RunSpec, *records: Record, **changes: Any) -> bytes:
    """What the journal of ``spec`` holds once ``records`` are in it, behind its beginning."""
    path = spec.out / "journal.jsonl"
    told = {"program": str(spec.program.path), "config": dict(spec.config), "seed": spec.seed, "epochs": spec.epochs}
    told |= {"execution": spec.execution.to_json(), "adapt": spec.adapt.to_json(), **changes}
    with JournalWriter(path) as writer:
        for record in (RunStarted(**told), *records):
            writer.write(record)
    return path.read_bytes()


SYNC = SyncChoice.parse("local:learners=2,every=4", "")
LATER = SyncChoice.parse("allreduce", "1000=local:learners=2,every=16")
CHANGES = {
    "seed": ({"seed": 4}, "seed .*got 4, begun with 0.*use --seed 0"),
    "setting": ({"config": {"lr": 0.3}}, "setting lr .*got 0.3, begun with 0.2.*use --set lr=0.2"),
    "unsaid": ({"config": {}}, "setting lr .*got 0.1, begun with 0.2.*use --set lr=0.2"),
    "own": (
        {"config": {"lr": 0.2, "batch_size": 8}},
        "setting batch_size .*got 8, begun with 16.*leave out",
    ),
    "fewer": ({"config": {"lr": 0.2, "epochs": 1}}, "at least as many epochs .*got 1, begun for 2.*--set epochs=2"),
    "mode": ({"execution": replace(PLACE, mode="fast")}, "mode .*got fast, begun with exact.*use --mode exact"),
    "slots": ({"execution": replace(PLACE, num_slots=8)}, "slots .*got 8, begun with 4.*use --slots 4"),
    "workers": (
        {"execution": replace(PLACE, workers=8)},
        "one for every worker .*got 4 slots, 8 workers.*--workers 4 or",
    ),
    "precision": ({"execution": replace(PLACE, precision="bf16")}, "precision .*use --precision fp32"),
    "threads": ({"execution": replace(PLACE, threads=2)}, "threads .*got 2, begun with 1.*use --threads 1"),
    "compress": (
        {"execution": replace(PLACE, compress="int8")},
        "compress .*got int8, begun with none.*leave out",
    ),
    "sync": ({"sync": SYNC.sync}, "sync .*got local.*begun with allreduce.*use --sync allreduce"),
    "schedule": ({"sync_schedule": LATER.schedule}, "sync_schedule .*begun with none.*leave out --sync-schedule"),
    "policy": ({"adapt": Adapt(("gns:max_batch=64",))}, "policies .*got gns, begun with none.*leave out --policy"),
    "weights": ({"start_from": StartFrom(Path("a"))}, "weights .*got a, begun with none.*leave out --start-from"),
    "dcp": ({"from_dcp": Path("b")}, "weights .*got b, begun with none.*leave out --from-dcp"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_would_change_the_result_is_refused(begun: RunSpec, name: str) -> None:
    changes, expected = CHANGES[name]
    before = journal(begun)
    with pytest.raises(UserError, match=expected) as told:
        check_resumed(replace(begun, **changes))
    assert "\n" not in str(told.value)
    for start in (run_job, lambda spec: run_here(spec, None)):  # type: ignore[arg-type]  # it comes no further
        with pytest.raises(UserError):
            start(replace(begun, **changes))
    assert sorted(path.name for path in begun.out.iterdir()) == ["journal.jsonl", "journal.jsonl.lock"]
    assert (begun.out / "journal.jsonl").read_bytes() == before, "nothing is written"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"execution": replace(PLACE, workers=4, micro_batch=2, topology="tree")},
        {"execution": ExecutionSettings(mesh=Mesh(data=2, shard=2), mechanism="zero", num_slots=4)},
        {"execution": ExecutionSettings(2, mechanism="tensor", virtual_tensor=8, device="cuda", num_slots=4)},
        {"config": {"lr": 0.2, "epochs": 5}},
        {"epochs": 5},
        {"max_steps": 8},
        {"checkpoint_every_steps": 3},
        {"adapt": Adapt((), ("noise_scale",))},
    ],
    ids=str,
)
def test_what_does_not_show_in_the_result_may_change(begun: RunSpec, changes: dict[str, Any]) -> None:
    journal(begun, Checkpointed(8, "step-8"))
    assert check_resumed(replace(begun, **changes)) == ""


def test_a_policy_may_have_other_options_and_none_is_dropped(begun: RunSpec) -> None:
    journal(replace(begun, adapt=Adapt(("gns:max_batch=64",))))
    assert check_resumed(replace(begun, adapt=Adapt(("gns:max_batch=128",)))) == ""
    with pytest.raises(UserError, match="policies .*got none, begun with gns.*use --policy gns:max_batch=64"):
        check_resumed(begun)


def test_of_the_weights_that_it_began_with_nothing_need_be_told(begun: RunSpec) -> None:
    source = StartFrom(Path("earlier"), fresh=("head.*",))
    journal(begun, start_from=source.to_json())
    assert check_resumed(begun) == check_resumed(replace(begun, start_from=source)) == ""
    with pytest.raises(UserError, match="weights .*got other, begun with earlier"):
        check_resumed(replace(begun, start_from=replace(source, source=Path("other"))))


def test_fewer_epochs_or_steps_are_refused(begun: RunSpec) -> None:
    journal(replace(begun, epochs=4), Reported(1, 8, 128, 1.0, {}, epochs=4), Checkpointed(8, "step-8"))
    with pytest.raises(UserError, match=r"got 3, begun for 4.*use --epochs 4 or more"):
        check_resumed(replace(begun, epochs=3))
    with pytest.raises(UserError, match=r"got no --epochs, begun for 4.*use --epochs 4 or more"):
        check_resumed(begun)
    with pytest.raises(UserError, match=r"newest checkpoint .*got --max-steps 7.*use --max-steps 8 or more"):
        check_resumed(replace(begun, epochs=4, max_steps=7))
    assert check_resumed(replace(begun, epochs=4, max_steps=8)) == "", "it is there already"
    assert check_resumed(replace(begun, config={"lr": 0.2, "epochs": 6})) == "", "more than before, however told"
    begun.program.path.write_text(PROGRAM.replace('"epochs": 2', '"epochs": 9'))
    assert check_resumed(begun) == "", "the program's own are more"


def test_the_epochs_that_the_program_asked_for_are_known_by_its_reports(begun: RunSpec) -> None:
    journal(begun, Reported(1, 8, 128, 1.0, {}, epochs=10))
    with pytest.raises(UserError, match=r"got 9, begun for 10"):
        check_resumed(replace(begun, epochs=9))
    assert check_resumed(replace(begun, epochs=11)) == ""


def test_a_longer_run_is_not_cut_again(begun: RunSpec) -> None:
    journal(begun)
    journal(begun, config={"lr": 0.2, "epochs": 5})
    with pytest.raises(UserError, match="got 2, begun for 5.*use --set epochs=5 or more"):
        check_resumed(begun)


def test_what_was_refused_by_workers_once_is_not_taken_for_the_beginning(begun: RunSpec) -> None:
    """Earlier versions wrote down how it was resumed before workers refused that."""
    journal(begun)
    journal(begun, RunFailed("user_error", "a run resumes with the seed it was begun with", 0), seed=4)
    assert check_resumed(begun) == ""


def test_the_folder_of_a_study_is_refused(begun: RunSpec) -> None:
    with JournalWriter(begun.out / "journal.jsonl") as writer:
        writer.write(StudyStarted({"kind": "tune"}))
    for refuses in (lambda: check_resumed(begun), lambda: execution_at_start(begun.out), lambda: run_job(begun)):
        with pytest.raises(UserError, match="in the folder of a run .*the journal of a study.*another --out"):
            refuses()
    assert sorted(path.name for path in begun.out.iterdir()) == ["journal.jsonl", "journal.jsonl.lock"]


def test_the_folder_of_something_else_is_refused(begun: RunSpec) -> None:
    with JournalWriter(begun.out / "journal.jsonl") as writer:
        writer.write(Checkpointed(8, "step-8"))
    with pytest.raises(UserError, match="a journal that begins with checkpointed"):
        check_resumed(begun)


def test_an_empty_folder_has_no_history(begun: RunSpec) -> None:
    assert check_resumed(begun) == ""
    assert execution_at_start(begun.out) is None
    journal(begun)
    assert execution_at_start(begun.out) == PLACE
