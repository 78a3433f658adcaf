"""Each kind of difference, from observations made by hand; and files of rubbish."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.runtime.observe.differences import differences
from elastune.runtime.observe.observations import (
    AfterStep,
    Backward,
    Forward,
    Made,
    ObservedCommand,
    Process,
    SamplerIterated,
    Seeded,
    Step,
    read_observation,
)

WEIGHTS = [[1.0, 2.0, 3.0]]


def process(rank: int, world: int, rows: str, gradient: float, reduced: float, **first: Any) -> Process:
    """Two steps on ``rows``, one letter a row, with a gradient that is a multiple of (1, -1, 2)."""
    events: list[Any] = [Made("t.py:1", "SGD", "optimizer"), Made("t.py:2", "DataLoader", "loader")]
    events.append(Seeded("t.py:3", 0, "seed"))
    for step in range(2):
        mine = list(rows[step * len(rows) // 2 : (step + 1) * len(rows) // 2])
        values = {"weights": WEIGHTS, **first} if step == 0 else {}
        events += [
            Forward(step, True, mine, "t.py:10", f"{rank}", "forward", **values),
            Backward(step, 1.0, "t.py:11", "backward"),
            Step(step, [0.1], [sketch(gradient)], [sketch(reduced)], "t.py:12", "step"),
            AfterStep(step, WEIGHTS, {"count": [1.0, 1.0, 1.0]}, "done"),
        ]
    return Process(rank, world, events)


def sketch(by: float) -> list[float]:
    return [by, -by, 2 * by]


ONE = ObservedCommand([process(0, 1, "abcdefgh", 2.0, 2.0)])
MANY = ObservedCommand([process(0, 2, "abef", 1.0, 2.0), process(1, 2, "cdgh", 3.0, 2.0)])


def kinds(one: ObservedCommand, many: ObservedCommand) -> list[str]:
    return [each.kind for each in differences(one, many)]


def changed(at: int, kind: type, observation: ObservedCommand = MANY, **values: Any) -> ObservedCommand:
    """``observation`` with other ``values`` in all of a process's events of a kind."""
    target = observation.processes[at]
    events = [replace(e, **values) if isinstance(e, kind) else e for e in target.events]
    return with_events(at, events, observation)


def with_events(at: int, events: list[Any], observation: ObservedCommand = MANY) -> ObservedCommand:
    processes = list(observation.processes)
    processes[at] = replace(processes[at], events=events)
    return replace(observation, processes=processes)


def test_the_same_training_has_no_difference() -> None:
    assert kinds(ONE, MANY) == []
    assert kinds(ONE, ONE) == []


def test_rows_that_two_ranks_share_are_an_overlap() -> None:
    many = ObservedCommand([process(0, 2, "abef", 1.0, 2.0), process(1, 2, "abgh", 3.0, 2.0)])
    assert kinds(ONE, many)[0] == "overlap"


def test_rows_that_no_rank_reads_are_missing() -> None:
    many = ObservedCommand([process(0, 2, "abef", 1.0, 2.0), process(1, 2, "cdgx", 3.0, 2.0)])
    assert kinds(ONE, many) == ["missing"]
    assert "missing" not in kinds(ONE, replace(many, ended=False))  # the rest may have been yet to come


def test_another_order_is_a_note_and_no_mistake() -> None:
    many = ObservedCommand([process(0, 2, "gebf", 1.0, 2.0), process(1, 2, "cahd", 3.0, 2.0)])
    found = differences(ONE, many)
    assert [(each.kind, each.note) for each in found] == [("order", True)]


def test_a_larger_global_batch_says_what_to_write() -> None:
    many = ObservedCommand([process(0, 2, "abcdefgh", 2.0, 2.0), process(1, 2, "ijklmnop", 2.0, 2.0)])
    found = differences(ONE, many)
    assert found[0].kind == "batch"
    assert "--set batch_size=4" in found[0].fix


@pytest.mark.parametrize(
    ("reduced", "kind"), [(4.0, "sum"), (1.0, "averaged twice"), (2.0, None), (1.99, None), (3.1, "gradient")]
)
def test_how_gradients_were_put_together(reduced: float, kind: str | None) -> None:
    many = ObservedCommand([process(0, 2, "abef", 1.0, reduced), process(1, 2, "cdgh", 3.0, reduced)])
    one = ONE if reduced != 1.99 else ObservedCommand([process(0, 1, "abcdefgh", 1.99, 1.99)])
    assert kinds(one, many) == ([kind] if kind else [])


def test_ranks_that_step_with_their_own_gradients() -> None:
    many = ObservedCommand([process(0, 2, "abef", 1.0, 1.0), process(1, 2, "cdgh", 3.0, 3.0)])
    assert kinds(ONE, many) == ["not reduced"]


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (Step, {"rates": [0.2]}, "rate"),
        (AfterStep, {"weights": [[1.0, 2.0, 4.0]]}, "drift"),
        (AfterStep, {"buffers": {"count": [2.0, 2.0, 2.0]}}, "buffers"),
        (Backward, {"line": "t.py:13"}, "branch"),
    ],
)
def test_what_one_rank_does_otherwise(kind: type, values: dict[str, Any], expected: str) -> None:
    at = 0 if kind is Step else 1
    assert kinds(ONE, changed(at, kind, **values)) == [expected]


def test_losses_that_are_divided_by_the_processes() -> None:
    many = changed(1, Backward, changed(0, Backward, loss=0.5), loss=0.5)
    found = differences(ONE, many)
    assert found[0].kind == "loss"
    assert "1/2 of that of 1 process" in found[0].finding
    assert found[0].line == "t.py:11"


def test_a_rank_with_fewer_steps_is_a_branch_only_if_the_command_ended() -> None:
    many = with_events(1, MANY.processes[1].events[:-4])
    assert kinds(ONE, many) == ["missing", "branch"]
    assert kinds(ONE, replace(many, ended=False)) == []


def first_events(rank: int, **values: Any) -> list[Any]:
    return process(rank, 2, "abef" if rank == 0 else "cdgh", 1.0 + 2 * rank, 2.0, **values).events


def test_batch_norm_dropout_and_first_weights() -> None:
    norms = with_events(1, first_events(1, batch_norms=2), with_events(0, first_events(0, batch_norms=2)))
    assert kinds(ONE, norms) == ["BatchNorm"]
    dropout = with_events(1, first_events(1, dropout=True), with_events(0, first_events(0, dropout=True)))
    assert kinds(ONE, dropout) == []  # each rank has random numbers of its own
    assert kinds(ONE, changed(1, Forward, dropout, random="0")) == ["seeds"]
    assert kinds(ONE, with_events(1, first_events(1, weights=[[9.0, 9.0, 9.0]])))[0] == "weights"


def test_a_sampler_that_shuffles_twice_from_one_epoch() -> None:
    def passes(*epochs: int) -> ObservedCommand:
        begun = [SamplerIterated("t.py:9", True, epoch, 7, "sampler") for epoch in epochs]
        return with_events(0, [*MANY.processes[0].events, *begun])

    assert kinds(ONE, passes(0, 0)) == ["set_epoch"]
    assert kinds(ONE, passes(0, 1)) == []


@pytest.mark.parametrize(
    ("of_ranks", "expected"),
    [(("xy", "z"), []), (("xy", "zx"), ["evaluation"]), (("xyz", "xyz"), ["evaluation"]), (("xy", ""), ["evaluation"])],
)
def test_rows_of_an_evaluation(of_ranks: tuple[str, str], expected: list[str]) -> None:
    def evaluated(rows: str, observation: ObservedCommand, at: int) -> ObservedCommand:
        call = Forward(2, False, list(rows), "t.py:20", "", "forward")
        return with_events(at, [*observation.processes[at].events, call], observation)

    one = evaluated("xyz", ONE, 0)
    found = differences(one, evaluated(of_ranks[1], evaluated(of_ranks[0], MANY, 0), 1))
    assert [each.kind for each in found] == expected
    assert all(each.note == (of_ranks == ("xyz", "xyz")) for each in found)


@pytest.mark.parametrize(
    "text",
    ["x\n", "{}\n", '{"kind": "start", "rank": -1, "world": 1}\n', '{"kind": "seed", "line": "", "value": 1}\n'],
)
def test_a_file_of_rubbish_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0-1.jsonl").write_text(text)
    with pytest.raises(UserError):
        read_observation(tmp_path)


def test_two_processes_of_one_rank_are_refused(tmp_path: Path) -> None:
    for pid in (1, 2):
        (tmp_path / f"rank-0-{pid}.jsonl").write_text(json.dumps({"kind": "start", "rank": 0, "world": 1}) + "\n")
    with pytest.raises(UserError, match="a rank of its own"):
        read_observation(tmp_path)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    start = json.dumps({"kind": "start", "rank": 0, "world": 1})
    (tmp_path / "rank-0-1.jsonl").write_text(f'{start}\n{{"kind": "se')
    assert read_observation(tmp_path).processes[0].events == []
