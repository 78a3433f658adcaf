"""Checkpoints under kills, rot and full disks."""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastune.core.checkpoint_keeping import DEFAULT_LAST
from elastune.core.errors import UserError
from elastune.core.run import Position
from elastune.train.checkpoints.checkpoint import (
    Checkpoint,
    complete,
    damaged,
    drop_drafts,
    load,
    load_newest,
    save,
    set_aside,
    spans,
)
from elastune.train.checkpoints.checkpoint import draft as draft_of
from elastune.train.checkpoints.spool import seal, unseal

MEGABYTES = 4


def checkpoint(step: int, megabytes: float = 0.01) -> Checkpoint:
    """Recognisable as whole: every value in it is its step."""
    weights = torch.full((int(megabytes * 2**18),), float(step))
    return Checkpoint(
        position=Position(epoch=step // 10, offset=step % 10, step=step, samples=8 * step),
        must_match={"seed": 1, "config": {"lr": 0.1, "layers": [1, 2]}, "mode": "exact"},
        states={
            "model": {"w": weights, "again": weights},
            "optimizer": {"state": {0: {"step": torch.tensor(step)}}},
            "progress": {"seconds": 1.5 * step, "metrics": {"accuracy": step / 3}, "spans": [[0, 0, step, 9, 1, step]]},
        },
    )


def assert_whole(found: Checkpoint) -> None:
    wanted = checkpoint(found.position.step, len(found.states["model"]["w"]) / 2**18)
    assert found.position == wanted.position
    assert (found.must_match, found.states["progress"]) == (wanted.must_match, wanted.states["progress"])
    assert torch.equal(found.states["model"]["w"], wanted.states["model"]["w"])
    assert torch.equal(found.states["model"]["again"], wanted.states["model"]["w"])
    assert found.states["optimizer"]["state"][0]["step"] == wanted.position.step


def test_what_is_saved_is_loaded_and_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (3, 20, 100):
        assert save(tmp_path, checkpoint(step)) == complete(tmp_path)[-1]
        assert_whole(load(complete(tmp_path)[-1]))
    assert [path.name for path in complete(tmp_path)] == ["step-0000000020", "step-0000000100"]
    assert len(list(tmp_path.iterdir())) == DEFAULT_LAST


def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, checkpoint(7, 0.01))
    save(tmp_path, checkpoint(7, 0.02))
    assert len(load(complete(tmp_path)[-1]).states["model"]["w"]) == int(0.02 * 2**18)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000007"]


def in_child(act: Callable[[int], None]) -> tuple[int, int]:
    """Run ``act(pipe)`` in a fork of this process; returns its pid and the end of the pipe to read."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act(theirs)
        finally:
            os._exit(0)
    os.close(theirs)
    return child, ours


def said_by(child: int, pipe: int) -> str:
    """All that a child has written, after its end."""
    with open(pipe) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


def save_for_ever(folder: Path, first: int, pipe: int) -> None:
    for step in range(first, 10**6):
        for _ in range(2):  # a step saved twice, as at the end of an epoch
            save(folder, checkpoint(step, MEGABYTES))
        os.write(pipe, f"{step}\n".encode())


def test_a_draft_that_others_have_begun_since_stays(tmp_path: Path) -> None:
    """Also one of the same step: at an epoch's end a second checkpoint of a step may follow the first at once."""
    published, stale, later = "8-2-1", ("7-2-0", "8-1-4", "8-2-0", "step-00000004", "best"), ("8-2-2", "6-3-0", "9-2-2")
    for name in (published, *stale, *later):
        draft_of(tmp_path, name).mkdir()
    drop_drafts(tmp_path, draft_of(tmp_path, published).name)
    assert {path.name for path in tmp_path.iterdir()} == {draft_of(tmp_path, name).name for name in later}
    drop_drafts(tmp_path)
    assert not [*tmp_path.iterdir()], "a run that begins keeps none"


def test_a_kill_at_any_moment_leaves_the_newest_complete_one(tmp_path: Path) -> None:
    rng = random.Random(7)
    folder, first, longest_s = tmp_path / "checkpoints", 1, 0.1
    for _ in range(40):
        child, pipe = in_child(functools.partial(save_for_ever, folder, first))
        time.sleep(rng.uniform(0.001, longest_s))
        os.kill(child, signal.SIGKILL)
        said = [int(line) for line in said_by(child, pipe).split()]
        found = [load(path) for path in complete(folder)]
        for each in found:
            assert_whole(each)
        if said:
            assert found[-1].position.step in (said[-1], said[-1] + 1)
        if found:
            first = found[-1].position.step + 1
        else:  # a busy machine
            longest_s *= 1.5
    assert first > 1, "no checkpoint was ever completed"
    save(folder, checkpoint(10**6))
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")], "drafts of killed processes"
    assert len(complete(folder)) == DEFAULT_LAST


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """``state.json`` with a change, under a digest that fits."""
    tree = unseal((path / "state.json").read_bytes())
    change(tree)
    (path / "state.json").write_bytes(seal(tree))


def damage(path: Path, how: str) -> None:
    tensors, tree = path / "tensors.safetensors", path / "state.json"
    other = save(path.parent.parent / "other", checkpoint(6))
    match how:
        case "tensors cut":
            os.truncate(tensors, tensors.stat().st_size // 2)
        case "tensors empty":
            os.truncate(tensors, 0)
        case "tensors longer":
            tensors.write_bytes(tensors.read_bytes() + b"0")
        case "tensors gone":
            tensors.unlink()
        case "tensors a pipe":
            tensors.unlink()
            os.mkfifo(tensors)
        case "tensors a folder":
            tensors.unlink()
            tensors.mkdir()
        case "tensors of another":
            shutil.copy(other / "tensors.safetensors", tensors)
        case "tensors under another name":
            tensors.rename(path / "tensors")
        case "a bit of a weight":
            content = bytearray(tensors.read_bytes())
            content[-1] ^= 1
            tensors.write_bytes(content)
        case "json cut":
            tree.write_text(tree.read_text()[:100])
        case "json empty":
            tree.write_text("")
        case "json gone":
            tree.unlink()
        case "json a pipe":
            tree.unlink()
            os.mkfifo(tree)
        case "json bytes":
            tree.write_bytes(b"\xff\xfe\x00")
        case "json deep":
            tree.write_text("[" * 100_000)
        case "json of something else":
            tree.write_text("[1, 2]")
        case "json of another":
            shutil.copy(other / "state.json", tree)
        case "json without its digest":
            tree.write_text(json.dumps(unseal(tree.read_bytes())))
        case "all of another":
            shutil.rmtree(path)
            other.rename(path)
        case "another step":
            tree.write_text(tree.read_text().replace('"step": 5', '"step": 4', 1))
        case "another epoch":
            tree.write_text(tree.read_text().replace('"epoch": 0', '"epoch": 1', 1))
        case "field gone":
            rewritten(path, lambda parsed: parsed.pop("position"))
        case "field of another type":
            rewritten(path, lambda parsed: parsed["position"].update(step="soon"))
        case "parts of another type":
            rewritten(path, lambda parsed: parsed.update(parts=["model"]))
        case "position unknown":
            rewritten(path, lambda parsed: parsed["position"].update(page=4))


DAMAGES = (
    *("tensors cut", "tensors empty", "tensors longer", "tensors gone", "tensors a pipe", "tensors a folder"),
    *("tensors of another", "tensors under another name", "a bit of a weight", "json cut", "json empty", "json gone"),
    *("json a pipe", "json bytes", "json deep", "json of something else", "json of another", "json without its digest"),
    *("all of another", "another step", "another epoch"),
)
"""What changes bytes that were written."""
NEVER_WRITTEN = ("field gone", "field of another type", "parts of another type", "position unknown")


@pytest.mark.parametrize("how", [*DAMAGES, *NEVER_WRITTEN])
def test_rot_is_told_with_the_folder(tmp_path: Path, how: str) -> None:
    path = save(tmp_path / "checkpoints", checkpoint(5))
    damage(path, how)
    with pytest.raises(UserError, match="a checkpoint must be whole") as told:
        load(path)
    assert str(path) in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("how", DAMAGES)
def test_the_one_before_a_damaged_one_is_used(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, checkpoint(4))
    damage(save(folder, checkpoint(5)), how)
    (found,) = damaged(folder).items()
    assert found[0] == 5
    newest = load_newest(folder)
    assert newest is not None
    assert_whole(newest[1])
    assert newest[1].position.step == 4
    assert "going on from the one before it" in capsys.readouterr().err
    set_aside(folder, damaged(folder))
    assert [path.name for path in complete(folder)] == ["step-0000000004"]
    assert (folder / "damaged-step-0000000005").is_dir(), "nothing was thrown away"
    assert damaged(folder) == {}


def test_where_none_is_whole_that_is_told(tmp_path: Path) -> None:
    for step in (4, 5):
        damage(save(tmp_path / "checkpoints", checkpoint(step)), "a bit of a weight")
    assert list(damaged(tmp_path / "checkpoints")) == [5, 4]
    with pytest.raises(UserError, match="step-0000000005"):
        load_newest(tmp_path / "checkpoints")
    assert load_newest(tmp_path / "nothing") is None


def test_no_single_bit_may_change(tmp_path: Path) -> None:
    """Every byte of ``state.json`` and of the tensors' header, and every 97th of the tensors: one bit of it."""
    path = save(tmp_path, checkpoint(5))
    rng = random.Random(5)
    for file in (path / "state.json", path / "tensors.safetensors"):
        whole = file.read_bytes()
        for at in [*range(min(len(whole), 1500)), *range(1500, len(whole), 97)]:
            changed = bytearray(whole)
            changed[at] ^= 1 << rng.randrange(8)
            file.write_bytes(changed)
            with pytest.raises(UserError):
                load(path)
            assert list(damaged(tmp_path)) == [5]
        file.write_bytes(whole)
    assert_whole(load(path))


@pytest.mark.parametrize(
    "name", ["step-1e3", "step-", "step-0000000007x", "step-7", "step-٠٠٠٠٠٠٠٠٠٧", "step--000000001"]
)
def test_folders_of_other_names_are_no_checkpoints(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, checkpoint(5))
    shutil.copytree(path, tmp_path / name)
    assert complete(tmp_path) == [path]
    assert damaged(tmp_path) == {}


def test_steps_of_any_length_are_in_their_order(tmp_path: Path) -> None:
    for step in (9_999_999_999, 10_000_000_000):
        save(tmp_path, checkpoint(step))
    assert [load(path).position.step for path in complete(tmp_path)] == [9_999_999_999, 10_000_000_000]


def test_a_checkpoint_of_somebody_else_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user may read it: nothing must be set aside."""
    path = save(tmp_path, checkpoint(5))

    def refuse(file: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # root may read whatever the mode says
    assert damaged(tmp_path) == {}
    with pytest.raises(UserError, match="must be readable"):
        load(path)


@pytest.mark.parametrize("number", [1, None, 3, 5, "2"])
def test_another_format_is_refused_in_one_line(tmp_path: Path, number: object) -> None:
    """None: written before formats had numbers."""
    path = save(tmp_path, checkpoint(5))
    parsed = unseal((path / "state.json").read_bytes())
    parsed["format"] = number
    if number is None:
        parsed = {"position": parsed["position"], "must_match": parsed["must_match"], "state": {}, "seconds": 3.0}
    (path / "state.json").write_bytes(seal(parsed) if number in (3, 5) else json.dumps(parsed).encode())
    for read in (load, spans):
        with pytest.raises(UserError, match="a checkpoint must be of format 4") as told:
            read(path)
        assert str(path) in str(told.value)
        assert "begin again" in told.value.fix
        assert "\n" not in str(told.value)


def test_a_run_does_not_resume_from_another_format(tmp_path: Path, command_here: Callable[..., Any]) -> None:
    """Exit code 2, one line that says what to do, and the folder as it was."""
    program = tmp_path / "program.py"
    program.write_text("def train(session):\n    pass\n")
    state = save(tmp_path / "out" / "checkpoints", checkpoint(5)) / "state.json"
    state.write_text(json.dumps({**unseal(state.read_bytes()), "format": 2}))
    before = state.read_bytes()
    said = command_here("run", program, "--out", tmp_path / "out", "--resume")
    assert said.code == 2
    (line,) = [line for line in said.err.splitlines() if "(got " in line]
    assert line.startswith("elastune: a checkpoint must be of format 4 (got format 2: ")
    assert "begin again in another --out" in line
    assert state.read_bytes() == before


def test_the_samples_used_are_read_without_tensors(tmp_path: Path) -> None:
    path = save(tmp_path, checkpoint(5))
    (path / "tensors.safetensors").unlink()
    assert spans(path) == [[0, 0, 5, 9, 1, 5]]


def save_on_a_full_disk(folder: Path, limit_bytes: int, pipe: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    try:
        save(folder, checkpoint(9, MEGABYTES))
    except UserError as error:
        os.write(pipe, f"{error}\n".encode())


@pytest.mark.parametrize("limit_bytes", [0, 300, 1 << 20])
def test_a_full_disk_is_told_and_older_checkpoints_stay(tmp_path: Path, limit_bytes: int) -> None:
    """A limit of the file size stands for the disk; 300 bytes are too few for the tree, too."""
    for step in (1, 2):
        save(tmp_path, checkpoint(step))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    told = said_by(*in_child(functools.partial(save_on_a_full_disk, tmp_path, limit_bytes)))
    assert told.startswith("a checkpoint must be writable (got ")
    assert str(tmp_path) in told
    assert told.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not list(tmp_path.glob(".*"))


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="a checkpoint must be writable"):
        save(tmp_path / "file" / "checkpoints", checkpoint(1))
