"""A command's training as a cluster runs it: what it reports, how it ends, and what is left of it."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastune.core.command import TrainingCommand
from elastune.core.journal.records import Record, Reported, RunFailed, RunFinished
from elastune.core.run import ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.base import NoRoomError
from elastune.runtime.clusters.command import CommandCluster, CommandHandle
from elastune.runtime.job.run import JobSupervisor

REPORT = "import json, os, signal, subprocess, sys, time\ndef say(**m): print(json.dumps(m), flush=True)\n"
Outcome = RunFinished | RunFailed


def alive(pid: int) -> bool:
    """Whether the process runs; an ended one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


@pytest.fixture
def cluster() -> Iterator[CommandCluster]:
    with CommandCluster(capacity=2, grace_s=0.3) as opened:
        yield opened


def spec_of(
    tmp_path: Path, lines: str, *, metrics: tuple[str, ...] = (), until: int | None = None, **more: object
) -> RunSpec:
    script = tmp_path / "script.py"
    script.write_text(REPORT + lines)
    command = TrainingCommand((sys.executable, str(script), "{lr}"), metrics)
    program = Program(tmp_path / "space.yaml", command=command)
    return RunSpec(program, tmp_path / "trial", {"lr": 0.5, **more}, until_epoch=until)


def follow(
    cluster: CommandCluster,
    spec: RunSpec,
    *,
    timeout_s: float | None = None,
    at: Callable[[Record, JobSupervisor], None] = lambda record, supervisor: None,
) -> tuple[list[Record], Outcome]:
    supervisor = JobSupervisor(cluster.start(spec), timeout_s=timeout_s)
    records: list[Record] = []
    while supervisor.outcome is None:
        cluster.wait(0.1)
        for record in supervisor.pump():
            records.append(record)
            at(record, supervisor)
    return records, supervisor.outcome


def test_lines_of_json_are_reports(cluster: CommandCluster, tmp_path: Path) -> None:
    lines = (
        "print('epoch 1 begins'); say(epoch=1, accuracy=0.5, note='x', best=True)\n"
        "say(epoch=2, step=20, samples=640, accuracy=0.75, loss=float('nan'))\n"
        "print('{}'); print('{\"words\": \"only\"}'); print('{broken'); print('[1, 2]')\n"
    )
    records, outcome = follow(cluster, spec_of(tmp_path, lines, epochs=2))
    first, second = records
    assert isinstance(first, Reported)
    assert isinstance(second, Reported)
    assert (first.epoch, first.epochs, first.metrics) == (1, 2, {"accuracy": 0.5})
    assert (second.step, second.samples, second.metrics["accuracy"]) == (20, 640, 0.75)
    assert math.isnan(second.metrics["loss"])
    assert 0 < first.seconds <= second.seconds
    assert isinstance(outcome, RunFinished)
    assert (outcome.stopped, outcome.epoch, outcome.steps, outcome.workers) == ("complete", 2, 20, 1)


def test_a_line_without_an_epoch_is_the_next_epoch(cluster: CommandCluster, tmp_path: Path) -> None:
    records, _ = follow(cluster, spec_of(tmp_path, "say(accuracy=.1)\nsay(accuracy=.2)"))
    assert [record.epoch for record in records if isinstance(record, Reported)] == [1, 2]


def test_metrics_come_by_expressions(cluster: CommandCluster, tmp_path: Path) -> None:
    lines = "print('epoch: 1'); print('test acc: 0.25'); print('epoch: 2\\ntest acc: 0.5'); print('test acc: -')"
    metrics = ("accuracy=acc: ([0-9.-]+)", "epoch=epoch: ([0-9]+)")
    records, outcome = follow(cluster, spec_of(tmp_path, lines, metrics=metrics))
    assert [(r.epoch, r.metrics) for r in records if isinstance(r, Reported)] == [
        (1, {"accuracy": 0.25}),
        (2, {"accuracy": 0.5}),
    ]
    assert isinstance(outcome, RunFinished)


def test_metrics_come_from_the_file_and_settings_from_the_environment(cluster: CommandCluster, tmp_path: Path) -> None:
    lines = (
        "assert sys.argv[1:] == ['0.5'] and os.environ['ELASTUNE_WORKERS'] == '1'\n"
        "assert os.path.isdir(os.environ['ELASTUNE_FOLDER']) and os.environ['ELASTUNE_SEED'] == '0'\n"
        "print(json.dumps({'epoch': 1, 'accuracy': .5}), file=open(os.environ['ELASTUNE_METRICS'], 'a'))\n"
        "time.sleep(.3)\n"
        "open(os.environ['ELASTUNE_METRICS'], 'a').write(json.dumps({'epoch': 2, 'accuracy': .75}))\n"
    )
    records, outcome = follow(cluster, spec_of(tmp_path, lines))
    assert isinstance(outcome, RunFinished), outcome
    assert [record.metrics["accuracy"] for record in records if isinstance(record, Reported)] == [0.5, 0.75]


@pytest.mark.parametrize(
    ("lines", "metrics", "reason", "says"),
    [
        ("say(accuracy=.5); sys.stderr.write('Traceback\\nValueError: bad lr\\n'); sys.exit(3)", (), "exception",
         "the command exited with code 3: ValueError: bad lr"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", (), "worker_lost",
         "the command was ended by signal 11 (a segmentation fault)"),
        ("print('loss is low')", (), "exception", "reported nothing: let it print a line such as {\"accuracy\": 0.9}"),
        ("print('loss is low')", ("accuracy=acc ([0-9]+)",), "exception", "reported nothing"),
        ("os.write(1, bytes(range(256)) * 50)", (), "exception", "reported nothing"),
        ("open(os.environ['ELASTUNE_METRICS'], 'w').write('acc 0.5\\n'); time.sleep(60)", (), "exception",
         "a line of ELASTUNE_METRICS must be a JSON object with a number (got acc 0.5)"),
    ],
)  # fmt: skip
def test_a_bad_command_fails_with_its_reason(
    cluster: CommandCluster, tmp_path: Path, lines: str, metrics: tuple[str, ...], reason: str, says: str
) -> None:
    _, outcome = follow(cluster, spec_of(tmp_path, lines, metrics=metrics))
    assert isinstance(outcome, RunFailed)
    assert outcome.reason == reason
    assert says in outcome.detail
    assert "\n" not in outcome.detail


def test_a_command_that_cannot_start_fails(cluster: CommandCluster, tmp_path: Path) -> None:
    program = Program(tmp_path / "space.yaml", command=TrainingCommand(("no-such-program",)))
    _, outcome = follow(cluster, RunSpec(program, tmp_path / "trial"))
    assert isinstance(outcome, RunFailed)
    assert outcome.detail == "the command did not start: No such file or directory"


def test_a_value_never_becomes_a_word(cluster: CommandCluster, tmp_path: Path) -> None:
    value = "a b; touch injected $(touch injected) `touch injected` --flag '\"{lr}"
    spec = spec_of(tmp_path, f"assert sys.argv[1:] == [{value!r}], sys.argv\nsay(accuracy=1)", lr=value)
    _, outcome = follow(cluster, spec)
    assert isinstance(outcome, RunFinished), outcome


def test_a_command_that_hangs_ends_at_its_time_limit(cluster: CommandCluster, tmp_path: Path) -> None:
    begin = time.monotonic()
    _, outcome = follow(cluster, spec_of(tmp_path, "say(accuracy=.5)\ntime.sleep(60)"), timeout_s=0.5)
    assert isinstance(outcome, RunFailed)
    assert (outcome.reason, outcome.detail) == ("timeout", "still running after 0.5 s")
    assert time.monotonic() - begin < 10
    assert cluster.free == 2


def test_a_command_that_ignores_sigterm_is_killed(cluster: CommandCluster, tmp_path: Path) -> None:
    lines = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay(accuracy=.5, pid=os.getpid())\ntime.sleep(60)"
    _, outcome = follow(cluster, spec_of(tmp_path, lines), at=lambda _, supervisor: supervisor.stop())
    assert isinstance(outcome, RunFinished)
    assert outcome.stopped == "requested"
    assert gone(int(outcome.metrics["pid"]))


def test_a_command_has_time_for_its_own_checkpoint_after_sigterm(cluster: CommandCluster, tmp_path: Path) -> None:
    lines = (
        "def end(*_): open(os.environ['ELASTUNE_FOLDER'] + '/saved', 'w').write('x'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nsay(accuracy=.5)\ntime.sleep(60)"
    )
    _, outcome = follow(cluster, spec_of(tmp_path, lines), at=lambda _, supervisor: supervisor.stop())
    assert isinstance(outcome, RunFinished)
    assert outcome.stopped == "requested"
    assert (tmp_path / "trial" / "saved").exists()


def test_what_a_command_leaves_behind_ends_with_it(cluster: CommandCluster, tmp_path: Path) -> None:
    lines = (
        "child = subprocess.Popen(['sleep', '100'])\n"
        "other = subprocess.Popen(['sh', '-c', 'trap \"\" TERM; sleep 100 & wait'], start_new_session=True)\n"
        "say(accuracy=.5, child=child.pid, other=other.pid)"
    )
    begin = time.monotonic()
    _, outcome = follow(cluster, spec_of(tmp_path, lines))
    assert isinstance(outcome, RunFinished)
    assert outcome.stopped == "complete"
    assert gone(int(outcome.metrics["child"]))
    assert gone(int(outcome.metrics["other"]))
    assert time.monotonic() - begin < 10
    assert "left behind" in (tmp_path / "trial" / "logs" / "stderr.log").read_text()


def test_logs_of_much_output_stay_small(cluster: CommandCluster, tmp_path: Path) -> None:
    lines = (
        "block = b'x' * (1 << 20)\n"
        "for _ in range(40): os.write(1, block); os.write(2, block + b'\\n')\n"
        "os.write(1, b'\\n'); say(accuracy=.5)"
    )
    records, outcome = follow(cluster, spec_of(tmp_path, lines))
    assert isinstance(outcome, RunFinished), outcome
    assert len(records) == 1
    assert sum(file.stat().st_size for file in (tmp_path / "trial" / "logs").iterdir()) < 20 << 20


def test_a_trial_pauses_after_its_epoch_and_goes_on_where_the_command_does(
    cluster: CommandCluster, tmp_path: Path
) -> None:
    lines = (
        "saved = os.environ['ELASTUNE_FOLDER'] + '/epoch'\n"
        "first = int(open(saved).read()) + 1 if os.path.exists(saved) else 1\n"
        "for epoch in range(first, 5):\n"
        "    time.sleep(.2); open(saved, 'w').write(str(epoch))\n"
        "    say(epoch=epoch, accuracy=epoch / 10); time.sleep(.2)\n"
    )
    spec = spec_of(tmp_path, lines, epochs=4, until=2)
    records, outcome = follow(cluster, spec)
    assert isinstance(outcome, RunFinished)
    assert (outcome.stopped, outcome.epoch, len(records)) == ("until_epoch", 2, 2)
    again = RunSpec(spec.program, spec.out, spec.config, resume=True)
    more, finished = follow(cluster, again)
    assert isinstance(finished, RunFinished)
    assert [record.epoch for record in more if isinstance(record, Reported)] == [3, 4]
    assert more[0].seconds > records[-1].seconds  # type: ignore[union-attr]  # the earlier start counts
    assert finished.stopped == "complete"


def test_a_cluster_has_room_for_as_many_processes_as_it_was_made_for(cluster: CommandCluster, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "say(accuracy=1)\ntime.sleep(60)")
    two = RunSpec(spec.program, spec.out, spec.config, execution=ExecutionSettings(workers=2, mode="fast"))
    cluster.start(two)
    assert cluster.free == 0
    with pytest.raises(NoRoomError):
        cluster.start(spec)
    cluster.close()
    assert cluster.free == 2


def test_a_command_ends_with_its_controller(tmp_path: Path) -> None:
    """The controller dies by SIGKILL; the command leads a session of its own, and has a child in another one."""
    pids = tmp_path / "pids"
    lines = (
        "child = subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(json.dumps([os.getpid(), child.pid]))\ntime.sleep(100)"
    )
    spec_of(tmp_path, lines)
    controller = os.fork()
    if controller == 0:
        spec = RunSpec(
            Program(tmp_path, command=TrainingCommand((sys.executable, str(tmp_path / "script.py")))),
            tmp_path / "trial",
        )
        handle = CommandHandle(spec, 0.3)
        while True:
            handle.poll()
            time.sleep(0.05)
    end = time.monotonic() + 30
    while not pids.exists() or not pids.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(controller, 9)
    os.waitpid(controller, 0)
    assert all(gone(pid) for pid in json.loads(pids.read_text()))
