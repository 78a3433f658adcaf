"""Beginning with another model's weights: what fits is taken bit by bit, the rest is told, and rubbish is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.programs.assets import build, points
from tests.support.elastic_runs import Runs, together
from tests.support.sessions import lone_session
from torch import nn

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import Record, StartedFrom
from elastune.core.run import ExecutionSettings, Program, RunSpec, StartFrom, parse_renames
from elastune.parallel.mechanisms.tensor_storage import whole
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.elastic_run import ElasticRun
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.job.run import JobFailed, run_job
from elastune.train.checkpoints.out_folder import FILE, OutFolder, note_beginning, noted_beginning
from elastune.train.checkpoints.start_from import start_from, weights_in

ASSETS = Path(__file__).parents[2] / "programs" / "assets.py"


def net(classes: int = 3) -> nn.Module:
    return nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)), "head": nn.Linear(4, classes)})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    model = net()
    with torch.no_grad():
        model["body"][1].running_mean += 0.5
    save_file(model.state_dict(), tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


def test_what_fits_is_taken_and_the_rest_is_told(source: Path) -> None:
    model = net(classes=5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report_of_start = start_from(model, StartFrom(source))
    assert (report_of_start.taken, report_of_start.unused) == (7, 2)
    assert report_of_start.fresh == {
        "head.weight": "of shape [5, 4], [3, 4] there",
        "head.bias": "of shape [5], [3] there",
    }
    with weights_in(source) as (result, digest):
        assert report_of_start.sha256 == digest
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name] if name in report_of_start.fresh else result[name])


def test_names_may_differ_and_be_left_out(source: Path) -> None:
    model = nn.ModuleDict({"encoder": net()["body"], "head": nn.Linear(4, 3)})
    asked = StartFrom(source, parse_renames(("body.=encoder.",)), ("head.*", "*.running_*"))
    report_of_start = start_from(model, asked)
    assert report_of_start.taken == 5
    assert set(report_of_start.fresh) == {"head.weight", "head.bias", "encoder.1.running_mean", "encoder.1.running_var"}
    assert set(report_of_start.fresh.values()) == {"asked for"}
    assert StartFrom.from_json(asked.to_json()) == asked


def test_a_transfer_of_nothing_is_refused(source: Path) -> None:
    with pytest.raises(UserError, match="some weights fit"):
        start_from(nn.Linear(7, 7), StartFrom(source))
    with pytest.raises(UserError, match="some weights fit"):
        start_from(net(), StartFrom(source, fresh=("*",)))
    with pytest.raises(UserError, match="both become"):
        start_from(net(), StartFrom(source, (("body.0.", "x."), ("body.1.", "x."))))


@pytest.mark.parametrize("text", ["", "a", "a=b=c"])
def test_what_is_no_rename_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="a rename is"):
        parse_renames((text,))


def test_rubbish_is_no_source(source: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "rubbish").write_bytes(b"\x10" + b"\0" * 7 + b"not a header at all, no")
    (tmp_path / "cut").write_bytes(source.read_bytes()[:-4])
    for name in ("empty", "rubbish", "cut", "none"):
        with pytest.raises(UserError, match="weights come from"):
            start_from(net(), StartFrom(tmp_path / name))


def test_a_session_tells_what_it_took(source: Path, tmp_path: Path) -> None:
    sent: list[Record] = []
    session, model = lone_session(tmp_path / "out", send=sent.append), net()
    report_of_start = session.start_from(model, source, fresh=["head.*"])
    assert [replace(one, begins="") for one in sent if isinstance(one, StartedFrom)] == [report_of_start]
    model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError, match=r"before session\.prepare"):
        session.start_from(model, source)
    with pytest.raises(UserError, match="a list of names"):
        lone_session(tmp_path / "more").start_from(net(), source, fresh="head.*")


def test_every_worker_begins_with_what_a_run_has_learnt(cluster: LocalCluster, tmp_path: Path) -> None:
    """With a rate of 0 the child ends with the parent's weights; resumed, it no longer needs the parent's folder."""
    parent, child = tmp_path / "parent", tmp_path / "child"
    run_job(RunSpec(Program(ASSETS), parent), cluster=cluster)
    begins = RunSpec(
        Program(ASSETS),
        child,
        {"lr": 0.0, "seed": 5},
        execution=ExecutionSettings(workers=2, num_slots=4),
        start_from=StartFrom(parent),
    )
    run_job(begins, cluster=cluster)
    results = [e.record for e in read(child / JOURNAL) if isinstance(e.record, StartedFrom)]
    assert [(r.source, r.taken, r.fresh, r.unused) for r in results] == [(str(parent), 4, {}, 0)]
    with weights_in(parent) as (theirs, _), weights_in(child) as (ours, _):
        assert theirs.keys() == ours.keys()
        for name in theirs:
            assert torch.equal(whole(theirs[name]), whole(ours[name]))
    parent.rename(tmp_path / "elsewhere")
    resumed = run_job(replace(begins, resume=True, epochs=3), cluster=cluster)
    assert resumed.steps == 15


def test_a_program_that_takes_weights_goes_on_without_their_source(cluster: LocalCluster, tmp_path: Path) -> None:
    """It is told what was taken as it was then: its groups of parameters are the same, so are the bits at the end."""
    parent = tmp_path / "parent"
    run_job(RunSpec(Program(ASSETS), parent), cluster=cluster)
    config = {"source": str(parent), "fresh": ["2.*"], "seed": 5}

    def trained(name: str, **more: Any) -> str:
        spec = RunSpec(
            Program(ASSETS), tmp_path / name, config, execution=ExecutionSettings(workers=2, num_slots=4), **more
        )
        return run_job(spec, cluster=cluster).sha256

    whole_run = trained("whole", epochs=3)
    trained("child", epochs=1)
    parent.rename(tmp_path / "elsewhere")
    assert trained("child", epochs=3, resume=True) == whole_run
    results = [e.record for e in read(tmp_path / "child" / JOURNAL) if isinstance(e.record, StartedFrom)]
    assert [(r.taken, r.fresh) for r in results] == [(2, {"2.weight": "asked for", "2.bias": "asked for"})]
    with pytest.raises(JobFailed, match="weights come from"):
        trained("new", epochs=1)


def test_who_joins_reads_no_source(cluster: LocalCluster, tmp_path: Path) -> None:
    """It is gone as soon as the run has begun, and no checkpoint was ever written."""
    parent, source = tmp_path / "parent", tmp_path / "source"
    run_job(RunSpec(Program(ASSETS), parent), cluster=cluster)
    runs, never = Runs(cluster, tmp_path / "runs", Program(ASSETS)), {"checkpoint_every_steps": 0}
    config: dict[str, Any] = {"source": str(source), "fresh": ["2.*"], "seed": 5, "epochs": 6, "spec": never}

    def grow(handle: ElasticRun, records: list[Record]) -> None:
        if source.exists() and any(isinstance(record, StartedFrom) for record in records):
            shutil.rmtree(source)
            handle.resize(2)

    shutil.copytree(parent, source)
    alone = runs(1, **config)
    grown = runs(1, act=grow, slow_until=together(2), **config)
    assert not source.exists()
    assert max(len(r.members) for r in grown.regrouped) == 2
    assert grown.sha256 == alone.sha256


def test_a_note_that_is_damaged_or_missing_tells_nothing(tmp_path: Path) -> None:
    result = StartedFrom("elsewhere", "0" * 64, 2, {"head": "asked for"})
    note_beginning(OutFolder.at(tmp_path), [result])
    assert noted_beginning(tmp_path) == [result]
    for text in ("", "[", "{}", "[1]", '[{"source": 1}]', "[" * 100_000):
        (tmp_path / FILE).write_text(text)
        assert noted_beginning(tmp_path) == []
    assert noted_beginning(tmp_path / "none") == []


def test_groups_train_at_rates_of_their_own(cluster: LocalCluster, tmp_path: Path) -> None:
    """What was taken at a tenth of what is fresh: after one step by plain gradients, to the bit as plain torch."""
    parent = tmp_path / "parent"
    run_job(RunSpec(Program(ASSETS), parent), cluster=cluster)
    config = {"source": str(parent), "fresh": ["2.*"], "seed": 5, "lr": 0.5, "batch_size": 200}
    run_job(
        RunSpec(
            Program(ASSETS), tmp_path / "child", config, epochs=1, execution=ExecutionSettings(workers=2, num_slots=4)
        ),
        cluster=cluster,
    )
    plain = build({"width": 8, "norm": False, "seed": 5})
    start_from(plain, StartFrom(parent, fresh=("2.*",)))
    x, y = points(200, seed=0).tensors
    torch.nn.functional.cross_entropy(plain(x), y).backward()
    with torch.no_grad(), weights_in(tmp_path / "child") as (result, _):
        for name, p in plain.named_parameters():
            stepped = p - (0.5 if name.startswith("2.") else 0.05) * p.grad
            assert torch.allclose(whole(result[name]), stepped, atol=1e-6), name
            assert not torch.allclose(whole(result[name]), p, atol=1e-4), name


@pytest.mark.parametrize(
    "options",
    [
        ("--start-from", "none"),
        ("--fresh", "head.*"),
        ("--rename", "a=b"),
        ("--start-from", ".", "--rename", "a"),
        ("--start-from", ".", "--from-dcp", "."),
    ],
)
def test_wrong_options_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], command_here: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command_here("run", str(ASSETS), "--out", "out", *options)
    assert result.line
    assert not Path("out").exists()


def test_the_command_line_says_what_was_taken(
    cluster: LocalCluster, tmp_path: Path, command_here: Callable[..., Any]
) -> None:
    parent = tmp_path / "parent"
    run_job(RunSpec(Program(ASSETS), parent), cluster=cluster)
    result = command_here(
        "run", str(ASSETS), "--out", str(tmp_path / "out"), "--start-from", str(parent), "--fresh", "2.*"
    )
    assert result.code == 0
    assert "begins with 2 tensors of" in result.err
    assert "fresh: 2.weight (asked for)" in result.err
    study = ("tune", str(ASSETS), "--out", str(tmp_path / "study"), "--trials", "1")
    assert command_here(*study, "--start-from", str(parent)).code == 0
    assert "the weights it was begun with" in command_here(*study, "--resume").line
    moved = parent.rename(tmp_path / "moved")
    assert command_here(*study, "--resume", "--start-from", str(moved)).code == 0


def test_a_source_that_has_changed_since_is_refused(source: Path) -> None:
    """Else trials of one study would begin with different weights, and a soup of them be thought to have one root."""
    report_of_start = start_from(net(), StartFrom(source))
    begun = StartFrom.from_json(StartFrom(source, sha256=report_of_start.sha256).to_json())
    assert start_from(net(), begun).taken == report_of_start.taken
    save_file(net().state_dict(), source)
    with pytest.raises(UserError, match="others in .* since"):
        start_from(net(), begun)


def test_what_is_to_be_fresh_is_there(source: Path) -> None:
    """Else a head that was not to be taken is taken without a word."""
    with pytest.raises(UserError, match=r"haed\.\*"):
        start_from(net(), StartFrom(source, fresh=("haed.*",)))
