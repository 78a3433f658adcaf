"""Whatever a journal holds: commands that read it tell what is in it, or refuse it in one line."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fuzz_journals import FOREIGN, KINDS, as_line, lines, mutated
from fuzz_kit import everything, fuzz, refusal, say
from hypothesis import given
from hypothesis import strategies as st

from elastune.cli.output import print_result
from elastune.cli.results import PickOptions, Result, result_of
from elastune.core.journal.records import Entry, encode_entry
from elastune.core.run import Program
from elastune.report.page import write_report
from elastune.tuning.simulate.run import SurrogateModel, simulate
from elastune.tuning.study.request import StudyRequest

WRITTEN = {kind: lines(make()) for kind, make in KINDS.items()}
journals = st.sampled_from(sorted(WRITTEN)).flatmap(lambda kind: mutated(WRITTEN[kind]))

PROGRAM = """
objectives = {"loss": "min", "seconds": "min"}

def space(trial):
    return {"lr": trial.suggest_float("lr", 0.01, 1.0, log=True), "kind": trial.suggest_categorical("kind", ["a", "b"])}

def surrogate(config, workers):
    return [(10.0 / workers, {"loss": config["lr"] / epoch}) for epoch in (1, 2, 3)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journals")


def put(folder: Path, content: bytes) -> Path:
    out = folder / "out"
    out.mkdir(exist_ok=True)
    (out / "journal.jsonl").write_bytes(content)
    return out


def shown(result: Result) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        for as_json in (True, False):
            print_result(result, as_json=as_json)


@fuzz(30)
@given(content=journals)
def test_readers_tell_or_refuse(folder: Path, content: bytes) -> None:
    out = put(folder, content)
    before = everything(out)
    for arguments in (
        ("explain", out),
        ("explain", out, "--json"),
        ("export", out, "--csv", folder / "a.csv", "--json", folder / "a.json", "--optuna", folder / "a.log"),
        ("report", out, "--ledger"),
    ):
        for file in folder.glob("a.*"):
            file.unlink()
        refused = say(*arguments).refusal
        assert not (refused and list(folder.glob("a.*"))), "a refused export leaves nothing"
    for wish in (PickOptions(), PickOptions({"accuracy": 0.5}), PickOptions(subset=2)):
        refusal(lambda wish=wish: shown(result_of(out, wish)))
    assert everything(out) == before


@fuzz(6)
@given(content=journals)
def test_reports_are_drawn_or_refused(folder: Path, content: bytes) -> None:
    out = put(folder, content)
    refusal(lambda: write_report(out))


# -- going on with a journal, and learning from one --------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated(folder: Path) -> tuple[StudyRequest, list[bytes]]:
    """The request of a simulated study, and the lines of its journal."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    request = StudyRequest(Program(program), folder / "study", trials=4, sampler="random", workers=2)
    search(request)
    return request, (folder / "study" / "journal.jsonl").read_bytes().splitlines()


def search(request: StudyRequest) -> object:
    space: dict[str, Any] = {}
    exec(compile(PROGRAM, "program.py", "exec"), space)
    return simulate(request, SurrogateModel(space["surrogate"]), space=space["space"])


@fuzz(30)
@given(data=st.data())
def test_a_study_goes_on_or_refuses(folder: Path, simulated: tuple[StudyRequest, list[bytes]], data: Any) -> None:
    request, written = simulated
    content = data.draw(st.one_of(mutated(written), journals))
    out = put(folder, content)
    if refusal(lambda: search(replace(request, out=out, resume=True, trials=5))):
        kept = (out / "journal.jsonl").read_bytes()
        assert content.startswith(kept), "but for a torn line, a refused journal stays as it is"


@fuzz(10)
@given(data=st.data())
def test_a_study_begins_with_another_or_refuses(
    folder: Path, simulated: tuple[StudyRequest, list[bytes]], tmp_path_factory: Any, data: Any
) -> None:
    request, written = simulated
    earlier = put(folder, data.draw(st.one_of(mutated(written), journals)))
    out = tmp_path_factory.mktemp("warm") / "out"
    if refusal(lambda: search(replace(request, out=out, warm_start=(earlier,), trials=2))):
        assert not out.exists(), "a refused study leaves no folder"


# -- one by one --------------------------------------------------------------------------------------------------------


def stamped(kind: str, at: float) -> bytes:
    return b"\n".join(encode_entry(Entry(at, record)) for record in KINDS[kind]()) + b"\n"


@pytest.mark.parametrize("command", ["explain", "export", "report"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "start"),
        (b"\x00" * 100 + b"\n", "line 1"),
        (b'{"at":1,"a":' + b"[" * 100_000 + b"\n" + WRITTEN["study"][0] + b"\n", "line 1"),
        (WRITTEN["study"][0] + b"\n" + b"[" * 100_000 + b"\n", "trial"),
        (stamped("study", -62_167_219_200.0), "at: must be from 0"),
        (stamped("study", 1e300), "at: must be from 0"),
        (
            as_line({"at": 1, "kind": "study_started", "settings": {"objectives": 7, "program": "p"}}) + b"\n",
            "objectives",
        ),
        *((line + b"\n" + WRITTEN["run"][0] + b"\n", "line 1") for line in FOREIGN),
    ],
    ids=lambda value: repr(value[:30]) if isinstance(value, bytes) else value,
)
def test_one_line(folder: Path, tmp_path: Path, command: str, content: bytes, message: str) -> None:
    out = put(folder, content)
    more = ("--csv", tmp_path / "a.csv") if command == "export" else ()
    refused = say(command, out, *more).refusal
    if b"[" * 100_000 in content and message == "trial":  # torn: what stands before it is told
        assert refused == ""
    else:
        assert refused


@pytest.mark.parametrize("kind", [*KINDS, "nothing"])
def test_each_kind_of_folder_is_explained_or_refused(folder: Path, kind: str) -> None:
    out = put(folder, b"\n".join(WRITTEN[kind]) + b"\n") if kind in KINDS else folder / "nothing"
    said = say("explain", out)
    assert bool(said.refusal) == (kind == "nothing")


def test_a_frontier_is_explained_in_words(folder: Path) -> None:
    said = say("explain", put(folder, b"\n".join(WRITTEN["frontier"]) + b"\n"))
    for words in (
        "Two workers do.",
        "1 worker: naive accuracy 0.900 (0.880 to 0.920) (holds) in 3 s",
        "1 of the search",
        "elastune run linear.py",
    ):
        assert words in said.out
    unfinished = say("explain", put(folder, b"\n".join(WRITTEN["frontier"][:5]) + b"\n"))
    assert "There is no answer yet: 1 training ended so far." in unfinished.out


@pytest.mark.parametrize("make", [lambda p: p.mkdir(), lambda p: p.symlink_to(p), os.mkfifo])
@pytest.mark.parametrize("command", ["explain", "report", "export", "resume"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], object], command: str) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out" / "journal.jsonl")
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments: tuple[object, ...] = (command, tmp_path / "out")
    if command == "export":
        arguments = (*arguments, "--csv", tmp_path / "a.csv")
    if command == "resume":
        arguments = ("simulate", tmp_path / "program.py", "--trials", 2, "--resume", "--out", tmp_path / "out")
    assert say(*arguments).refusal
