"""From options to what the drivers take."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elastune.cli import output
from elastune.core.errors import UserError
from elastune.runtime.job.output import next_folder, release_unused


def test_the_next_free_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("examples/digits.py")
    assert output.choose_out(None, file, "run", resume=False) == Path("elastune-out/digits-run-1")
    for taken in ("digits-run-3", "digits-tune-2"):
        (tmp_path / "elastune-out" / taken).mkdir(parents=True)
    assert output.choose_out(None, file, "run", resume=False) == Path("elastune-out/digits-run-2")
    assert output.choose_out(None, file, "frontier", resume=False).name == "digits-frontier-1"
    assert output.choose_out(tmp_path, file, "run", resume=True) == tmp_path
    with pytest.raises(UserError, match="no --out"):
        output.choose_out(None, file, "run", resume=True)


def test_commands_that_begin_at_once_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as at_once:
        found = list(at_once.map(lambda _: next_folder(Path("digits.py"), "run"), range(24)))
    assert {folder.name for folder in found} == {f"digits-run-{number}" for number in range(1, 25)}
    (found[3] / "journal.jsonl").touch()
    release_unused()
    assert list((tmp_path / "elastune-out").iterdir()) == [tmp_path / found[3]]


def test_resuming_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output.choose_out(tmp_path / "mistyped", Path("digits.py"), "tune", resume=True)
    assert "mistyped holds nothing to go on with, so this starts from the beginning" in capsys.readouterr().err
    (tmp_path / "journal.jsonl").touch()
    output.choose_out(tmp_path, Path("digits.py"), "tune", resume=True)
    assert capsys.readouterr().err == ""


def test_data_goes_to_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTUNE_DATA", "before")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    output.use_data(None)
    assert os.environ["ELASTUNE_DATA"] == "before"
    output.use_data(Path("data"))
    assert os.environ["ELASTUNE_DATA"] == str(tmp_path / "data"), "absolute: workers may stand elsewhere"
    with pytest.raises(UserError, match="--data must be a folder"):
        output.use_data(Path("nothing"))


def test_an_unknown_device() -> None:
    with pytest.raises(UserError, match="choose one of cpu"):
        output.choose_device("cuda:99")
