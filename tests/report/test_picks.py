"""What a study recommends: headline, pick, table, figure and command are of one trial, which may be recommended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.studies import SETTINGS, Telling

from elastune.cli.results import PickOptions, result_of
from elastune.core.errors import UserError
from elastune.core.journal.records import DataContext, RunContext, RunFinished, StudyStarted, TrialFinished
from elastune.report.explain import explain
from elastune.report.overviews import gather_study
from elastune.report.page import study_page, write_report
from elastune.tuning.study.results import Study

THREE = {"accuracy": "max", "seconds": "min", "cost": "min"}


def study_of(rows: list[tuple[float, ...]], objectives: dict[str, str] = THREE, **settings: object) -> Telling:
    journal = Telling({**SETTINGS, "objectives": objectives, **settings})
    for number, row in enumerate(rows):
        values = dict(zip(objectives, row, strict=True))
        journal.start(number, lr=0.001 * (number + 1), workers=1 + number % 2).wait(5)
        journal.tell(TrialFinished(number, "complete", values, dict(values), seconds=5.0, worker_seconds=5.0))
    return journal.finish()


def of(journal: Telling) -> Study:
    return Study.of(Path("out"), journal.entries)


@pytest.mark.parametrize("seed", range(12))
def test_headline_pick_table_figure_and_command_are_of_one_trial(seed: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(seed)
    for case in range(4):
        count = int(draw.integers(1, 9))
        objectives = THREE if case % 2 else {"loss": "min", "seconds": "min"}
        rows = [tuple(float(x) for x in draw.integers(1, 30, len(objectives)) / 30) for _ in range(count)]
        outcome = study_of(rows, objectives)
        out = outcome.write(tmp_path / str(case))
        study = Study.load(out)
        choices = study.choices()
        pick = choices[0].trial
        result = result_of(out)
        assert result.data["pick"] == result.data["choices"][0]
        assert [each["trial"] for each in result.data["choices"]] == [each.trial.number for each in choices]
        assert result.data["pick"]["trial"] == study.pick().trial.number == pick.number
        (picked,) = [line for line in result.lines if line.startswith("pick ")]
        assert picked.startswith(f"pick    trial {pick.number} ({choices[0].reason})")
        commands = [line.removeprefix("train   ") for line in result.lines if line.startswith("train   ")]
        assert commands == [each.command for each in choices]
        for each in choices:
            assert f"--set lr={each.trial.config['lr']!r} " in each.command
        (own,) = [row for row in result.tables[0].rows if row[-1].startswith("pick")]
        assert own[0] == str(pick.number)

        story = gather_study(outcome.entries)
        assert story is not None
        page = study_page(story, study)
        assert page.answer.startswith(f"Trial {pick.number}, {choices[0].reason}: ")
        assert page.command == choices[0].command
        assert page.command_note.startswith(f"Trains the pick, trial {pick.number}, again")
        (ring,) = [s for s in page.figures[0].panels[0].series if s.name == "pick"]
        assert (ring.x, ring.y) == ((pick.values["seconds"],), (pick.values[study.objectives[0].name],))
        words = next(part.lines for part in explain(study).parts if part.title == "Which trial to take")
        assert words[0].startswith(f"The pick is trial {pick.number} (")
        assert list(words[1::2]) == commands
        numbers = [each.trial.number for each in choices]
        assert set(numbers) <= {trial.number for trial in study.front()}


def test_the_example_of_a_study_whose_least_time_is_chance() -> None:
    choices = of(study_of([(0.99, 2.0, 2.0), (0.97, 1.5, 1.5), (0.11, 1.0, 1.0)])).choices()
    assert [each.trial.number for each in choices] == [0, 1]


def test_until_binds_what_is_recommended(tmp_path: Path) -> None:
    outcome = study_of([(0.758, 5.0), (0.287, 1.0)], {"accuracy": "max", "seconds": "min"}, until=["accuracy >= 0.5"])
    study = of(outcome)
    assert [each.trial.number for each in study.choices()] == [0]
    assert study.pick(weights={"seconds": 1.0}).trial.number == 0
    assert study.pick(seconds=2.0).trial.number == 1, "a target of one's own takes its place"
    outcome = study_of([(0.3, 5.0), (0.287, 1.0)], {"accuracy": "max", "seconds": "min"}, until=["accuracy >= 0.5"])
    study, out = of(outcome), outcome.write(tmp_path / "out")
    with pytest.raises(UserError, match="must reach accuracy >= 0.5.*the best accuracy is 0.3"):
        study.pick()
    result = result_of(out)
    assert result.data["pick"] is None
    assert result.data["choices"] == []
    (line,) = [line for line in result.lines if line.startswith("pick")]
    assert line.startswith("pick    none: a trial must reach accuracy >= 0.5")
    assert "No pick: a trial must reach accuracy &gt;= 0.5" in write_report(out).read_text()
    assert "None: a trial must reach accuracy >= 0.5" in str(explain(study))
    assert result_of(out, PickOptions(targets={"accuracy": 0.29})).data["pick"]["trial"] == 0


def test_a_resumed_study_has_the_newest_until() -> None:
    result = study_of([(0.758, 5.0), (0.287, 1.0)], {"accuracy": "max", "seconds": "min"}, until=["accuracy >= 0.9"])
    result.tell(StudyStarted({**result.settings, "until": ["accuracy >= 0.7"]}, resumed=True))
    assert of(result).pick().trial.number == 0


def test_nothing_worse_than_the_programs_own_settings_is_recommended() -> None:
    journal = Telling({**SETTINGS, "defaults": {"lr": 0.1}})
    for number, (lr, accuracy, seconds) in enumerate([(0.1, 0.90, 9.0), (0.2, 0.91, 8.0), (0.3, 0.88, 1.0)]):
        journal.start(number, lr=lr).wait(1).complete(number, accuracy, seconds)
    assert [each.trial.number for each in of(journal).choices()] == [1]
    journal.settings["defaults"]["lr"] = 0.7
    assert [each.trial.number for each in of(journal).choices()] == [1, 2], "their result is not known here"


def test_nothing_that_guesses_is_recommended() -> None:
    with pytest.raises(UserError, match="the auc 0.5 of chance"):
        of(study_of([(0.48, 5.0)], {"auc": "max", "seconds": "min"})).pick()


@pytest.mark.parametrize(
    ("workers", "more", "once"),
    [((2, 2, 2), {}, True), ((1, 2, 2), {}, False), ((2, 2, 2), {"trial_workers": [1, 2]}, False)],
)
def test_time_and_its_price_count_once_by_the_settings_not_by_the_values(
    workers: tuple[int, ...], more: dict[str, object], once: bool
) -> None:
    journal = Telling({**SETTINGS, "objectives": THREE, **more})
    for number, count in enumerate(workers):
        journal.start(number, lr=0.1).wait(1)
        journal.entries[-1].record.execution["workers"] = count
        values = {"accuracy": 0.9 + number / 100, "seconds": 1.0 + number, "cost": 2.0 + 2 * number}
        journal.tell(TrialFinished(number, "complete", values, values, seconds=1.0))
    study = of(journal)
    assert study.proportional == ({"cost"} if once else frozenset())
    assert [each.name for each in study.counted] == ["accuracy", "seconds", *([] if once else ["cost"])]


@pytest.mark.parametrize("name", ["node", "group"])
def test_parts_of_a_tree_of_classes_are_not_compared(name: str, tmp_path: Path) -> None:
    journal = Telling({**SETTINGS, "objectives": {"accuracy": "max"}})
    for number, node in enumerate(["", "0", "1"]):
        journal.start(number, lr=0.1).wait(1)
        journal.entries[-1].record.config.update({"tree": [[0, 1], [2]], name: node})
        journal.tell(TrialFinished(number, "complete", {"accuracy": 0.5 + number / 10}, {"accuracy": 0.5}, seconds=1.0))
    out = journal.finish().write(tmp_path / "out")
    study = Study.load(out)
    assert study.tasks == ("the root", "0", "1")
    with pytest.raises(UserError, match="among trials of one task.*3 parts"):
        study.pick()
    result = result_of(out)
    assert (result.data["pick"], result.data["front"], result.data["choices"]) == (None, [], [])
    assert result.data["tasks"] == {"0": "the root", "1": "0", "2": "1"}
    assert not any(line.startswith("pick") for line in result.lines)
    assert [row[0] for row in result.tables[0].rows] == ["the root", "0", "1"]
    page = write_report(out).read_text()
    assert "so none is picked" in page
    assert "Trains the pick" not in page
    words = str(explain(study))
    assert "3 parts of a tree of classes: they have no front together" in words
    assert "None: a pick is among trials of one task" in words
    assert "What to try next" not in words


def measured(signals: dict[str, tuple[float, float | None]] | None = None, **settings: object) -> Telling:
    """Two trials of data whose most frequent class has .3 of the samples."""
    journal = Telling({**SETTINGS, "defaults": {}})
    context = RunContext(DataContext(90, classes=3, largest_class=0.3), 10, "cpu", "any", 1)
    for number, accuracy in enumerate([0.25, 0.24]):
        journal.start(number, lr=0.1).wait(1)
        journal.entries[-1].record.config.update(settings)
        journal.entries[-1].record.execution["policy"] = settings.get("policy", "none")
        run = RunFinished("sha", 1, 9, 90, 1.0, {}, signals=signals or {}, context=context)
        values = {"accuracy": accuracy, "seconds": 2.0 - number}
        journal.tell(TrialFinished(number, "complete", values, values, seconds=1.0, run=run))
    return journal


def test_an_accuracy_below_the_share_of_the_most_frequent_class_is_not_recommended() -> None:
    with pytest.raises(UserError, match="the accuracy 0.3 of chance"):
        of(measured()).pick()


def test_a_batch_beyond_the_noise_scale_of_a_trial_is_told_with_the_evidence(tmp_path: Path) -> None:
    measurement = measured({"noise_scale": (44.8, 16.0)}, batch_size=500)
    for entry in measurement.entries:
        if isinstance(entry.record, TrialFinished):
            entry.record.values["accuracy"] += 0.5
    out = measurement.write(tmp_path / "out")
    result = result_of(out)
    said = (
        "Gradient noise scale 45 ± 16 at the end of training: batches up to about that use their samples well "
        "(McCandlish et al. 2018); trial 0's batch of 500 is beyond it, so it buys time with samples: by that model 12 "
        "times those of small batches; what it reaches was trained and measured, which outweighs this estimate."
    )
    assert not any(said in line for line in result.lines), "elastune explain says why"
    assert result.data["pick"]["batch_verdict"] == said
    assert said in str(explain(Study.load(out)))
    assert "is within it." in result_of(measured_at(tmp_path / "small", batch_size=60)).data["pick"]["batch_verdict"]
    for name, settings in {"none": {}, "policy": {"batch_size": 500, "policy": "gns"}}.items():
        unknown = measured_at(tmp_path / name, **settings)
        assert "batch_verdict" not in result_of(unknown).data["pick"], "the batch at its end is not known"


def measured_at(out: Path, **settings: object) -> Path:
    measurement = measured({"noise_scale": (44.8, 16.0)}, **settings)
    measurement.entries[0].record.settings["objectives"] = {"accuracy": "max"}
    for entry in measurement.entries:
        if isinstance(entry.record, TrialFinished):
            entry.record.values["accuracy"] += 0.5
    return measurement.write(out)
