"""The head of a page and of a terminal's answer: a title, tiles, banners, a small table, and folded parts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from elastune.cli.output import wrapped
from elastune.core.formatting import differing
from elastune.core.journal.records import FrontierAnswer, Measured, OwnMachine
from elastune.report import plotly_html as interactive
from elastune.report.document import MOST_WORDS, Section, few_words, render
from elastune.report.figures import Axis, Figure, Panel, Series, whole_ticks
from elastune.report.frontier import pareto_figure
from elastune.report.glance import FEW_TRIALS, frontier_glance, run_glance
from elastune.report.overviews import gather_run, gather_study
from elastune.report.page import frontier_page, run_page, study_page
from elastune.report.study import curves_figure, history_figure
from elastune.tuning.study.results import Study


def page_of(study_entries, tmp_path):
    return study_page(gather_study(study_entries), Study.of(tmp_path, study_entries))


def test_titles_are_a_few_words_and_that_of_the_window_fewer(found, study_entries, run_entries, tmp_path):
    frontier, run = frontier_glance(found), run_glance(gather_run(run_entries), "digits.py")
    study = page_of(study_entries, tmp_path).glance
    assert frontier.title == "8 workers: 0.975 in 7.4 s (modelled)"
    assert frontier.short_title == "8 workers: 0.975"
    assert study.title.startswith("Trial ")
    assert run.title == "digits.py: accuracy 0.9791 in 16.8 s on 2 workers"
    for glance in (frontier, study, run):
        assert len(glance.title.split()) <= MOST_WORDS
        assert len(glance.short_title) < len(glance.title)
    assert len(few_words("word " * 40).split()) == MOST_WORDS
    none = replace(found, answer=FrontierAnswer("None."))
    assert frontier_glance(none).title == "No row is shown to reach accuracy 0.975"
    assert frontier_glance(none).tiles == ()


def test_three_tiles_stand_beside_today_and_one_tuned_worker(found, study_entries, tmp_path):
    quality, time, cost = frontier_glance(found).tiles
    assert (quality.name, quality.value) == ("accuracy (0.9721 to 0.9783, 95 %)", "0.9752")
    assert quality.beside == (("today's settings", "0.9712"), ("one worker, tuned", "0.9783"))
    assert time.value == "7.4 s"
    assert time.beside == (("today's settings", "41.8 s"), ("one worker, tuned", "36.2 s"))
    assert "modelled, ×÷ 1.4" in time.name
    assert cost.beside[0] == ("today's settings", "41.8 worker-s")
    on_one = frontier_glance(replace(found, answer=replace(found.answer, pick=4)))
    assert [tile.beside[1][1] for tile in on_one.tiles] == ["this is it"] * 3
    naive = [row for row in found.rows if row.role == "naive"]
    untuned = replace(found, rows=naive, answer=FrontierAnswer("None."))
    tiles = frontier_glance(replace(untuned, answer=FrontierAnswer("Use 8 workers.", pick=3))).tiles
    assert [tile.beside[1][1] for tile in tiles] == ["not tried"] * 3
    study = page_of(study_entries, tmp_path).glance
    assert [tile.name for tile in study.tiles] == ["accuracy", "time", "cost"]
    assert {what for tile in study.tiles for what, _ in tile.beside} == {"today's settings", "one worker, tuned"}


def test_banners_say_what_limits_the_answer(found, frontier_entries, study_entries, tmp_path):
    study = gather_study(frontier_entries)
    banners = frontier_glance(found, study).banners
    assert any(line.startswith("Thin search: ") for line in banners), "18 trials of its search have a result"
    assert "Times on 4, 8 workers are modelled, not measured: they may be off by a factor of 1.4." in banners
    assert "The pick needs 8 workers; this machine has 2 cores." in banners
    assert "Not done: policy gns: no training with it is in the table." in banners
    roomy = replace(found, answer=replace(found.answer, this_machine=OwnMachine(8, 0, 7, ""), not_done=[]))
    measured = replace(roomy, rows=[replace(row, seconds_label="measured") for row in roomy.rows])
    assert frontier_glance(measured).banners == ()
    assert not any("Thin" in line for line in page_of(study_entries, tmp_path).glance.banners), f"> {FEW_TRIALS} trials"
    html = render(frontier_page(study))
    assert html.count("<p class=banner>") == len(banners)
    assert html.count("<section class=tile>") == 3


def test_a_table_of_five_columns_comes_first_and_all_else_is_folded(frontier_entries, study_entries, tmp_path):
    for page in (frontier_page(gather_study(frontier_entries)), page_of(study_entries, tmp_path)):
        assert len(page.glance.table.header) == 5
        assert not any(section.open for section in page.sections)
        html = render(page)
        html = html.replace(interactive.script(), "")
        assert html.index("<table") < html.index("<figure")
        last = html.rindex("</figure>")
        assert html.count("<section><details>", last) == html.count("<section>", last) == len(page.sections)
    opened = render(replace(page, sections=(Section("Why it failed", (), open=True),)))
    assert "<details open><summary>Why it failed</summary>" in opened


def test_only_settings_that_differ_are_shown(found):
    table = frontier_glance(found).table
    assert "momentum" not in str(table.rows), "it is the same in all rows"
    assert table.rows[0][1] == "today's; lr=0.05, batch_size=32"
    assert table.rows[7][1] == "pick: tuned; lr=0.083, batch_size=64"
    assert differing([{"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}]) == ("b", "c")
    assert differing([{"a": 1}]) == ()


def test_marks_carry_trials_and_lead_to_rows(found, study_entries, tmp_path):
    page = page_of(study_entries, tmp_path)
    front = next(series for series in page.figures[0].panels[0].series if series.name == "front")
    assert front.links == tuple(f"trial-{trial}" for trial in front.inside)
    html = render(page)
    for link in front.links:
        assert html.count(f'id="{link}"') == 1
        assert f'<a href="#{link}">' in html
    assert '"customdata":["trial-' in interactive.div(page.figures[0])
    tuned = next(series for series in pareto_figure(found).panels[0].series if series.name.startswith("after"))
    assert tuned.links == ("row-4", "row-5", "row-6", "row-7")
    assert "trials 1, 2, 3" in tuned.labels[0]
    with pytest.raises(ValueError, match="2 points but 1 of links"):
        Series("s", (0.0, 1.0), (0.0, 1.0), "#000000", links=("a",))


def test_an_outlier_is_clipped_and_stands_at_the_edge(study_entries):
    study = gather_study(study_entries)
    worst = next(trial for trial in study.trials if trial.complete)
    values = worst.finished.values
    values["accuracy"] = -40.0
    (panel, _) = history_figure(study).panels
    assert panel.y_range()[0] > 0
    assert any((0, -1) in series.beyond(panel).values() for series in panel.series)


def test_axes_that_count_have_whole_numbers():
    assert whole_ticks(0.7, 4.3) == (1, 2, 3, 4)
    assert whole_ticks(-0.5, 100.2) == (0, 20, 40, 60, 80, 100)
    assert whole_ticks(0.2, 0.8) == ()
    assert all(tick == int(tick) for tick in whole_ticks(3, 12_345))
    assert len(whole_ticks(0, 1e6)) <= 10
    panel = Panel("", Axis("steps", whole=True), Axis("workers", whole=True), (Series("w", (0, 9), (1, 2), "#000000"),))
    html = interactive.div(Figure("w", "w", (panel,)))
    assert '"ticktext":["1","2"]' in html


def test_panels_side_by_side_are_plots_of_their_own(found):
    assert interactive.div(pareto_figure(found)).count('class="plotly-graph-div"') == 1
    three = interactive.div(Figure("f", "f", pareto_figure(found).panels * 3))
    assert three.count('class="plotly-graph-div"') == 3
    assert 'class="panels three"' in three
    assert three.count("<ul class=legend>") == 1


def test_commands_have_a_button_that_copies(frontier_entries):
    html = render(frontier_page(gather_study(frontier_entries)))
    assert re.search(r"<div class=command><code>elastune run [^<]*</code><button type=button class=copy>Copy<", html)
    assert "prefers-color-scheme: dark" in html


def test_the_page_of_a_run_has_its_training_loss(run_entries):
    losses = tuple(Measured(step, 0, 32 * step, 0.1 * step, 1, 32, 0.1, {"loss": (2 / step, None)}) for step in (1, 9))
    run = gather_run(run_entries)
    first = curves_figure(run, losses).panels[0]
    assert (first.y.label, first.series[0].x, first.series[0].y) == ("training loss", (1, 9), (2, 2 / 9))
    assert [panel.y.label for panel in curves_figure(run).panels] == ["accuracy", "loss"]
    without_metrics = replace(run, reports=())
    assert curves_figure(without_metrics) is None
    assert len(curves_figure(without_metrics, losses).panels) == 1
    assert run_page(run).figures[0].panels[0].y.label == "accuracy"


@pytest.mark.parametrize("words", [3, 40])
def test_lines_of_a_terminal_have_at_most_100_columns(words):
    text = " ".join(f"word{i}" for i in range(words))
    lines = wrapped(f"note    {text}", 100)
    assert max(map(len, lines)) <= 100
    assert all(line.startswith("        ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == f"note {text}"


def test_a_wrapped_command_can_be_copied():
    command = "elastune run 'my file.py' " + " ".join(f"--set 'name {i}=a  b'" for i in range(12))
    lines = wrapped(f"train   {command}", 100)
    assert len(lines) > 1
    assert max(map(len, lines)) <= 100
    assert all(line.endswith(" \\") for line in lines[:-1])
    again = "\n".join(lines).removeprefix("train   ").replace(" \\\n        ", " ")
    assert again == command
