"""What monitors measured and policies decided: in words, as JSON, as a table, as one figure and on the page."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import numpy as np
import pytest

from elastune.core.journal.records import (
    Decided,
    Entry,
    Measured,
    NotMeasured,
    PolicyFailed,
    Restarted,
    RunFinished,
    RunStarted,
)
from elastune.report import matplotlib_png as static
from elastune.report import plotly_html as interactive
from elastune.report.adaptation import (
    MOST_LABELS,
    MOST_MARKS,
    Adaptation,
    adaptation_figure,
    adaptation_json,
    adaptation_line,
    batch_line,
    decisions_table,
    failures_table,
    gather_adaptation,
)
from elastune.report.document import Note, render
from elastune.report.explain import explain_run
from elastune.report.figures import Series
from elastune.report.lines import cause_text, change_text, decided_line, failed_line, measured_text, unmeasured_line
from elastune.report.overviews import gather_run
from elastune.report.page import run_page, write_report

SEEN = Measured(320, 2, 20_480, 12.5, 2, 64, 0.05, {"loss": (0.3123, None), "noise_scale": (412.3, 29.7)})


def decided(decision, outcome="applied", **changes):
    return Decided(**{"policy": "gns", "step": 321, "decision": decision, "cause": SEEN, "outcome": outcome, **changes})


def told(*records):
    return gather_adaptation([Entry(float(i), record) for i, record in enumerate(records)])


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        ({"batch_size": 128, "lr_factor": 2**0.5}, "batch 64 -> 128, lr 0.05 -> 0.0707"),
        ({"lr": 0.1}, "lr 0.05 -> 0.1"),
        ({"lr": 0.1, "lr_factor": 0.5, "ramp_steps": 20}, "lr 0.05 -> 0.05 over 20 steps"),
        ({"workers": 4, "micro_batch": 16}, "workers 2 -> 4, micro-batch 16"),
        ({"lr_factor": 0.5, "restore": True, "remember": False}, "lr 0.05 -> 0.025, back to the state kept"),
        (
            {"replace_rank": 0, "correct_momentum": True, "stop": True},
            "another worker for rank 0, momentum corrected, stop",
        ),
        ({"topology": "<tree>"}, "topology <tree>"),
        ({}, "nothing"),
    ],
)
def test_a_decision_says_what_it_changes(decision, words):
    assert change_text(decided(decision)) == words


def test_a_decision_is_one_line_with_its_reason():
    line = "step 321: gns: batch 64 -> 128, lr 0.05 -> 0.0707 (noise scale 412 ± 30, loss 0.312)"
    assert decided_line(decided({"batch_size": 128, "lr_factor": 2**0.5})) == line
    refused = decided({"workers": 64}, "refused", detail="at most\n4", cause=replace(SEEN, signals={}))
    assert decided_line(refused) == "step 321: gns: workers 2 -> 64: refused, at most 4"
    assert "not applied, workers disagreed" in decided_line(decided({"lr": 1.0}, "disagreed"))
    failed = PolicyFailed("Mine", "after_step", 7, 1, "ZeroDivisionError: no\nluck", off=True)
    assert failed_line(failed) == (
        "step 7: Mine: after_step failed on worker 1: ZeroDivisionError: no luck; it is not called any more"
    )


def test_the_foremost_signals_come_first_and_few_are_shown():
    signals = {"zeal": (1.0, None), "step_s": (0.01, None), "noise_scale": (5.0, None)}
    assert cause_text(replace(SEEN, signals=signals)) == "noise scale 5, step 10 ms"
    assert measured_text(SEEN) == "loss 0.312, noise scale 412 ± 30, batch 64, lr 0.05, 2 workers"
    assert measured_text(replace(SEEN, signals={"loss": (float("nan"), None)}, workers=1)).startswith("loss NaN, batch")


def test_the_result_counts_what_became_of_decisions():
    started = RunStarted("p.py", {}, 0, {}, adapt={"policies": ["gns"], "monitors": []})
    failed = PolicyFailed("Mine", "after_step", 7, 1, "no")
    result = told(started, decided({"lr": 1.0}), decided({"lr": 2.0}, "disagreed"), failed, SEEN)
    assert adaptation_json(result) == {
        "adapt": {
            "policies": ["gns"],
            "decisions": 1,
            "disagreed": 1,
            "refused": 0,
            "failed": 1,
            "not_measured": {},
            "noise_scale": 412.3,
            "noise_scale_error": 29.7,
            "batch_verdict": batch_line(result),
            "batch_size": 64,
            "lr": 0.05,
        }
    }
    assert adaptation_line(result) == (
        "1 decision applied, 1 that workers disagreed on, 1 call of a policy failed, noise scale 412 ± 30, batch 64, "
        "lr 0.05"
    )
    end = RunFinished("sha", 1, 400, 1, 1.0, {}, signals={"noise_scale": (500.0, None)})
    assert told(started, SEEN, end).signal("noise_scale") == (500.0, None), "the last word is the run's end"
    assert adaptation_json(told(replace(started, adapt={}))) == {}
    assert adaptation_line(Adaptation()) == ""


def test_a_batch_beyond_the_noise_scale_is_told_with_the_evidence():
    started = RunStarted("p.py", {}, 0, {}, adapt={"monitors": ["noise_scale"]})
    large, end = replace(SEEN, batch_size=1024), RunFinished("sha", 1, 400, 1, 1.0, {}, signals=SEEN.signals)
    beyond = (
        "Gradient noise scale 412 ± 30 at the end of training: batches up to about that use their samples well "
        "(McCandlish et al. 2018); the run's batch of 1024 is beyond it, so it buys time with samples: by that model "
        "3.5 times those of small batches."
    )
    assert batch_line(told(started, large, end)) == beyond
    within = batch_line(told(started, replace(SEEN, batch_size=440)))
    assert within.startswith("Gradient noise scale 412 ± 30 when last measured")
    assert within.endswith("the run's batch of 440 is within it."), "within its standard error"
    unknown = replace(SEEN, batch_size=440, signals={"noise_scale": (412.0, math.nan)})
    assert "Gradient noise scale 412 when" in batch_line(told(started, unknown))
    assert "440 is beyond it" in batch_line(told(started, unknown)), "nothing is allowed for an unknown error"
    assert batch_line(told(started, replace(SEEN, signals={}))) == batch_line(Adaptation()) == ""
    entries = [Entry(float(i), record) for i, record in enumerate((started, large, end))]
    run = gather_run(entries)
    assert explain_run(run, entries).parts[0].lines == (beyond,)
    page = run_page(run, adaptation=gather_adaptation(entries))
    (section,) = [section for section in page.sections if section.title == "How it adapted"]
    assert Note(beyond) in section.parts


def test_what_could_not_be_measured_is_told_with_its_reason():
    started = RunStarted("p.py", {}, 0, {}, adapt={"policies": ["gns"]})
    result = told(started, NotMeasured("noise_scale", 1, "one pass"), replace(SEEN, signals={}), Restarted(0))
    assert adaptation_json(result)["adapt"]["not_measured"] == {"noise_scale": "one pass"}
    assert adaptation_line(result) == "0 decisions applied, noise scale not measured"
    assert unmeasured_line(*result.unmeasured) == "noise scale is not measured: one pass"
    assert told(started, NotMeasured("noise_scale", 1, "one pass"), started).unmeasured == (), "begun anew"


def test_what_a_run_went_back_behind_is_taken_back():
    later = replace(SEEN, step=400)
    started = RunStarted("p.py", {}, 0, {}, adapt={"policies": ["gns"]})
    before = [started, SEEN, later, decided({"lr": 1.0}), decided({"lr": 1.0}, step=401)]
    assert [m.step for m in told(*before, Restarted(350)).measured] == [320]
    resumed = told(*before, replace(started, resumed_step=321, adapt={"policies": ["warmup"]}))
    assert ([m.step for m in resumed.measured], [d.step for d in resumed.decided]) == ([320], [321])
    assert resumed.policies == ("warmup",), "other policies may go on"
    assert not told(*before, started).measured, "begun anew"


def test_tables_have_a_line_for_each(adapting_entries):
    result = gather_adaptation(adapting_entries)
    rows = decisions_table(result).rows
    assert len(rows) == len(result.decided) == 6
    assert rows[0][1:3] == ("gns", "batch 32 -> 64, lr 0.05 -> 0.0707 over 20 steps")
    assert rows[0][3].startswith("noise scale ")
    assert {row[4].partition(":")[0] for row in rows} == {"applied", "not applied, workers disagreed", "refused"}
    ((*_, error, since),) = failures_table(result).rows
    assert (error, since) == ("ZeroDivisionError: by <zero>", "switched off")


def test_one_figure_has_all_on_one_time_axis(adapting_entries):
    run, result = gather_run(adapting_entries), gather_adaptation(adapting_entries)
    figure = adaptation_figure(run, result)
    assert figure is not None
    assert figure.stacked
    assert figure.columns == 1
    assert [[s.name for s in panel.series] for panel in figure.panels] == [
        ["loss"],
        ["gradient noise scale", "batch size"],
        ["learning rate"],
        ["workers"],
    ]
    assert figure.panels[1].y.log
    assert figure.panels[3].y.ticks == (1.0, 2.0, 4.0)
    scale, batch = figure.panels[1].series
    assert scale.band
    assert len(scale.error) == len(scale.x) == len(result.measured) - 4, "nothing was known of it at first"
    assert batch.line == "steps"
    assert (batch.y[0], batch.y[-1]) == (32.0, 512.0)
    assert [mark.x for mark in figure.marks] == [each.cause.seconds for each in result.decided]
    assert figure.marks[0].label == "batch 32→64"
    assert [mark.strange for mark in figure.marks].count(True) == 2
    low, high = figure.x_range()
    assert low < result.measured[0].seconds < result.measured[-1].seconds < high


def test_many_decisions_are_drawn_without_words_and_the_last_only(adapting_entries):
    run, result = gather_run(adapting_entries), gather_adaptation(adapting_entries)
    many = replace(result, decided=result.decided[:1] * (MOST_LABELS + 1))
    assert {mark.label for mark in adaptation_figure(run, many).marks} == {""}
    many = replace(result, decided=result.decided[:1] * (MOST_MARKS + 1))
    assert len(adaptation_figure(run, many).marks) == MOST_MARKS
    assert f"last {MOST_MARKS} of {MOST_MARKS + 1}" in adaptation_figure(run, many).caption


def test_what_was_not_measured_has_no_row(adapting_entries, run_entries):
    run = gather_run(adapting_entries)
    bare = adaptation_figure(run, Adaptation(measured=(replace(SEEN, signals={"noise_scale": (float("inf"), None)}),)))
    assert [[s.name for s in panel.series] for panel in bare.panels] == [["batch size"], ["learning rate"], ["workers"]]
    assert bare.panels[-1].x.label == "training time (s)"
    assert len(static.png(bare)) > 5000
    told_by_program = adaptation_figure(gather_run(run_entries), Adaptation(measured=(SEEN, replace(SEEN, signals={}))))
    assert told_by_program.panels[0].series[0].name == "loss"
    told_by_program = adaptation_figure(gather_run(run_entries), Adaptation(measured=(replace(SEEN, signals={}),)))
    assert told_by_program.panels[0].series[0].name == "reported loss"
    assert adaptation_figure(run, Adaptation()) is None


@pytest.mark.filterwarnings("error")
def test_a_decision_after_the_last_measurement_lies_within_the_figure(run_entries):
    late = decided({"batch_size": 128}, cause=replace(SEEN, seconds=30.0))
    figure = adaptation_figure(
        gather_run(run_entries), Adaptation(measured=(replace(SEEN, signals={}),), decided=(late,))
    )
    low, high = figure.x_range()
    assert low < SEEN.seconds < 30.0 < high
    assert len(static.png(figure)) > 5000


def test_a_band_ends_at_the_edge_of_a_log_axis():
    series = Series(
        "s", (0.0, 1.0, 2.0), (10.0, None, 4.0), "#000000", error=((2.0, 2.0), (1.0, 1.0), (9.0, 9.0)), band=True
    )
    assert series.edges(floor=1.0) == ([0.0, 2.0], [8.0, 1.0], [12.0, 13.0])
    assert series.edges(floor=5.0)[1] == [8.0, 4.0], "never above the line"


def test_both_renderers_draw_band_and_marks(adapting_entries):
    import matplotlib.image

    run, result = gather_run(adapting_entries), gather_adaptation(adapting_entries)
    figure = adaptation_figure(run, result)
    drawn = static.png(figure)
    bare = static.png(replace(figure, marks=()))
    assert drawn != bare
    image = matplotlib.image.imread(io.BytesIO(drawn), format="png")
    band = np.isclose(image[..., :3], np.array([0.78, 0.914, 0.876]), atol=0.02).all(axis=-1)
    assert band.sum() > 500, "a light green band lies along the noise scale"
    html = interactive.div(figure)
    assert '"fill":"toself"' in html
    assert "batch 32→64" in html or "batch 32\\u219264" in html
    assert html.count('"type":"line"') == len(figure.marks)


def test_the_page_has_the_figure_the_decisions_and_the_command(written):
    page = (written["adapting"] / "report.html").read_text()
    for text in ("Noise scale and batch size over training", "How it adapted", "Decisions (6)", "4 decisions applied"):
        assert text in page
    assert "--policy gns:max_batch=512 --policy Mine --monitor noise_scale" in page
    assert "ZeroDivisionError: by &lt;zero&gt;" in page
    assert "by <zero>" not in page.replace(interactive.script(), "")
    assert (written["adapting"] / "adapting.png").stat().st_size > 20_000


def test_without_measurements_nothing_changes(run_entries, journal):
    run = gather_run(run_entries)
    page = run_page(run)
    assert [figure.name for figure in page.figures] == ["curves"]
    assert render(page) == render(run_page(run, adaptation=gather_adaptation(run_entries)))
    assert "How it adapted" not in render(page)
    out = write_report(journal(run_entries)).parent
    assert not (out / "adapting.png").exists()
