"""Results at a URL: what is copied in which order, what is never copied, and what comes back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.forked import elastune

from elastune.core.errors import UserError
from elastune.runtime.job import output as mirrors
from elastune.runtime.job.output import Mirror, changes, is_copied, is_url, order, whole

STEP3, STEP6 = ("checkpoints/step-0000000003", "checkpoints/step-0000000006")
PROGRAM = Path(__file__).parents[2] / "faults" / "programs" / "elastic.py"


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder behind the URL."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mirrors, "LOOK_S", 0.02)
    return tmp_path / "there"


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def mirror(there: Path, resume: bool = False) -> tuple[Mirror, list[str]]:
    told: list[str] = []
    one = Mirror(f"file://{there}", told.append)
    one.begin(resume)
    return one, told


@pytest.mark.parametrize(
    ("name", "expected"),
    [("journal.jsonl", True), (f"{STEP3}/state.json", True), ("trials/0001/journal.jsonl", True),
     ("", False), ("../journal.jsonl", False), ("a/../../b", False), ("/etc/passwd", False), ("a\\b", False),
     (".coordinator.json", False), (".agent-token", False), ("cluster/token", False), ("logs/worker-0.log", False),
     ("journal.jsonl.lock", False), ("checkpoints/.draft-3-1/state.json", False)],
)  # fmt: skip
def test_secrets_drafts_and_ways_out_do_not_go(name: str, expected: bool) -> None:
    assert is_copied(name) == expected


def test_what_makes_a_checkpoint_one_comes_after_it_and_goes_before_it() -> None:
    here = {"journal.jsonl": 2, "report.html": 1, f"{STEP6}/state.json": 1, f"{STEP6}/tensors.safetensors": 1}
    there = {"journal.jsonl": 1, f"{STEP3}/state.json": 1, f"{STEP3}/tensors.safetensors": 1, "of/others": 1}
    found = changes(here, there)
    assert found.copy == [f"{STEP6}/tensors.safetensors", f"{STEP6}/state.json", "report.html", "journal.jsonl"]
    assert found.remove == [f"{STEP3}/state.json", f"{STEP3}/tensors.safetensors"]
    assert changes(here, here).copy == []
    assert order(["a/checkpoints/step-0000000003/state.json", "journal.jsonl"])[-1] == "journal.jsonl"
    assert set(whole([*there, f"{STEP6}/tensors.safetensors"])) == set(there)


@pytest.mark.parametrize(("out", "expected"), [("s3://b/run", True), ("dir::file:///x", True), ("a/b", False),
                                                ("s3:/b", False), ("C:/x", False)])  # fmt: skip
def test_urls(out: str, expected: bool) -> None:
    assert is_url(out) == expected


def test_a_folder_goes_and_comes_back_on_another_machine(there: Path) -> None:
    one, _ = mirror(there)
    put(one.folder, "journal.jsonl", f"{STEP3}/tensors.safetensors", f"{STEP3}/state.json", "logs/a.log", ".secret")
    one.finish()
    kept = ["journal.jsonl", f"{STEP3}/tensors.safetensors", f"{STEP3}/state.json"]
    assert names(there) == sorted(kept)
    shutil.rmtree(one.folder)
    put(there, f"{STEP6}/tensors.safetensors")  # of which the last file never came
    other, told = mirror(there, resume=True)
    assert names(other.folder) == sorted(kept)
    assert "going on from file://" in told[0]
    shutil.rmtree(other.folder / STEP3)
    put(other.folder, f"{STEP6}/state.json")
    other.finish()
    assert names(there) == [f"{STEP6}/state.json", "journal.jsonl"]


def test_what_is_here_stays_where_it_has_gone_further(there: Path) -> None:
    one, _ = mirror(there)
    put(one.folder, "journal.jsonl")
    one.finish()
    with (one.folder / "journal.jsonl").open("a") as journal:
        journal.write(" and more")
    again, told = mirror(there, resume=True)
    assert told == []
    again.finish()
    assert (there / "journal.jsonl").read_text() == "journal.jsonl and more"
    (again.folder / "journal.jsonl").write_text("something else")
    third, _ = mirror(there, resume=True)
    assert (third.folder / "journal.jsonl").read_text() == "journal.jsonl and more"
    assert [path.name for path in third.folder.parent.glob("*.before-*/*")] == ["journal.jsonl"]
    third.finish()


def test_nothing_is_mixed_with_what_others_have_there(there: Path) -> None:
    put(there, "holiday.jpg")
    for resume in (False, True):
        with pytest.raises(UserError, match=r"must be new or empty.*none of them journal.jsonl"):
            mirror(there, resume)
    put(there, "journal.jsonl")
    with pytest.raises(UserError, match="--resume"):
        mirror(there)
    assert names(there) == ["holiday.jpg", "journal.jsonl"]


def test_a_url_that_cannot_be_reached_is_told_in_one_line(there: Path) -> None:
    with pytest.raises(UserError, match="a URL that fsspec can open"):
        Mirror("nosuch://bucket/run", print)
    one, told = mirror(there)
    put(there.parent, "there")  # a file stands where the folder is to be
    put(one.folder, "journal.jsonl")
    with pytest.raises(UserError, match="results must reach --out"):
        one.finish()
    assert all("results wait for" in line for line in told)


@pytest.mark.timeout(120)
def test_a_run_with_a_url_goes_on_from_it_without_its_folder(there: Path, tmp_path: Path) -> None:
    words = ["run", str(PROGRAM), "--seed", "3", "--set", "epochs=1", "--json", "--out", f"file://{there}"]
    said = tmp_path / "said"
    with said.open("wb") as file:
        assert elastune(*words, "--max-steps", "3", out=file, err=file).wait(60) == 0, said.read_text()
    assert any(name.startswith("checkpoints/step-") for name in names(there))
    shutil.rmtree(tmp_path / "elastune-out")
    with said.open("wb") as file:
        assert elastune(*words, "--resume", out=file, err=file).wait(60) == 0, said.read_text()
    assert '"resumed_step":' in (there / "journal.jsonl").read_text()
