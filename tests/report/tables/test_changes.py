from __future__ import annotations

from elastune.core.journal.records import (
    ChangeTimed,
    Entry,
    FaultInjected,
    LearnerLeftOut,
    Regrouped,
    Restarted,
    RunFinished,
    RunStarted,
    StateLost,
    StepsCompleted,
    StragglerDetected,
    WorkerGone,
)
from elastune.report.document import render
from elastune.report.lines import left_out_line
from elastune.report.overviews import gather_run
from elastune.report.page import run_page
from elastune.report.sample_ledger import ledger
from elastune.report.worker_changes import (
    Changes,
    change_lines,
    change_parts_table,
    changes_line,
    changes_table,
    gather_changes,
    left_out_table,
    worker_steps,
)

STORY = [
    RunStarted("p.py", {}, 0, {"workers": 2}),
    FaultInjected("kill", 1),
    WorkerGone(1, "lost", "worker 1 was ended by <signal 9>", -9),
    Regrouped(2, [0], False, 11, 0.080, 1),
    FaultInjected("join"),
    Regrouped(3, [0, 2], True, 15, 0.010, 0),
    StragglerDetected(2, "worker 2 keeps 1 other waiting"),
    RunFinished("sha", 2, 30, 300, 1.0, {}),
]
ENTRIES = [Entry(float(i), record) for i, record in enumerate(STORY)]


def test_pauses_and_faults_are_summed_up() -> None:
    result = gather_changes(ENTRIES)
    assert result.faults == (("kill", 1), ("join", 1))
    assert changes_line(result) == "2 changes of workers, pauses 45 ms median, 80 ms at most, 1 step done again"
    assert worker_steps(2, result, 30) == ((0.0, 11.0, 15.0, 30.0), (2.0, 1.0, 2.0, 2.0))
    assert changes_line(Changes()) == ""


def test_state_that_was_lost_and_a_mesh_are_told() -> None:
    story = [StateLost(8, ["body.weight", "head.bias"]), Regrouped(2, [0, 2], False, 9, 0.080, 1, "shard=2")]
    result = gather_changes([Entry(float(i), record) for i, record in enumerate(story)])
    outcome = (
        "state lost after step 8 (body.weight, head.bias, ...), all its holders at once: on from the newest checkpoint"
    )
    assert changes_line(result).endswith(f"1 step done again; {outcome}")
    assert "2 (shard=2)" in changes_table(result).rows[0]


def test_a_restart_after_a_total_loss_counts() -> None:
    result = gather_changes([Entry(0.0, Restarted(22, 20, 7.5))])
    assert (result.number, result.longest_pause_s, result.discarded) == (1, 7.5, 20)
    restarted = "restarted from step 22: 20 steps repeated, after 7.5 s without a worker"
    line = f"1 change of workers, pauses 7.5 s median, 7.5 s at most, 20 steps done again; {restarted}"
    assert changes_line(result) == line
    assert changes_table(result).rows == (("–", "23", "–", "–", "restart, all were lost", "7.5 s", "20"),)
    older = gather_changes([*ENTRIES, Entry(9.0, Restarted(0))])
    assert (older.number, older.median_pause_s, older.discarded) == (3, 0.045, 1), "its costs are not known"


def test_a_round_that_ended_without_a_learner_is_told() -> None:
    left = LearnerLeftOut(3, 1, 2, 0, 11, 12, [(110, 115), (125, 130)])
    claims = [StepsCompleted(0, 1, 2, 0, 0, 100, 140, 1, 10), StepsCompleted(0, 2, 1, 0, 100, 140, 140, 11, 14)]
    result = gather_changes([Entry(float(i), record) for i, record in enumerate([*STORY, left, left, *claims])])
    assert (result.short_rounds, result.samples_left_out) == (1, 10)
    assert "1 round without a learner that was lost or late (10 samples left out)" in changes_line(result)
    assert left_out_table(result).rows == (("11 to 12", "3", "1", "10", "worker 1 was ended by <signal 9>"),)
    assert left_out_line(left) == "steps 11 to 12 ended without learner 3 (worker 1): 10 samples left out"


def test_a_page_tells_of_them_and_escapes_what_it_tells() -> None:
    run = gather_run(ENTRIES)
    assert run is not None
    page = render(run_page(run, gather_changes(ENTRIES), ledger(ENTRIES)))
    for text in ("Workers over the steps", "1 x kill, 1 x join", "after a loss", "keeps 1 other waiting"):
        assert text in page
    assert "&lt;signal 9&gt;" in page
    assert "<signal 9>" not in page
    assert "Workers over the steps" not in render(run_page(run))


def test_the_parts_of_a_change_are_those_of_its_slowest_worker() -> None:
    slow, quick = {"noticed": 30.0, "view known": 0.4, "first step": 20.0}, {"noticed": 1.0, "first step": 20.0}
    loss = [ChangeTimed(2, 0, 11, slow), ChangeTimed(2, 3, 11, quick), Regrouped(2, [0, 3], False, 11, 0.08, 1)]  # type: ignore[arg-type]
    planned = [ChangeTimed(3, 0, 15, {"noticed": 2.0, "connected": 6.0}), Regrouped(3, [0, 3, 4], True, 15, 0.01, 0)]
    result = gather_changes([Entry(float(i), record) for i, record in enumerate([*loss, *planned])])
    table = change_parts_table(result)
    assert table.header == (
        "version",
        "first step",
        "slowest worker",
        "noticed",
        "view known",
        "connected",
        "first step",
    )
    assert table.rows == (
        ("2", "11", "0", "30 ms", "400 µs", "0 s", "20 ms"),
        ("3", "15", "0", "2 ms", "0 s", "6 ms", "0 s"),
    )
    of_planned, of_losses = change_lines(result)
    assert of_planned.endswith("medians: noticed 2 ms, connected 6 ms.")
    assert of_losses.endswith("medians: noticed 30 ms, first step 20 ms."), "what took under 1 ms is left out"
    assert change_lines(gather_changes(ENTRIES)) == (), "a journal from before says nothing of parts"
