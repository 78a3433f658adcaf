"""What is said to Slurm, what is heard from it, and how many agents there are to be."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.errors import UserError
from elastune.runtime.agents.agent import hello_of
from elastune.runtime.clusters.fleet import (
    AgentStatus,
    ControllerAddress,
    Fleet,
    FleetSize,
    NotStarted,
    Phase,
    ScalingDecision,
    Starter,
    forget,
    plan,
    read_controller_address,
    write_controller_address,
)
from elastune.runtime.clusters.kind import Access, CapacityRequest
from elastune.runtime.clusters.registry import parse_cluster
from elastune.runtime.clusters.slurm_commands import (
    JobShape,
    QueueEntry,
    agent_command,
    ask,
    batch_script,
    begins_again,
    last_line,
    never_starts,
    outside,
    read_queue,
    read_submitted,
    sbatch_arguments,
    waits_for,
)

IDLE = AgentStatus(idle_s=90.0)
BUSY = AgentStatus()
GOING = AgentStatus(going=True)


@pytest.mark.parametrize(
    ("needed", "starts", "agents", "came", "orders"),
    [
        (2, {}, {}, (), ScalingDecision(start=2)),
        (2, {"1": "waiting"}, {}, (), ScalingDecision(start=1)),
        (2, {"1": "running", "2": "waiting"}, {"1": BUSY}, ("1",), ScalingDecision()),
        # the agent has gone, whatever the queue says of its job
        (2, {"1": "running", "2": "running"}, {"2": BUSY}, ("1", "2"), ScalingDecision(start=1)),
        # it will go: another one comes in its place
        (1, {"1": "running"}, {"1": GOING}, ("1",), ScalingDecision(start=1)),
        # what waits goes before what is there
        (1, {"1": "running", "2": "waiting"}, {"1": IDLE}, ("1",), ScalingDecision(cancel=("2",))),
        (1, {"1": "running", "2": "running"}, {"1": IDLE}, ("1",), ScalingDecision()),
        (1, {"1": "running", "2": "running"}, {"1": IDLE, "2": BUSY}, ("1", "2"), ScalingDecision(dismiss=("1",))),
        (1, {"1": "running", "2": "running"}, {"1": BUSY, "2": AgentStatus(9.0)}, ("1", "2"), ScalingDecision()),
        (0, {"1": "running", "2": "running"}, {"1": BUSY, "2": BUSY}, ("1", "2"), ScalingDecision()),
        # one that somebody else has started counts, too
        (2, {"1": "running"}, {"1": BUSY, "#2": BUSY}, ("1", "#2"), ScalingDecision()),
    ],
)
def test_as_many_agents_as_are_needed(
    needed: int,
    starts: Mapping[str, Phase],
    agents: Mapping[str, AgentStatus],
    came: Sequence[str],
    orders: ScalingDecision,
) -> None:
    assert plan(needed, starts, agents, came, 60.0) == orders


@given(
    needed=st.integers(0, 6),
    starts=st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["waiting", "running"])),
    agents=st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([IDLE, BUSY, GOING])),
)
def test_nobody_who_is_needed_is_let_go(needed: int, starts: dict[str, Phase], agents: dict[str, AgentStatus]) -> None:
    orders = plan(needed, starts, agents, agents.keys(), 60.0)
    there = sum(not agent.going for agent in agents.values())
    coming = len(starts.keys() - agents.keys())
    assert not (orders.start and (orders.cancel or orders.dismiss))
    assert there + coming + orders.start - len(orders.cancel) - len(orders.dismiss) >= needed
    assert there - len(orders.dismiss) >= min(there, needed)
    assert all(agents[label] == IDLE for label in orders.dismiss)
    assert all(starts[label] == "waiting" for label in orders.cancel)


def test_a_label_is_all_that_an_agent_adds() -> None:
    plain, labelled = hello_of({"torch": "2"}, "n1", 2), hello_of({"torch": "2"}, "n1", 2, label="17")
    assert labelled == replace(plain, label="17")
    assert labelled != plain


def test_how_many_agents_it_takes() -> None:
    size = FleetSize(most=4, workers_each=2, least=1)
    assert [size.agents(workers) for workers in (0, 1, 2, 3, 8, 99)] == [1, 1, 1, 2, 4, 4]
    assert FleetSize(most=3).agents(1) == 3


class TensorStore(Starter):
    """Has agents started that never come, or refuses."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.began, self.closed = refuses, 0, False
        self.jobs: dict[str, Phase] = {}

    def start(self, count: int) -> None:
        if self.refuses:
            raise NotStarted(self.refuses)
        for _ in range(count):
            self.began += 1
            self.jobs[str(self.began)] = "running"

    def look(self) -> dict[str, Phase]:
        return dict(self.jobs)

    def cancel(self, labels: Sequence[str]) -> None:
        for label in labels:
            del self.jobs[label]

    def why(self, label: str) -> str:
        return "no such module"

    def waits(self) -> str:
        return ""

    def close(self) -> None:
        self.closed = True


def until(true: object) -> None:
    deadline = time.monotonic() + 30.0
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_fails_again_and_again_is_started_no_more() -> None:
    shelf = TensorStore()
    fleet = Fleet(shelf, 60.0)
    fleet.begin(1)
    fleet.steer(1, {"other": GOING})
    said: list[str] = []
    for at in range(1, 4):
        until(lambda at=at: str(at) in shelf.jobs)
        fleet.steer(1, {})
        shelf.jobs.pop(str(at))
        fleet.steer(1, {"other": GOING})  # news, for a look at once
        fleet.steer(1, {})
        until(lambda at=at: len(said) >= at or said.extend(fleet.news()))
    assert fleet.given_up
    ended = [f"{at} has ended before its agent came: no such module" for at in (1, 2, 3)]
    assert said == [*ended, "no more agents are started: 3 starts in a row brought none"]
    fleet.close()
    assert (shelf.began, shelf.closed) == (3, True)


def test_what_was_cancelled_has_not_failed() -> None:
    shelf = TensorStore()
    fleet = Fleet(shelf, 60.0)
    fleet.begin(5)
    shelf.jobs.update(dict.fromkeys(shelf.jobs, "waiting"))
    fleet.steer(5, {})
    fleet.steer(1, {})
    until(lambda: list(shelf.jobs) == ["1"])
    fleet.steer(2, {})
    until(lambda: list(shelf.jobs) == ["1", "6"])
    fleet.close()
    assert (fleet.news(), fleet.given_up) == ([], False)


def test_what_is_refused_at_first_is_told_and_what_is_refused_later_is_tried_again_later() -> None:
    with pytest.raises(NotStarted, match="limit reached"):
        Fleet(TensorStore("limit reached"), 60.0).begin(1)
    shelf = TensorStore()
    fleet = Fleet(shelf, 60.0)
    fleet.begin(1)
    shelf.refuses = "limit reached"
    fleet.steer(3, {})
    said: list[str] = []
    until(lambda: said or said.extend(fleet.news()))
    fleet.steer(2, {})
    fleet.close()
    assert (said, fleet.news(), shelf.began) == (["limit reached"], [], 1)


def test_what_a_controller_before_has_started_counts() -> None:
    shelf = TensorStore()
    shelf.start(2)
    fleet = Fleet(shelf, 60.0)
    fleet.begin(3)
    fleet.close()
    assert shelf.began == 3


FOUND = ControllerAddress("elastune-0123abcd", "127.0.0.9", 7070)


def test_the_next_controller_finds_the_jobs_of_the_one_before(tmp_path: Path) -> None:
    assert read_controller_address(tmp_path) is None
    write_controller_address(tmp_path, FOUND.name, f"{FOUND.address}:{FOUND.port}")
    assert read_controller_address(tmp_path) == FOUND
    forget(tmp_path)
    forget(tmp_path)
    assert read_controller_address(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "elastune-0123abcd,mine", "address": "n1", "port": 7}',
        '{"name": "elastune-0123abcd", "address": "n1", "port": 0}',
        '{"name": "elastune-0123abcd", "address": "n1", "port": "7"}',
        '{"name": "elastune-0123abcd", "address": "..", "port": 7}',
        '{"name": "elastune-0123abcd", "address": "n1", "port": 7, "more": 1}',
        "[]",
        "\x00",
    ],
)
def test_a_damaged_memory_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "controller.json").write_text(text)
    assert read_controller_address(tmp_path) is None


SHAPE = JobShape("gpu", "lab", None, "1-00:00:00", 90, cpus=8, gpus=4)


def test_a_job_says_all_that_was_asked_for_and_no_secret(tmp_path: Path) -> None:
    arguments = sbatch_arguments(SHAPE, "elastune-1", tmp_path)
    assert arguments == [
        *("--parsable", "--job-name=elastune-1", "--nodes=1", "--ntasks=1", "--cpus-per-task=8", "--partition=gpu"),
        *("--account=lab", "--time=1-00:00:00", "--gpus-per-node=4", "--no-requeue", "--signal=B:USR1@90"),
        f"--output={tmp_path}/elastune-agent-%j.log",
    ]
    command = agent_command("/usr/my python", "10.0.0.1:7", Path("/out/it's/token"), 4)
    script = batch_script(command, 90)
    first, step, line, end = script.split("\n")
    assert (first, step[:5], end) == ("#!/bin/sh", "srun ", "")
    assert line.startswith("exec '/usr/my python' -m elastune agent --join 10.0.0.1:7 --token-file ")
    assert line.endswith('--notice-seconds 90 --label "$SLURM_JOB_ID"')


def test_what_the_queue_says() -> None:
    text = "12|RUNNING|None\n7|PENDING|Resources\n13|COMPLETING|None\n9|PENDING|(it's a | reason)\n3|FAILED|x\n"
    assert read_queue(text) == {
        "7": QueueEntry("waiting", "Resources"),
        "9": QueueEntry("waiting", "(it's a | reason)"),
        "12": QueueEntry("running", "None"),
    }
    assert waits_for(read_queue(text)) == "2 jobs wait in Slurm's queue (Resources, (it's a | reason))"
    assert (waits_for({}), read_queue("")) == ("", {})
    assert (read_submitted("17\n"), read_submitted("17;there\n")) == ("17", "17")


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("PartitionTimeLimit", "less time="),
        ("BadConstraints", "gpus_per_node="),
        ("InvalidQOS", "another qos="),
        ("AssocMaxWallDurationPerJobLimit", "time="),
        ("QOSMaxGRESPerNode", "gpus_per_node="),
    ],
)
def test_a_job_that_no_waiting_helps_is_known_by_two_looks(reason: str, fix: str) -> None:
    first, other = read_queue(f"7|PENDING|{reason}\n"), read_queue(f"8|PENDING|{reason}\n")
    assert never_starts({}, first) is None
    assert never_starts(other, first) is None
    found = never_starts(first, first)
    assert found is not None
    assert f"job 7 is held up by {reason}" in found.value
    assert fix in found.fix


@pytest.mark.parametrize(
    "reason", ["Resources", "Priority", "AssocGrpCpuLimit", "QOSMaxCpuPerUserLimit", "PartitionNodeLimit", "None"]
)
def test_what_others_hold_up_is_waited_for(reason: str) -> None:
    queue = read_queue(f"7|PENDING|{reason}\n8|RUNNING|BadConstraints\n")
    assert never_starts(queue, queue) is None


@pytest.mark.parametrize("text", ["slurm_load_jobs error", "1|RUNNING", "1a|RUNNING|x", "|PENDING|x", "\x00"])
def test_rubbish_is_no_queue(text: str) -> None:
    with pytest.raises(ValueError, match="no line of a queue"):
        read_queue(text)
    with pytest.raises(ValueError, match="no job number"):
        read_submitted(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("slurm:nodes=0", "nodes: COUNT or LOW:HIGH, with HIGH at least 1"),
        ("slurm:nodes=4:2", "nodes: COUNT or LOW:HIGH"),
        ("slurm:nodes=all", "nodes: COUNT or LOW:HIGH"),
        ("slurm:partition=a b", "partition: string should match"),
        ("slurm:partition=$(x)", "partition: string should match"),
        ("slurm:time=soon", "time: string should match"),
        ("slurm:workers_per_node=0", "workers_per_node: input should be greater"),
        ("slurm:queue=x", "must have settings that it knows (got 'queue')"),
        ("slurm:agents=tasks", "agents: input should be 'jobs' or 'steps'"),
        ("slurm:agents=steps", "agents=steps needs an allocation"),
        ("slurm:time=1:00", "longer than the notice before its end (got time=1:00: 60 s, and notice_s=120): raise"),
        ("slurm:time=2", "longer than the notice before its end (got time=2: 120 s, and notice_s=120)"),
        ("slurm:time=0:1:0,notice_s=60", "(got time=0:1:0: 60 s, and notice_s=60)"),
        ("slurm:time=0-0:1,notice_s=60", "(got time=0-0:1: 60 s, and notice_s=60)"),
        ("slurm:time=1-1,notice_s=60", "needs Slurm's commands"),
        ("slurm:time=2:01", "needs Slurm's commands"),
        ("slurm", "needs Slurm's commands (got no sbatch on PATH)"),
    ],
)
def test_what_cannot_be_asked_for(text: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(UserError) as refused:
        parse_cluster(text).check(Access())
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_allocation_has_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with pytest.raises(UserError, match="steps have the resources of their allocation .got partition=gpu"):
        parse_cluster("slurm:partition=gpu").check(Access())


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of programs with which Slurm answers: each a shell script of one line."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name in ("sbatch", "squeue", "scancel", "sinfo"):
        _program(folder, name, "echo 127.0.0.1" if name == "sinfo" else "true")
    return folder


def _program(folder: Path, name: str, line: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("sbatch", "echo sbatch: error: one >&2; echo 'sbatch: error: QOSMaxSubmitJobLimit' >&2; exit 1", "QOSMaxSub"),
        ("sbatch", "echo rubbish", "no job number in 'rubbish"),
        ("sinfo", "true", "a partition with nodes"),
        ("sinfo", "echo no.such.host.invalid", "nodes must be reachable"),
    ],
)
def test_a_cluster_that_cannot_be_had_is_told_in_one_line(
    name: str, line: str, told: str, programs: Path, tmp_path: Path
) -> None:
    _program(programs, name, line)
    with pytest.raises(UserError) as refused:
        parse_cluster("slurm").open(Access(gather_s=5.0), CapacityRequest(tmp_path / "run", 1, 1))
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_jobs_of_a_controller_elsewhere_are_told_to_come_here(programs: Path, tmp_path: Path) -> None:
    folder, said = tmp_path / "run" / "cluster", list[str]()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    write_controller_address(folder, FOUND.name, f"{FOUND.address}:{port}")
    _program(programs, "scancel", f'echo "$@" >> {tmp_path}/cancelled')
    _program(programs, "sbatch", f"cat > {tmp_path}/script; echo 5")
    room = CapacityRequest(tmp_path / "run", 1, 1, grace_s=60.0, adopts=True)
    with parse_cluster("slurm").open(Access(notify=said.append), room) or nullcontext():
        assert said == ["jobs elastune-0123abcd will connect to 127.0.0.1 instead of 127.0.0.9"]
        assert read_controller_address(folder) == ControllerAddress(FOUND.name, "127.0.0.1", port)
        assert not (tmp_path / "cancelled").exists()
        assert f"--join 127.0.0.1:{port} " in (tmp_path / "script").read_text()
        assert f"--moves {folder / 'controller.json'} " in (tmp_path / "script").read_text()
    assert read_controller_address(folder) is None


@pytest.mark.parametrize("asked", ["slurm:folder=local", "slurm:port=1", "slurm"])
def test_jobs_that_could_not_find_their_controller_are_ended(asked: str, programs: Path, tmp_path: Path) -> None:
    """They do not see its file, or its port cannot be had here."""
    folder, said = tmp_path / "run" / "cluster", list[str]()
    folder.mkdir(parents=True)
    write_controller_address(folder, FOUND.name, f"{FOUND.address}:{FOUND.port}")
    _program(programs, "scancel", f'echo "$@" >> {tmp_path}/cancelled')
    _program(programs, "sbatch", "echo 5")
    room = CapacityRequest(tmp_path / "run", 1, 1, grace_s=60.0, adopts=True)
    with ExitStack() as stack:
        if asked == "slurm":
            stack.enter_context(socket.create_server(("127.0.0.1", FOUND.port)))
        with pytest.raises(UserError, match="agents with room for 1 workers must come"):
            parse_cluster(asked).open(Access(gather_s=0.0, notify=said.append), room)
    assert said[0] == "jobs elastune-0123abcd look for their controller at 127.0.0.9:7070, and are ended"
    first, *later = (tmp_path / "cancelled").read_text().splitlines()
    assert first == "--state=PENDING --name=elastune-0123abcd"
    assert later
    assert all("elastune-0123abcd" not in line for line in later)  # its own jobs have another name


def test_an_allocation_ends_with_its_command(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    for name in ("srun", "scontrol"):
        _program(programs, name, "true")
    with pytest.raises(UserError, match="an allocation ends with its command .got --grace 60s"):
        parse_cluster("slurm").open(Access(), CapacityRequest(tmp_path / "run", 1, 1, grace_s=60.0))


def test_slow_answers_and_none_are_told(programs: Path, tmp_path: Path) -> None:
    _program(programs, "squeue", "exec sleep 60")
    with pytest.raises(NotStarted, match="squeue has not answered within 0.1 s"):
        ask("squeue", limit_s=0.1)
    _program(programs, "scontrol", "echo Partition nope not found; exit 1")
    with pytest.raises(NotStarted, match="scontrol: Partition nope not found"):
        ask("scontrol", "show", "partition", "nope")
    with pytest.raises(NotStarted, match="nosuch is not on PATH"):
        ask("nosuch")
    with pytest.raises(UserError, match="5 workers, 4 at most"):
        parse_cluster("slurm:nodes=2,workers_per_node=2").open(Access(), CapacityRequest(tmp_path / "run", 5, 5))
    assert not (tmp_path / "run").exists()


def test_a_job_knows_nothing_of_the_job_that_it_was_submitted_in() -> None:
    environment = {"SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "2", "SLURM_CONF": "c", "PATH": "p"}
    assert outside(environment) == {"SLURM_CONF": "c", "PATH": "p"}


@pytest.mark.parametrize(
    ("counted", "answer", "again"),
    [
        (None, "JobState=COMPLETING Requeue=1 Restarts=1 BatchFlag=1", True),
        (None, "JobState=COMPLETING Requeue=1 Restarts=0 BatchFlag=1", False),  # scancel
        ("1", "Requeue=1 Restarts=1", False),
        ("1", "Requeue=1 Restarts=2", True),
        ("many", "Restarts=2", False),
        (None, "slurm_load_jobs error: Invalid job id specified", False),
    ],
)
def test_a_job_that_slurm_begins_again(
    counted: str | None, answer: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastune.runtime.clusters.slurm_commands.ask", lambda *words, **limit: answer)
    count = {} if counted is None else {"SLURM_RESTART_COUNT": counted}
    assert begins_again({"SLURM_JOB_ID": "7", **count}) == again
    assert not begins_again(count), "it is in no job"


def test_a_slurm_that_does_not_answer_begins_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*words: str, **limit: float) -> str:
        raise NotStarted("scontrol has not answered within 5 s")

    monkeypatch.setattr("elastune.runtime.clusters.slurm_commands.ask", silent)
    assert not begins_again({"SLURM_JOB_ID": "7"})


def test_the_last_line_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == f"it left no {log}"
    log.write_bytes(b"")
    assert last_line(log) == f"{log} is empty"
    log.write_bytes(b"first\n\xffwhy\n\n")
    assert last_line(log) == f"\ufffdwhy ({log})"
