"""Whatever is wrong with the input: one line with rule, value and fix; exit code 2; nothing changed."""

import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "nothing.py"], "existing Python file"),
        (["run", "."], "existing Python file"),
        (["run", "empty.py"], "must define train(session)"),
        (["run", "broken.py"], "broken.py:2"),
        (["run", "raises.py"], "raises.py:1"),
        (["run", "linear.py", "--workers", "0"], "--workers must be from 1"),
        (["run", "linear.py", "--workers", "9", "--slots", "8"], "slot for every worker"),
        (["run", "linear.py", "--mode", "quick"], "exact or fast"),
        (["run", "linear.py", "--precision", "fp8"], "fp32 or bf16"),
        (["run", "linear.py", "--mesh", "wide=2"], "axes of a mesh"),
        (["run", "linear.py", "--mesh", "data=0"], "at least one worker"),
        (["run", "linear.py", "--mesh", "data=2", "--workers", "3"], "workers and mesh must agree"),
        (["run", "linear.py", "--mesh", "data=4", "--workers", "1:2"], "within its bounds"),
        (["run", "linear.py", "--mesh", "shard=2", "--mechanism", "replicated"], "workers along shard"),
        (["run", "linear.py", "--mechanism", "magic"], "mechanism must be known"),
        (["run", "linear.py", "--mechanism", "tensor+zero", "--workers", "4"], "needs a mesh"),
        (["run", "linear.py", "--copies", "2", "--workers", "4"], "leave --copies out"),
        (["run", "linear.py", "--schedule", "gpipe"], "a pipeline"),
        (["run", "linear.py", "--offload"], "leave --offload out"),
        (["run", "linear.py", "--zero-stage", "2"], "deepspeed"),
        (["run", "linear.py", "--compress", "zip", "--mode", "fast"], "one of none, bf16"),
        (["run", "linear.py", "--compress", "int8"], "use --mode fast"),
        (["run", "linear.py", "--compress", "topk", "--mode", "fast", "--policy", "gns"], "use --compress int8"),
        (["run", "linear.py", "--compress", "int8", "--mode", "fast", "--sync", "local:learners=2"], "not gradients"),
        (["run", "linear.py", "--compress", "topk:ratio=0", "--mode", "fast"], "ratio=0.01"),
        (["run", "linear.py", "--compress", "powersgd:rank=many", "--mode", "fast"], "rank=4"),
        (["tune", "linear.py", "--trials", "2", "--mesh", "data=2,data=2"], "second data"),
        (["tune", "linear.py", "--trials", "2", "--mechanism", "zero+sharded"], "all but one"),
        (["frontier", "linear.py", "--mechanism", "magic"], "mechanism must be known"),
        (["run", "linear.py", "--device", "tpu"], "choose one of cpu"),
        (["run", "linear.py", "--mechanism", "tensor", "--virtual-tensor", "0"], "virtual blocks must be from 1"),
        (["run", "linear.py", "--start-from", "linear.py"], "or a safetensors file (got"),
        (["run", "linear.py", "--start-from", "."], "no checkpoint in"),
        (["run", "linear.py", "--kind", "spot"], "--kind is of --prices (got spot)"),
        (["tune", "linear.py", "--trials", "2", "--kind", "spot"], "--kind is of --prices (got spot)"),
        (["report", "nothing", "--kind", "spot"], "--kind is of --prices (got spot)"),
        (
            ["simulate", "linear.py", "--scaling", "cubic", "--trials", "2"],
            "--scaling is of recorded trials (got cubic)",
        ),
        (["doctor", "--out", "linear.py/x"], "--out is for the hosts of a cluster"),
        (["doctor", "--cluster", "hosts:7070", "--out", "linear.py/x"], "linear.py is a file"),
        (
            ["tune", "linear.py", "--trials", "2", "--until", "beauty > 1"],
            "reported metrics (got beauty): known: ",
        ),
        (["run", "linear.py", "more.py"], "what is for the program stands behind -- (got more.py)"),
        (["run", "linear.py", "--set", "lrr=1"], "known: batch_size, epochs, lr"),
        (["run", "linear.py", "--set", "lr"], "NAME=VALUE"),
        (["run", "linear.py", "--set", "lr=abc"], "lr must be a number, as in the program's config (got 'abc')"),
        (["run", "linear.py", "--set", "lr.x=1"], "known: batch_size, epochs, lr"),
        (["tune", "linear.py", "--trials", "2", "--set", "batch_size=many"], "batch_size must be a number"),
        (["frontier", "linear.py", "--set", "batch_size=many"], "batch_size must be a number"),
        (["plan", "linear.py", "--nodes", "1", "--set", "lr=abc"], "lr must be a number"),
        (["run", "adaptive.py", "--set", "kind=adma"], "kind must be one of the choices of the space (got 'adma')"),
        (["run", "adaptive.py", "--set", "optim.lr=abc"], "optim.lr must be a number"),
        (["run", "linear.py", "--epochs", "0"], "--epochs must be at least 1"),
        (["run", "linear.py", "--divergence", "0.5"], "a factor above 1"),
        (["tune", "linear.py", "--trials", "2", "--divergence", "soon"], "a factor above 1"),
        (["run", "linear.py", "--max-steps", "0"], "--max-steps must be at least 1"),
        (["run", "linear.py", "--checkpoint-every", "-1"], "--checkpoint-every must be at least 0"),
        (["run", "linear.py", "--resume"], "no --out"),
        (["run", "linear.py", "--data", "nothing"], "--data must be a folder"),
        (["run", "linear.py", "--out", "linear.py/out"], "--out"),
        (["run", "linear.py", "--policy", "wizard"], "a policy must be known (got wizard)"),
        (["run", "linear.py", "--policy", "gns:max_batch=many"], "max_batch"),
        (["run", "linear.py", "--policy", "gns:luck=7"], "luck"),
        (["run", "linear.py", "--policy", ""], "policy"),
        (["run", "linear.py", "--monitor", "crystal_ball"], "crystal_ball"),
        (["run", "linear.py", "--log", "paper"], "--log must be csv or"),
        (["tune", "linear.py", "--trials", "2", "--log", "csv:a=1"], "the logger csv has no such option"),
        (["frontier", "linear.py", "--log", "csv", "--log", "csv"], "a logger may be named once"),
        (["report", "nothing", "--log", "paper"], "--log must be csv or"),
        (["run", "linear.py", "--monitor", "noise_scale:every=0"], "every"),
        (
            ["run", "linear.py", "--monitor", "noise_scale:every=2", "--monitor", "noise_scale:every=3"],
            "one set of options",
        ),
        (["tune", "adaptive.py", "--trials", "2"], "wizard"),
        (["tune", "linear.py"], "needs a budget"),
        (["tune", "linear.py", "--until", "accuracy"], "--patience"),
        (["tune", "linear.py", "--trials", "2", "--until", "accuracy"], "must be a comparison"),
        (["tune", "linear.py", "--patience", "0"], "patience must be"),
        (["tune", "linear.py", "--trials", "0"], "trials must be at least 1"),
        (["tune", "linear.py", "--budget", "3x"], "--budget must be a duration"),
        (["tune", "linear.py", "--budget", "0s"], "above 0"),
        (["tune", "linear.py", "--trials", "2", "--objective", "beauty:max"], "beauty"),
        (["tune", "linear.py", "--trials", "2", "--objective", "loss:up"], "max or min"),
        (["tune", "linear.py", "--trials", "2", "--workers", "0"], "workers must be at least 1"),
        (["tune", "linear.py", "--trials", "2", "--sampler", "oracle"], "oracle"),
        (["tune", "linear.py", "--trials", "2", "--price", "-1"], "a price of a worker-hour must be above 0"),
        (["run", "linear.py", "--price", "0"], "a price of a worker-hour must be above 0"),
        (["run", "linear.py", "--policy", "spot:deadline_h=2"], "prices"),
        (["run", "linear.py", "--policy", "spot:deadline_h=2,prices=any.csv"], "use --cluster hosts:PORT"),
        (["run", "linear.py", "--prices", "nowhere.csv"], "readable"),
        (["run", "linear.py", "--prices", "spot.csv", "--price", "2"], "leave one of them out"),
        (["run", "linear.py", "--prices", "spot.csv"], "every kind of host needs a price (got 'on-demand'"),
        (["tune", "linear.py", "--trials", "2", "--prices", "spot.csv", "--kind", "spot", "--price", "2"], "leave one"),
        (["frontier", "linear.py", "--prices", "spot.csv"], "every kind of host needs a price"),
        (["tune", "linear.py", "--trials", "2", "--prices", "spot.csv", "--kind", "free"], "free"),
        (["tune", "linear.py", "--trials", "2", "--trial-timeout", "1"], "--trial-timeout"),
        (["tune", "linear.py", "--trials", "2", "--collective-timeout", "0.01s"], "wait for each other"),
        (["frontier", "linear.py", "--collective-timeout", "soon"], "--collective-timeout must be a duration"),
        (["tune", "linear.py", "--trials", "2", "--constraint", "lr >"], "lr >"),
        (["tune", "linear.py", "--trials", "2", "--constraint", "lr > 2"], "lr > 2"),
        (["tune", "linear.py", "--trials", "2", "--constraint", "lr > 0.5", "--constraint", "lr < 0.1"], "lr"),
        (["tune", "empty.py", "--trials", "2"], "must define train(session)"),
        (["frontier", "linear.py", "--workers", "0,1"], "--workers must be from 1"),
        (["frontier", "linear.py", "--workers", "1,two"], "--workers"),
        (["frontier", "linear.py", "--budget", "3x"], "--budget must be a duration"),
        (["frontier", "linear.py", "--seeds", "1"], "at least 2 seeds"),
        (["frontier", "linear.py", "--quality", "beauty"], "beauty"),
        (["report", "nothing"], "nothing"),
        (["run"], "Missing argument"),
        (["run", "linear.py", "--worker", "2"], "No such option"),
        (["run", "linear.py", "--workers", "two"], "--workers"),
        (["dance"], "No such command 'dance'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_one_line(here: Path, elastune: Command, arguments: list[str], expected: str) -> None:
    (here / "empty.py").write_text("")
    (here / "spot.csv").write_text("kind,price\nspot,1\n")
    (here / "any.csv").write_text("kind,price\nany,1\n")
    (here / "broken.py").write_text("import math\ndef train(session:\n")
    (here / "raises.py").write_text("1 / 0\n")
    space = (
        "config = {'kind': 'sgd', 'optim': {'lr': 0.1}}\ndef space(trial):\n"
        "    kind = trial.suggest_categorical('kind', ['sgd', 'adam'])\n"
        "    return {'kind': kind, 'policy': trial.suggest_categorical('policy', ['none', 'wizard:might=9'])}\n"
    )
    (here / "adaptive.py").write_text(f"objectives = {{'loss': 'min'}}\n{space}def train(session):\n    pass\n")
    before = files(here)
    assert expected in elastune(*arguments).line
    after = files(here)
    assert {name: after[name] for name in before} == before
    assert not (here / "elastune-out").exists(), "nothing was begun"


def test_the_process_says_the_same(process: Command) -> None:
    assert "--budget must be a duration (got '3x')" in process("tune", "linear.py", "--budget", "3x").line


def test_the_installed_command_is_the_same(here: Path) -> None:
    script = shutil.which("elastune", path=str(Path(sys.executable).parent))
    assert script is not None, "pip install -e . puts it beside the interpreter"
    done = subprocess.run([script, "run", "nothing.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_an_existing_result_is_left_alone(here: Path, elastune: Command, finished_run: Path) -> None:
    shutil.copytree(finished_run, here / "done")
    before = files(here / "done")
    for command in (["run", "linear.py"], ["tune", "linear.py", "--trials", "2"], ["frontier", "linear.py"]):
        assert "--out must be a new or empty folder" in elastune(*command, "--out", "done").line
    assert "resume" in elastune("tune", "linear.py", "--trials", "2", "--out", "done", "--resume").line
    assert files(here / "done") == before


def test_a_corrupt_journal_is_named_with_its_line(here: Path, elastune: Command, finished_study: Path) -> None:
    shutil.copytree(finished_study, here / "done")
    journal = here / "done" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], b'{"at":1.0,"kind":"nonsense"}\n', *lines[2:]]))
    before = files(here / "done")
    assert "line 2" in elastune("report", "done").line
    assert "line 2" in elastune("tune", "linear.py", "--trials", "4", "--out", "done", "--resume").line
    assert files(here / "done") == before


def test_a_foreign_file_is_no_journal(here: Path, elastune: Command) -> None:
    (here / "done").mkdir()
    (here / "done" / "journal.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00")
    assert "line 1" in elastune("report", "done").line
    (here / "done" / "journal.jsonl").write_bytes(b"")
    assert "must hold the start" in elastune("report", "done").line


def test_an_unreadable_data_file_is_one_line_from_a_worker(here: Path, elastune: Command) -> None:
    (here / "data.py").write_text(
        "from elastune.recipes.datasets import mnist\nconfig = {}\ndef train(session):\n    mnist()\n"
    )
    data = here / "data"
    data.mkdir()
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (data / f"{part}-ubyte.gz").write_bytes(gzip.compress(b"\0\0\10\3" + b"\0" * 64)[:-12])
    assert "train-images-idx3-ubyte.gz" in elastune("run", "data.py", "--data", data).line


ODD_SPACES = {
    "mechanism": ("trial.suggest_categorical('mechanism', ['replicated', 'fsdp9'])", "fsdp9"),
    "mode": ("trial.suggest_categorical('mode', ['fast', 'quick'])", "mode must be exact or fast"),
    "policy": ("trial.suggest_categorical('policy', ['none', 'wizard'])", "a policy must be known"),
    "micro_batch": ("trial.suggest_int('micro_batch', 0, 10**9)", "micro_batch must be at least 1"),
    "workers": ("trial.suggest_int('workers', 1, 10**9)", "a trial's workers"),
    "lr": ("1 / (10**9 - trial.suggest_int('lr', 1, 10**9))", "ZeroDivisionError"),
    "epochs": ("[1][trial.suggest_int('epochs', 0, 10**6) // 10**6]", "IndexError"),
    "batch_size": ("exit(3) if trial.suggest_int('batch_size', 1, 10**6) == 1 else 8", "exit"),
}
"""What only a corner of a space does, which a random configuration hardly meets."""


@pytest.mark.parametrize("name", ODD_SPACES)
def test_corners_of_a_space_are_probed_before_anything_is_launched(here: Path, elastune: Command, name: str) -> None:
    text, told = ODD_SPACES[name]
    program = (here / "linear.py").read_text()
    program = program.replace('{"lr": trial.suggest_float("lr", 0.01, 1.0, log=True)}', f"{{'{name}': {text}}}")
    (here / "odd.py").write_text(program)
    line = elastune("tune", "odd.py", "--trials", "2", "--out", "out").line
    assert told in line
    assert not (here / "out").exists()
    if name in ("lr", "epochs", "batch_size"):
        assert "odd.py:" in line, "the user's own line"
        assert told in elastune("frontier", "odd.py", "--workers", "1,2", "--out", "out").line
        assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("policy", "a policy is written NAME"),
        ("mechanism", "mechanism must be known (got '1')"),
        ("micro_batch", "micro_batch must be a whole number or None (got '1')"),
        ("mesh", "the axes of a mesh are data, shard, tensor, pipeline (got '1')"),
        ("workers", "workers must be a whole number, at least one (got '1')"),
    ],
)
def test_means_that_a_frontiers_space_names_are_checked_before_anything_is_trained(
    here: Path, elastune: Command, name: str, told: str
) -> None:
    text = f"{{'lr': 0.1, '{name}': trial.suggest_categorical('{name}', ['1', '2'])}}"
    program = (here / "linear.py").read_text()
    (here / "means.py").write_text(program.replace('{"lr": trial.suggest_float("lr", 0.01, 1.0, log=True)}', text))
    assert told in elastune("frontier", "means.py", "--workers", "1,2", "--out", "out").line
    assert not (here / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "linear.py", "--slots", "1000000000"], "slots"),
        (["run", "linear.py", "--threads", "1000000000"], "threads must be at most"),
        (["run", "linear.py", "--seed", "-1"], "a seed must be from 0"),
        (["run", "linear.py", "--seed", str(10**30)], "a seed must be from 0"),
        (["tune", "linear.py", "--trials", "2", "--seed", str(10**30)], "seed must be"),
        (["tune", "linear.py", "--trials", "2", "--slots", "1000000000"], "slots"),
        (["frontier", "linear.py", "--slots", "1000000000"], "slots"),
        (["run", "linear.py", "--notice-url", "http://"], "--notice-url must be a web address"),
        (["run", "linear.py", "--notice-url", "http://[::1"], "--notice-url must be a web address"),
        (["run", "linear.py", "--notice-url", "http://host:port/"], "--notice-url must be a web address"),
        (["run", "linear.py", "--notice-url", "http://a b/"], "--notice-url must be a web address"),
        (["run", "linear.py", "--notice-url", "ftp://host/"], "--notice-url must be a web address"),
        (["run", "pipe.py"], "existing Python file"),
        (["run", "latin.py"], "latin.py"),
        (["run", "binary.py"], "binary.py"),
        (["run", "deep.py"], "deep.py"),
        (["run", "deep_config.py"], "config values must be"),
        (["tune", "linear.py", "--trials", "2", "--warm-start", "nothing"], "nothing"),
        (["tune", "linear.py", "--trials", "2", "--warm-start", "."], "journal"),
        (["frontier", "linear.py", "--seed", "-1"], "a seed must be from 0"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_what_is_refused_leaves_nothing(here: Path, elastune: Command, arguments: list[str], told: str) -> None:
    os.mkfifo(here / "pipe.py")
    (here / "latin.py").write_bytes("# Größe\n".encode("latin-1"))
    (here / "binary.py").write_bytes(bytes(range(256)))
    (here / "deep.py").write_text("x = " + "(" * 500 + ")" * 500)
    (here / "deep_config.py").write_text(
        "config = {}\nfor _ in range(10000):\n    config = {'a': config}\ndef train(session): pass\n"
    )
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert told in elastune(*arguments, "--out", "new/out").line
    after = {path: path.read_bytes() for path in here.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert after == before
    assert not (here / "new").exists()
    assert not (here / "elastune-out").exists()


def test_an_agent_looks_for_no_address_that_is_none(here: Path, elastune: Command) -> None:
    (here / "token").touch(mode=0o600)
    (here / "token").write_text("0123456789abcdef")
    said = elastune("agent", "--join", "[::1:5", "--token-file", "token", "--workers", "1", "--patience", "60s")
    assert "must be HOST:PORT (got [::1:5)" in said.line


def test_a_byte_order_mark_is_no_error(here: Path, elastune: Command) -> None:
    (here / "bom.py").write_bytes(b"\xef\xbb\xbf" + (here / "linear.py").read_bytes())
    assert "wizard" in elastune("run", "bom.py", "--policy", "wizard").line


HEADS = """
import torch
from torch import nn

config = {"heads": 3}

def train(session):
    layer = nn.TransformerEncoderLayer(12, session.config["heads"])
    session.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
"""


def test_a_model_that_its_mechanism_does_not_take_is_refused_before_a_worker_starts(
    here: Path, elastune: Command
) -> None:
    """No worker, so no folder of a run: from ``session.prepare`` on a worker it would come with one."""
    (here / "heads.py").write_text(HEADS)
    said = elastune("run", "heads.py", "--mesh", "tensor=2", "--out", "mine")
    assert "layer of the plan (got self_attn has 3 heads): use --virtual-tensor with a divisor" in said.line
    assert not (here / "mine").exists()
    assert not (here / "elastune-out").exists()


REFUSES = """
import torch
from torch.utils.data import TensorDataset
import elastune

def train(session):
    model = torch.nn.Linear(1, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for epoch in session.epochs(3):
        if epoch == {epoch}:
            raise elastune.UserError("data must be there", "none", "fetch them")
        for (x,) in session.batches(TensorDataset(torch.ones(8, 1)), 8):
            session.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        session.report(loss=1.0)
"""


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_run_that_a_worker_refuses_leaves_only_what_it_has_trained(here: Path, elastune: Command, epoch: int) -> None:
    (here / "refuses.py").write_text(REFUSES.format(epoch=epoch))
    said = elastune("run", "refuses.py")
    assert said.code == 2
    assert said.err.splitlines()[-1].startswith("elastune: data must be there (got none): fetch them")
    kept = [folder.name for folder in here.glob("elastune-out/*")]
    assert kept == ([] if epoch == 0 else ["refuses-run-1"])
    assert (here / "elastune-out").exists() == bool(kept)
