import io
import math
import os
import re
import stat
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from elastune.core.errors import UserError
from elastune.core.formatting import duration
from elastune.core.journal.records import (
    Entry,
    FrontierAnswer,
    Reported,
    RunStarted,
    StudyStarted,
    TrialFinished,
    TrialStarted,
)
from elastune.report import matplotlib_png as static
from elastune.report import plotly_html as interactive
from elastune.report.frontier import pareto_figure, tradeoff_figure
from elastune.report.overviews import gather_run, gather_study
from elastune.report.page import frontier_page, run_page, study_page, write_frontier_report, write_report
from elastune.report.study import curves_figure

HOSTILE = "<script>alert('x')</script><img src=http://evil.example/x onerror=alert(1)> $\\frac$ \"'"


class Tags(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self._inside = [], "", None
        self.feed(own(page))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data + "\n"


def own(page):
    """The page without Plotly's library."""
    script = interactive.script()
    assert page.count(script) <= 1
    return page.replace(script, "")


def assert_picture(path):
    import matplotlib.image

    image = matplotlib.image.imread(io.BytesIO(path.read_bytes()), format="png")
    assert image.shape[0] > 400
    assert image.shape[1] > 800
    packed = (image[::2, ::2, :3] * 255).astype(np.uint32) @ np.array([1, 256, 65536], dtype=np.uint32)
    assert len(np.unique(packed)) > 50, "an empty plot has few colours"


def test_frontier_report_is_whole(found, written):
    out = written["frontier"]
    path = out / "report.html"
    page = Tags(path.read_text())
    assert page.text.count(found.answer.sentence) == 1, "below the title"
    assert page.text.count("8 workers: 0.975 in 7.4 s (modelled)") == 1
    assert "What earned it" in page.text
    assert "8 instead of 1, with the same settings: 4.89 times as fast (modelled, 3.49 to 6.85)" in page.text
    assert found.command in page.text
    for row in found.rows:
        assert duration(row.seconds) + ("" if row.seconds_label == "measured" else " ×÷ 1.4") in page.text
    assert "0.9752 (0.9721 to 0.9783)" in page.text
    assert "noise scale: <outweighed>" in page.text
    assert "Hypervolume at equal budget" in page.text
    for result in (
        "0.831 (0.811 to 0.850)",
        "0.9541",
        "first 12 of 30",
        "2.0 min, all there was",
        "accuracy 0.91, 44 s",
    ):
        assert result in page.text
    assert "Budget: 5.2 min of one worker" in page.text
    assert "Example CPU" in page.text
    assert "diverged: loss is NaN at step 12" in page.text
    assert "predicted / measured" in page.text
    assert "4, 8 workers" in page.text
    for name in ("tradeoff", "front", "history"):
        assert_picture(out / f"{name}.png")
    assert not [p for p in out.iterdir() if p.name.startswith(".")], "temporary files are gone"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_study_report_is_whole(written):
    out = written["study"]
    page = Tags((out / "report.html").read_text())
    assert "41 trials ended" in page.text
    assert "elastune run examples/digits.py" in page.text
    assert "--epochs 8" in page.text
    assert "finished after 13.5 min" in page.text
    assert "breaks workers * batch_size <= 512" in page.text
    for name in ("front", "history"):
        assert_picture(out / f"{name}.png")


def test_run_report_is_whole(written):
    out = written["run"]
    page = Tags((out / "report.html").read_text())
    assert "digits.py: accuracy 0.9791 in 16.8 s on 2 workers" in page.text
    assert "--set lr=0.05 --set batch_size=32" in page.text
    assert "9f" * 32 in page.text
    assert_picture(out / "curves.png")


@pytest.mark.parametrize("kind", ["run", "study", "frontier"])
def test_unfinished_work_has_a_report_that_says_so(kind, journal, request):
    entries = request.getfixturevalue(f"{kind}_entries")
    for length in (1, 3):
        page = Tags(write_report(journal(entries[:length])).read_text())
        assert "unfinished" in page.text
    gather, describe = {
        "run": (gather_run, run_page),
        "study": (gather_study, study_page),
        "frontier": (gather_study, frontier_page),
    }[kind]
    for length in range(1, len(entries)):
        page = describe(gather(entries[:length]))
        assert page.state.startswith("unfinished")
        assert not page.ended


def test_an_unfinished_frontier_shows_its_search(frontier_entries, journal):
    out = journal(frontier_entries[:-2])
    page = Tags(write_report(out).read_text())
    assert "No frontier yet" in page.text
    assert_picture(out / "history.png")


def test_a_failed_run_shows_why(failed_run_entries, journal):
    page = Tags(write_report(journal(failed_run_entries)).read_text())
    assert "failed: exception, worker 1" in page.text
    assert "ValueError: shapes (3,) and (4,)" in page.text
    assert "line 3" in page.text


@pytest.mark.parametrize("kind", ["run", "study", "frontier"])
def test_a_page_loads_nothing_from_elsewhere(kind, written):
    page = (written[kind] / "report.html").read_text()
    assert "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'" in page
    for _, attributes in Tags(page).tags:
        assert not {"src", "srcset", "data", "action"} & attributes.keys()
        assert attributes.get("href", "#").startswith("#"), "links stay within the page"
    assert not re.search(r"@import|url\(\s*['\"]?https?:", own(page))
    assert "http://" not in own(page)
    assert "https://" not in own(page).replace('"plotlyServerURL":"https:\\u002f\\u002fplot.ly"', "")


def hostile_frontier(entries):
    changed = []
    for entry in entries:
        record = entry.record
        if hasattr(record, "answer"):
            rows = [replace(row, lr_rule=HOSTILE, mechanism=HOSTILE, config={HOSTILE: HOSTILE}) for row in record.rows]
            answer = replace(record.answer, sentence=HOSTILE, command=HOSTILE, naive_rule=HOSTILE, not_done=[HOSTILE])
            record = replace(record, quality=HOSTILE, answer=answer, rows=rows)
        elif isinstance(record, StudyStarted):
            settings = {**record.settings, HOSTILE: HOSTILE, "objectives": {HOSTILE: "max"}}
            record = replace(record, settings=settings, context={HOSTILE: HOSTILE})
        elif isinstance(record, TrialStarted):
            record = replace(record, config={HOSTILE: HOSTILE})
        elif isinstance(record, TrialFinished):
            values = {HOSTILE: record.values.get("accuracy", 0.5)}
            record = replace(record, values=values, reason=HOSTILE)
        changed.append(Entry(entry.at, record))
    return changed


def test_hostile_strings_stay_strings(frontier_entries, found, journal):
    out = journal(hostile_frontier(frontier_entries))
    page = write_report(out).read_text()
    tags = Tags(page).tags
    of_a_figure = interactive.div(tradeoff_figure(found)).count("<script")
    panels = {"tradeoff": 3, "front": 1, "history": 1}
    assert of_a_figure == panels["tradeoff"]
    assert sum(tag == "script" for tag, _ in tags) == 2 + sum(panels.values()), "Plotly, the page's own, and the plots"
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in tags)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in page
    for name in ("tradeoff", "front", "history"):
        assert_picture(out / f"{name}.png")


def test_hostile_runs_too(journal):
    started = RunStarted(HOSTILE, {HOSTILE: HOSTILE}, 0, {HOSTILE: HOSTILE}, {HOSTILE: HOSTILE})
    report = Reported(epoch=0, step=1, samples=1, seconds=1.0, metrics={HOSTILE: 0.5, "nan": math.nan})
    page = write_report(journal([Entry(0.0, started), Entry(1.0, report)])).read_text()
    assert "<script>alert" not in page
    assert not any(tag == "img" for tag, _ in Tags(page).tags)


def test_both_renderers_draw_every_number(found):
    for figure in (tradeoff_figure(found), pareto_figure(found)):
        fragment = interactive.div(figure)
        for panel in figure.panels:
            for series in panel.series:
                for y in series.y:
                    assert f"{y}" in fragment
        assert static.png(figure).startswith(b"\x89PNG")


def test_pngs_are_the_same_each_time_and_follow_the_data(found, with_rows):
    first = static.png(tradeoff_figure(found))
    assert first == static.png(tradeoff_figure(found))
    assert first != static.png(tradeoff_figure(with_rows({2: {"quality": 0.90}})))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change",
    [
        {0: {"quality": math.nan, "ci": None}},
        {i: {"quality": math.nan, "ci": None} for i in range(8)},
        {i: {"quality": 0.9, "ci": (0.9, 0.9), "seconds": 5.0} for i in range(8)},
        {i: {"seconds": 0.0} for i in range(8)},
        {3: {"ci": None, "quality": -1e9}},
    ],
    ids=["one diverged", "all diverged", "all equal", "no time", "far off"],
)
def test_odd_frontiers_are_drawn(with_rows, change):
    changed = with_rows(change)
    for figure in (tradeoff_figure(changed), pareto_figure(changed)):
        assert static.png(figure).startswith(b"\x89PNG")
        assert interactive.div(figure)


def test_a_frontier_of_one_row_is_drawn(found, frontier_entries, tmp_path):
    for rows in ([found.rows[0]], []):
        changed = replace(found, rows=rows, answer=FrontierAnswer("None."), target=None)
        entries = [Entry(e.at, changed) if hasattr(e.record, "answer") else e for e in frontier_entries]
        assert write_frontier_report(entries, tmp_path).is_file()


def test_long_curves_are_drawn_quickly(run_entries):
    report = run_entries[1].record
    many = [Entry(0.0, replace(report, step=i)) for i in range(5000)]
    assert len(static.png(curves_figure(gather_run([run_entries[0], *many])))) > 5000


def test_nothing_there_is_told(tmp_path, journal, run_entries):
    with pytest.raises(UserError, match="a journal must exist"):
        write_report(tmp_path / "missing")
    with pytest.raises(UserError, match="start of a run or study"):
        write_report(journal([]))
    with pytest.raises(UserError, match="start of a run or study"):
        write_report(journal(run_entries[1:3]))


def test_a_report_that_cannot_be_written_leaves_the_old_one(run_entries, journal):
    out = journal(run_entries)
    path = write_report(out)
    before = path.read_bytes()
    (out / "curves.png").unlink()
    (out / "curves.png").mkdir()
    with pytest.raises(UserError, match="must be writable"):
        write_report(out)
    assert path.read_bytes() == before
    assert not [name for name in os.listdir(out) if name.startswith(".")]
