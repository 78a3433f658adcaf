"""Whatever is typed: an exit code that is documented, no traceback, one line where it is refused, and nothing left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from fuzz_journals import KINDS, lines
from fuzz_kit import everything, fuzz, say
from hypothesis import given
from hypothesis import strategies as st

from elastune.cli.app import main
from elastune.core.errors import UserError

SURROGATE = """
objectives = {"loss": "min", "seconds": "min"}
config = {"lr": 0.1, "batch_size": 16}

def space(trial):
    return {"lr": trial.suggest_float("lr", 0.01, 1.0, log=True)}

def surrogate(config, workers):
    return [(10.0 / workers, {"loss": config["lr"] / epoch}) for epoch in (1, 2)]
"""
PROGRAMS = {
    "good.py": SURROGATE.encode() + b"\ndef train(session): pass\n",
    "made_up.py": SURROGATE.encode(),
    "empty.py": b"",
    "exits.py": b"raise SystemExit(0)\n",
    "odd_exit.py": b"class Odd(BaseException): pass\nraise Odd('no\\n\\nno')\n",
    "latin.py": "# Gr\u00f6\u00dfe\n".encode("latin-1"),
    "binary.py": bytes(range(256)),
    "odd_config.py": b"config = {1: 2}\ndef train(session): pass\n",
    "odd_space.py": b"space = 5\ndef train(session): pass\n",
    "exit_space.py": SURROGATE.encode() + b"\ndef space(trial): exit(0)\n",
    "list_space.py": SURROGATE.encode() + b"\ndef space(trial): return [1]\n",
    "objectives.py": SURROGATE.encode() + b"\nobjectives = {'loss': 'up'}\n",
}
PATHS = [
    *PROGRAMS,
    "pipe.py",
    "folder",
    "nothing",
    "",
    ".",
    "/dev/null",
    "a/b/c",
    "run",
    "study",
    "frontier",
    "x" * 300,
]
WORDS = [
    *("0", "1", "2", "-1", "1000000000", "1e9", "1.5", "nan", "inf", "-inf", "", " ", "None", "true", "two", "\u0663"),
    *("9" * 40, "1:2", "2:1", ":", "1,2", "1,,2", "90s", "3m", "0s", "9999d", "fast", "exact", "quick", "cpu", "cuda"),
    *("lr=0.1", "lr=", "=1", "lr=nan", "lr=[[1]]", "lr={}", "lr=" + "[" * 3000, "rl=1", "loss:min", "loss:up", "loss"),
    *("lr <= 0.5", "lr >", "1/0 > lr", "loss >= 0.5", "().__class__ > 1", "random", "grid", "tpe", "oracle", "asha"),
    *(
        "asha:eta=0",
        "pbt",
        "gns",
        "gns:max_batch=many",
        "noise_scale",
        "http://",
        "http://[::1",
        "kill@40%",
        "kill:9/s",
    ),
    *("accuracy=0.9", "loss=1", "fp32", "fp8", "\u202e\u00e9", "x" * 5000, "--", "-", "-h", "--version"),
]
OPTIONS = {
    "run": [
        *(
            "--workers",
            "--mode",
            "--slots",
            "--micro-batch",
            "--precision",
            "--threads",
            "--device",
            "--set",
            "--epochs",
        ),
        *("--seed", "--policy", "--monitor", "--heartbeat", "--chaos", "--chaos-verify", "--notice-url", "--resume"),
        *(
            "--notice-file",
            "--notice-seconds",
            "--checkpoint-every",
            "--max-steps",
            "--data",
            "--json",
            "--log",
        ),
    ],
    "tune": [
        *("--workers", "--mode", "--slots", "--set", "--epochs", "--seed", "--objective", "--constraint", "--sampler"),
        *("--trials", "--budget", "--worker-hours", "--stopping", "--trial-workers", "--price", "--trial-timeout"),
        *("--warm-start", "--resume", "--json", "--data"),
    ],
    "simulate": [
        *("--workers", "--set", "--epochs", "--seed", "--objective", "--constraint", "--sampler", "--trials", "--json"),
        *("--budget", "--worker-hours", "--stopping", "--trial-workers", "--price", "--trial-timeout", "--recorded"),
        *("--scaling", "--start", "--pause", "--lose-every", "--resume"),
    ],
    "frontier": [
        *("--workers", "--target", "--budget", "--quality", "--seeds", "--constraint", "--sampler", "--stopping"),
        *("--trial-workers", "--price", "--set", "--epochs", "--seed", "--slots", "--mode", "--resume", "--json"),
    ],
    "report": ["--ledger", "--log", "--pick", "--weights", "--subset", "--json"],
    "explain": ["--json"],
    "export": ["--csv", "--json", "--optuna"],
    "resize": ["--json", "--cluster", "--token-file"],
    "doctor": ["--json"],
    "dance": ["--json"],
}
FLAGS = {"--json", "--resume", "--ledger", "--chaos-verify"}


class CollectiveHandle(UserError):
    """All was right with the command line: something would have been trained."""

    RULE = "nothing is trained here"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder to stand in, with programs and results of all kinds."""
    folder = tmp_path_factory.mktemp("commands")
    for name, content in PROGRAMS.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe.py")
    (folder / "folder").mkdir()
    for kind in ("run", "study", "frontier"):
        (folder / kind).mkdir()
        (folder / kind / "journal.jsonl").write_bytes(b"\n".join(lines(KINDS[kind]())) + b"\n")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from([*OPTIONS, "run", "tune", "simulate", "frontier"]))
    words = [command]
    likely = {"simulate": "made_up.py", "report": "study", "explain": "study", "export": "study", "resize": "run"}
    if command != "doctor":
        words.append(draw(st.one_of(st.just(likely.get(command, "good.py")), st.sampled_from(PATHS))))
    if command == "resize":
        words.append(draw(st.sampled_from(WORDS)))
    if command in ("tune", "simulate"):
        words += ["--trials", "2"]
    for _ in range(draw(st.integers(0, 3))):
        option = draw(st.sampled_from(OPTIONS[command]))
        words.append(option)
        if command == "export":
            words.append("made.out")
        elif option not in FLAGS:
            words.append(draw(st.one_of(st.sampled_from(WORDS), st.sampled_from(PATHS), st.text(max_size=8))))
    return [word.replace("\x00", "") for word in words]


def begin(*_: object, **__: object) -> object:
    raise CollectiveHandle(CollectiveHandle.RULE, "a request that is right", "none")


@fuzz(30)
@given(words=command_lines())
def test_any_command_line(place: Path, words: list[str]) -> None:
    """Workers are not started: what would start them says so, in the way of a refusal."""
    shutil.rmtree(place / "made", ignore_errors=True)
    writes = words[0] in ("run", "tune", "frontier", "simulate")
    before = {name: content for name, content in everything(place).items() if "__pycache__" not in name}
    arguments = [*words, "--out", "made/out"] if writes else words
    with (
        mock.patch("elastune.runtime.clusters.elastic_cluster.ElasticCluster.start", begin),
        mock.patch.dict(os.environ),
    ):
        said = say(*arguments)
    refused = "" if CollectiveHandle.RULE in said.err else said.refusal
    after = {name: content for name, content in everything(place).items() if "__pycache__" not in name}
    assert {name: after.get(name) for name in before} == before or words[0] == "report"
    if refused:
        assert "made/out" not in {str(Path(name).parent) for name in after}, refused
    for name in after.keys() - before.keys():
        (place / name).unlink(missing_ok=True)


@fuzz(15)
@given(
    words=st.lists(
        st.one_of(st.sampled_from(WORDS), st.sampled_from(PATHS), st.text(max_size=8)), min_size=1, max_size=4
    )
)
def test_any_words(place: Path, words: list[str]) -> None:
    say(*(word.replace("\x00", "") for word in words)).refusal  # noqa: B018 - it asserts


@pytest.mark.parametrize("value", ["", "nothing", "/dev/null", "\n", "x" * 5000, "good.py"])
def test_any_folder_of_data(place: Path, value: str) -> None:
    with mock.patch.dict(os.environ, {"ELASTUNE_DATA": value}):
        assert say("doctor").refusal == "" or len(value) > 255
        assert main(["export", "study", "--csv", "a.csv"]) == 0
