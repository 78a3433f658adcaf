import io
from dataclasses import replace

import pytest
from rich.console import Console

from elastune.core.text import number
from elastune.journal.records import TimesFitted
from elastune.report.gather import front_trials, gather_run, gather_study
from elastune.report.tables.study_tables import failures_table, front_table, trials_table
from elastune.report.tables.tables import Table, frontier_table, reports_table, run_table, times_table, to_html, to_rich


def printed(table, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(to_rich(table, width))
    return console.file.getvalue()


def column(table, start):
    index = next(i for i, name in enumerate(table.header) if name.startswith(start))
    return [row[index] for row in table.rows]


def test_frontier_table_holds_the_rows(found):
    table = frontier_table(found)
    assert column(table, "workers") == ["1", "2", "4", "8"] * 2
    assert column(table, "accuracy")[:2] == ["0.9712 ± 0.0021", "0.9655 ± 0.0034"]
    assert column(table, "training (s)")[1:3] == ["23.1 measured", "13.4 modelled"]
    assert column(table, "time to target (s)")[3:5] == ["not reached", "21.72"]
    assert column(table, "lr")[1] == "0.1 (linear)"
    assert column(table, "cost (worker-hours)")[0] == number(41.8 / 3600)
    assert column(table, "other")[0] == "momentum=0.9, epochs=8"
    assert column(table, "rule")[3:5] == ["naive", "tuned, front"]
    assert table.strong == {7}
    assert column(table, "rule")[7] == "tuned, pick"


def test_frontier_table_says_what_is_weaker(found, with_rows):
    changed = with_rows({0: {"held_out": False, "diverged": 2}}, price_per_worker_hour=3.5)
    table = frontier_table(changed)
    assert column(table, "accuracy")[0].endswith("(validation)")
    assert column(table, "seeds")[0] == "3, 2 diverged"
    assert column(table, "cost (at 3.5 a worker-hour)")


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_frontier_table_fits_a_terminal(found, width):
    text = printed(frontier_table(found), width)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    assert "0.9752 ± 0.0031" in text
    assert "7.4 modelled" in text
    assert ("no room for" in text) == (width < 150)


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
    table = failures_table(gather_study(study_entries))
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
    used = {str(t.trial): t.started.means.get("mechanism", "–") for t in study.trials}
    for table in (front_table(study, front_trials(study)), trials_table(study)):
        found = dict(zip(column(table, "trial"), column(table, "mechanism"), strict=True))
        assert found == {trial: used[trial] for trial in found}
    assert set(used.values()) == {"ddp"}


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


def test_times_table_has_units():
    times = TimesFitted(2e-3, 3.4e-5, 4.2e-4, 1e-9, 151_000, [1, 2], {"batch 64 on 2 workers": 1.07})
    cells = dict(times_table(times).rows)
    assert cells["fixed part of a step"] == "2 ms"
    assert cells["gradient of one sample"] == "34 µs"
    assert cells["link"] == "1000 MB/s"
    assert cells["predicted / measured, batch 64 on 2 workers"] == "1.07"
    assert dict(times_table(replace(times, seconds_per_byte=0.0)).rows)["link"] == "free"
