"""What is kept of a model's predictions: every sample once, in order, whoever computed it; and nothing else is read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.sessions import lone_session
from torch.utils.data import TensorDataset

from elastune.core.errors import Diverged, UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import PredictionsKept, Record
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.job.run import run_job
from elastune.train.predictions import EvaluatedSamples, file_of, in_order, kept_in, own_part, read_predictions

ASSETS = Path(__file__).parent.parent / "programs" / "assets.py"


def part(batches: list[list[int]], length: int) -> bytes:
    seen = EvaluatedSamples(length, batches)
    rows = torch.tensor(seen.places, dtype=torch.float32)
    return own_part(seen, [rows.reshape(-1, 1).repeat(1, 2)] if batches else [], [rows.long()] if batches else [])


def test_workers_do_not_show_in_what_is_kept(cluster: LocalCluster, tmp_path: Path) -> None:
    kept = []
    for execution in (
        ExecutionSettings(workers=1, num_slots=4),
        ExecutionSettings(workers=3, num_slots=4),
        ExecutionSettings(workers=2, mechanism="sharded", num_slots=4),
    ):
        out = tmp_path / f"{execution.mechanism}-{execution.workers}"
        run_job(RunSpec(Program(ASSETS), out, execution=execution), cluster=cluster)
        told = [e.record for e in read(out / JOURNAL) if isinstance(e.record, PredictionsKept)]
        assert [(r.name, r.step, r.samples) for r in told] == [
            ("validation", 5, 100),
            ("validation", 10, 100),
            ("test", 10, 100),
        ]
        assert kept_in(out) == {r.name: r.sha256 for r in told}
        kept.append(kept_in(out))
    assert kept[0] == kept[1] == kept[2]


def test_a_worker_that_dies_in_an_evaluation_does_not_show_either(cluster: LocalCluster, tmp_path: Path) -> None:
    alone, hit, marker = tmp_path / "alone", tmp_path / "hit", tmp_path / "marker"
    run_job(RunSpec(Program(ASSETS), alone, execution=ExecutionSettings(num_slots=4)), cluster=cluster)
    run_job(
        RunSpec(Program(ASSETS), hit, {"marker": str(marker)}, execution=ExecutionSettings(workers=3, num_slots=4)),
        cluster=cluster,
    )
    assert marker.exists()
    assert kept_in(hit) == kept_in(alone)


def test_rows_are_put_into_the_samples_order() -> None:
    whole = in_order([part([[0, 1], [4, 5]], 7), part([[2, 3], [6]], 7), part([], 7)], 7)
    assert whole["targets"].tolist() == list(range(7))
    assert whole["outputs"][:, 1].tolist() == list(range(7))


@pytest.mark.parametrize("parts", [[[[0, 1]]], [[[0, 1, 2], [2]]], [[]]])
def test_half_an_evaluation_is_refused(parts: list[list[list[int]]]) -> None:
    with pytest.raises(UserError, match="every sample of an evaluation"):
        in_order([part(batches, 3) for batches in parts], 3)


def test_a_session_keeps_what_its_newest_evaluation_gave(tmp_path: Path) -> None:
    sent: list[Record] = []
    session = lone_session(tmp_path, send=sent.append)
    data = TensorDataset(torch.arange(10.0).reshape(-1, 1), torch.arange(10))
    outputs, targets = zip(*((x, y) for x, y in session.batches(data, batch_size=4, train=False)), strict=True)
    session.predictions("validation", outputs, targets)
    file = file_of(tmp_path, "validation")
    assert load_file(file)["targets"].tolist() == list(range(10))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert sent == [PredictionsKept("validation", 0, 10, file.stat().st_size, digest)]
    assert read_predictions(file, digest)["outputs"].shape == (10, 1)
    with pytest.raises(UserError, match="digest"):
        read_predictions(file, "0" * 64)
    for name in ("", "a/b", "../x", "Test", "x" * 41, 3):
        with pytest.raises(UserError, match="have a name"):
            session.predictions(name, outputs, targets)  # type: ignore[arg-type]
    for wrong in (outputs[:2], [], [1.0, 2.0], 5, torch.tensor(1.0)):
        with pytest.raises(UserError, match="outputs are"):
            session.predictions("validation", wrong, targets)
    with pytest.raises(UserError, match="floating-point"):
        session.predictions("validation", targets, targets)
    with pytest.raises(Diverged):
        session.predictions("validation", [x * float("nan") for x in outputs], targets)
    with pytest.raises(UserError, match="targets are finite"):
        session.predictions("validation", outputs, [x.float() / 0 for x in targets])
    with pytest.raises(UserError, match="targets are classes"):
        session.predictions("validation", outputs, [x.to(torch.complex64) for x in targets])


def test_rubbish_is_no_predictions(tmp_path: Path) -> None:
    good = {"outputs": torch.rand(4, 2), "targets": torch.arange(4)}
    files = {name: tmp_path / f"{name}.safetensors" for name in ("empty", "text", "short", "other", "nan", "whole")}
    files["empty"].write_bytes(b"")
    files["text"].write_text("no tensors at all, and long enough to have a header")
    save_file(good, tmp_path / "cut")
    files["whole"].mkdir()
    files["short"].write_bytes((tmp_path / "cut").read_bytes()[:-3])
    save_file({**good, "more": torch.zeros(1)}, files["other"])
    save_file({**good, "outputs": torch.full((4, 2), float("inf"))}, files["nan"])
    for name, changed in {
        "eighths": {"outputs": torch.rand(4, 2).to(torch.float8_e4m3fn)},
        "missing": {"targets": torch.full((4,), float("nan"))},
        "imaginary": {"targets": torch.zeros(4, dtype=torch.complex64)},
    }.items():
        files[name] = tmp_path / f"{name}.safetensors"
        save_file({**good, **changed}, files[name])
    for file in (*files.values(), tmp_path / "none.safetensors"):
        with pytest.raises(UserError, match="must be a file that elastune has written"):
            read_predictions(file)
