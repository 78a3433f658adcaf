import io
from dataclasses import replace

import pytest
from rich.console import Console

from elastune.core.formatting import number
from elastune.core.journal.records import LinkFitted, TimesFitted, WorkerSteps
from elastune.report.frontier import frontier_table, reasons_table, settings_table, volumes_table
from elastune.report.overviews import front_trials, gather_run, gather_study
from elastune.report.study import failed_trials_table, front_table, trials_table
from elastune.report.tables import Table, reports_table, run_table, times_table, to_html, to_rich, worker_steps_table


def printed(table, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(to_rich(table, width))
    return console.file.getvalue()


def scaled_by(found, efficiencies=(None, 0.9, 0.78, 0.7)):
    """The frontier with scaling efficiencies."""
    results = [
        replace(row, scaling_efficiency=each, scaling_label="modelled" if each else None)
        for row, each in zip(found.rows, efficiencies * 2, strict=True)
    ]
    return replace(found, rows=[replace(row, scaling_label=row.seconds_label) for row in results])


def column(table, start):
    index = next(i for i, name in enumerate(table.header) if name.startswith(start))
    return [row[index] for row in table.rows]


def test_frontier_table_holds_the_rows(found):
    table = frontier_table(found)
    assert column(table, "workers") == ["1", "2", "4", "8"] * 2
    assert column(table, "accuracy")[:2] == ["0.9712 (0.9691 to 0.9733)", "0.9655 (0.9621 to 0.9689)"]
    assert column(table, "training time")[1:3] == ["23.1 s", "13.4 s ×÷ 1.4"]
    assert column(table, "time to target")[3:5] == ["not reached", "21.7 s (18.1 s to 27.2 s)"]
    assert column(table, "reaches")[2:5] == ["no", "no", "yes"]
    assert column(table, "worker time")[0] == "41.8 s"
    assert column(table, "worker time")[2].startswith("≈ "), "reckoned from a modelled time"
    assert column(table, "rule")[3:5] == ["naive", "tuned, front"]
    assert table.strong == {7}
    assert column(table, "rule")[7] == "tuned, pick"
    assert table.note == (
        "×÷: modelled, and by what factor it may be off (predicted / measured 0.71); ≈: reckoned from that; "
        "intervals: seeds and 400 test samples"
    )
    settings = settings_table(found)
    assert column(settings, "lr")[1] == "0.1 (linear)"
    assert column(settings, "other")[0] == "momentum=0.9, epochs=8"
    assert column(settings, "samples/s")[:3] == ["1,531", "2,771", "≈ 4,776"]
    scaled = settings_table(scaled_by(found))
    assert column(scaled, "samples/s (scaling eff")[:3] == ["1,531", "2,771 (90 %)", "≈ 4,776 (78 %)"]
    assert "as the same settings on the fewest workers" in scaled.note
    assert column(settings, "worse by")[2] == "0.028 (≤ 0.04)"
    assert [row[0] for row in reasons_table(found).rows] == ["decides", "hint"]


def test_frontier_table_says_what_is_weaker(found, with_rows):
    changed = with_rows({0: {"held_out": False, "diverged": 2, "quality_label": "emulated"}}, price_per_worker_hour=3.5)
    table = frontier_table(changed)
    assert column(table, "accuracy")[0].endswith("(validation)")
    assert column(table, "by")[:2] == ["emulated", "measured"]
    assert column(settings_table(changed), "seeds")[0] == "3, 2 diverged"
    assert column(table, "cost ($3.5 a worker-hour)")[0] == "$0.01"
    unchecked = with_rows({2: {"seconds_factor": None, "test_samples": None}}, model_errors={})
    assert column(frontier_table(unchecked), "training time")[2] == "13.4 s ×÷ ?"
    assert "unchecked" in frontier_table(unchecked).note
    assert column(frontier_table(with_rows({}, target=None, direction="min")), "holds")[2] == "rises"


@pytest.mark.parametrize("width", [100, 120, 200])
@pytest.mark.parametrize("quality", ["accuracy", "validation_balanced_accuracy_of_everything"])
def test_frontier_tables_fit_a_terminal(found, with_rows, width, quality):
    """At 120 columns with nothing left out, whatever the metric is called."""
    wide = with_rows(
        {i: {"quality_label": "emulated", "noise_scale": 1412.3, "noise_scale_error": 122.0} for i in range(8)}
    )
    shown = replace(scaled_by(wide), quality=quality)
    for table in (frontier_table(shown), settings_table(shown), volumes_table(shown)):
        text = printed(table, width)
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width
        assert "no room for" not in text
    text = printed(frontier_table(shown), width)
    assert "7.4 s ×÷ 1.4" in text
    if width >= 120:
        assert "0.9752 (0.9721" in text


def test_markup_in_cells_is_text():
    table = Table("[bold]t", ("[red]a",), (("[link=x]y[/link]",), ("[/nothing]",)))
    text = printed(table, 80)
    assert "[link=x]y[/link]" in text
    assert "[/nothing]" in text


def test_html_is_escaped_and_marks_numbers():
    table = Table("t", ("<b>", "n"), (("<script>alert(1)</script>", "1"),), frozenset({1}), strong=frozenset({0}))
    page = to_html(table)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<td class=n>1</td>" in page
    assert "<tr class=strong>" in page


def test_ragged_rows_are_refused():
    with pytest.raises(ValueError, match="2 columns but a row of 1"):
        Table("t", ("a", "b"), (("1",),))


def test_trials_table_holds_every_trial(study_entries):
    study = gather_study(study_entries)
    table = trials_table(study)
    assert len(table.rows) == 41
    accuracy = column(table, "accuracy")
    assert accuracy == [number(t.value("accuracy")) for t in study.trials]
    assert column(table, "state").count("infeasible") == 4
    assert table.rows[40][-1] == "breaks workers * batch_size <= 512 by 512"


def test_unfinished_trials_say_so(study_entries):
    table = trials_table(gather_study(study_entries[:2]))
    assert column(table, "state") == ["unfinished"]


def test_failures_table_gives_reasons(study_entries):
    table = failed_trials_table(gather_study(study_entries))
    assert len(table.rows) == 5
    assert column(table, "why")[0] == "diverged: loss is NaN at step 12"


def test_front_table_is_the_front_best_first(study_entries):
    study = gather_study(study_entries)
    table = front_table(study, front_trials(study))
    accuracy = [float(cell) for cell in column(table, "accuracy")]
    assert accuracy == sorted(accuracy, reverse=True)
    assert {int(cell) for cell in column(table, "trial")} == set(front_trials(study))


def test_tables_of_a_study_name_the_mechanism_of_each_trial(study_entries):
    study = gather_study(study_entries)
    used = {str(t.trial): t.started.execution.get("mechanism", "–") for t in study.trials}
    for table in (front_table(study, front_trials(study)), trials_table(study)):
        results = dict(zip(column(table, "trial"), column(table, "mechanism"), strict=True))
        assert results == {trial: used[trial] for trial in results}
    assert set(used.values()) == {"replicated"}


def test_run_tables_hold_the_run(run_entries, failed_run_entries):
    run = gather_run(run_entries)
    cells = dict(run_table(run).rows)
    assert cells["final accuracy"] == number(run.finished.metrics["accuracy"])
    assert cells["median step"] == "31.1 ms"
    assert cells["SHA-256 of the final state"] == "9f" * 32
    assert len(reports_table(run).rows) == 12
    failed = dict(run_table(gather_run(failed_run_entries)).rows)
    assert failed["failed"] == "exception: ValueError: shapes (3,) and (4,)"
    assert "final accuracy" not in failed


def test_steps_of_workers_tell_who_is_slow(run_entries):
    run = gather_run(run_entries)
    assert worker_steps_table(run).rows == ()
    steps = [WorkerSteps(0, 0.02, 0.005, 0.25), WorkerSteps(1, 0.021, 0.02, 1.0)]
    changed = replace(run, finished=replace(run.finished, worker_steps=steps))
    assert worker_steps_table(changed).rows == (("0", "20 ms", "5 ms", "25 %"), ("1", "21 ms", "20 ms", "100 %"))


def test_times_table_has_units():
    times = TimesFitted(2e-3, 3.4e-5, 4.2e-4, 1e-9, 151_000, [1, 2], {"batch 64 on 2 workers": 1.07})
    cells = dict(times_table(times).rows)
    assert cells["fixed part of a step"] == "2 ms"
    assert cells["gradient of one sample"] == "34 µs"
    assert cells["link"] == "1000 MB/s"
    assert cells["predicted / measured, batch 64 on 2 workers"] == "1.07"
    assert dict(times_table(replace(times, seconds_per_byte=0.0)).rows)["link"] == "free"


def test_times_table_tells_the_links_within_and_across_hosts():
    times = TimesFitted(
        2e-3, 3.4e-5, 4.2e-4, 1e-9, 151_000, [1, 4], across=LinkFitted(2.5e-3, 8e-9), workers_per_host=2
    )
    cells = dict(times_table(times).rows)
    assert cells["link within a host"] == "1000 MB/s"
    assert (cells["latency of one message across hosts"], cells["link across hosts"]) == ("2.5 ms", "125 MB/s")
    assert cells["workers that fit a host"] == "2"
    assert "link" not in cells
