"""The frontier of a command: processes that train for real, times of what ran, and a model for the rest."""

import sys
from pathlib import Path

import pytest

from elastune.cli import main
from elastune.core.journal.files import read
from elastune.core.journal.records import FrontierFound, StudyFinished, TrialStarted
from elastune.core.mesh import Mesh
from elastune.train.machine import cores
from elastune.tuning.frontier.by_command import fitted
from elastune.tuning.frontier.trainings import StepKind

SCRIPT = """
import json, random, sys, time

lr, batch, workers, seed = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
random.seed(seed)
for epoch in range(1, 3):
    time.sleep(0.01 + 0.06 / workers)
    loss = abs(lr - 0.1) + batch * workers / 2000 + 1 / (1 + 4 * epoch)
    print(json.dumps({"epoch": epoch, "accuracy": 1 - loss + random.gauss(0, 0.001)}))
"""
SPACE = """
objectives: {accuracy: max}
lr: {low: 0.02, high: 0.5, log: true, default: 0.06}
batch_size: {choices: [16, 32, 64], default: 16}
epochs: 2
"""
WORDS = "{python} train.py {{lr}} {{batch_per_worker}} {{workers}} {{seed}} {{epochs}}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "space.yaml").write_text(SPACE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(*more: str, command: str = WORDS) -> list[str]:
    line = command.format(python=sys.executable)
    return ["frontier", "--command", line, "--space", "space.yaml", "--seeds", "2", "--out", "out", *more]


def test_a_frontier_of_a_command(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    beyond = max(4, 2 * cores())
    assert main(words("--workers", f"1,2,{beyond}", "--budget", "6s")) == 0
    said = capfd.readouterr().out
    assert f"train   {sys.executable} train.py 0." in said.replace("\\\n", "")
    entries = read(folder / "out" / "journal.jsonl")
    (found,) = [entry.record for entry in entries if isinstance(entry.record, FrontierFound)]
    assert {row.workers for row in found.rows} == {1, 2}  # no row without a training
    assert all((row.seconds_label, row.quality_label) == ("measured", "measured") for row in found.rows)
    naive = {row.workers: row for row in found.rows if row.role == "naive"}
    assert naive[1].batch_size == 16
    assert naive[2].batch_size == 32
    assert naive[2].lr == pytest.approx(0.12)
    assert naive[2].seconds < naive[1].seconds
    point = next(each for each in naive[1].scaling if each.workers == beyond)
    assert point.seconds_label == "modelled"
    assert any(text.startswith(f"{beyond} workers: this machine has") for text in found.answer.not_done)
    phases = [entry.record.phase for entry in entries if isinstance(entry.record, TrialStarted)]
    assert list(dict.fromkeys(phases)) == ["naive", "search", "confirm"]
    assert (folder / "out" / "report.html").exists()


@pytest.mark.soak
def test_a_frontier_of_a_command_goes_on(folder: Path) -> None:
    def naive() -> list[TrialStarted]:
        started = [entry.record for entry in read(folder / "out" / "journal.jsonl")]
        return [each for each in started if isinstance(each, TrialStarted) and each.phase == "naive"]

    assert main(words("--workers", "1,2", "--budget", "8s")) == 0
    assert len(naive()) == 4
    before = len(read(folder / "out" / "journal.jsonl"))
    assert main(["resume", "out", "--budget", "12s"]) == 0
    assert len(naive()) == 4  # none is trained again
    entries = read(folder / "out" / "journal.jsonl")
    assert any(isinstance(entry.record, TrialStarted) for entry in entries[before:])
    assert [e.record.reason for e in entries if isinstance(e.record, StudyFinished)][-1] == "a budget of 12 s"


@pytest.mark.parametrize(
    ("more", "space", "says"),
    [
        (["--mesh", "data=2"], SPACE, "decides itself how its processes compute"),
        (["--throughput"], SPACE, "decides itself how its processes compute"),
        (["--policy", "gns"], SPACE, "cannot change from outside"),
        (["--cluster", "ray"], SPACE, "run on this machine"),
        (["--workers", "4096"], SPACE, "the fewest processes of a command must run here"),
        ([], SPACE.replace(", default: 0.06", ""), "lr and batch_size"),
        ([], SPACE.replace("objectives: {accuracy: max}", ""), "needs a quality objective"),
    ],
)
def test_what_a_command_cannot_have_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], more: list[str], space: str, says: str
) -> None:
    (folder / "space.yaml").write_text(space)
    assert main(words("--budget", "9s", *(["--workers", "1"] if "--workers" not in more else []), *more)) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    assert not (folder / "out").exists()


def test_a_command_that_fails_with_its_own_settings_ends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "{python} train.py {{lr}} x{{batch_per_worker}} {{epochs}}"
    assert main(words("--workers", "1", "--budget", "20s", command=command)) == 2
    assert "must train with its own settings" in capsys.readouterr().err


def test_times_of_other_counts_are_modelled() -> None:
    times = fitted({1: [11.0, 9.0], 2: [6.0]})
    assert times.shape(4) == pytest.approx(4.0)
    assert times.miss is None  # two points fit exactly
    more = fitted({1: [10.0], 2: [6.0], 4: [5.0]})
    assert more.miss is not None
    assert more.miss > 1
    assert fitted({1: [10.0]}).shape(8) == fitted({1: [10.0]}).shape(1)
    assert times.factor_of(StepKind(Mesh(data=4))) is None
