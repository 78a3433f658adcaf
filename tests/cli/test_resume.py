"""Going on: for longer, by ``elastune resume`` alone, and never with something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Command

from elastune.cli.groups import command_line_of, resumed_words
from elastune.core.journal.files import JournalWriter, read
from elastune.core.journal.records import RunFailed, RunStarted, StudyStarted
from elastune.core.run import CommandLine, Program
from elastune.tuning.frontier.checked_request import check
from elastune.tuning.study.request import FrontierRequest

ONE_CYCLE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

config = {"epochs": 2, "kind": "one_cycle"}

def train(session):
    data = TensorDataset(torch.linspace(-1, 1, 64).reshape(64, 1))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps, kinds = 4 * session.config["epochs"], torch.optim.lr_scheduler
    one = session.config["kind"] == "one_cycle"
    schedule = kinds.OneCycleLR(optimizer, 0.1, total_steps=steps) if one else kinds.CosineAnnealingLR(optimizer, steps)
    model, optimizer, schedule = session.prepare(model, optimizer, schedule)
    for _ in session.epochs(session.config["epochs"]):
        for (x,) in session.batches(data, batch_size=16):
            session.backward((model(x) - 3 * x).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        session.report(rate=optimizer.param_groups[0]["lr"])
"""


def begun(out: Path, kind: type) -> list[Any]:
    return [entry.record for entry in read(out / "journal.jsonl") if isinstance(entry.record, kind)]


def test_a_finished_run_trains_longer_with_the_bits_of_one_that_was_longer_from_the_start(
    elastune: Command, here: Path, finished_run: Path
) -> None:
    whole = elastune(
        "run", "linear.py", "--set", "lr=0.2", "--seed", "4", "--slots", "4", "--epochs", "4", "--json"
    ).json
    for number, more in enumerate((("--epochs", "4"), ("--set", "epochs=4"), ("--max-steps", "12", "--epochs", "4"))):
        out = here / f"longer{number}"
        shutil.copytree(finished_run, out)
        command = ("run", "linear.py", "--set", "lr=0.2", "--seed", "4", "--json", "--out", out, "--resume")
        result = elastune(*command, *more).json
        if "--max-steps" in more:
            assert (result["steps"], result["stopped"]) == (12, "max_steps")
            result = elastune("resume", out, "--max-steps", "16", "--workers", "2", "--json").json
            assert result["workers"] == 2
        assert (result["sha256"], result["steps"]) == (whole["sha256"], 16)
    assert set(begun(here / "longer2", RunStarted)[-1].command.words) == {
        *("run", "--epochs=4", "--seed=4", "--set=lr=0.2", "--max-steps=16", "--workers=2", "--", "linear.py")
    }


def test_a_run_that_would_be_another_is_refused_and_stays_as_it_was(
    elastune: Command, here: Path, finished_run: Path
) -> None:
    out = here / "out"
    shutil.copytree(finished_run, out)
    elastune("report", "out", "--json")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    command = ("run", "linear.py", "--set", "lr=0.2", "--out", "out", "--resume")
    assert "seed it was begun with (got 0, begun with 4): use --seed 4" in elastune(*command).line
    assert "setting lr it was begun with (got 0.5, begun with 0.2)" in elastune("resume", "out", "--set", "lr=0.5").line
    assert "(got 2, begun with 4): use --slots 4" in elastune("resume", "out", "--slots", "2").line
    assert (
        "at least as many epochs as it was begun for (got 1, begun for 2)"
        in elastune("resume", out, "--epochs", 1).line
    )
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert not begun(out, RunFailed)


def test_it_has_the_slots_that_it_was_begun_with_on_any_number_of_workers(elastune: Command, here: Path) -> None:
    command = ("run", "linear.py", "--out", "out", "--json")
    wide = elastune(*command, "--slots", "6", "--max-steps", "4").json
    assert wide["num_slots"] == 6
    assert elastune(*command, "--resume", "--workers", "2").json["num_slots"] == 6, "the default would be 2"


@pytest.mark.parametrize("kind", ["one_cycle", "cosine"])
def test_what_a_schedule_does_beyond_its_end_is_said(elastune: Command, here: Path, kind: str) -> None:
    (here / "rates.py").write_text(ONE_CYCLE)
    assert elastune("run", "rates.py", "--set", f"kind={kind}", "--out", "out", "--json").code == 0
    before = (here / "out" / "journal.jsonl").read_bytes()
    longer = ("resume", "out", "--epochs", "4")
    if kind == "one_cycle":
        line = elastune(*longer).line
        assert "OneCycleLR goes on for no longer than that was built for (got 4 epochs; it was built for 8" in line
        assert "--start-from" in line
        assert (here / "out" / "journal.jsonl").read_bytes() == before
    else:
        result = elastune(*longer, "--json")
        assert "CosineAnnealingLR was built for 8 steps; beyond, its rate rises again" in result.err
        assert result.json["metrics"]["rate"] == pytest.approx(0.1), "so it does"


def test_a_study_and_a_run_do_not_share_a_folder(elastune: Command, here: Path, finished_study: Path) -> None:
    shutil.copytree(finished_study, here / "out")
    before = {path: path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()}
    line = elastune("run", "linear.py", "--out", "out", "--resume").line
    assert "a run goes on in the folder of a run (got out has the journal of a study)" in line
    assert {path: path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()} == before


def test_a_study_goes_on_by_its_folder_alone(
    elastune: Command, here: Path, finished_study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished_study, here / "out")
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    before = (here / "out" / "journal.jsonl").read_bytes()
    for change, expected in (
        (("--seed", "8"), "a study resumes with the seed it was begun with (got 8, begun with 7): use --seed 7"),
        (("--set", "batch_size=16"), "setting batch_size it was begun with (got 16, begun with 32)"),
        (("--sampler", "tpe"), "sampler it was begun with (got tpe, begun with random): use --sampler random"),
        (("--objective", "seconds:min"), "use --objective loss:min"),
    ):
        assert expected in elastune("resume", here / "out", *change).line
    assert (here / "out" / "journal.jsonl").read_bytes() == before
    result = elastune("resume", here / "out", "--trials", "4", "--json")
    assert result.json["trials"] == {"complete": 4}
    assert "--trials=4" in begun(here / "out", StudyStarted)[-1].command.words
    assert "--trials=3" not in begun(here / "out", StudyStarted)[-1].command.words


def test_a_frontier_is_compared_with_its_journal(elastune: Command, here: Path) -> None:
    request = FrontierRequest(Program(Path("linear.py")), here / "out", workers=(1, 2), budget_s=9.0, seed=3)
    words = ("frontier", "--workers=1,2", "--budget=9s", "--seed=3", "--", "linear.py")
    with JournalWriter(here / "out" / "journal.jsonl") as journal:
        journal.write(StudyStarted(check(request).settings, command=CommandLine(words, str(here))))
    before = (here / "out" / "journal.jsonl").read_bytes()
    for change, expected in (
        (("--seed", "4"), "a study resumes with the seed it was begun with (got 4, begun with 3): use --seed 3"),
        (("--mode", "fast"), "mode it was begun with (got fast, begun with exact): use --mode exact"),
        (("--epochs", "5"), "epochs it was begun with (got 5, begun with none): leave out --epochs"),
        (("--constraint", "lr < 1"), 'constraints it was begun with (got ["lr < 1"], begun with []): leave it out'),
    ):
        assert expected in elastune("resume", "out", *change).line
    assert (here / "out" / "journal.jsonl").read_bytes() == before


def test_a_folder_that_moved_names_the_command(elastune: Command, here: Path, finished_run: Path) -> None:
    shutil.copytree(finished_run, here / "out")
    journal = here / "out" / "journal.jsonl"
    first, *rest = journal.read_text().splitlines(keepends=True)
    data = json.loads(first)
    data["command"] = {"words": ["run", "--seed=4", "--", "gone.py"], "folder": str(here / "gone")}
    journal.write_text(json.dumps(data) + "\n" + "".join(rest))
    line = elastune("resume", "out").line
    assert f"no folder {here / 'gone'}" in line
    assert f"elastune run --seed=4 --out={here / 'out'} --resume -- gone.py" in line
    data["command"] = None
    journal.write_text(json.dumps(data) + "\n" + "".join(rest))
    assert "in Python, call it again with resume=True" in elastune("resume", "out").line
    assert "the output folder comes first" in elastune("resume", "--trials", "4", "out").line
    assert "--resume --out memory://run" in elastune("resume", "memory://run").line
    journal.write_text("".join(rest))
    assert "only a run, a study or a frontier can be resumed" in elastune("resume", "out").line


def test_what_was_given_is_given_again_but_for_what_changes() -> None:
    words = ("run", "--epochs=2", "--set=lr=0.2", "--set=kind=a=b", "--workers=4", "--offload", "--", "train.py")
    given, out = CommandLine(words, "/there"), Path("/out")
    tail = [f"--out={out}", "--resume", "--", "train.py"]
    assert resumed_words(given, [], out) == [*words[:-2], *tail]
    changed = resumed_words(given, ["--workers", "1:8", "--set", "lr=0.1", "--json"], out)
    assert changed == [
        *("run", "--epochs=2", "--set=kind=a=b", "--offload", "--workers=1:8", "--set=lr=0.1", "--json"),
        *tail,
    ]
    longer = resumed_words(given, ["--set", "epochs=9"], out)
    assert "--epochs=2" not in longer, "it would go over the setting"
    short = CommandLine(("run", "--max-steps=8", "--", "train.py"), "/there")
    assert "--max-steps=8" not in resumed_words(short, ["--epochs", "9"], out), "it would end before"
    assert "--max-steps=9" in resumed_words(short, ["--epochs", "9", "--max-steps", "9"], out)


@pytest.mark.parametrize("name", ["run", "tune", "frontier", "tree"])
def test_every_option_is_recorded_as_the_command_line_names_it(name: str) -> None:
    from inspect import signature

    import typer
    from typer.models import OptionInfo

    from elastune.cli.app import app

    (command,) = (each.callback for each in app.registered_commands if each.callback.__name__ == name)  # type: ignore[union-attr]
    options = {each.name: each.opts for each in typer.main.get_command(app).commands[name].params}  # type: ignore[attr-defined]
    for parameter in signature(command).parameters.values():
        if any(isinstance(each, OptionInfo) for each in parameter.annotation.__metadata__):
            given = command_line_of(name, [parameter], {parameter.name: "text"}).words[1:-1]
            assert not given or given[0].removesuffix("=text") in options[parameter.name]


@pytest.mark.parametrize("words", [[], ["run", "--epochs=2"], ["init", "--", "x.py"], ["nonsense", "--"]])
def test_a_command_that_elastune_did_not_write_is_refused(
    elastune: Command, here: Path, finished_run: Path, words: list[str]
) -> None:
    lines = [json.loads(line) for line in (finished_run / "journal.jsonl").read_text().splitlines()]
    edited = [
        {**line, "command": {**line["command"], "words": words}} if line.get("command") else line for line in lines
    ]
    assert edited != lines
    (here / "edited").mkdir()
    (here / "edited" / "journal.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in edited))
    result = elastune("resume", "edited")
    assert (result.code, "as elastune wrote it" in result.line) == (2, True), result.err
