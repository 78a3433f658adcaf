"""Strategies and topologies of a run: gathered, in words, as a table, as bands on the run's axis, for TensorBoard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastune.core.journal.execution_records import BY_CHECKPOINT
from elastune.core.journal.records import (
    Entry,
    Measured,
    Record,
    Restarted,
    RunFinished,
    RunStarted,
    SyncChanged,
    TopologyChanged,
)
from elastune.loggers.events import JournalEvents
from elastune.report import matplotlib_png as static
from elastune.report import plotly_html as interactive
from elastune.report.adaptation import (
    SyncHistory,
    adaptation_figure,
    adaptation_json,
    adaptation_line,
    gather_adaptation,
    gather_sync,
    sync_line,
    sync_table,
)
from elastune.report.document import render
from elastune.report.explain import explain_run
from elastune.report.figures import Figure
from elastune.report.lines import since_line
from elastune.report.overviews import gather_run
from elastune.report.page import run_page
from elastune.runtime.logger import LineLogged, ValuesLogged

LOCAL = "local:learners=8,every=16"
STARTED = RunStarted("p.py", {}, 0, {"workers": 2, "topology": "tree"})
LAID = TopologyChanged(0, "tree", 2, "the run's settings", 0.1)
APART = SyncChanged(100, LOCAL, "schedule", 2.0)
RING = TopologyChanged(250, "ring", 2, "Mine", 4.0)
TOGETHER = SyncChanged(300, "allreduce", "<b>session.set_sync</b>", 5.0)
ENDED = RunFinished("0" * 64, 2, 400, 12_800, 7.0, {})


def seen(step: int, seconds: float, bytes_: float, distance: float | None = None) -> Measured:
    signals = {"sent_bytes": (bytes_, None)} | ({} if distance is None else {"learners_distance": (distance, None)})
    return Measured(step, 0, step * 32, seconds, 2, 32, 0.05, signals)


RECORDS: list[Record] = [
    STARTED,
    LAID,
    seen(50, 1.0, 1e6),
    APART,
    seen(116, 2.5, 1e5, 0.02),
    seen(200, 3.0, 1e5, 0.03),
    RING,
    TOGETHER,
    seen(350, 6.0, 1e6),
    ENDED,
]


def stamped(records: list[Record]) -> list[Entry]:
    return [Entry(100.0 + i, record) for i, record in enumerate(records)]


def story_of(*records: Record) -> SyncHistory:
    return gather_sync(stamped(list(records)))


def figure_of(records: list[Record]) -> Figure | None:
    entries = stamped(records)
    run = gather_run(entries)
    assert run is not None
    return adaptation_figure(run, gather_adaptation(entries), gather_sync(entries))


def test_what_was_in_use_from_when_on() -> None:
    story = story_of(*RECORDS)
    assert [(each.what, each.step, each.seconds) for each in story.strategies] == [
        ("allreduce", 0, 0.0),
        (LOCAL, 100, 2.0),
        ("allreduce", 300, 5.0),
    ]
    assert [(each.what, each.seconds) for each in story.topologies] == [("tree", 0.0), ("ring", 4.0)]
    assert [each.step for each in story.changes] == [100, 250, 300]
    assert sync_line(story) == f"allreduce -> {LOCAL} -> allreduce (2 changes), sums by tree, then ring"
    rows = sync_table(story).rows
    assert [row[:4] for row in rows] == [
        ("0", "strategy", "allreduce", "2 s"),
        ("0", "topology", "tree", "4 s"),
        ("100", "strategy", LOCAL, "3 s"),
        ("250", "topology", "ring", "3 s"),
        ("300", "strategy", "allreduce", "2 s"),
    ]
    assert since_line(APART) == f"step 100: {LOCAL} from here on (schedule)"
    assert since_line(RING) == "step 250: sums by ring from here on (Mine)"


def test_a_run_that_asks_for_nothing_has_nothing_to_tell() -> None:
    plain = replace(STARTED, execution={"workers": 2})
    story = story_of(plain, ENDED)
    assert not story.any
    assert sync_line(story) == ""
    assert sync_table(story).rows == ()
    assert figure_of([plain, ENDED]) is None
    assert story_of().strategies == ()
    from_the_start = story_of(replace(plain, sync=LOCAL), ENDED)
    assert sync_line(from_the_start) == LOCAL
    assert [row[:4] for row in sync_table(from_the_start).rows] == [("0", "strategy", LOCAL, "7 s")]
    assert figure_of([replace(plain, sync=LOCAL), ENDED]) is not None


def test_what_a_resumed_run_took_back_is_left_out() -> None:
    again = replace(STARTED, resumed_step=250)
    story = story_of(*RECORDS, again, replace(RING, seconds=4.5), seen(260, 4.6, 1e5), replace(TOGETHER, step=310))
    assert [(each.what, each.step) for each in story.strategies] == [("allreduce", 0), (LOCAL, 100), ("allreduce", 310)]
    assert [(each.what, each.step) for each in story.topologies] == [
        ("tree", 0),
        ("ring", 250),
        ("tree", 250),
        ("ring", 250),
    ]
    assert story.seconds == 5.0
    restarted = story_of(*RECORDS[:-1], Restarted(0))
    assert [each.what for each in restarted.strategies] == ["allreduce"]
    assert [each.what for each in story_of(*RECORDS, STARTED).strategies] == ["allreduce"], "a fresh start"


def test_a_default_is_not_what_somebody_asked_for() -> None:
    plain = replace(STARTED, execution={"workers": 2})
    entries = stamped([plain, replace(RING, step=5), ENDED])
    story = gather_sync(entries)
    assert sync_line(story) == "allreduce, sums by native, then ring"
    assert [each.why for each in story.all][:2] == ["the default"] * 2
    run = gather_run(entries)
    assert run is not None
    (part,) = [part for part in explain_run(run, entries).parts if part.title == "How workers agreed"]
    assert part.lines[1] == "From step 0 on: sums by native (the default)."
    asked = gather_sync(stamped([replace(plain, execution={"topology": "tree"}, sync=LOCAL), ENDED]))
    assert [each.why for each in asked.all] == ["asked for at the start"] * 2


def test_a_resumed_run_goes_on_with_the_topology_of_its_checkpoint() -> None:
    plain = replace(STARTED, execution={"workers": 2})
    laid = replace(RING, step=5)
    again = (replace(plain, resumed_step=20), replace(RING, step=20, cause=BY_CHECKPOINT))
    story = story_of(plain, laid, seen(20, 2.0, 1e5), *again, ENDED)
    assert [(each.what, each.step) for each in story.topologies] == [("native", 0), ("ring", 5)]


@pytest.mark.filterwarnings("error")
def test_the_runs_axis_has_bands_distance_and_bytes() -> None:
    figure = figure_of(RECORDS)
    assert figure is not None
    labels = [panel.y.label for panel in figure.panels]
    assert labels == ["samples", "learning rate", "workers", "learners' distance", "bytes a step", ""]
    distance, sent, bands = figure.panels[3:]
    ((apart,), (line,)) = distance.series, sent.series
    assert (apart.x, apart.y) == ((2.5, 3.0), (0.02, 0.03)), "none where there was one learner"
    assert line.y == (1e6, 1e5, 1e5, 1e6)
    assert bands.y.names == ("topology", "strategy")
    assert bands.x.label == "training time (s)"
    drawn = {bars.name: list(zip(bars.y, bars.begin, bars.end, strict=True)) for bars in bands.bars}
    assert drawn == {
        "sums by tree": [(0.0, 0.0, 4.0)],
        "sums by ring": [(0.0, 4.0, 7.0)],
        "allreduce": [(1.0, 0.0, 2.0), (1.0, 5.0, 7.0)],
        LOCAL: [(1.0, 2.0, 5.0)],
    }
    assert len({bars.color for bars in bands.bars}) == 4
    low, high = figure.x_range()
    assert low < 0.0 < 7.0 < high
    assert len(static.png(figure)) > 20_000
    html = interactive.div(figure)
    assert LOCAL in html
    assert "<b>session" not in html


def test_phases_of_learners_are_lines_of_their_own() -> None:
    later = [seen(360, 6.2, 0.0, 0.1), seen(370, 6.4, float("nan"), float("inf"))]
    figure = figure_of([*RECORDS[:-1], *later, ENDED])
    assert figure is not None
    distance, sent = figure.panels[3:5]
    assert [series.x for series in distance.series] == [(2.5, 3.0), (6.2,)]
    assert len(sent.series[0].x) == 4, "no logarithm of no bytes, nor of what is no number"


def test_bands_alone_where_nothing_was_measured() -> None:
    figure = figure_of([STARTED, LAID, ENDED])
    assert figure is not None
    assert [len(panel.bars) for panel in figure.panels] == [2]
    assert len(static.png(figure)) > 5_000


def test_page_words_and_loggers_tell_of_it(tmp_path: Path) -> None:
    entries = stamped(RECORDS)
    run = gather_run(entries)
    assert run is not None
    adaptation = gather_adaptation(entries)
    assert adaptation_line(adaptation) == "", "nobody asked it to adapt"
    assert adaptation_json(adaptation) == {}
    page = render(run_page(run, adaptation=adaptation, history=gather_sync(entries)))
    assert "How workers agreed" in page
    assert "&lt;b&gt;session.set_sync" in page
    (part,) = [part for part in explain_run(run, entries).parts if part.title == "How workers agreed"]
    assert part.lines[2] == f"From step 100 on: {LOCAL} (schedule)."
    journal = JournalEvents(tmp_path)
    events = [event for entry in entries for event in journal.of(entry)]
    lines = [(event.topic, event.step, event.line) for event in events if isinstance(event, LineLogged)]
    assert [step for topic, step, _ in lines if topic == "sync/strategy"] == [100, 300]
    assert ("sync/topology", 250, since_line(RING)) in lines
    values = [event for event in events if isinstance(event, ValuesLogged)]
    assert [event.step for event in values if "signals/learners_distance" in event.values] == [116, 200]
