"""The one record of the answer: who earned it, at what price, and that all that is shown comes from it."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tests.support.frontiers import FREE, TARGETED, cell

from elastune.core.formatting import number
from elastune.core.journal.records import (
    FrontierAnswer,
    FrontierFound,
    FrontierRow,
    FrontierVolumes,
    OwnMachine,
    ScalingPoint,
    StudyFinished,
    StudyStarted,
    decode,
    encode,
)
from elastune.core.plan.confidence_intervals import bounded_ci
from elastune.report.explain import explain_frontier
from elastune.report.frontier import ELSEWHERE, TUNED, answer_lines, frontier_table, pareto_figure, tradeoff_figure
from elastune.report.overviews import StudyOverview
from elastune.report.page import frontier_page
from elastune.tuning.frontier.answer import MOST_WORDS, answer_of, more_seeds, pick_row
from elastune.tuning.frontier.criteria import FrontierCriteria, mark_front

COUNTS = (1, 2, 4, 8)


def timed(role: str, workers: int, seconds: dict[int, float], *, beyond: int = 2, **changes: Any) -> FrontierRow:
    """A row whose settings take ``seconds`` on each number of workers; modelled ``beyond`` so many, within 1.25."""
    points = [
        ScalingPoint(n, s, *(("measured", 1.0) if n <= beyond else ("modelled", 1.25)), n * s / 3600)
        for n, s in sorted(seconds.items())
    ]
    own = next(point for point in points if point.workers == workers)
    answer = {name: getattr(own, name) for name in ("seconds", "seconds_label", "seconds_factor", "cost")}
    return cell(role, workers, **{"scaling": points, "throughput": 100 / own.seconds, **answer, **changes})  # type: ignore[arg-type]


def of_issue() -> list[FrontierRow]:
    """Tuning bought 3.45 times, 4 workers 1.77 (modelled) at 2.26 times the cost."""
    own, tuned = {1: 3.01, 2: 1.9, 4: 1.45}, {1: 0.872, 2: 0.66, 4: 0.494}
    config = {"lr": 0.3, "batch_size": 60}
    return [
        timed("naive", 1, own, quality=0.97),
        timed("naive", 2, {1: 2.2, 2: 1.73, 4: 1.2}, quality=0.96),
        timed("naive", 4, {1: 2.0, 2: 1.5, 4: 1.1}, quality=0.7, verdict="falls"),
        timed("tuned", 1, tuned, quality=0.97, config=config),
        timed("tuned", 4, tuned, quality=0.97, config=config),
    ]


def test_workers_that_buy_less_than_their_price_are_not_taken_and_settings_get_their_own_credit() -> None:
    answer = answer_of(of_issue(), TARGETED, (1, 2, 4), OwnMachine(2))
    assert (answer.pick, answer.conclusion) == (3, "fewest are enough")
    assert answer.sentence == (
        "One worker is enough: settings bring 3.5 times the speed, 4 workers 1.8 times (modelled) for 2.3 times the "
        "cost."
    )
    settings = answer.settings
    assert settings is not None
    assert (settings.workers, settings.beside_workers, settings.beside, settings.label) == (1, 1, 0, "measured")
    assert (settings.times_as_fast, settings.low) == (pytest.approx(3.01 / 0.872), None)
    assert settings.times_the_cost == pytest.approx(0.872 / 3.01)
    assert answer.workers is None
    more = answer.more_workers
    assert more is not None
    assert (more.workers, more.times_as_fast, more.times_the_cost) == (
        4,
        pytest.approx(1.765, abs=0.001),
        pytest.approx(2.27, abs=0.01),
    )
    assert more.low is not None
    assert (more.low, more.high) == (pytest.approx(1.765 / 1.25, abs=0.01), pytest.approx(1.765 * 1.25, abs=0.01))
    assert answer.fastest_row == 4
    assert answer.cheapest is None
    assert answer.this_machine == OwnMachine(2, 0, 3)


def test_workers_that_pay_are_taken_with_both_factors_apart() -> None:
    tuned = {1: 0.8, 2: 0.42, 4: 0.22}
    config = {"lr": 0.3, "batch_size": 60}
    rows = [*of_issue()[:3], timed("tuned", 1, tuned, config=config), timed("tuned", 4, tuned, config=config)]
    answer = answer_of(rows, TARGETED, (1, 2, 4), OwnMachine(2))
    assert (answer.pick, answer.conclusion) == (4, "use")
    assert answer.sentence == (
        "Use 4 workers with tuned settings: 3.8 times as fast by settings, 3.6 times by workers (modelled)."
    )
    assert answer.settings is not None
    assert answer.workers is not None
    assert answer.total is not None
    assert answer.total.times_as_fast == pytest.approx(answer.settings.times_as_fast * answer.workers.times_as_fast)
    assert answer.workers.beside == 3, "the row of the same settings on one worker"
    assert answer.naive is not None
    assert (answer.naive.beside, answer.naive.times_as_fast) == (2, pytest.approx(5.0))
    assert answer.cheapest is not None
    assert answer.cheapest.beside == 3
    assert answer.this_machine == OwnMachine(2, 0, 3), "two cores: the row of one worker is the best that fits"


def test_where_only_the_model_speaks_for_more_workers_they_are_not_credited() -> None:
    tuned = {1: 0.8, 4: 0.7}
    config = {"lr": 0.3, "batch_size": 60}
    rows = [timed("naive", 1, {1: 3.0, 4: 2.0}), timed("tuned", 4, tuned, config=config)]
    answer = answer_of(rows, TARGETED, (1, 4))
    assert (answer.pick, answer.conclusion) == (1, "fewest may be enough"), "no row of one worker with these settings"
    assert answer.sentence == (
        "One worker may be enough: 4 workers are only 1.1 times as fast (modelled) for 3.5 times the cost."
    )
    free = [rows[0], replace(rows[1], mode="fast")]
    one = replace(free[1], role="tuned", workers=1, num_slots=1, seconds=0.8, cost=0.8 / 3600, verdict="falls")
    assert answer_of([*free, one], TARGETED, (1, 4)).conclusion == "use", "there it would not reach the target"


def test_settings_that_are_no_better_are_not_picked_more_seeds_are_asked_for() -> None:
    """ "0.920 (0.902 to 0.934), .475 times as fast as with its own settings", whose mean is the same."""
    values = [0.914, 0.926]
    own = timed(
        *("naive", 1, {1: 1.0}),
        quality=0.92,
        seeds=2,
        seed_values=values,
        ci=bounded_ci(values, 0, 1),
        verdict="not shown",
    )
    tuned = timed("tuned", 1, {1: 2.1}, quality=0.92, ci=(0.902, 0.934), config={"lr": 9})
    answer = answer_of([own, tuned], TARGETED, (1,))
    assert (answer.pick, answer.shown, answer.more_seeds) == (0, 1, 2)
    assert answer.sentence == ("The program's own settings do as well on 1 worker, not yet shown: 2 more seeds would.")
    faster = replace(tuned, seconds=0.9, cost=0.9 / 3600)
    assert pick_row([own, faster], TARGETED).row == 1, "faster is a gain"
    far = replace(own, seed_values=[0.84, 1.0], ci=(0.2, 1.0))
    assert more_seeds(far, TARGETED) is None
    assert pick_row([far, tuned], TARGETED).row == 1, "nobody trains that many seeds"
    better = replace(tuned, quality=0.99, ci=(0.985, 0.995))
    assert pick_row([replace(own, ci=(0.8, 0.95)), better], TARGETED).row == 1, "shown to be better"


def test_more_seeds_without_a_target_are_those_of_the_paired_test() -> None:
    row = cell(workers=2, verdict="not shown", loss=0.002, loss_bound=0.02, margin=0.01, pairs=2)
    assert more_seeds(row, FREE) == 1
    assert more_seeds(replace(row, loss=0.02), FREE) is None, "it is worse"
    assert more_seeds(replace(row, diverged=1), FREE) is None


def test_nothing_is_made_up_where_nothing_was_measured() -> None:
    rows = [cell(seconds=3.0), cell("tuned", 4, seconds=1.0, cost=0.9)]
    answer = answer_of(rows, TARGETED, (1, 4))
    assert (answer.pick, answer.settings, answer.workers) == (1, None, None)
    assert answer.total is not None
    assert "not measured" in dict(answer_lines(found_of(rows, answer)))["settings"]
    lost = answer_of([cell("tuned", 4, verdict="not shown")], FREE, (1, 4))
    assert (lost.conclusion, lost.pick) == ("diverged", None)


def found_of(rows: list[FrontierRow], answer: FrontierAnswer, by: FrontierCriteria = TARGETED) -> FrontierFound:
    quality = by.quality
    return FrontierFound(quality.name, quality.direction, by.target, 1.0, rows, FrontierVolumes(1.0, None, []), answer)


def test_lines_say_what_each_buys_at_what_price_and_what_this_machine_can_do() -> None:
    rows = of_issue()
    answer = answer_of(rows, TARGETED, (1, 2, 4), OwnMachine(2), ["search: none of its trainings ended"])
    answer = replace(answer, fastest_command="elastune run x --workers 4")
    lines = answer_lines(found_of(rows, answer))
    assert [name for name, _ in lines] == ["settings", "more", "price", "faster", "here", "rule", "not done"]
    said = dict(lines)
    assert said["settings"] == (
        "tuned settings instead of the program's own, on 1 worker: 3.45 times as fast (measured), at 0.29 times the "
        "cost"
    )
    assert said["more"] == (
        "4 instead of 1 workers, with the same settings: 1.77 times as fast (modelled, 1.41 to 2.21), at 2.27 times "
        "the cost, less than their price or than the model's error"
    )
    assert said["price"] == "no row that reaches 0.9 is cheaper than the pick"
    assert said["faster"].startswith("the fastest row that reaches 0.9, tuned settings (batch 40, lr 0.1) on 4 workers")
    assert said["faster"].endswith(": elastune run x --workers 4")
    assert said["here"] == "this machine has 2 cores, enough for the pick"
    wide = [rows[0], rows[4]]
    answer = answer_of(wide, TARGETED, (1, 4), OwnMachine(2))
    answer = replace(answer, this_machine=OwnMachine(2, 0, 0, "elastune run x --workers 1"))
    said = dict(answer_lines(found_of(wide, answer)))
    assert said["workers"].endswith("on 1 these settings were not trained, so that only the time there is known")
    assert said["here"] == (
        "this machine has 2 cores; of the rows with so few workers use the program's own settings (batch 10, lr 0.1) "
        "on 1 worker, in 3.01 s: elastune run x --workers 1"
    )
    gpus = found_of(wide, replace(answer, this_machine=OwnMachine(8, 4)))
    assert (
        dict(answer_lines(gpus))["here"]
        == "this machine has 8 cores and 4 GPUs: no row with so few workers reaches 0.9"
    )


def test_an_older_journal_is_read() -> None:
    found = found_of(of_issue(), answer_of(of_issue(), TARGETED, (1, 2, 4)))
    assert decode(encode(found)) == found
    line = encode(found).decode()
    start, end = line.index('"answer":'), line.index(',"reasons"')
    older = (
        line[:start] + '"answer":"Use 2 workers.","pick":1,"command":"elastune run x","command_trial":3' + line[end:]
    )
    read = decode(older)
    assert isinstance(read, FrontierFound)
    assert answer_lines(read) == [], "it says nothing of who earned it"
    assert read.answer == FrontierAnswer("Use 2 workers.", pick=1, command="elastune run x", command_trial=3)
    with pytest.raises(ValueError, match="rows by their numbers"):
        decode(line.replace('"pick":3', '"pick":9'))


# -- over random tables -----------------------------------------------------------------------------------------------


def table(draw: Random) -> tuple[list[FrontierRow], FrontierCriteria]:
    """Rows as a frontier may find them, of random settings, times, qualities and labels."""
    by = draw.choice((TARGETED, FREE))
    beyond, counts = draw.choice((1, 2, 8)), sorted(draw.sample(COUNTS, draw.randint(1, 4)))
    factor = draw.choice((1.1, 1.4, None))
    rows = []

    def add(role: str, workers: int, config: dict[str, Any], one_s: float) -> None:
        serial = draw.uniform(0.0, 0.9)
        seconds = {n: one_s * (serial + (1 - serial) / n) * draw.uniform(0.95, 1.05) for n in counts}
        quality, wide = draw.uniform(0.8, 0.99), draw.uniform(0.001, 0.05)
        ends = (max(0.0, quality - wide), min(1.0, quality + wide))
        met = "holds" if ends[0] >= 0.9 else "falls" if ends[1] < 0.9 else "not shown"
        verdict = met if by.target is not None else draw.choice(("holds", "holds", "not shown", "falls"))
        made = timed(role, workers, seconds, beyond=beyond, config=config, quality=quality, ci=ends, verdict=verdict)
        points = [p if p.seconds_label == "measured" else replace(p, seconds_factor=factor) for p in made.scaling]
        if made.seconds_label == "modelled":
            made = replace(made, seconds_factor=factor)
        values = [quality - wide / 4, quality, quality + wide / 4]
        mode, batch = draw.choice(("exact", "fast")), config["batch_size"]
        label = "emulated" if mode == "exact" and workers > 1 else "measured"
        made = replace(made, scaling=points, seed_values=values, mode=mode, quality_label=label, batch_size=batch)
        rows.append(replace(made, loss=0.0, loss_bound=draw.uniform(0.001, 0.05), margin=0.01, pairs=3))

    for workers in counts:
        if draw.random() < 0.9:
            add("naive", workers, {"lr": 0.1 * workers, "batch_size": 10 * workers}, draw.uniform(1, 10))
    settings = [{"lr": draw.uniform(0.01, 1), "batch_size": draw.choice((10, 20, 40))} for _ in range(2)]
    for workers in counts:
        if draw.random() < 0.8 or not rows:
            add("tuned", workers, draw.choice(settings), draw.uniform(0.5, 10))
    return mark_front(rows, by), by


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_sentence_pick_command_table_and_pictures_agree(first: int) -> None:
    for seed in range(first, first + 20):
        check(seed)


def check(seed: int) -> None:
    rows, by = table(Random(seed))
    parts = tuple(sorted({r.workers for r in rows}))
    answer = answer_of(rows, by, parts, OwnMachine(2), ["policy gns: no training with it is in the table"])
    if answer.pick is not None:
        answer = replace(
            answer, command=f"elastune run x --workers {rows[answer.pick].workers} --set lr={rows[answer.pick].lr}"
        )
    found = found_of(rows, answer, by)
    check_the_sentence(rows, answer)
    check_who_earned_it(rows, answer)
    check_the_pick(rows, answer, by)
    check_what_is_shown(found)


def check_the_sentence(rows: list[FrontierRow], answer: FrontierAnswer) -> None:
    words = answer.sentence
    assert 3 <= len(words.split()) <= MOST_WORDS, words
    assert words.endswith(".")
    if answer.pick is None:
        assert words.startswith(("No settings were found", "The program's own settings diverged"))
        return
    chosen = rows[answer.pick]
    counts = [int(n) for n in re.findall(r"(\d+) workers?\b", words.replace("One worker", "1 worker"))]
    others = {gain.workers for gain in (answer.more_workers,) if gain is not None}
    others |= {gain.beside_workers for gain in (answer.workers,) if gain is not None}
    assert set(counts) <= {chosen.workers, *others}, words
    assert chosen.workers in counts, words
    if answer.conclusion in ("fewest are enough", "fewest may be enough"):
        assert "enough" in " ".join(words.split()[:8]), "that comes first"
    # Each factor that is named is that of what it is named for.
    named = re.findall(r"([\d.e+-]+) times (as fast by settings|by workers|the speed|as fast|the cost)", words)
    gains = {
        "as fast by settings": answer.settings,
        "the speed": answer.settings,
        "by workers": answer.workers,
        "the cost": answer.more_workers if answer.conclusion == "fewest are enough" else answer.workers,
        "as fast": answer.more_workers if answer.conclusion == "fewest are enough" else answer.workers,
    }
    for value, what in named:
        gain = gains[what]
        assert gain is not None, words
        assert value == number(gain.times_the_cost if what == "the cost" else gain.times_as_fast, 2), words


def check_who_earned_it(rows: list[FrontierRow], answer: FrontierAnswer) -> None:
    """Settings beside the program's own on as many workers; workers beside fewer with the same settings."""
    if answer.pick is None:
        return
    chosen = rows[answer.pick]
    alone = {point.workers: point for point in chosen.scaling}
    fewest = min(alone)
    if answer.workers is not None:
        assert (answer.workers.workers, answer.workers.beside_workers) == (chosen.workers, fewest)
        assert answer.workers.times_as_fast == pytest.approx(alone[fewest].seconds / chosen.seconds)
        assert answer.workers.times_the_cost == pytest.approx(chosen.cost / alone[fewest].cost)
        labels = {alone[fewest].seconds_label, chosen.seconds_label}
        assert answer.workers.label == ("modelled" if "modelled" in labels else "measured")
        if answer.workers.beside is not None:
            beside = rows[answer.workers.beside]
            assert (beside.settings, beside.workers) == (chosen.settings, fewest)
    else:
        assert chosen.workers == fewest
    if answer.settings is not None:
        assert answer.settings.workers == answer.settings.beside_workers == fewest
        assert answer.settings.beside is not None
        base = rows[answer.settings.beside]
        assert (base.role, base.workers) == ("naive", fewest)
        assert answer.settings.times_as_fast == pytest.approx(base.seconds / alone[fewest].seconds)
        assert answer.total is not None
        by_workers = 1.0 if answer.workers is None else answer.workers.times_as_fast
        assert answer.total.times_as_fast == pytest.approx(answer.settings.times_as_fast * by_workers)
    if answer.conclusion == "use" and answer.workers is not None and chosen.mode == "exact":
        assert answer.workers.times_as_fast > answer.workers.times_the_cost, "its workers are worth their price"
    if answer.conclusion == "fewest are enough":
        assert chosen.workers == fewest
        for point in chosen.scaling:
            dear = chosen.seconds / point.seconds <= point.cost / chosen.cost
            unsure = point.seconds_label == "modelled" or chosen.seconds_label == "modelled"
            assert point.workers == fewest or dear or unsure


def check_the_pick(rows: list[FrontierRow], answer: FrontierAnswer, by: FrontierCriteria) -> None:
    holding = [r for r in rows if r.verdict == "holds"]
    if answer.pick is None:
        assert not holding
        return
    chosen = rows[answer.pick]
    assert chosen.verdict != "falls"
    if answer.shown is not None:
        shown = rows[answer.shown]
        assert (chosen.role, chosen.verdict, shown.verdict) == ("naive", "not shown", "holds")
        assert chosen.seconds <= shown.seconds
        assert chosen.cost <= shown.cost
        assert answer.more_seeds is not None
    elif holding:
        assert chosen.verdict == "holds"
        if by.target is not None:
            same = [r for r in holding if r.workers == chosen.workers]
            assert not any(r.seconds < chosen.seconds and r.cost < chosen.cost for r in same), "no row beats it"
    here = answer.this_machine
    assert here is not None
    assert here.row is None or rows[here.row].workers <= here.cores
    if answer.cheapest is not None and answer.cheapest.beside is not None:
        assert rows[answer.cheapest.beside].verdict == "holds"
        assert rows[answer.cheapest.beside].cost == min(r.cost for r in holding if by.target is not None or r.cost)


def check_what_is_shown(found: FrontierFound) -> None:
    answer, rows = found.answer, found.rows
    cells = frontier_table(found)
    strong = frozenset() if answer.pick is None else frozenset({answer.pick})
    assert cells.strong == strong
    assert [i for i, row in enumerate(cells.rows) if row[0].endswith("pick")] == sorted(strong)
    story = StudyOverview(StudyStarted({"kind": "frontier"}, {}), frontier=found, finished=StudyFinished("x", 1.0))
    page = frontier_page(story)
    assert (page.answer, page.command) == (answer.sentence, answer.command)
    assert answer.sentence in [line for part in explain_frontier(story).parts for line in part.lines]
    for figure in (tradeoff_figure(found), pareto_figure(found)):
        for panel in figure.panels:
            rings = [series for series in panel.series if series.marker == "ring"]
            assert len(rings) == (answer.pick is not None)
            if answer.pick is not None:
                assert panel.series[-1] is rings[0], "on top of all others"
                across = rows[answer.pick].seconds if figure.name == "front" else rows[answer.pick].workers
                assert rings[0].x == (across,)
                value = rings[0].y[0]
                assert value is not None
                assert panel.beyond(value) == 0, "it is never beyond the axis"
    for panel in tradeoff_figure(found).panels:
        for series in panel.series:
            if series.name == TUNED and panel.title == "What does it buy?":
                joined = [r for r in rows if r.role == "tuned" and r.seconds in series.y]
                assert len({r.settings for r in joined}) == 1, "a line is of one setting"
            if series.name == ELSEWHERE and answer.pick is not None and panel.title == "What does it buy?":
                assert series.y == tuple(point.seconds for point in rows[answer.pick].scaling)
    if found.target is not None:
        joined = next(series for series in pareto_figure(found).panels[0].series if series.name.startswith("Pareto"))
        missed = {r.seconds for r in rows if r.verdict == "falls"}
        assert not missed & set(joined.x), "who misses the target is not on its front"
    lines = dict(answer_lines(found))
    assert lines["not done"].startswith("policy gns")
